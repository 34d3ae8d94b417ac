"""What the gateway's connections make of bytes and of time; what they rely on in uvicorn: `test_uvicorn_server.py`."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from math import ceil
from types import SimpleNamespace

import pytest
import uvicorn

from proxy.http import asgi
from proxy.server.connection import LINGER_SECONDS, MAX_PIPELINED, MAX_UNREAD, ConnectionState, bounded
from proxy.server.process_limits import SPARE
from proxy.settings import Settings

LIMIT, TIMEOUT, IDLE, SEND_TIMEOUT, CONNECTIONS = 1000, 60.0, 95.0, 100.0, 10
SETTINGS = Settings(max_header_bytes=LIMIT, client_timeout=TIMEOUT, keepalive_timeout=IDLE, send_timeout=SEND_TIMEOUT)


class Transport(asyncio.Transport):
    """A socket of which the test sees what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.writes, self.unsent = b"", 0, 0
        self.closed = self.aborted = False

    def get_write_buffer_size(self):
        return self.unsent

    def abort(self):
        self.closed = self.aborted = True

    def write(self, data):
        self.written += data
        self.writes += 1

    def writelines(self, pieces):
        self.write(b"".join(pieces))

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    pause_reading = resume_reading = lambda self: None


class Connection:
    """A client's connection to an application that waits until it may answer."""

    def __init__(self, others: int = 0) -> None:
        """With `others` beside it at the same server."""
        self.scopes, self.bodies, self.may_answer = [], [], asyncio.Event()
        self.headers, self.pieces, self.is_whole = [(b"content-length", b"0")], [], False
        protocol = bounded(SETTINGS, CONNECTIONS)
        config = uvicorn.Config(self.app, interface="asgi3", http=protocol, ws="none", log_config=None, lifespan="off")
        config.load()
        self.transport = Transport()
        state = ConnectionState()
        state.connections |= {object() for _ in range(others)}  # type: ignore[arg-type]  # counted only
        self.protocol = config.http_protocol_class(config, state, {})
        self.protocol.connection_made(self.transport)

    async def app(self, scope, receive, send):
        self.scopes.append(scope)
        await self.may_answer.wait()
        self.bodies.append((await receive()).get("body"))
        if self.is_whole and scope[asgi.SERVED].answer(200, self.headers, b"".join(self.pieces)):
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)

    async def take(self, data: bytes) -> None:
        self.send(data)
        await turn()

    async def answer(self, data: bytes) -> None:
        self.may_answer.set()
        await self.take(data)

    def pass_time(self, seconds: float) -> None:
        """The server looks at the connection every second for so long."""
        begun = ceil(self.protocol.loop.time())
        for second in range(int(seconds) + 1):
            self.protocol.check(begun + second)

    @property
    def status(self) -> int:
        return int(self.transport.written.split(b" ")[1])

    @property
    def error(self) -> dict:
        return json.loads(self.transport.written.rpartition(b"\r\n\r\n")[2])["error"]


