"""Clients that are slow, do not read, break off, leave, or are too many; limits: each bound on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers, free_port
from proxy.routing.prefix_index import ENTRY_BYTES
from proxy.server.uvicorn_server import server_for
from proxy.settings import Settings
from tests.bench.soak import bad_lines, resident_bytes
from tests.harness.api_keys import bearer, entry
from tests.harness.counters import samples_of
from tests.harness.gateways import CHAT, GatewayForks, chat, metric, post, start_gateway
from tests.harness.load import open_files
from tests.harness.raw_http import Connection, Cut, Response, request
from tests.harness.raw_worker import DRIPPING, SILENT, SLOW_BODY, STALLED, RawWorker, chunk, raw_worker, started, whole
from tests.harness.recording_worker import COMPLETION, RecordingWorker, recording_worker
from tests.harness.waiting import until, wait_for

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


LIMIT = 256


def limited_gateway(fleet: Servers, *workers: RecordingWorker) -> Server:
    port = free_port()
    serve = f"{shlex.quote(sys.executable)} -m proxy.cli serve --port {port} --self-check-interval 0 --stop-delay 0"
    named = " ".join(["--health-interval 0.5", *(f"--worker {worker.url}" for worker in workers)])
    gateway = fleet.start("limited", port, ["bash", "-c", f"ulimit -n {LIMIT} && exec {serve} {named}"], {})
    gateway.wait_until_ready("/ready")
    return gateway


async def ask(connection: Connection) -> Response | None:
    """The answer to a request; None if the connection was closed instead."""
    with contextlib.suppress(Cut, OSError):
        body = json.dumps(chat("Tide?")).encode()
        await connection.send(request("POST", CHAT, {"content-type": "application/json"}, body))
        return await connection.response()
    return None


def test_clients_beyond_the_descriptors_are_refused_and_no_worker_is_blamed(fleet):
    with recording_worker() as first, recording_worker() as second:
        gateway = limited_gateway(fleet, first, second)

        async def crowd() -> list[Response | None]:
            for worker in (first, second):
                worker.hold.set()
            # As many as have come go on being served; those behind them ask one by one.
            clients = [await Connection.open(gateway) for _ in range(80)]
            asking = [asyncio.ensure_future(ask(client)) for client in clients]
            await until(lambda: len(first.requests) + len(second.requests) == len(clients))
            more = [await Connection.open(gateway) for _ in range(300)]
            refused = await asyncio.gather(*map(ask, more[16:]))
            for worker in (first, second):
                worker.hold.clear()
            answered = await asyncio.gather(*asking, *map(ask, more[:16]))
            for client in (*clients, *more):
                client.close()
            assert [each.status if each is not None else 0 for each in answered] == [200] * 96
            return refused

        told = [answer for answer in asyncio.run(crowd()) if answer is not None]
        assert told and {answer.status for answer in told} == {503}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in told)
        assert {json.loads(answer.body)["error"]["code"] for answer in told} == {"overloaded"}
        wait_for(lambda: post(gateway, chat("afterwards")).status_code == 200)
        assert metric(gateway, "seamark_worker_up") == 2 and " is down" not in gateway.log.read_text()


TIMES = 3

_numbers = itertools.count(1)


class Leaving(NamedTuple):
    """How the worker answers, and what the client has seen when it leaves."""

    path: str
    stream: bool
    answer: str  # of the raw worker
    sees: bool = False  # the client has some of the answer; otherwise only the worker has the request


LEAVING = (
    Leaving(CHAT, True, SILENT),
    Leaving(CHAT, False, SILENT),
    Leaving(CHAT, True, STALLED, sees=True),
    Leaving(CHAT, True, DRIPPING, sees=True),
    Leaving(CHAT, False, SLOW_BODY),
    Leaving("/v1/audio/speech", False, SLOW_BODY, sees=True),
    Leaving("/v1/messages", True, SILENT),
    Leaving("/v1/responses", True, DRIPPING, sees=True),
)


@contextlib.asynccontextmanager
async def asking(gateway: Any, case: Leaving) -> AsyncIterator[tuple[str, Connection]]:
    """A new request's name at the raw worker, and its connection, which is closed at the end."""
    name = f"left-{next(_numbers)}"
    body = json.dumps({**chat(name, stream=case.stream, max_tokens=16), "input": name}).encode()
    headers = {"content-type": "application/json", "x-mock": case.answer, "x-mock-id": name}
    connection = await Connection.open(gateway)
    await connection.send(request("POST", case.path, headers, body))
    yield name, connection
    connection.close()


