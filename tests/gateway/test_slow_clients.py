"""Clients that are slow, do not read, break off within HTTP, or speak an old one: each before a real gateway."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from tests.bench.soak import resident_bytes
from tests.harness.gateways import CHAT, chat, metric, post, start_gateway
from tests.harness.raw_worker import chunk, raw_worker, whole
from tests.harness.recording_worker import COMPLETION
from tests.harness.waiting import wait_for

ANSWER_BYTES = 30 * 2**20

UNREAD = 10

POST = b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode()


def connect(gateway) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1])), timeout=30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    return client


def large_json() -> bytes:
    message = {"role": "assistant", "content": "tide " * (ANSWER_BYTES // 5)}
    return whole({**COMPLETION, "choices": [{"index": 0, "message": message, "finish_reason": "length"}]})


def large_stream(event_bytes: int) -> bytes:
    event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"tide " * (event_bytes // 5))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunk(event * (ANSWER_BYTES // len(event))) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        pytest.param(large_json(), False, id="json"),
        pytest.param(large_stream(100), True, id="events", marks=pytest.mark.thorough),
        pytest.param(large_stream(ANSWER_BYTES - 200), True, id="one event", marks=pytest.mark.thorough),
    ],
)
def test_answers_that_nobody_reads_fill_no_memory_and_give_their_slots_back(fleet, answer, stream):
    with raw_worker(lambda body, served: answer if b"large" in body else whole()) as worker:
        gateway = start_gateway(fleet, worker, flags=("--send-timeout", "2", "--max-inflight", str(UNREAD)))
        post(gateway, chat("warm"))
        before = resident_bytes(gateway.process.pid)
        body = json.dumps(chat("large", stream=stream)).encode()
        clients = [connect(gateway) for _ in range(UNREAD)]
        for client in clients:
            client.sendall(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        wait_for(lambda: metric(gateway, "seamark_inflight{") == UNREAD)
        most = 0
        while metric(gateway, "seamark_inflight{"):
            most = max(most, resident_bytes(gateway.process.pid) - before)
            time.sleep(0.05)
        assert most < 100 * 2**20  # ten such answers, and what carries them, were 474 MiB
        assert metric(gateway, 'seamark_requests_total{code="499"') == UNREAD
        assert post(gateway, chat("afterwards")).status_code == 200
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    "beginning",
    [b"GET /health HTTP/1.1\r\nx: ", POST + b"content-length: 100000\r\n\r\n"],
    ids=["head", "body"],
)
def test_a_request_that_drips_is_given_up(fleet, worker, beginning):
    gateway = start_gateway(fleet, worker, flags=("--client-timeout", "1", "--min-body-rate", "1000"))
    with connect(gateway) as slow:
        slow.sendall(beginning)
        slow.settimeout(0.1)
        answer = b""
        while b"client_timeout" not in answer:
            if not answer:
                slow.sendall(b"a")  # every tenth of a second would do for ever
            with contextlib.suppress(TimeoutError):
                answer += slow.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")
        wait_for(lambda: is_closed(slow))


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed; what it still sends is read."""
    try:
        client.sendall(b"a")
        return client.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_an_answered_body_does_not_hold_its_connection(fleet, worker):
    fleet.constants["proxy.server.connection.LINGER_SECONDS"] = 0.5
    gateway = start_gateway(fleet, worker, flags=("--max-body-bytes", "1000", "--client-timeout", "60"))
    with connect(gateway) as client:
        client.sendall(POST + b"content-length: 100000\r\nexpect: 100-continue\r\n\r\n")
        answer = client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"100 Continue" not in answer
        client.settimeout(0.1)
        wait_for(lambda: is_closed(client))  # although a byte comes every tenth of a second