@pytest.fixture
async def connection():
    made = Connection()
    yield made
    made.may_answer.set()
    made.protocol.connection_lost(None)
    await turn()


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
OFFER = b"connection: keep-alive, Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        # Of each header its name, its value, and four bytes around them; and the target.
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (LIMIT - 5) + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * LIMIT + b" HTTP/1.1\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * LIMIT, 431, "headers_too_large"),  # and it does not end
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
        (GET[:-2] + b"x: aaaaaaaaaaaaaaaaaaaaaa\r\n" * (LIMIT // 20) + b"\r\n", 431, "headers_too_large"),
        # what is ambiguous, with an upgrade too
        (b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: a\r\n\r\n" + GET, 400, "invalid_http"),
        (POST + OFFER + b"content-length: 4\r\ncontent-length: 5\r\n\r\n" + GET, 400, "invalid_http"),
        (POST + OFFER + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + GET, 400, "invalid_http"),
    ],
)
@pytest.mark.parametrize("size", [22, 10_000])
async def test_what_is_no_request_is_refused_in_the_envelope(connection, sent, status, code, size):
    for start in range(0, len(sent), size):
        if not connection.transport.closed:  # behind that, nothing more is read
            connection.send(sent[start : start + size])
    assert (connection.status, connection.error["code"], connection.transport.closed) == (status, code, True)
    assert not connection.scopes


@pytest.mark.parametrize(
    ("before", "drip", "written", "others", "seconds"),
    [
        (b"", b"", 0, 9, TIMEOUT),
        (b"GET / HTTP/1.1\r\nx: ", b"a", 408, 9, TIMEOUT),
        (GET + b"GET /", b"a", 200, 9, TIMEOUT),
        (GET, b"\r\n", 200, 0, TIMEOUT),
        (GET, b"", 200, 6, IDLE),
        (GET, b"", 200, 7, LINGER_SECONDS),
    ],
    ids=["nothing", "a head", "the next head", "empty lines behind an answer", "an answer", "many connections"],
)
async def test_a_head_has_one_deadline_however_often_a_byte_comes(before, drip, written, others, seconds):
    connection = Connection(others)
    connection.may_answer.set()
    if before:
        await connection.take(before)
    if drip:
        connection.send(drip)
    begun = connection.protocol._free_since = 1000  # sums of it and seconds are exact
    for second in range(int(seconds) + 2):
        assert not connection.transport.closed
        if drip:
            connection.send(drip)
        connection.protocol.check(begun + second)
    assert connection.transport.closed and (connection.status if connection.transport.written else 0) == written
    if b" 408 " in connection.transport.written:
        assert connection.error["code"] == "request_timeout" and "client_timeout" in connection.error["message"]


async def test_what_is_left_of_an_answered_requests_body_has_a_moment(connection):
    await connection.take(POST + b"content-length: 1000\r\n\r\n")
    connection.send(b"x")  # the application reads no more than that
    connection.may_answer.set()
    await turn()
    assert connection.status == 200 and not connection.transport.closed
    begun = connection.protocol._free_since = 1000  # sums of it and seconds are exact
    for second in range(int(LINGER_SECONDS) + 2):
        assert not connection.transport.closed
        connection.send(b"a")
        connection.protocol.check(begun + second)
    assert connection.transport.closed and connection.transport.written.count(b"HTTP/1.1") == 1


async def test_once_it_has_come_the_connection_is_kept_as_ever(connection):
    await connection.answer(POST + b"content-length: 4\r\n\r\na")
    await connection.take(b"bcd" + GET)
    assert [scope["method"] for scope in connection.scopes] == ["POST", "GET"]
    assert connection.transport.written.count(b"HTTP/1.1 200") == 2 and not connection.transport.closed


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off_and_its_request_ends(connection, is_over):
    left = []
    if is_over:
        connection.may_answer.set()
    await connection.take(GET)
    connection.scopes[0][asgi.SERVED].on_left = lambda: left.append(1)
    connection.transport.unsent = 100_000
    if is_over:
        connection.transport.close()  # which waits until all is sent
    else:
        connection.protocol.pause_writing()
    connection.pass_time(SEND_TIMEOUT - 1)
    assert not connection.transport.aborted
    connection.pass_time(SEND_TIMEOUT + 2)
    assert connection.transport.aborted
    connection.protocol.connection_lost(None)
    assert left == [1] * (not is_over)


@pytest.mark.parametrize(
    ("is_paused", "unsent"),
    [
        (False, lambda second: 0),
        (False, lambda second: 1000),
        (True, lambda second: 1000 - second // int(SEND_TIMEOUT)),
    ],
    ids=["its answer takes long", "a stream is written as fast as it is read", "it takes a part in time"],
)
async def test_an_honest_client_that_is_slow_is_not_cut_off(connection, is_paused, unsent):
    await connection.take(GET)
    begun = ceil(connection.protocol.loop.time())  # before the pause, whose second it would add on a busy machine
    if is_paused:
        connection.protocol.pause_writing()
    for second in range(int(5 * SEND_TIMEOUT)):
        connection.transport.unsent = unsent(second)
        connection.protocol.check(begun + second)
    assert not connection.transport.closed


async def test_a_request_leaves_nothing_to_the_garbage_collector(connection):
    """It counts objects: a hundred large bodies would be few."""
    gc.collect()
    gc.disable()
    try:
        await connection.take(POST + b"content-length: 3\r\n\r\nabc")
        request = weakref.ref(served := connection.scopes[0][asgi.SERVED])
        with asgi.ClientWatch(served):
            del served
        connection.protocol.connection_lost(None)
        connection.may_answer.set()
        await turn()
        connection.scopes.clear()
        assert request() is None
    finally:
        gc.enable()


async def test_a_server_that_stops_ends_connections_with_their_answers(connection):
    connection.protocol._state.is_stopping = True
    await connection.answer(GET)
    assert b"connection: close" in connection.transport.written and connection.transport.closed


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_client_of_http_1_0_gets_no_chunks(connection, length, method):
    connection.pieces = [b"ab", b"", b"cde"]
    connection.headers = [(b"content-length", b"5")] if length else []
    await connection.answer(method + b" / HTTP/1.0\r\nhost: a\r\n\r\n")
    head, _, body = connection.transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and (b"content-length: 5" in head) is length
    assert body == (b"abcde" if method == b"GET" else b"") and connection.transport.closed


@pytest.mark.parametrize(("length", "is_reset"), [(b"5", False), (None, True)])
async def test_half_an_answer_to_http_1_0_does_not_end_as_a_whole_one(connection, length, is_reset):
    connection.pieces, connection.headers = [b"ab", 5], [(b"content-length", length)] if length else []
    await connection.answer(b"GET / HTTP/1.0\r\nhost: a\r\n\r\n")
    assert connection.transport.closed and connection.transport.aborted is is_reset


@pytest.mark.parametrize(("is_whole", "method", "writes"), [(True, "GET", 1), (False, "GET", 2), (True, "HEAD", 1)])
async def test_a_whole_answer_goes_out_in_one_write_and_any_other_as_it_comes(connection, is_whole, method, writes):
    connection.is_whole, connection.headers, connection.pieces = is_whole, [(b"content-length", b"2")], [b"ok"]
    connection.may_answer.set()
    for number in (1, 2):
        await connection.take(GET.replace(b"GET", method.encode()))
        assert connection.transport.written.count(b"content-length: 2\r\n\r\n" + b"ok" * (method == "GET")) == number
        assert connection.transport.writes == number * writes


@pytest.mark.parametrize(
    ("headers", "pieces"),
    [
        ([(b"content-length", b"5")], [b"abcd"]),
        ([(b"content-length", b"3")], [b"ab", b"xy"]),
        ([(b"a", b"b\r\nc: d")], []),
        ([], [b"a", 5]),
    ],
)
async def test_half_an_answer_ends_its_connection_and_is_never_taken_for_a_whole_one(connection, headers, pieces):
    connection.headers, connection.pieces = headers, pieces
    await connection.answer(GET * 2)
    assert connection.transport.closed and len(connection.scopes) == 1
    assert not connection.transport.written.endswith((b"0\r\n\r\n", b"xy"))


async def test_a_client_that_leaves_is_reported_to_each_of_its_requests(connection):
    left = []
    await connection.take(GET * 3)
    requests = [request for request, _ in connection.protocol._requests]
    for name, request in enumerate(requests):
        request.on_left = lambda name=name: left.append(name)
    connection.protocol.connection_lost(None)
    assert left == [0, 1, 2] and len(connection.scopes) == 1
    with pytest.raises(asgi.ClientGone), asgi.ClientWatch(requests[0]):
        await asyncio.sleep(1000)


async def test_a_body_that_is_no_http_is_told_to_its_own_request(connection):
    await connection.take(GET + POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n")
    assert [request.is_broken for request, _ in connection.protocol._requests] == [False, True]
    connection.may_answer.set()
    await turn()
    await turn()
    assert connection.transport.written.count(b"HTTP/1.1 200") == 2 and connection.transport.closed


async def test_a_body_that_is_no_http_and_belongs_to_an_answered_request_ends_the_connection(connection):
    await connection.answer(POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    connection.send(b"zz\r\n")
    assert connection.transport.written.count(b"HTTP/1.1") == 1 and connection.transport.closed


@pytest.mark.parametrize(("length", "is_refused"), [(LIMIT // 4, False), (LIMIT, True)])
async def test_trailers_count_with_the_head(connection, length, is_refused):
    await connection.take(POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
    for number in range(4):
        connection.send(b"x-%d: " % number + b"a" * (length // 4) + b"\r\n")
    await connection.answer(b"\r\n")
    assert connection.scopes[0]["headers"] == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]
    assert connection.transport.closed == is_refused and connection.status == 200


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"1;x="])
async def test_a_trailer_or_an_extension_without_an_end_is_not_read_on(connection, endless):
    await connection.take(POST + b"transfer-encoding: chunked\r\n\r\n" + endless)
    for _ in range(3):
        connection.send(b"a" * LIMIT)
    assert connection.protocol._requests[0][0].is_broken


async def test_a_large_body_behind_a_request_under_way_is_not_waited_for(connection):
    """Reading would pause, and a client that leaves would not be seen."""
    await connection.take(GET + POST + b"content-length: 100000\r\n\r\n")
    connection.send(b"a" * (MAX_UNREAD + 1))
    assert [request.is_broken for request, _ in connection.protocol._requests] == [False, True]


async def test_too_many_requests_behind_each_other_are_refused_after_those_before_are_answered(connection):
    connection.send(GET * (MAX_PIPELINED + 2))
    connection.send(GET)
    assert not connection.transport.written
    connection.may_answer.set()
    for _ in range(MAX_PIPELINED + 2):
        await turn()
    assert connection.transport.written.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1 == len(connection.scopes)
    assert connection.transport.closed


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("fields", [b"content-length: 29", b"transfer-encoding: chunked"])
async def test_the_body_of_a_request_that_offers_an_upgrade_is_no_request(connection, fields, size, caplog):
    hidden = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"[:29]
    body = hidden if b"length" in fields else b"1d\r\n" + hidden + b"\r\n0\r\n\r\n"
    sent = POST + OFFER + fields + b"\r\n\r\n" + body + POST.replace(b"/", b"/next", 1) + OFFER + b"\r\n"
    for start in range(0, len(sent), size):
        connection.send(sent[start : start + size])
    connection.may_answer.set()
    await turn()
    await turn()
    assert [(scope["method"], scope["path"]) for scope in connection.scopes] == [("POST", "/"), ("POST", "/next")]
    name, _, value = fields.partition(b": ")
    assert connection.scopes[0]["headers"] == [(b"host", b"a"), (b"connection", b"keep-alive"), (name, value)]
    assert connection.bodies[0] == hidden
    assert connection.transport.written.count(b"HTTP/1.1 200") == 2 and not connection.transport.closed
    assert not caplog.records  # anyone could fill the log
    await connection.take(POST.replace(b"1.1", b"1.0") + OFFER + b"\r\n")
    await turn()
    assert connection.transport.written.count(b"HTTP/1.1 200") == 3 and connection.transport.closed


async def test_behind_a_head_without_an_end_nothing_more_is_read_while_a_request_is_answered(connection):
    connection.send(GET)
    connection.send(b"GET / HTTP/1.1\r\nx: " + b"a" * LIMIT)
    assert not connection.transport.written
    read: list[bytes] = []
    connection.protocol._parser = SimpleNamespace(feed_data=read.append)
    connection.send(b"a" * LIMIT)
    assert not read
    connection.may_answer.set()
    await turn()
    assert connection.status == 200 and connection.transport.closed and len(connection.scopes) == 1


@pytest.mark.parametrize(
    ("others", "is_crowded", "is_refused"),
    [
        (CONNECTIONS - 1, False, False),
        (CONNECTIONS, True, False),
        (CONNECTIONS + SPARE - 1, True, False),
        (CONNECTIONS + SPARE, True, True),
    ],
)
async def test_connections_beyond_those_that_fit_are_for_pages_and_some_more_are_refused_at_once(
    others, is_crowded, is_refused
):
    connection = Connection(others)
    assert connection.transport.closed is is_refused and bool(connection.transport.written) is is_refused
    if is_refused:
        assert connection.status == 503 and "max_connections" in connection.error["message"]
        assert b"connection: close" in connection.transport.written
    else:
        await connection.answer(GET)
        assert connection.scopes[0][asgi.SERVED].is_crowded is is_crowded
        assert connection.status == 200 and connection.transport.closed is is_crowded
    connection.protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("fields", "is_websocket"),
    [
        (b"connection: upgrade\r\nupgrade: h2c, WebSocket/13\r\n", True),
        (b"connection: upgrade\r\nupgrade: h2c\r\nx: websocket\r\n", False),
        (b"upgrade: websocket\r\n", False),  # which offers nothing
    ],
)
async def test_an_offer_of_a_websocket_is_told_once(connection, fields, is_websocket):
    connection.may_answer.set()
    for sent in (b"GET / HTTP/1.1\r\nhost: a\r\n" + fields + b"\r\n", GET):
        await connection.take(sent)
    told = [scope[asgi.SERVED].wants_websocket for scope in connection.scopes]
    assert told == [is_websocket, False] and not connection.transport.closed
