"""What comes over a connection to a worker: the same as h11 reads, wherever it is cut into pieces, or an error."""

from __future__ import annotations

import asyncio
import re
import socket
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import Mock

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.http.client import Broken, Malformed, WorkerConnection

MOST_HEAD = 2000


class Read(NamedTuple):
    """What a reader has made of an answer."""

    status: int | None = None  # None: no head came
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    is_whole: bool = False


async def _read(pieces: list[bytes], method: str, unsent: int) -> tuple[Read, type[Broken] | bool]:
    idle: list[WorkerConnection] = []
    connection = WorkerConnection(MOST_HEAD, idle, set())
    transport = Mock(**{"get_write_buffer_size.return_value": unsent})
    with socket.socket() as own:
        transport.get_extra_info = {"socket": own}.get
        connection.connection_made(transport)
    asking = asyncio.create_task(connection.ask(b"", b"", None, is_head=method == "HEAD", may_repeat=False))
    await asyncio.sleep(0)
    for piece in pieces:
        if not transport.abort.called:
            connection.data_received(piece)
    is_kept = bool(idle)
    if not transport.abort.called:
        connection.eof_received()
    found = Read()
    try:
        answer = await asking
        found = Read(answer.status, tuple((name.lower(), value) for name, value in answer.headers))
        while chunk := await answer.next_chunk():
            found = found._replace(body=found.body + chunk)
    except Broken as error:
        return found, type(error)
    return found._replace(is_whole=True), is_kept


def read(raw: bytes, cuts: Any = (), method: str = "GET", unsent: int = 0) -> Any:
    """By a connection of ours, and whether that is kept, or the error. The bytes come in pieces, and then the end."""
    ends = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return asyncio.run(_read([raw[a:b] for a, b in pairwise(ends)], method, unsent))


def reference(raw: bytes, method: str) -> Read:
    """By h11."""
    peer = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD)
    peer.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    peer.send(h11.EndOfMessage())
    found = Read()
    try:
        for data in (raw, b"") if raw else (b"",):
            peer.receive_data(data)
            while (event := peer.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    found = Read(event.status_code, tuple(event.headers))
                elif isinstance(event, h11.Data):
                    found = found._replace(body=found.body + bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    return found._replace(is_whole=True)
                elif isinstance(event, h11.ConnectionClosed):
                    return found
    except h11.RemoteProtocolError:
        pass
    return found


_name = st.from_regex(rb"[Xx]-[!#$%&'*+.^_`|~0-9A-Za-z-]{0,9}", fullmatch=True)
_value = st.from_regex(rb"([\x21-\x7e\x80-\xff]([\x20-\x7e\x80-\xff\t]{0,20}[\x21-\x7e\x80-\xff])?)?", fullmatch=True)
_space = st.sampled_from([b"", b" ", b"\t", b"  "])
_field = st.builds(lambda *parts: b"%b:%b%b%b\r\n" % parts, _name, _space, _value, _space)
_fields = st.lists(_field, max_size=4).map(b"".join)
_interim = st.sampled_from([b"100 Continue", b"102 Processing", b"103 Early Hints"])
_interims = st.lists(st.builds(lambda *parts: b"HTTP/1.1 %b\r\n%b\r\n" % parts, _interim, _fields), max_size=2)
_line = st.sampled_from(
    [
        b"1.1 200 OK",
        b"1.1 200 ",
        b"1.0 200 OK",
        b"1.1 204 No Content",
        b"1.1 304 Not Modified",
        b"1.1 404 \xff",
        b"1.1 599 X",
    ]
)
_option = st.sampled_from([b"", b"", b"Connection: close\r\n", b"connection: keep-alive\r\nUpgrade: h2c\r\n"])
_pieces = st.lists(st.binary(min_size=1, max_size=40), max_size=4)
_extension = st.sampled_from([b"", b"", b";a", b";a=b", b';a="b"'])


@st.composite
def _answers(draw: st.DrawFn) -> bytes:
    """Correct ones, and what may follow them."""
    pieces, option, fields = draw(_pieces), draw(_option), draw(_fields)
    framing = draw(st.sampled_from([b"", b"Content-Length: %d\r\n", b"Transfer-Encoding: chunked\r\n"]))
    body = b"".join(pieces)
    if b"%d" in framing:
        framing %= len(body)
    elif framing:
        chunks = [b"%X%b\r\n%b\r\n" % (len(piece), draw(_extension), piece) for piece in pieces]
        body = b"".join([*chunks, b"0", draw(_extension), b"\r\n", draw(_fields), b"\r\n"])
    head = b"HTTP/%b\r\n%b%b%b\r\n" % (draw(_line), option, fields, framing)
    return b"".join([*draw(_interims), head, body, draw(st.sampled_from([b"", b"", b"H", b"\0", head]))])


_cuts = st.lists(st.integers(0, 2000), max_size=6)
_methods = st.sampled_from(["GET", "GET", "GET", "HEAD"])


@settings(max_examples=150)
@given(_answers(), st.integers(0, 4000), _cuts, _methods)
def test_an_answer_and_one_that_is_cut_is_what_another_reader_sees(raw, size, cuts, method):
    raw = raw[:size]
    assert read(raw, cuts, method)[0] == reference(raw, method)


_nasty = st.sampled_from([*(bytes([byte]) for byte in b"\r\n\0 \t:;,01\x7f\xffa"), b"\r\n", b"HTTP/1.1 ", b""])
_edits = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5), _nasty), min_size=1, max_size=3)

