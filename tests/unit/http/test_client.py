"""Requests to the workers: what is sent again, what is not, and who is to blame when none can be sent."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohappyeyeballs
import pytest
import uvloop

from proxy.http import client
from proxy.http.client import Answer, Broken, Exhausted, Malformed, Refused, Silent, Stale, Unreachable, Upstream
from proxy.http.json_body import OverBound
from tests.harness.waiting import until

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request):
    return request.param()


class Peer:
    """A worker whose every step is a test's."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        listening.settimeout(30)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.accepted = 0
        self.read = b""

    async def accept(self) -> None:
        """Take the next connection, and what comes first on it."""
        self.accepted += 1
        self._taken, _ = await asyncio.to_thread(self._listening.accept)
        self._taken.settimeout(30)
        await self.receive()

    async def receive(self) -> None:
        self.read += await asyncio.to_thread(self._taken.recv, 65536)

    def write(self, data: bytes) -> None:
        self._taken.sendall(data)

    def close(self) -> None:
        """Close the connection. On the loopback, the other side's system knows at once."""
        self._taken.close()


@pytest.fixture
def peer():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Peer(listening)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream(connect_timeout=30, max_header_bytes=20_000)
    yield made
    await made.aclose()


async def kept(upstream: Upstream, peer: Peer) -> None:
    """A connection that has served a request, and waits for the next one."""
    answer = await exchange(upstream, peer, ANSWER + b"ok", url=peer.url + "/first")
    assert await answer.read() == b"ok"
    peer.read = b""


CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"


async def exchange(upstream: Upstream, peer: Peer, answer: bytes = CLOSING + b"ok", **request: Any) -> Answer:
    """One request on a new connection; what arrived is in `peer.read`."""
    peer.read = b""
    sending = asyncio.create_task(upstream.send(**{"method": "GET", "url": peer.url + "/", **request}))
    await peer.accept()
    peer.write(answer)
    return await sending


@pytest.mark.parametrize(("method", "body", "is_stale"), [("POST", b"{}", False), ("GET", b"", True)])
async def test_a_body_that_may_have_been_read_is_not_sent_again_and_what_changes_nothing_may(
    upstream, peer, method, body, is_stale
):
    await kept(upstream, peer)
    sending = asyncio.create_task(upstream.send(method, peer.url + "/second", body=body))
    await peer.receive()
    peer.close()
    with pytest.raises(Broken) as failed:
        await sending
    assert isinstance(failed.value, Stale) is is_stale and peer.accepted == 1 and peer.read.count(b"/second") == 1


async def test_the_gateways_own_requests_get_a_new_connection_for_one_that_was_closed(upstream, peer):
    await kept(upstream, peer)
    peer.close()
    fetching = asyncio.create_task(upstream.fetch("POST", peer.url + "/second", b"{}"))
    await peer.accept()
    peer.write(ANSWER + b"ok")
    assert await fetching == (200, b"ok")


