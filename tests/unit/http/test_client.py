"""Requests to the workers: what is sent again, what is not, and who is to blame when none can be sent."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator

import pytest

from proxy.http import client
from proxy.http.client import Answer, Broken, Exhausted, Malformed, Stale, Unreachable, Upstream
from proxy.http.json_body import OverBound

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Peer:
    """A worker whose every step is a test's."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(30)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
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

    def end(self) -> None:
        self._listening.close()


@pytest.fixture
def peer():
    started = Peer()
    yield started
    started.end()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream(connect_timeout=30, max_header_bytes=20_000)
    yield made
    await made.aclose()


async def kept(upstream: Upstream, peer: Peer) -> None:
    """A connection that has served a request, and waits for the next one."""
    sending = asyncio.create_task(upstream.send("GET", peer.url + "/first"))
    await peer.accept()
    peer.write(ANSWER + b"ok")
    answer = await sending
    assert await answer.read() == b"ok"
    peer.read = b""


async def answered(sending: asyncio.Task[Answer], peer: Peer) -> bytes:
    """The body of an answer on a new connection."""
    await peer.accept()
    peer.write(ANSWER + b"ok")
    return await (await sending).read()


async def test_a_kept_connection_that_was_closed_is_found_before_a_body_is_written(upstream, peer):
    await kept(upstream, peer)
    peer.close()  # the event loop gets no turn to see it
    with pytest.raises(Stale):
        await upstream.send("POST", peer.url + "/second", body=b"{}")


async def test_a_connection_that_is_being_closed_here_gets_no_body(peer):
    """What is written to it is dropped without a word, and its request would not be sent again."""
    _, writer = await asyncio.open_connection(*peer.url.removeprefix("http://").split(":"))
    assert not client._is_closed(writer.transport)
    writer.transport.close()
    assert client._is_closed(writer.transport)


async def test_a_body_that_may_have_been_read_is_not_sent_again(upstream, peer):
    await kept(upstream, peer)
    sending = asyncio.create_task(upstream.send("POST", peer.url + "/second", body=b"{}"))
    await peer.receive()
    peer.close()
    with pytest.raises(Broken) as failed:
        await sending
    assert not isinstance(failed.value, Stale) and peer.accepted == 1 and peer.read.count(b"/second") == 1


async def test_an_empty_body_may_have_been_read_as_well(upstream, peer):
    await kept(upstream, peer)
    sending = asyncio.create_task(upstream.send("DELETE", peer.url + "/second"))
    await peer.receive()
    peer.close()
    with pytest.raises(Broken) as failed:
        await sending
    assert not isinstance(failed.value, Stale) and b"content-length: 0" in peer.read.lower()


async def test_what_changes_nothing_may_be_sent_once_more(upstream, peer):
    await kept(upstream, peer)
    sending = asyncio.create_task(upstream.send("GET", peer.url + "/second"))
    await peer.receive()
    peer.close()
    with pytest.raises(Stale):
        await sending


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_nothing_is_sent_again_by_itself(upstream, peer, method):
    sending = asyncio.create_task(upstream.send(method, peer.url + "/only"))
    await peer.accept()
    peer.close()
    with pytest.raises(Broken):
        await sending
    assert peer.accepted == 1


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
        sending = asyncio.create_task(upstream.send("POST", peer.url + "/second", body=b"{}"))
        assert await answered(sending, peer) == b"ok"
    else:
        with pytest.raises(Stale):
            await upstream.send("POST", peer.url + "/second", body=b"{}")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
async def test_a_shortage_of_this_machine_is_not_the_workers(upstream, monkeypatch, number):
    def no_socket(address):
        raise OSError(number, "none left")

    monkeypatch.setattr(client, "_no_delay", no_socket)
    with pytest.raises(Exhausted):
        await upstream.send("POST", "http://127.0.0.1:9/", body=b"{}")


async def test_a_refused_connection_is_the_workers(upstream, peer):
    peer.end()
    with pytest.raises(Unreachable) as refused:
        await upstream.send("POST", peer.url + "/", body=b"{}")
    assert not isinstance(refused.value, Exhausted) and str(refused.value).startswith("connection refused")


async def test_a_server_that_speaks_no_tls_is_told_from_one_that_is_not_there(upstream, peer):
    sending = asyncio.create_task(upstream.send("GET", peer.url.replace("http:", "https:") + "/"))
    await peer.accept()
    peer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(Unreachable, match="TLS fails: http:// instead of https://"):
        await sending


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "its host name is not known here"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to host"),
        (OSError("odd"), "no connection"),
        (TimeoutError(), "no connection within 30 s"),
    ],
)
async def test_why_there_is_no_connection_is_told(upstream, peer, monkeypatch, error, words):
    def fail(*_, **__):
        raise error

    if isinstance(error, socket.gaierror):
        monkeypatch.setattr(socket, "getaddrinfo", fail)
        url = "http://worker.example:8000/"
    else:
        monkeypatch.setattr(client, "_no_delay", fail)
        url = peer.url + "/"
    with pytest.raises(Unreachable) as unreachable:
        await upstream.send("GET", url)
    assert str(unreachable.value) == words


async def test_a_header_as_long_as_a_request_passes(upstream, peer):
    sending = asyncio.create_task(upstream.send("GET", peer.url + "/"))
    await peer.accept()
    peer.write(b"HTTP/1.1 307 Moved\r\nlocation: /" + b"a" * 20_000 + b"\r\ncontent-length: 0\r\n\r\n")
    assert len((await sending).header("location")) == 20_001


@pytest.mark.parametrize("junk", [b"HTTP/1.1 200 OK\r\nx: " + b"a" * 40_000 + b"\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
async def test_an_answer_that_is_none_is_told_apart(upstream, peer, junk):
    sending = asyncio.create_task(upstream.send("POST", peer.url + "/", body=b"{}"))
    await peer.accept()
    peer.write(junk)
    with pytest.raises(Malformed):
        await sending
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