# What llhttp takes and h11 does not, and nobody sees: empty lines before a head, control characters in a reason.
_UNSEEN = re.compile(rb"(\A|\r\n)[\r\n]+HTTP/|HTTP/1.. ... ?[^\r\n]*[\0-\x08\x0b-\x1f\x7f]")


@settings(max_examples=250)
@given(_answers(), _edits, _cuts, _methods)
def test_what_is_not_refused_is_what_another_reader_sees_wherever_it_is_cut(raw, edits, cuts, method):
    for at, size, put in edits:
        raw = raw[:at] + put + raw[at + size :]
    found, end = read(raw, cuts, method)
    whole, whole_end = read(raw, (), method)
    assert found == whole and (end == whole_end or found.is_whole)
    if found.is_whole and not _UNSEEN.search(raw):
        assert found == reference(raw, method)


OK, SIZED, CODED = b"HTTP/1.1 200 OK\r\n", b"content-length: 2\r\n", b"transfer-encoding: chunked\r\n"
WHOLE, CHUNKS = OK + SIZED + b"\r\nok", b"\r\n2;a=b\r\nok\r\n0\r\n"

# First lines, fields and codings that are no HTTP, or nothing that was asked for.
LINES = b"1.1 101 X|1.1 101 X\r\nupgrade: a\r\nconnection: upgrade|1.1 2000 X|1.1 2x|1.1 099 X|1.1 600 X|1.2 200 X"
FIELDS = b"a: b\nc: d|a: b\r\n c|a: b\rc: d|a: \0|a : b|a b: c|content-length: 2|content-length: 3"
CODINGS = b"gzip, chunked|chunked, gzip|identity||chunked\r\ntransfer-encoding: chunked|chunked\r\ncontent-length: 9"
BAD_HEADS = (
    *(b"HTTP/%b\r\n" % line for line in LINES.split(b"|")),
    *(OK + fields + b"\r\n" for fields in FIELDS.split(b"|")),
    *(OK + b"transfer-encoding: %b\r\n" % coding for coding in [*CODINGS.split(b"|"), b" chunked\t"]),
    b"SSH-2.0-OpenSSH_9.2\r\n",
)


@pytest.mark.parametrize(
    ("raw", "body", "end"),
    [
        (WHOLE, b"ok", True),
        (OK + CODED + CHUNKS + b"a: b\r\n\r\n", b"ok", True),
        (b"HTTP/1.1 103 X\r\n\r\n" + WHOLE, b"ok", True),
        *((b"HTTP/1.1 %b X\r\n" % status + SIZED + b"\r\n", b"", True) for status in (b"204", b"304")),
        *((raw, b"ok", False) for raw in (WHOLE * 2, WHOLE + b"H", WHOLE.replace(b"c", b"connection: close\r\nc", 1))),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n" + CODED + CHUNKS + b"\r\n", b"ok", False),
        (OK + b"\r\nok", b"ok", False),
        *((raw, None, Broken) for raw in (b"", OK, b"HTTP/1.1 100 X\r\n\r\n")),
        *((raw, b"o", Broken) for raw in (WHOLE[:-1], OK + CODED + b"\r\n2\r\no")),
        *((OK + CODED + b"\r\n2\r\nok" + rest, b"ok", Malformed) for rest in (b"0\r\n", b"\r\n-1\r\n", b"\r\n0\r\n:a")),
        *((head + SIZED + b"\r\nok", None, Malformed) for head in BAD_HEADS),
    ],
)
def test_how_an_answer_ends_and_whether_its_connection_is_kept(raw, body, end):
    found, how = read(raw)
    assert (found.body, found.status is None) == (body or b"", body is None)
    assert (found.is_whole, how) == (isinstance(end, bool), end)


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 ", OK + b"a: ", OK + CODED + b"\r\n0\r\na: ", OK + CODED + b"\r\n1;"])
def test_no_head_nor_trailer_is_longer_than_it_may_be_however_it_comes(begun):
    assert read(begun + b"b" * 2 * MOST_HEAD, range(0, 2 * MOST_HEAD, 60))[1] is Malformed


def test_a_connection_is_not_kept_after_a_head_alone_nor_with_a_request_that_is_not_wholly_sent():
    assert read(OK + SIZED + b"\r\n", method="HEAD") == (Read(200, ((b"content-length", b"2"),), b"", True), False)
    assert read(WHOLE, unsent=1)[1] is False


async def test_a_piece_that_its_sink_fails_at_ends_the_answer_and_none_is_read_in_its_place():
    connection = WorkerConnection(MOST_HEAD, [], set())
    with socket.socket() as own:
        connection.connection_made(Mock(**{"get_extra_info.return_value": own}))
    asking = asyncio.create_task(connection.ask(b"", b"", None, is_head=False, may_repeat=False))
    await asyncio.sleep(0)
    connection.data_received(OK + SIZED + b"\r\n")
    (answer := await asking).sink = Mock(side_effect=KeyError("half taken"))
    connection.data_received(b"a")
    with pytest.raises(KeyError):
        await answer.next_chunk()
