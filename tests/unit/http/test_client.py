"""Requests to the workers: what is sent again, what is not, and who is to blame when none can be sent."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohappyeyeballs
import pytest

from proxy.http import client
from proxy.http.client import Answer, Broken, Exhausted, Malformed, Silent, Stale, Unreachable, Upstream
from proxy.http.json_body import OverBound

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


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
        await asyncio.sleep(0.05)
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


@pytest.mark.parametrize("junk", [b"HTTP/1.1 200 OK\r\nx: " + b"a" * 40_000 + b"\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
async def test_an_answer_that_is_none_is_told_apart(upstream, peer, junk):
    with pytest.raises(Malformed):
        await exchange(upstream, peer, junk, method="POST", body=b"{}")
    peer.close()


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
    assert [chunk async for chunk in answer.chunks()] == [b"raw"]
    sending = asyncio.create_task(upstream.send("GET", peer.url + "/again"))
    peer.read = b""
    await peer.receive()
    peer.write(ANSWER + b"ok")
    assert not (await sending).is_encoded and b"cookie" not in peer.read.lower() and peer.accepted == 1


async def test_an_answer_that_breaks_off_is_broken_however_it_is_read(upstream, peer):
    for read in (Answer.read, Answer.next_chunk):
        answer = await exchange(upstream, peer, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
        peer.close()
        with pytest.raises(Broken) as broken:
            await read(answer)
        assert not isinstance(broken.value, Silent)


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
