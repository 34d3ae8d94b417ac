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
from collections.abc import Callable
from pathlib import Path

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.gateways import CHAT, chat, metric, post
from tests.harness.raw_http import Connection, Cut, Response, request
from tests.harness.raw_worker import RawWorker, raw_worker, whole
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

LIMIT = 256

EMBEDDINGS = "/v1/embeddings"

BODY = json.dumps(chat("Tide?")).encode()


def limited_gateway(
    fleet: Servers,
    *workers: RecordingWorker,
    ulimit: str = "ulimit -n",
    limit: int = LIMIT,
    flags: tuple[str, ...] = (),
) -> Server:
    """One that may have `limit` descriptors."""
    port = free_port()
    serve = f"{shlex.quote(sys.executable)} -m proxy.cli serve --port {port} --self-check-interval 0 --stop-delay 0"
    named = " ".join(["--health-interval 0.5", *(f"--worker {worker.url}" for worker in workers), *flags])
    command = ["bash", "-c", f"{ulimit} {limit} && exec {serve} {named}"]
    gateway = fleet.start("limited-gateway", port, command, {})
    gateway.wait_until_ready("/ready")
    return gateway


async def ask(connection: Connection, path: str = CHAT) -> Response | None:
    """The answer to a request; None if the connection was closed instead."""
    with contextlib.suppress(Cut, OSError):
        await connection.send(request("POST", path, {"content-type": "application/json"}, BODY))
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

        refused = asyncio.run(crowd())
        told = [answer for answer in refused if answer is not None]
        assert told and {answer.status for answer in told} == {503}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in told)
        assert all(json.loads(answer.body)["error"]["code"] == "overloaded" for answer in told)
        wait_for(lambda: post(gateway, chat("afterwards")).status_code == 200)
        assert metric(gateway, "seamark_worker_up") == 2
        assert " is down" not in gateway.log.read_text()


def test_a_gateway_without_a_descriptor_left_blames_no_worker(fleet):
    with raw_worker(lambda body, served: whole()) as worker:
        gateway = limited_gateway(fleet, worker, flags=("--health-interval", "60"))
        pid = gateway.process.pid

        async def starve() -> list[Response | None]:
            client = await Connection.open(gateway)
            assert (answer := await ask(client, EMBEDDINGS)) is not None and answer.status == 200
            number = await settled(lambda: first_free_descriptor(pid), worker)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, LIMIT))
            refused = [await ask(client, EMBEDDINGS) for _ in range(8)]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
            client.close()
            return refused

        refused = asyncio.run(starve())
        assert {answer.status if answer is not None else 0 for answer in refused} == {503}
        assert {json.loads(answer.body)["error"]["code"] for answer in refused if answer is not None} == {"overloaded"}
        assert len(worker.seen[""]) == 1
        wait_for(lambda: post(gateway, chat("afterwards")).status_code == 200)
        assert " is down" not in gateway.log.read_text()


def test_bodies_beyond_the_memory_are_refused_and_no_worker_is_blamed(fleet):
    """512 MiB of address space, of which the program takes most; 200 bodies of 2 MB come at once."""
    body = json.dumps(chat("x" * 2_000_000)).encode()
    with recording_worker() as worker:
        gateway = limited_gateway(fleet, worker, ulimit="ulimit -v", limit=512 * 1024)
        assert "max_bodies_bytes is" in gateway.log.read_text()

        async def one() -> Response | None:
            with contextlib.suppress(Cut, OSError):
                connection = await Connection.open(gateway)
                await connection.send(request("POST", CHAT, {"content-type": "application/json"}, body))
                return await connection.response()
            return None

        async def crowd() -> list[Response | None]:
            return await asyncio.gather(*(one() for _ in range(200)))

        for _ in range(2):
            told = [answer for answer in asyncio.run(crowd()) if answer is not None]
            assert {answer.status for answer in told} == {200, 503}
            refused = [answer for answer in told if answer.status == 503]
            assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
            assert {json.loads(answer.body)["error"]["code"] for answer in refused} == {"overloaded"}
        wait_for(lambda: post(gateway, chat("afterwards")).status_code == 200)
        assert gateway.process.poll() is None and metric(gateway, "seamark_worker_up") == 1
        log = gateway.log.read_text()
        assert not re.search(" is down: (?!no answer within)", log)  # a busy machine may be late with an answer
        assert "Traceback" not in log and "out of memory" not in log


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
