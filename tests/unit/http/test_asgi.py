"""Bodies are bounded one by one and together; headers travel on; a client that leaves ends its request."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.errors import BodyTooLarge, InvalidHttp, KeyBusy, Overloaded, TooSlow
from proxy.http import asgi
from proxy.http.asgi import BodyMemory, ClientGone, ClientWatch, Pace, end_to_end, read_body
from tests.harness.virtual_time import on_virtual_time


def piece(body: bytes, more: bool = True) -> dict:
    return {"type": "http.request", "body": body, "more_body": more}


SCOPE = {"headers": []}

PACE = Pace(60.0, 0)

GONE = {"type": "http.disconnect"}


def receiver(*messages):
    """The `receive` of a server that has these messages, and then no more."""
    waiting = list(messages)

    async def receive():
        if not waiting:
            await asyncio.Event().wait()
        message = waiting.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message

    return receive


async def read(scope, *messages, limit=6, memory=None, pace=PACE):
    room = (memory or BodyMemory(100)).of()
    return await read_body(scope, receiver(*messages), limit=limit, pace=pace, room=room)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ((piece(b"abc"), GONE), ClientGone),
        ((piece(b"abc"), piece(b"defg")), BodyTooLarge),
        ((piece(b"abc"), piece(b"de"), asyncio.CancelledError()), asyncio.CancelledError),
        ((piece(b"abc"), OSError()), OSError),
        ((piece(b"abc"),), TooSlow),
    ],
)
async def test_bodies_broken_off_give_their_room_back(messages, error):
    memory = BodyMemory(1000)
    memory.of().take(10)  # another request's
    for _ in range(3):
        with pytest.raises(error):
            await read(SCOPE, *messages, memory=memory, pace=Pace(0.001, 0) if error is TooSlow else PACE)
    assert memory.held == 10


async def test_a_body_for_which_there_is_no_room_or_that_is_no_http_gives_back_what_it_had():
    served = SimpleNamespace(whole_body=lambda: None, is_broken=True)
    broken, memory = {**SCOPE, asgi.SERVED: served}, BodyMemory(5)
    for scope, error in ((SCOPE, Overloaded), (broken, InvalidHttp)):
        with pytest.raises(error):
            await read(scope, piece(b"abc"), piece(b"def"), limit=100, memory=memory)
        assert memory.held == 0


async def test_a_body_that_is_announced_as_too_large_is_refused_before_it_is_asked_for():
    asked = []

    async def receive():
        asked.append(True)

    for length in (b"7", b"9" * 20, b"9" * 5000, b"0" * 5000 + b"7"):  # Python reads at most 4,300 digits
        scope = {"headers": [(b"content-length", length)]}
        with pytest.raises(BodyTooLarge, match="max_body_bytes"):
            await read_body(scope, receive, limit=6, pace=PACE, room=BodyMemory(6).of())
    assert not asked


@pytest.mark.parametrize(("rate", "is_refused"), [(99, False), (200, True), (0, False)])
@on_virtual_time
async def test_a_body_that_drips_has_to_keep_up_with_the_rate(rate, is_refused):
    """A hundred bytes a second for five minutes: no piece is late, and the whole may be."""

    async def drip():
        await asyncio.sleep(1)
        return piece(b"x" * 100, more=asyncio.get_running_loop().time() < 300)

    reading = read_body(SCOPE, drip, limit=10**9, pace=Pace(60, rate), room=BodyMemory(10**9).of())
    with pytest.raises(TooSlow, match="min_body_rate") if is_refused else nullcontext():
        assert len(await reading) == 30_000
    assert asyncio.get_running_loop().time() == pytest.approx(120 if is_refused else 300, abs=2)


async def test_a_body_may_be_as_long_as_the_limit_in_one_piece_and_in_several():
    for pieces in ((piece(b"abcdef", more=False),), (piece(b"abc"), piece(b"def", more=False)), (piece(b"abcdef"), {})):
        messages = [{"type": "http.request", **each} for each in pieces]
        assert await read(SCOPE, *messages) == b"abcdef"
    for pieces in ((piece(b"abcdefg", more=False),), (piece(b"abcdef"), piece(b"g", more=False))):
        with pytest.raises(BodyTooLarge):
            await read(SCOPE, *pieces)


async def test_a_request_on_a_connection_too_many_is_refused():
    asgi.check_room({asgi.SERVED: SimpleNamespace(is_crowded=False)})
    with pytest.raises(Overloaded, match="max_connections"):
        asgi.check_room({asgi.SERVED: SimpleNamespace(is_crowded=True)})


@pytest.mark.parametrize(
    ("accepted", "is_asked"),
    [
        ([], True),
        ([b"gzip", b"br;q=0.5"], True),
        ([b"identity;q=0.5"], True),
        ([b"identity; q=0.001, *;q=0"], True),
        ([b"gzip;q=0"], True),
        ([b"br, Identity ;Q=0.0"], False),
        ([b"br", b"identity;q=0.000"], False),
        ([b"*;q=0"], False),
        ([b"identity;q=1, *;q=0"], True),
        ([b"*;q=1, identity;q=0."], False),
    ],
)
def test_a_body_without_a_coding_is_asked_for_unless_the_client_takes_none_such(accepted, is_asked):
    headers = [(b"a", b"b"), *((b"accept-encoding", each) for each in accepted), (b"c", b"d")]
    wanted = [(b"a", b"b"), (b"c", b"d"), (b"accept-encoding", b"identity")]
    assert asgi.unencoded(headers) == (wanted if is_asked else headers)


def test_each_header_that_concerns_one_connection_stays_on_it():
    for name in asgi.HOP_BY_HOP:
        assert end_to_end([(name.upper(), b"x"), (b"y", b"z")], asgi.HOP_BY_HOP) == [(b"y", b"z")]
    given = [(b"b", b"1"), (b"connection", b"a"), (b"connection", b" B "), (b"a", b"2"), (b"c", b"3"), (b"c", b"4")]
    assert end_to_end(given, asgi.HOP_BY_HOP | {b"d"}) == [(b"c", b"3"), (b"c", b"4")]
    assert end_to_end([(b"D", b"1"), (b"e", b"2")], asgi.HOP_BY_HOP | {b"d"}) == [(b"e", b"2")]


async def test_a_watch_waits_for_the_message_that_says_so_and_for_no_other():
    messages: asyncio.Queue = asyncio.Queue()

    async def handle():
        with ClientWatch(None, messages.get):
            await asyncio.Event().wait()

    task = asyncio.create_task(handle())
    messages.put_nowait(piece(b"x"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    messages.put_nowait(GONE)
    with pytest.raises(ClientGone):
        await task


class Bodies(RuleBasedStateMachine):
    """Bodies of three keys, and of nobody's, that grow and go; what is refused would have broken one of the rules."""

    @initialize(most=st.sampled_from([90, 16 * asgi.SMALL_BYTES]))
    def begin(self, most):
        self.most, self.memory, self.holds = most, BodyMemory(most), []

    def of(self, owner):
        return sum(hold.size for each, hold in self.holds if each == owner)

    @rule(owner=st.sampled_from([None, "ann", "bob", "cleo"]))
    def comes(self, owner):
        self.holds.append((owner, self.memory.of(owner)))

    @rule(data=st.data())
    def grows(self, data):
        if self.holds:
            owner, hold = data.draw(st.sampled_from(self.holds))
            size = data.draw(st.integers(0, self.most) | st.sampled_from([1, asgi.SMALL_BYTES, asgi.SMALL_BYTES + 1]))
            held = sum(each.size for _, each in self.holds) + size
            is_large = hold.size + size > asgi.SMALL_BYTES
            if held > self.most * (1 - asgi.LEFT_BY_LARGE if is_large else 1):
                error = Overloaded
            elif owner and self.of(owner) + size > asgi.TIMES_WHAT_IS_FREE * (self.most - held):
                error = KeyBusy
            else:
                hold.take(size)
                return
            with pytest.raises(error, match="max_bodies_bytes"):
                hold.take(size)

    @rule(data=st.data(), part=st.booleans())
    def goes(self, data, part):
        if self.holds:
            at = data.draw(st.integers(0, len(self.holds) - 1))
            if part:
                self.holds[at][1].give_back(self.holds[at][1].size // 2)
            else:
                with self.holds.pop(at)[1]:  # however its context ends
                    pass

    @invariant()
    def what_is_held_is_what_the_bodies_hold_and_each_key_leaves_room_for_another(self):
        assert self.memory.held == sum(hold.size for _, hold in self.holds) <= self.most
        assert all(self.of(owner) <= self.most * 2 / 3 for owner in ("ann", "bob", "cleo"))


TestBodies = Bodies.TestCase


def test_the_heap_is_given_back_once_for_so_many_bytes_that_were_freed(monkeypatch):
    trims: list[int] = []
    monkeypatch.setattr(asgi, "_trim", trims.append)
    memory = BodyMemory(10 * asgi.TRIM_AFTER_BYTES)
    seen = []
    for size in (asgi.TRIM_AFTER_BYTES - 1, 1, asgi.TRIM_AFTER_BYTES - 1, asgi.TRIM_AFTER_BYTES, 1):
        with memory.of() as hold:
            hold.take(size)
        seen.append(len(trims))
    assert seen == [0, 1, 1, 2, 2] and set(trims) == {0}
    monkeypatch.setattr(asgi, "_trim", None)  # another libc
    with memory.of() as hold:
        hold.take(2 * asgi.TRIM_AFTER_BYTES)
    assert memory.held == 0
