"""Bodies are bounded one by one and together; headers travel on; a client that leaves ends its request."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from proxy.errors import BodyTooLarge, InvalidHttp, Overloaded, TooSlow
from proxy.http import asgi
from proxy.http.asgi import (
    BodyState,
    ClientGone,
    ClientWatch,
    Pace,
    check_room,
    codings,
    end_to_end,
    header,
    read_body,
    send_whole,
    unencoded,
)
from proxy.http.body_memory import BodyMemory
from tests.harness.virtual_time import VirtualTimeLoop


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


async def test_a_body_in_pieces_is_put_together_and_keeps_its_room():
    memory = BodyMemory(6)
    room = memory.of()
    receive = receiver(piece(b"abc"), piece(b""), piece(b"def", more=False))
    assert await read_body(SCOPE, receive, limit=6, pace=PACE, room=room) == b"abcdef"
    assert memory.held == 6
    with pytest.raises(Overloaded, match="max_bodies_bytes"):
        await read_body(SCOPE, receiver(piece(b"x", more=False)), limit=6, pace=PACE, room=memory.of())
    room.give_back()
    assert memory.held == 0


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ((piece(b"abc"), GONE), ClientGone),
        ((piece(b"abc"), piece(b"defg")), BodyTooLarge),
        ((piece(b"abcdefg"),), BodyTooLarge),
        ((piece(b"abc"), piece(b"de"), asyncio.CancelledError()), asyncio.CancelledError),
        ((piece(b"abc"), OSError()), OSError),
        ((piece(b"abc"),), TooSlow),
    ],
)
async def test_bodies_broken_off_give_their_room_back(messages, error):
    memory = BodyMemory(1000)
    memory.of().take(10)  # another request's
    for _ in range(3):
        pace = Pace(0.001, 0) if error is TooSlow else PACE
        with pytest.raises(error):
            await read_body(SCOPE, receiver(*messages), limit=6, pace=pace, room=memory.of())
    assert memory.held == 10


async def test_a_body_for_which_there_is_no_room_gives_back_what_it_had():
    memory = BodyMemory(5)
    with pytest.raises(Overloaded):
        await read_body(SCOPE, receiver(piece(b"abc"), piece(b"def")), limit=100, pace=PACE, room=memory.of())
    assert memory.held == 0


async def test_a_body_that_the_server_has_needs_no_time():
    scope = {**SCOPE, "extensions": {asgi.BODY_STATE: lambda: BodyState.HERE}}
    body = await read_body(
        scope, receiver(piece(b"abc", more=False)), limit=6, pace=Pace(0, 0), room=BodyMemory(6).of()
    )
    assert body == b"abc"


async def test_a_body_that_is_no_http_is_refused():
    scope = {**SCOPE, "extensions": {asgi.BODY_STATE: lambda: BodyState.BROKEN}}
    memory = BodyMemory(6)
    room = memory.of()
    with pytest.raises(InvalidHttp) as raised:
        await read_body(scope, receiver(piece(b"abc")), limit=6, pace=PACE, room=room)
    assert (raised.value.status, raised.value.code, memory.held) == (400, "invalid_http", 0)


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
def test_a_body_that_drips_has_to_keep_up_with_the_rate(rate, is_refused):
    """A hundred bytes a second for five minutes: no piece is late, and the whole may be."""

    async def drip():
        await asyncio.sleep(1)
        return piece(b"x" * 100, more=asyncio.get_running_loop().time() < 300)

    reading = read_body(SCOPE, drip, limit=10**9, pace=Pace(60, rate), room=BodyMemory(10**9).of())
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        if is_refused:
            with pytest.raises(TooSlow, match="min_body_rate"):
                runner.run(reading)
            assert runner.get_loop().time() == pytest.approx(120, abs=2)
        else:
            assert len(runner.run(reading)) == 30_000


def test_headers_of_a_connection_stay_on_it():
    given = [
        (b"Host", b"a"),
        (b"Connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"TE", b"trailers"),
        (b"X-Y", b"2"),
    ]
    assert end_to_end(given, asgi.RECOMPUTED) == [(b"x-y", b"2")]
    assert end_to_end([(b"authorization", b"k")], asgi.RECOMPUTED) == [(b"authorization", b"k")]
    assert end_to_end([(b"authorization", b"k"), (b"x-api-key", b"k")], asgi.RECOMPUTED_WITH_KEY) == []


def test_many_headers_of_a_connection_cost_no_more_than_others():
    """By copies of the set of names, since time depends on the machine."""

    class Counted(frozenset):
        copies = 0

        def __or__(self, other):
            Counted.copies += 1
            return Counted(super().__or__(other))

    given = [(b"connection", b"x-%d" % number) for number in range(5000)]
    named = [(b"x-%d" % number, b"") for number in range(5000)]
    assert end_to_end([*given, *named, (b"y", b"")], Counted()) == [(b"y", b"")]
    assert Counted.copies == 1


def test_of_equal_headers_the_first_is_read():
    scope = {"headers": [(b"a", b"\xe9"), (b"b", b"2"), (b"b", b"3")]}
    assert (header(scope, b"a"), header(scope, b"b"), header(scope, b"c")) == ("é", "2", None)


async def test_a_whole_response_has_its_length():
    sent = []

    async def send(message):
        sent.append(message)

    await send_whole(send, 200, [(b"a", b"b")], b"body")
    assert sent[0]["headers"] == [(b"a", b"b"), (b"content-length", b"4")]
    assert sent[1]["body"] == b"body" and not sent[1].get("more_body")


class Server:
    """A client's connection under the gateway's own server, or under one that has only ASGI's messages."""

    def __init__(self, own: bool) -> None:
        self.leaves = asyncio.Event()
        self.callbacks = []
        self.scope = {"extensions": {asgi.ON_DISCONNECT: self.callbacks.append}} if own else {}

    async def receive(self):
        await self.leaves.wait()
        return GONE

    def leave(self):
        self.leaves.set()
        for callback in self.callbacks:
            callback()


