"""A gateway with few descriptors: who does not fit is refused politely, and no worker is blamed for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import resource
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.gateways import CHAT, chat, metric, post
from tests.harness.raw_http import Connection, Cut, Response, request
from tests.harness.raw_worker import RawWorker, raw_worker, whole
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

LIMIT = 256


def limited_gateway(fleet: Servers, *workers: RecordingWorker, interval: str = "0.5", limit: str = f"-n {LIMIT}"):
    """One that may have no more of what `ulimit` bounds."""
    port = free_port()
    serve = f"{shlex.quote(sys.executable)} -m proxy.cli serve --port {port} --self-check-interval 0 --stop-delay 0"
    named = " ".join([f"--health-interval {interval}", *(f"--worker {worker.url}" for worker in workers)])
    gateway = fleet.start("limited", port, ["bash", "-c", f"ulimit {limit} && exec {serve} {named}"], {})
    gateway.wait_until_ready("/ready")
    return gateway


async def ask(connection: Connection, path: str = CHAT, question: str = "Tide?") -> Response | None:
    """The answer to a request; None if the connection was closed instead."""
    with contextlib.suppress(Cut, OSError):
        body = json.dumps(chat(question)).encode()
        await connection.send(request("POST", path, {"content-type": "application/json"}, body))
        return await connection.response()
    return None


def assert_polite(answers: Sequence[Response | None]) -> None:
    told = [answer for answer in answers if answer is not None]
    assert told and {answer.status for answer in told} == {503}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in told)
    assert {json.loads(answer.body)["error"]["code"] for answer in told} == {"overloaded"}


def assert_serves(gateway: Server, workers: int) -> None:
    """No worker was blamed."""
    wait_for(lambda: post(gateway, chat("afterwards")).status_code == 200)
    assert gateway.process.poll() is None and metric(gateway, "seamark_worker_up") == workers
    log = gateway.log.read_text()
    assert not re.search(" is down: (?!no answer within)", log)  # a busy machine may be late with an answer
    assert "Traceback" not in log and "out of memory" not in log


def test_clients_beyond_the_descriptors_are_refused_and_no_worker_is_blamed(fleet):
    with recording_worker() as first, recording_worker() as second:
        gateway = limited_gateway(fleet, first, second)

        async def crowd() -> list[Response | None]:
            for worker in (first, second):
                worker.hold.set()
            # As many as have come go on being served; those behind them ask one by one.
            clients = [await Connection.open(gateway) for _ in range(80)]
            asking = [asyncio.ensure_future(ask(client)) for client in clients]
            while len(first.requests) + len(second.requests) < len(clients):
                await asyncio.sleep(0.01)
            more = [await Connection.open(gateway) for _ in range(300)]
            refused = await asyncio.gather(*map(ask, more[16:]))
            for worker in (first, second):
                worker.hold.clear()
            answered = await asyncio.gather(*asking, *map(ask, more[:16]))
            for client in (*clients, *more):
                client.close()
            assert [each.status if each is not None else 0 for each in answered] == [200] * 96
            return refused

        assert_polite(asyncio.run(crowd()))
        assert_serves(gateway, 2)


def test_a_gateway_without_a_descriptor_left_blames_no_worker(fleet):
    with raw_worker(lambda body, served: whole()) as worker:
        gateway = limited_gateway(fleet, worker, interval="60")
        pid = gateway.process.pid

        async def starve() -> list[Response | None]:
            client = await Connection.open(gateway)
            assert (answer := await ask(client, "/v1/embeddings")) is not None and answer.status == 200
            number = await settled(lambda: first_free_descriptor(pid), worker)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, LIMIT))
            refused = [await ask(client, "/v1/embeddings") for _ in range(8)]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
            client.close()
            return refused

        refused = asyncio.run(starve())
        assert None not in refused and len(worker.seen[""]) == 1
        assert_polite(refused)
        assert_serves(gateway, 1)


def first_free_descriptor(pid: int) -> int:
    """The number that the next descriptor of the process gets."""
    held = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in itertools.count() if number not in held)


async def settled(value: Callable[[], int], worker: RawWorker) -> int:
    """The value once it stands still, and nobody is connected to the worker."""
    known, times = value(), 0
    while times < 50:
        worker.close_idle()
        await asyncio.sleep(0.01)
        times = times + 1 if (value(), len(worker.open)) == (known, 0) else 0
        known = value()
    return known
