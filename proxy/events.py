"""An event stream on its way to the client: every byte as it came, but whole events only.

So a stream that breaks off can be told to have done so, a comment can be put between two events, and the usage that
the gateway asked for itself can be taken out again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator

from prometheus_client import Counter

from proxy import wire
from proxy.outcome import Usage, usage_of

HEARTBEAT = b": keep-alive\n\n"
# An event this long is passed on in pieces.
MAX_HELD_BYTES = 2**22
_ENDS = (b"\n\n", b"\n\r\n")


class EventRelay:
    """One stream."""

    def __init__(self, send: wire.Send, strips_usage: bool, keeps_first: bool) -> None:
        """`strips_usage`: take out the event that holds nothing but usage. `keeps_first`: `first` is wanted."""
        self._send = send
        self._strips = strips_usage
        self._keeps = keeps_first
        self._held = b""
        self._closed = False
        self._with_usage = b""
        self.first = b""  # its first event
        self.last = b""  # its last few
        self.moved = time.monotonic()  # when something was last sent
        self.sending = False

    async def run(self, chunks: AsyncIterator[bytes], begun: Callable[[], None] = lambda: None) -> None:
        """Pass on everything up to the end, the end itself excepted; `begun` is called when the first piece comes."""
        first = True
        async for chunk in chunks:
            if first:
                first = False
                begun()
            if self._held:
                chunk = self._held + chunk
                self._held = b""
            if not chunk.endswith(_ENDS):
                chunk = self._hold(chunk)
                if not chunk:
                    continue
            if b'"usage"' in chunk:
                self._with_usage = chunk
                if self._strips:
                    chunk = self._without_usage(chunk)
                    if not chunk:
                        continue
            if self._keeps:
                self.first = self.first or chunk[: _end_of_first(chunk)]
                self.last = chunk
            await self._pass_on(chunk)
        if self._held:
            await self._pass_on(self._held)

    async def finish(self, event: bytes = b"") -> None:
        """End the stream, with one more event if there is one."""
        self._closed = True
        await self._send({"type": "http.response.body", "body": event})

    async def beat(self) -> None:
        """A comment, between two events."""
        if not self._closed and not self.sending:
            await self._pass_on(HEARTBEAT)

    @property
    def usage(self) -> Usage | None:
        """What the stream reported of its tokens."""
        return usage_in_stream(self._with_usage)

    async def _pass_on(self, chunk: bytes) -> None:
        self.sending = True
        try:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            self.sending = False
            self.moved = time.monotonic()

    def _hold(self, chunk: bytes) -> bytes:
        """Keep back the event that is not complete yet; what can go."""
        cut = max(chunk.rfind(end) + len(end) if end in chunk else 0 for end in _ENDS)
        if len(chunk) - cut > MAX_HELD_BYTES:
            return chunk
        self._held = chunk[cut:]
        return chunk[:cut]

    def _without_usage(self, events: bytes) -> bytes:
        """`events` without the one that holds nothing but usage, which has the last word `"usage"` in it."""
        at = events.rindex(b'"usage"')
        start = max(events.rfind(end, 0, at) + len(end) if end in events[:at] else 0 for end in _ENDS)
        end = min((events.index(end, at) + len(end) for end in _ENDS if end in events[at:]), default=len(events))
        return events[:start] + events[end:] if _is_usage_alone(events[start:end]) else events


def usage_in_stream(events: bytes) -> Usage | None:
    """Usage out of events, the last that has some."""
    at = len(events)
    while (at := events.rfind(b'"usage"', 0, at)) >= 0:
        start = events.rfind(b"\n", 0, at) + 1
        line = events[start:].partition(b"\n")[0]
        at = start
        if line.startswith(b"data:"):
            with contextlib.suppress(ValueError):
                if (usage := usage_of(json.loads(line[5:]))) is not None:
                    return usage
    return None


def _is_usage_alone(event: bytes) -> bool:
    if not event.startswith(b"data:") or b'"usage"' not in event:
        return False
    try:
        data = json.loads(event[5:])
    except ValueError:
        return False
    return isinstance(data, dict) and data.get("choices") == [] and isinstance(data.get("usage"), dict)


def _end_of_first(events: bytes) -> int:
    return min((events.find(end) + len(end) for end in _ENDS if end in events), default=0)


class Pulse:
    """Comments on streams that have been silent for a while: clients and what lies between give up on silence."""

    def __init__(self, interval: float, sent: Counter) -> None:
        """`interval` in seconds, 0 for never; `sent` counts the comments."""
        self._interval = interval
        self._sent = sent
        self._streams: set[EventRelay] = set()
        self._beats: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def watching(self, stream: EventRelay) -> Iterator[None]:
        """While it is entered."""
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    async def run(self) -> None:
        """Look at all streams, for ever."""
        while self._interval:
            await asyncio.sleep(self._interval / 4)
            silent = time.monotonic() - self._interval
            for stream in [each for each in self._streams if each.moved <= silent and not each.sending]:
                self._sent.inc()
                task = asyncio.create_task(stream.beat())
                self._beats.add(task)
                task.add_done_callback(self._beats.discard)