@pytest.fixture(params=[True, False], ids=["own server", "another server"])
def server(request):
    return Server(request.param)


async def test_a_client_that_leaves_ends_its_request_and_nothing_else(server):
    ended = []

    async def handle():
        with contextlib.suppress(ClientGone):
            async with ClientWatch(server.scope, server.receive):
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(True)
        await asyncio.sleep(0)  # the task itself lives on: nothing cancels it now
        return "handled"

    task = asyncio.create_task(handle())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    server.leave()
    assert await asyncio.wait_for(task, 60) == "handled"
    assert ended and not task.cancelling()


async def test_a_client_that_leaves_after_its_answer_ends_nothing(server):
    async with ClientWatch(server.scope, server.receive) as watch:
        watch.over = True
        server.leave()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not watch.gone


async def test_a_watch_that_is_left_leaves_no_task_behind(server):
    before = asyncio.all_tasks()
    async with ClientWatch(server.scope, server.receive):
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    server.leave()
    await asyncio.sleep(0)  # this task was not cancelled


async def test_an_error_of_the_request_is_not_hidden_by_a_client_that_left(server):
    async def handle():
        async with ClientWatch(server.scope, server.receive):
            server.leave()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await handle()


async def read(scope, *messages, limit=6, memory=None, pace=PACE):
    room = (memory or BodyMemory(100)).of()
    return await read_body(scope, receiver(*messages), limit=limit, pace=pace, room=room)


@pytest.mark.parametrize("length", [b"6", b"0", b"6 ", b"x", b"-1", "٧".encode(), b"0" * 19 + b"6"])
async def test_an_announced_length_that_fits_or_is_none_is_no_reason_to_refuse(length):
    assert await read({"headers": [(b"content-length", length)]}, piece(b"abcdef", more=False)) == b"abcdef"


async def test_an_announced_length_is_looked_at_before_anything_has_come_only():
    """Later the bytes themselves are counted, and of a body that is here nothing has to be refused early."""
    scope = {"headers": [(b"content-length", b"7")], "extensions": {asgi.BODY_STATE: lambda: BodyState.HERE}}
    assert await read(scope, piece(b"abc"), {"type": "http.request"}) == b"abc"


async def test_a_body_may_be_as_long_as_the_limit_in_one_piece_and_in_several():
    for pieces in ((piece(b"abcdef", more=False),), (piece(b"abc"), piece(b"def", more=False)), (piece(b"abcdef"), {})):
        messages = [{"type": "http.request", **each} for each in pieces]
        assert await read(SCOPE, *messages) == b"abcdef"
    for pieces in ((piece(b"abcdefg", more=False),), (piece(b"abcdef"), piece(b"g", more=False))):
        with pytest.raises(BodyTooLarge):
            await read(SCOPE, *pieces)


