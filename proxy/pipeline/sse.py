"""An event stream on its way to the client: every byte as it came, in whole events only.

Whole events allow an error event in a stream that breaks off, a comment between two events, and the removal of the
usage that only the gateway asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter

from proxy.chat.usage import Usage, usage_of
from proxy.fleet.part import Change, Part
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.client import Answer
from proxy.http.json_body import loads
from proxy.http.token_limits import Charge
from proxy.idle_work import beside

# Between two events, and a line of the next one: of a blank line SDKs make an empty event.
HEARTBEAT = b": keep-alive\n"

MAX_HELD_BYTES = 2**20  # an event this long is passed on in pieces

# Health checks in a row in which nothing listens at a worker, and a stream of it brings nothing: it is gone. One that
# stops in good order does not listen either, and says something meanwhile.
GONE_CHECKS = 4

_ENDS = (b"\n\n", b"\n\r\n")
_FINISHED = b'"finish_reason":"'  # in the event that ends a choice
_USAGE = re.compile(rb'"usage":\s*\{')  # not within a text, where a backslash stands before each quote

# How the last event of a stream begins, in each API.
_ENDED = tuple(b"event: response." + end for end in (b"completed", b"incomplete", b"failed"))
_LAST = (b"data: [DONE]", b"event: message_stop", *_ENDED)


@dataclass(eq=False)
class SseRelay:
    _answer: Answer
    _send: asgi.Send
    _served: asgi.Request | None = None  # by which pieces are sent where they arrive; None: all go by `_send`
    _choices: int = 0  # remove the event that holds only usage, behind the ends of so many; 0: leave it
    # Called with the first event before that is sent; then `first` and `last` are kept.
    _opened: Callable[[bytes], None] | None = None
    # Counts the events for a key with limits in tokens: all that is known of a stream without usage.
    _charge: Charge | None = None
    _ended: int = 0  # choices
    _held: bytes = b""  # the beginning of an event
    _terminal: bytes = b""  # a whole event that the usage may have to go into
    _closed: bool = False
    _whole: bool = True  # what was passed on ends with an event's end
    _with_usage: bytes = b""
    first: bytes = b""  # its first event
    last: bytes = b""  # its last few
    _passed: bytes = b""  # the last few that were sent
    moved: float = field(default_factory=lambda: time.monotonic())  # when something was last sent
    sending: bool = False
    _refusals: int = 0  # by its worker, since that said something

    def __post_init__(self) -> None:
        if self._charge is not None:
            self._charge.streamed = 0

    async def run(self, piece: bytes) -> None:
        """Pass on this piece and all behind it up to the end, the end itself excepted."""
        self._answer.sink = self.write_through
        try:
            while piece:
                if not self.write_through(piece) and (chunk := self._take(piece)):
                    await self._pass_on(chunk)
                    self._passed = chunk
                piece = await self._answer.next_chunk()
        finally:
            self._answer.sink = None  # it leads back here
        self._terminal += self._held
        self._held = b""

    def write_through(self, piece: bytes) -> bool:
        """Pass a piece on in the call that brings it; whether that could be done."""
        served = self._served
        if served is None or self.sending or self._closed or not served.is_writable():
            return False
        if chunk := self._take(piece):
            served.write_chunk(chunk)
            self._whole, self._passed, self.moved = chunk.endswith(_ENDS), chunk, time.monotonic()
        return True

    def _take(self, chunk: bytes) -> bytes:
        """What of all that is here can be sent."""
        self._refusals = 0
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not chunk.endswith(_ENDS):
            chunk = self._hold(chunk)
        if self._choices:
            chunk = self._stripped(chunk)
        elif b'"usage"' in chunk:
            self._with_usage = chunk
        if chunk and self._opened is not None:
            if not self.first:
                self.first = chunk[: _end_of_event(chunk, 0)]
                self._opened(self.first)
            self.last = chunk
        if self._charge is not None:
            self._charge.streamed = (self._charge.streamed or 0) + sum(map(chunk.count, _ENDS))
        return chunk

    async def finish(self, event: bytes = b"") -> None:
        """End the stream, with one more event if there is one."""
        self._closed = True
        if event and not self._whole:
            event = b"\n\n" + event
        await self._send({"type": "http.response.body", "body": self._terminal + event})

    def refused(self, in_a_row: int) -> None:
        """Nothing listens at its worker, for so many checks: break it off if it has brought nothing meanwhile."""
        self._refusals += 1
        if min(self._refusals, in_a_row) >= GONE_CHECKS and not self.sending:
            self._answer.close()

    async def beat(self) -> None:
        """A comment, between two events."""
        if self._whole and not self._closed and not self.sending:
            await self._pass_on(HEARTBEAT)

    @property
    def response(self) -> Any:
        """The last response object in a stream of /v1/responses; complete if the stream was."""
        responses = (data_of_last(events).get("response") for events in (self.last, self.first) if events)
        return next((response for response in responses if response is not None), None)

    @property
    def is_complete(self) -> bool:
        """Whether the last event that its API has was sent: clients may leave there, before the stream itself ends."""
        start = _start_of_event(self._passed, len(self._passed) - 2)
        return self._whole and self._passed.startswith(_LAST, start)

    @property
    def usage(self) -> Usage | None:
        return usage_in_stream(self._with_usage)

    async def _pass_on(self, chunk: bytes) -> None:
        self.sending = True
        self._whole = chunk is HEARTBEAT or chunk.endswith(_ENDS)
        try:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            self.sending = False
            self.moved = time.monotonic()

    def _hold(self, chunk: bytes) -> bytes:
        """Keep back the event that is not complete yet; returns what can be sent."""
        cut = _start_of_event(chunk, len(chunk))
        if len(chunk) - cut > MAX_HELD_BYTES or (cut == 0 and not self._whole and not self._terminal):
            cut = len(chunk.rstrip(b"\r\n"))  # what may be half of an event's end stays with the other half
        self._held = chunk[cut:]
        return chunk[:cut]

    def _stripped(self, events: bytes) -> bytes:
        """The part of `events` that can be sent, without the event that holds only usage."""
        self._ended += events.count(_FINISHED)
        if self._terminal:
            events = self._terminal + events
            self._terminal = b""
        if b'"usage"' in events:
            self._with_usage = events
            rest = _without_usage(events)
            if _USAGE.search(rest) is None:
                return rest
            self._choices = 0  # usage beside a choice was not asked for: this worker reports it to all clients
            return events
        if self._ended >= self._choices and _FINISHED in events:
            start = _start_of_event(events, len(events) - 2)
            if _FINISHED in events[start:]:
                self._terminal = events[start:]
                return events[:start]
        return events


def _without_usage(events: bytes) -> bytes:
    """`events` as if usage had not been asked for: vLLM then stamps another event, the one that ends the choice.

    Of several choices only the last one gets its stamp back: the others had gone out before it was known.
    """
    at = events.rindex(b'"usage"')
    start, end = _start_of_event(events, at), _end_of_event(events, at)
    data = _data(events[start:end]) if events.startswith(b"data:", start) else {}
    if data.get("choices") != [] or not isinstance(data.get("usage"), dict):
        return events
    before = events[:start]
    stamp = data.get("system_fingerprint")
    if stamp is not None and _FINISHED in before and b'"system_fingerprint"' not in before:
        brace = before.rindex(b"}")
        before = b'%b,"system_fingerprint":%b%b' % (before[:brace], json.dumps(stamp).encode(), before[brace:])
    return before + events[end:]


def _start_of_event(events: bytes, at: int) -> int:
    return max((found + len(end) for end in _ENDS if (found := events.rfind(end, 0, at)) >= 0), default=0)


def _end_of_event(events: bytes, at: int) -> int:
    return min((found + len(end) for end in _ENDS if (found := events.find(end, at)) >= 0), default=len(events))


def _data(line: bytes) -> dict[str, Any]:
    """The object in a line of data; empty if there is none."""
    with contextlib.suppress(ValueError):
        data = loads(line[5:])
        if isinstance(data, dict):
            return data
    return {}


def data_of_last(events: bytes) -> dict[str, Any]:
    """The data of the last of some events; empty if it is no object."""
    return next((_data(line) for line in reversed(events.splitlines()) if line.startswith(b"data:")), {})


def usage_in_stream(events: bytes) -> Usage | None:
    """Usage in the last of some events that reports it."""
    at = len(events)
    while (at := events.rfind(b'"usage"', 0, at)) >= 0:
        at = events.rfind(b"\n", 0, at) + 1
        line = events[at:].partition(b"\n")[0]
        if line.startswith(b"data:") and (usage := usage_of(_data(line))) is not None:
            return usage
    return None


@dataclass(eq=False)
class Heartbeats(Part):
    """Comments on streams that have been silent for a while: clients and proxies before them give up on silence.

    So no client's clock runs out any more, and a stream whose worker is gone without a word is ended here.
    """

    name = "heartbeats"

    _interval: float  # seconds; 0: never
    _sent: Counter  # counts the comments
    streams: dict[SseRelay, Worker] = field(default_factory=dict)  # under way, and by whom

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """Break off what hangs at a worker that is gone."""
        if change is not Change.REFUSED:
            return
        for stream in [each for each, of in self.streams.items() if of is worker]:
            stream.refused(worker.refusals)

    async def run(self) -> None:
        while self._interval:
            await asyncio.sleep(self._interval / 4)
            silent = time.monotonic() - self._interval
            for stream in [each for each in self.streams if each.moved <= silent and not each.sending]:
                self._sent.inc()
                beside(stream.beat())