@pytest.mark.parametrize("unasked", [ANSWER + b"no", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"])
@pytest.mark.parametrize("is_seen", [True, False])
async def test_an_answer_that_nobody_asked_for_is_nobodys(upstream, peer, unasked, is_seen):
    await kept(upstream, peer)
    peer.write(unasked)
    if is_seen:
        await until(lambda: not upstream._open)
        answer = await exchange(upstream, peer, method="POST", body=b"{}")
        assert await answer.read() == b"ok"
    else:
        with pytest.raises(Stale):
            await upstream.send("POST", peer.url + "/second", body=b"{}")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to host"),
        (OSError("odd"), "no connection"),
        (TimeoutError(), "no connection within 30 s"),
        *((OSError(getattr(errno, name), "none left"), None) for name in ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM")),
        (OSError(errno.EADDRNOTAVAIL, "none left"), None),
    ],
)
async def test_why_there_is_no_connection_is_told_and_a_shortage_of_this_machine_is_not_the_workers(
    upstream, peer, monkeypatch, error, words
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(aiohappyeyeballs, "start_connection", fail)
    with pytest.raises(Unreachable if words else Exhausted) as failed:
        await upstream.send("POST", peer.url + "/", body=b"{}")
    assert words is None or (str(failed.value) == words and not isinstance(failed.value, Exhausted))


async def test_lines_are_read_as_they_come_and_none_is_longer_than_it_may_be(upstream, peer):
    sending = asyncio.create_task(upstream.send("GET", peer.url + "/lines"))
    await peer.accept()
    peer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for piece in (b"on", b"e\ntwo\n\nthr", b"ee", b"\n" + b"x" * 65, b"y"):
        peer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    answer = await sending
    lines = answer.lines(64)
    assert [await anext(lines) for _ in range(4)] == [b"one", b"two", b"", b"three"]
    with pytest.raises(OverBound):
        await anext(lines)
    answer.close()
    for body in (b"one\ntwo", b"one\ntwo\n"):  # the last line counts whether it has ended or not
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        answer = await exchange(upstream, peer, head + body)
        assert [line async for line in answer.lines(64)] == [b"one", b"two"]


async def test_no_answer_to_the_gateways_own_requests_is_longer_than_it_may_be(upstream, peer, monkeypatch):
    monkeypatch.setattr(client, "MOST_OWN_BYTES", 64)
    for size in (64, 65):
        sending = asyncio.create_task(upstream.fetch("GET", peer.url + "/v1/models"))
        await peer.accept()
        peer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        if size == 64:
            assert await sending == (200, b"x" * 64)
        else:
            with pytest.raises(Malformed):
                await sending
        peer.close()


async def test_an_answer_is_as_it_came(upstream, peer):
    """Neither unpacked nor followed, and no cookie is kept."""
    head = b"HTTP/1.1 302 Found\r\nLocation: /other\r\nset-cookie: a=b\r\nContent-Encoding: gzip\r\n"
    answer = await exchange(upstream, peer, head + b"x: one\r\nx: two\r\ncontent-length: 3\r\n\r\nraw")
    assert (answer.status, answer.header("X"), answer.header("missing")) == (302, "one", None)
    assert answer.headers[0] == (b"Location", b"/other") and answer.is_encoded
    assert await answer.next_chunk() == b"raw" and not await answer.read()
    sending = asyncio.create_task(upstream.send("GET", peer.url + "/again"))
    peer.read = b""
    await peer.receive()
    peer.write(ANSWER + b"ok")
    assert not (await sending).is_encoded and b"cookie" not in peer.read.lower() and peer.accepted == 1


async def test_a_worker_that_says_nothing_is_silent(upstream, peer):
    sending = asyncio.create_task(upstream.send("POST", peer.url + "/", body=b"{}", read_timeout=0.05))
    await peer.accept()
    with pytest.raises(Silent):
        await sending


async def test_an_address_with_credentials_gets_these_and_no_other_does(upstream, peer):
    mine, clients = b"authorization: Basic YTpi", [(b"authorization", b"Bearer c"), (b"x", b"1")]
    upstream.trust(peer.url, "a:b")
    await exchange(upstream, peer, headers=clients)
    assert mine in peer.read and b"Bearer c" not in peer.read and b"x: 1" in peer.read
    await exchange(upstream, peer)
    assert mine in peer.read
    upstream.trust(peer.url[:-1], "c:d")  # another port, which begins alike
    upstream.trust(peer.url, None)
    await exchange(upstream, peer, headers=clients)
    assert b"Basic" not in peer.read and b"authorization: Bearer c" in peer.read
    upstream.trust(peer.url, "e:f")
    upstream.trust(peer.url, "a:b")
    await exchange(upstream, peer)
    assert peer.read.count(b"Basic") == 1 and mine in peer.read


async def test_the_gateways_own_requests_carry_the_workers_key_and_a_clients_carry_the_clients_headers(peer):
    upstream = Upstream(30, 20_000, api_key="k")
    asking = asyncio.create_task(upstream.ask("POST", peer.url + "/v1/x", body=b"{}"))
    await peer.accept()
    peer.write(CLOSING + b"ok")
    (await asking).close()
    assert b"authorization: bearer k" in peer.read.lower() and b"content-type: application/json" in peer.read.lower()
    await exchange(upstream, peer)
    assert b"authorization" not in peer.read.lower()
    await upstream.aclose()


BIG = b"b" * 2**25  # more than fits between two processes


async def test_an_answer_before_the_whole_request_is_read_counts_and_its_connection_serves_no_other(upstream, peer):
    answer = await exchange(upstream, peer, ANSWER + b"no", method="POST", body=BIG)
    assert await answer.read() == b"no" and not upstream._open
    assert await (await exchange(upstream, peer)).read() == b"ok"


async def test_a_worker_that_takes_no_more_of_a_request_is_silent(upstream, peer):
    sending = asyncio.create_task(upstream.send("POST", peer.url + "/", body=BIG, read_timeout=0.05))
    await peer.accept()
    with pytest.raises(Silent):
        await sending


async def test_an_answer_that_nobody_reads_waits_at_the_worker_which_is_not_silent(upstream, peer):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BIG)
    answer = await exchange(upstream, peer, head, read_timeout=30)
    writing = asyncio.create_task(asyncio.to_thread(peer.write, BIG))
    await until(lambda: answer._connection._is_paused)
    answer._connection._heard -= 60
    answer._connection.check()
    assert answer.held < 2**20 and not writing.done()
    assert await answer.read() == BIG and await writing is None


@pytest.mark.parametrize("turns", range(9))
async def test_a_request_that_is_given_up_leaves_nothing_for_the_next_one(upstream, peer, turns):
    await kept(upstream, peer)
    sending = asyncio.create_task(upstream.send("POST", peer.url + "/a", body=b"{}", fresh=turns % 2 == 1))
    for _ in range(turns):
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    await until(lambda: not any(each._answer for each in upstream._open) and len(upstream._idle[peer.url]) <= 1)


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_header_ends_where_its_line_does(upstream, peer, value):
    with pytest.raises(ValueError, match="line break"):
        await upstream.send("GET", peer.url + "/", [(b"x", value)])
    await exchange(upstream, peer, headers=[(b"X-Y", b"\xff\xe9 \t;")], url=peer.url + "/a%2Fb?", method="DELETE")
    host = peer.url.removeprefix("http://").encode()
    assert (
        peer.read == b"DELETE /a%2Fb? HTTP/1.1\r\nHost: " + host + b"\r\nX-Y: \xff\xe9 \t;\r\nContent-Length: 0\r\n\r\n"
    )


async def test_the_addresses_of_a_name_are_tried_in_turn_and_looked_for_again(upstream, peer, monkeypatch):
    port, found = int(peer.url.rsplit(":")[-1]), ["127.0.0.9", "127.0.0.1"]
    asked: list[str] = []

    loop = type(asyncio.get_running_loop())
    real = loop.getaddrinfo

    async def getaddrinfo(self: Any, host: str, port: int, **how: Any) -> list[Any]:
        if host != "worker":  # uvloop asks for addresses, too
            return await real(self, host, port, **how)
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in found]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    for _ in range(2):
        assert await (await exchange(upstream, peer, url=f"http://worker:{port}/")).read() == b"ok"
    assert asked == ["worker"]  # the answer is believed for a while
    upstream._names.expire(time.monotonic() + client.NAME_SECONDS)
    found.pop()
    with pytest.raises(Refused):
        await upstream.send("GET", f"http://worker:{port}/")