async def leave(gateway: Any, worker: RawWorker, case: Leaving) -> None:
    """One client comes and leaves, and the worker notices."""
    async with asking(gateway, case) as (name, connection):
        await worker.arrived(name)
        if case.answer in (DRIPPING, SLOW_BODY):
            await worker.flowing(name)
        seen = b""
        while case.sees and not seen.partition(b"\r\n\r\n")[2]:
            seen += await connection.some()
        connection.close()
        await worker.left(name)


async def leave_all(gateway: Any, worker: RawWorker, times: int) -> None:
    """Each of them so often."""
    for case in LEAVING * times:
        await leave(gateway, worker, case)


async def at_rest(gateway: Server, files: int | None = None) -> int:
    """Open files of the gateway, once nothing is under way and they are no more than `files`: some connections stay."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client:

        async def is_at_rest() -> bool:
            found = await samples_of(client, gateway)
            idle = found["seamark_inflight"] == found["seamark_queued"] == 0
            return idle and (files is None or open_files(gateway.process.pid) <= files + 2)  # health checks come and go

        await until(is_at_rest)
    return open_files(gateway.process.pid)


async def test_a_client_that_leaves_at_any_moment_frees_the_worker(raw, tmp_path):
    with GatewayForks(tmp_path) as fleet:
        gateway = await started(fleet.gateway(raw))
        await leave_all(gateway, raw, 2)
        before = await at_rest(gateway)
        await leave_all(gateway, raw, TIMES)
        await at_rest(gateway, before)
    assert not raw.malformed and bad_lines(gateway, 0) == []


async def test_a_client_that_leaves_in_the_queue_never_reaches_the_worker(raw, tmp_path):
    names = []
    with GatewayForks(tmp_path) as fleet:
        gateway = await started(fleet.gateway(raw, flags=("--max-inflight", "1")))
        async with httpx.AsyncClient() as client, asking(gateway, LEAVING[1]) as (holder, holding):
            await raw.arrived(holder)

            async def queued(wanted: float) -> None:
                await until(lambda: is_queued(wanted), 30, 0.001)

            async def is_queued(wanted: float) -> bool:
                return (await samples_of(client, gateway))["seamark_queued"] == wanted

            for case in LEAVING[:2] * 2:
                async with asking(gateway, case) as (name, connection):
                    names.append(name)
                    await queued(1)
                    connection.close()
                    await queued(0)
            holding.close()
            await raw.left(holder)
        # The worker is free: whatever was still queued would come before this one.
        async with asking(gateway, LEAVING[1]) as (last, _):
            await raw.arrived(last)
        await at_rest(gateway)
    assert not raw.seen.keys() & set(names)


async def test_no_task_outlives_the_clients(raw):
    """The gateway in this process, where its tasks can be counted."""
    port = free_port()
    server = server_for(Settings(worker=(raw.url,), port=port), {"version": 1})
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    gateway = SimpleNamespace(url=f"http://127.0.0.1:{port}")
    await leave_all(gateway, raw, 1)
    counts = []
    for _ in range(60):
        counts.append(len(asyncio.all_tasks()))
        await asyncio.sleep(0.05)
    await leave_all(gateway, raw, 2)
    await until(lambda: len(asyncio.all_tasks()) <= min(counts[-20:]), 30)
    server.should_exit = True
    await serving


def chats_at(worker: RecordingWorker) -> int:
    return sum(request.target == CHAT for request in worker.requests)


async def test_a_model_whose_workers_are_full_holds_up_no_other(in_memory, worker):
    second = RecordingWorker(models=("other",))
    gateway = await in_memory(worker, second, max_inflight=1)
    worker.hold.set()
    waiting = [asyncio.create_task(gateway.post(chat(f"{number}"))) for number in range(3)]
    await until(lambda: gateway.metric("seamark_queued") == 2)
    assert (await gateway.post(chat("at once", model="other"))).status_code == 200
    worker.hold.clear()
    assert {(await answer).status_code for answer in waiting} == {200}


async def test_a_body_counts_as_what_it_takes_parsed(in_memory, worker):
    gateway = await in_memory(worker, max_bodies_bytes=1_000_000)
    many = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": [{}] * 30_000})
    refused = await gateway.post(many.encode())
    assert refused.status_code == 503 and "max_bodies_bytes" in refused.json()["error"]["message"]
    assert chats_at(worker) == 0
    assert (await gateway.post(many.replace(", {}" * 29_000, "").encode())).status_code == 200


async def test_a_key_leaves_room_for_other_keys(in_memory, worker, keys):
    gateway = await in_memory(worker, max_bodies_bytes=300_000, api_keys=keys)
    worker.hold.set()
    kept = [asyncio.create_task(gateway.post(chat("x" * 80_000), **bearer("ann")))]
    await until(lambda: chats_at(worker) == 1)
    refused = await gateway.post(chat("x" * 80_000), **bearer("ann"))
    assert refused.status_code == 429 and refused.headers["retry-after"]
    kept.append(asyncio.create_task(gateway.post(chat("x" * 20_000), **bearer("bob"))))
    await until(lambda: chats_at(worker) == 2)
    worker.hold.clear()
    assert [(await answer).status_code for answer in kept] == [200, 200]


async def test_the_index_of_prefixes_forgets_the_oldest_when_its_share_of_the_memory_is_full(in_memory, worker):
    entries = 12
    gateway = await in_memory(worker, memory_bytes=-(-8 * entries * ENTRY_BYTES // 3))
    for number in range(2 * entries):
        assert (await gateway.post(chat(f"{number}?"))).status_code == 200
    assert (await gateway.status())["directory_entries"] == entries
    assert gateway.metric("seamark_directory_evictions_total") >= entries


async def test_the_limits_of_a_key(in_memory, worker, keys):
    keys.write_text(entry("ann", max_inflight=1, max_queued=1) + entry("bob"))
    gateway = await in_memory(worker, api_keys=keys)

    async def ask(name: str) -> httpx.Response:
        return await gateway.post(chat("Tide?"), **bearer(name))

    worker.hold.set()
    anns = [asyncio.create_task(ask("ann")) for _ in range(2)]
    await until(lambda: chats_at(worker) == 1)
    bobs = [asyncio.create_task(ask("bob")) for _ in range(3)]
    await until(lambda: chats_at(worker) == 4)  # whoever waits for a limit of its own holds nobody up
    refused = await ask("ann")
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    worker.hold.clear()
    assert {(await answer).status_code for answer in (*anns, *bobs)} == {200}


def test_stopping_is_bounded_and_whoever_is_cut_off_is_told(fleet, worker):
    pool = ThreadPoolExecutor()
    gateway = start_gateway(fleet, worker, flags=("--drain-timeout", "1"))
    worker.pause.set()
    stream = pool.submit(post, gateway, chat("stream", stream=True))
    wait_for(lambda: chats_at(worker) == 1)
    worker.hold.set()
    whole_answer = pool.submit(post, gateway, chat("whole"))
    wait_for(lambda: chats_at(worker) == 2)
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as half:  # a body that does not come to its end
        half.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
        assert half.recv(4096).startswith(b"HTTP/1.1 100")
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(30) == -signal.SIGTERM
        assert half.recv(4096).split(b" ")[1:2] in ([], [b"503"])
    assert "Traceback" not in gateway.log.read_text()
    last = stream.result().content.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert whole_answer.result().status_code == 503


async def test_the_depth_of_a_body_is_bounded(in_memory, worker):
    gateway = await in_memory(worker, max_json_depth=32)
    for depth, status in ((32, 200), (33, 400)):
        nested = "[" * (depth - 1) + '"[[[[["' + "]" * (depth - 1)
        answer = await gateway.post(f'{json.dumps(chat("Tide?"))[:-1]}, "x": {nested}}}'.encode())
        assert answer.status_code == status
    assert "max_json_depth" in answer.json()["error"]["message"]


@pytest.mark.parametrize("filling", [b"{},", b'"":0,'])
async def test_the_values_of_a_body_are_bounded_and_the_worker_sees_none_of_a_larger_one(in_memory, worker, filling):
    gateway = await in_memory(worker, max_json_values=1000)
    opened, closed = (b"{", b'"z":0}') if b":" in filling else (b"[", b"0]")
    for times, status in ((200, 200), (3000, 400)):
        raw = json.dumps(chat("Tide?")).encode()[:-1] + b', "x": ' + opened + filling * times + closed + b"}"
        answer = await gateway.post(raw)
        assert answer.status_code == status
    assert "max_json_values" in answer.json()["error"]["message"] and len(worker.requests) == 1
