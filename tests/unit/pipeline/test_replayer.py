"""A prompt that is sent for its prefix alone, and what is believed of it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.chat import CHAT
from proxy.fleet.hot_prefixes import WarmupRequest
from proxy.http.client import Broken, Upstream
from proxy.pipeline.replayer import Replayer
from proxy.routing.prefix_index import PrefixIndex

FOUND = Found((Boundary("system", b"s", "first:1", estimate=150),), (b"s",))

PROMPT = WarmupRequest(CHAT, b'{"model":"m","messages":[]}', ("model", "messages"), {}, FOUND, "m")

WORKER = SimpleNamespace(
    url="http://w", address="http://w", addressed=list, boot="w#1", hint=lambda found: found.entries()
)


class Answering(Upstream):
    """It answers with a status, or breaks off."""

    def __init__(self, status: int | None) -> None:
        super().__init__(1.0, 65536, "the workers' key")
        self._status = status
        self.asked, self.closed = [], 0
        self.outcome: str | None = None  # in the head of its answer
        self.breaks = False  # in its body

    async def send(self, *asked, **named):
        self.asked.append((asked, named))
        if self._status is None:
            raise Broken("gone")

        async def read() -> bytes:
            if self.breaks:
                raise Broken("gone")
            return b"{}"

        def close() -> None:
            self.closed += 1

        return SimpleNamespace(status=self._status, read=read, close=close, header=lambda name: self.outcome)


class Events:
    """What the engine's events are told of a request."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def sent(self, *what: object) -> None:
        self.told.append("sent")

    def refused(self, *what: object) -> None:
        self.told.append("refused")

    @contextlib.contextmanager
    def pin_asked(self, *what: object) -> Iterator[Callable[[], Awaitable[str]]]:
        yield AsyncMock(return_value="pinned")


@pytest.mark.parametrize("status", [200, 503, None])
@pytest.mark.parametrize("pin", [None, True])
async def test_a_prefix_counts_as_the_workers_only_if_it_has_computed_it(status, pin):
    index, events = PrefixIndex(10**6), Events()
    replayer = Replayer(Answering(status), index, events, 5.0)
    if status is None:
        with pytest.raises(Broken):
            await replayer.send(WORKER, PROMPT, pin=pin)
    else:
        answer = await replayer.send(WORKER, PROMPT, pin=pin)
        assert answer.status == status and answer.pin == ("pinned" if pin and status == 200 else "")
    if pin is None:
        assert (index.sent((b"s",), {"w#1"}) is not None) == (status == 200) and events.told == []
    else:
        assert events.told == (["sent"] if status == 200 else ["sent", "refused"])


async def test_an_answer_that_breaks_off_is_closed_and_what_was_recorded_is_taken_back():
    upstream, events = Answering(200), Events()
    upstream.breaks = True
    with pytest.raises(Broken):
        await Replayer(upstream, PrefixIndex(10**6), events, 5.0).send(WORKER, PROMPT, pin=True)
    assert upstream.closed == 1 and events.told == ["sent", "refused"]