def test_a_body_has_its_grace_and_then_its_rate_and_silence_has_its_own_bound():
    """Seconds until it is refused: the grace, and a second for each `rate` bytes that came."""

    def refused_after(pace: Pace, *came: tuple[float, bytes]) -> float:
        waiting = list(came)

        async def receive():
            seconds, body = waiting.pop(0) if waiting else (10_000, b"")
            await asyncio.sleep(seconds)
            return piece(body)

        async def reading() -> float:
            memory = BodyMemory(10**6)
            with pytest.raises(TooSlow) as refused:
                await read_body(SCOPE, receive, limit=10**6, pace=pace, room=memory.of())
            assert memory.held == 0 and f"{pace.seconds:g} seconds" in str(refused.value)
            return asyncio.get_running_loop().time() - began

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            began = runner.get_loop().time()
            return runner.run(reading())

    assert refused_after(Pace(60, 0)) == pytest.approx(60, abs=1)
    assert refused_after(Pace(60, 0), (50, b"x")) == pytest.approx(110, abs=1)
    assert refused_after(Pace(60, 100), (50, b"x" * 3000)) == pytest.approx(90, abs=1)
    assert refused_after(Pace(60, 100), (50, b"x" * 9000)) == pytest.approx(110, abs=1)


async def test_a_request_on_a_connection_too_many_is_refused():
    check_room({})
    check_room({"extensions": {asgi.BODY_STATE: None}})
    with pytest.raises(Overloaded, match="max_connections"):
        check_room({"extensions": {asgi.IS_CROWDED: {}}})


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], []),
        ([(b"content-encoding", b"")], []),
        ([(b"content-encoding", b"Identity"), (b"x", b"gzip")], []),
        ([(b"content-encoding", b"GZip, identity,br ,"), (b"content-encoding", b"zstd")], ["gzip", "br", "zstd"]),
    ],
)
def test_codings_are_named_in_the_order_of_their_steps(headers, found):
    assert codings(headers) == found


@pytest.mark.parametrize(
    ("accepted", "is_asked"),
    [
        ([], True),
        ([b"gzip, br"], True),
        ([b"gzip;q=1"], True),
        ([b"gzip", b"br;q=0.5"], True),
        ([b"identity;q=0.5"], True),
        ([b"identity; q=0.001, *;q=0"], True),
        ([b"gzip;q=0"], True),
        ([b"identity;q=0"], False),
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
    assert unencoded(headers) == (wanted if is_asked else headers)


def test_each_header_that_concerns_one_connection_stays_on_it():
    for name in asgi.HOP_BY_HOP:
        assert end_to_end([(name.upper(), b"x"), (b"y", b"z")], frozenset()) == [(b"y", b"z")]
    given = [(b"b", b"1"), (b"connection", b"a"), (b"connection", b" B "), (b"a", b"2"), (b"c", b"3"), (b"c", b"4")]
    assert end_to_end(given, frozenset({b"d"})) == [(b"c", b"3"), (b"c", b"4")]
    assert end_to_end([(b"D", b"1"), (b"e", b"2")], frozenset({b"d"})) == [(b"e", b"2")]


async def test_a_whole_response_is_marked_as_whole_in_its_head():
    sent = []

    async def send(message):
        sent.append(message)

    await send_whole(send, 404, [], b"")
    assert sent[0][asgi.IS_WHOLE] is True and (sent[0]["type"], sent[0]["status"]) == ("http.response.start", 404)
    assert sent[1]["type"] == "http.response.body" and len(sent) == 2


async def test_a_client_that_left_is_told_however_its_request_ends(server):
    async def handle(how):
        async with ClientWatch(server.scope, server.receive) as watch:
            server.leave()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            assert watch.gone
            if how is not None:
                raise how

    for how in (None, asyncio.CancelledError()):
        task = asyncio.create_task(handle(how))
        with pytest.raises(ClientGone):
            await task


async def test_a_watch_waits_for_the_message_that_says_so_and_for_no_other():
    messages: asyncio.Queue = asyncio.Queue()

    async def handle():
        async with ClientWatch({}, messages.get):
            await asyncio.Event().wait()

    task = asyncio.create_task(handle())
    messages.put_nowait(piece(b"x"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    messages.put_nowait(GONE)
    with pytest.raises(ClientGone):
        await task
