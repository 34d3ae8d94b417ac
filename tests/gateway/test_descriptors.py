"""A gateway with few descriptors: who does not fit is refused politely, and no worker is blamed for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.gateways import CHAT, chat, metric, post
from tests.harness.raw_http import Connection, Cut, Response, request
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

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

        told = [answer for answer in asyncio.run(crowd()) if answer is not None]
        assert told and {answer.status for answer in told} == {503}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in told)
        assert {json.loads(answer.body)["error"]["code"] for answer in told} == {"overloaded"}
        wait_for(lambda: post(gateway, chat("afterwards")).status_code == 200)
        assert metric(gateway, "seamark_worker_up") == 2 and " is down" not in gateway.log.read_text()
