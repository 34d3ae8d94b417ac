"""What a worker gets is one request by the letter, whatever a client frames: vLLM's server reads it with httptools."""

from __future__ import annotations

import asyncio
import json

import httptools

from proxy.bench.harness.servers import Servers
from tests.bench.fuzz_framing import SMUGGLED
from tests.harness.gateways import CHAT, chat
from tests.harness.raw_http import Connection, request
from tests.harness.raw_worker import RawWorker, Seen

BODY = json.dumps(chat("Tide?")).encode()

HIDDEN = b"GET %b HTTP/1.1\r\nhost: w\r\n\r\n" % SMUGGLED

# By which a client could make a server behind the gateway see another framing, or another protocol.
FIELDS = {
    "upgrade": {"connection": "upgrade", "upgrade": "h2c", "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA"},
    "upgrade unnamed": {"upgrade": "websocket"},
    "websocket": {"connection": "keep-alive, Upgrade", "upgrade": "websocket", "sec-websocket-key": "x"},
    "te": {"te": "trailers, chunked"},
    "trailer": {"trailer": "content-length"},
    "keep-alive": {"connection": "close, content-length", "keep-alive": "timeout=1"},
    "expect": {"expect": "100-continue"},
    "proxy": {"proxy-connection": "keep-alive", "proxy-authorization": "Basic x"},
    "names like framing": {"x-transfer-encoding": "chunked", "content_length": "0", "transfer_encoding": "chunked"},
}

HOP_BY_HOP = {b"upgrade", b"te", b"trailer", b"transfer-encoding", b"keep-alive", b"expect", b"proxy-authorization"}


class Reader:
    """What vLLM's server makes of bytes: uvicorn reads with this parser."""

    def __init__(self) -> None:
        self.targets: list[bytes] = []
        self.body = b""
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.targets.append(url)

    def on_body(self, body: bytes) -> None:
        self.body += body


def as_sent(seen: Seen) -> bytes:
    fields = b"".join(b"%b: %b\r\n" % field for field in seen.headers.items())
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (seen.method, seen.target, fields, seen.body)


async def all_seen(fleet: Servers) -> tuple[dict[str, list[Seen]], RawWorker]:
    """What reaches a worker of each method with each of these fields before each body."""
    seen = {}
    async with RawWorker() as worker:
        gateway = fleet.gateway(worker)
        await asyncio.to_thread(gateway.wait_until_ready, "/ready")
        for name, fields in FIELDS.items():
            for method in ("POST", "DELETE", "GET"):
                for body in (BODY, HIDDEN, b""):
                    connection = await Connection.open(gateway)
                    await connection.send(request(method, CHAT, {"x-mock-id": "one", **fields}, body))
                    await connection.response()
                    connection.close()
                    seen[f"{method} {name} {len(body)}"] = worker.pop("one")
    return seen, worker


def test_a_worker_reads_one_request_with_one_length_and_no_other_protocol(fleet):
    seen, worker = asyncio.run(all_seen(fleet))
    assert not worker.malformed and sum(map(len, seen.values())) > len(seen) / 2
    for name, requests in seen.items():
        assert len(requests) <= 1, name
        for each in requests:
            assert not each.headers.keys() & HOP_BY_HOP, name
            assert b"upgrade" not in each.headers.get(b"connection", b"").lower(), name
            read = Reader()
            read.parser.feed_data(as_sent(each))
            assert not read.parser.should_upgrade(), name
            assert (read.targets, read.body) == ([CHAT.encode()], each.body), name