async def test_by_tls_a_certificate_has_to_be_trusted_and_an_answer_without_a_length_ends_with_an_alert(
    upstream, tmp_path, monkeypatch
):
    made = str(tmp_path / "both.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, "-keyout", made, "-out", made]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    worker = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    worker.load_cert_chain(made)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_cut = b"/cut" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nok")
        await writer.drain()
        if is_cut:
            socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())).shutdown(socket.SHUT_WR)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=worker) as server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Unreachable, match="a certificate that is not trusted here"):
            await upstream.send("GET", url + "/")
        monkeypatch.setattr(client, "_tls", lambda: ssl.create_default_context(cafile=made))
        assert await (await upstream.send("GET", url + "/")).read() == b"ok"
        with pytest.raises(Broken):
            await (await upstream.send("GET", url + "/cut")).read()


async def test_an_idle_connection_ends_and_one_that_was_to_be_new_serves_one_request(upstream, peer, monkeypatch):
    await kept(upstream, peer)
    (idle,), at_the_peer = upstream._idle[peer.url], peer._taken
    assert await (await exchange(upstream, peer, ANSWER + b"ok", fresh=True)).read() == b"ok"
    assert upstream._idle[peer.url] == [idle] and peer.accepted == 2
    sending = asyncio.create_task(upstream.send("GET", peer.url + "/", fresh=True))
    await peer.accept()
    peer.close()
    with pytest.raises(Broken) as failed:
        await sending
    assert not isinstance(failed.value, Stale)  # nothing was kept
    monkeypatch.setattr(client, "KEEPALIVE_SECONDS", 0.0)
    await until(lambda: not upstream._open)
    at_the_peer.close()
