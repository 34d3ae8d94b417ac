"""The clients of deploy/clients.md, the real programs: two sessions each, and what the second one hits."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.bench.harness.servers import Server, Servers
from tests.harness.client_environments import CLIENTS, Client
from tests.harness.client_worker import client_worker
from tests.harness.gateways import metric, start_gateway, told

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(1200)]

SHAREABLE, CAME = "seamark_shareable_tokens_total", "seamark_shareable_cached_tokens_total"

LEAST = 0.9  # of what the second session shares with the first


def counted(gateway: Server) -> tuple[float, float]:
    return metric(gateway, SHAREABLE), metric(gateway, CAME)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_second_session_of_a_client_hits_what_it_shares(client: Client, fleet: Servers, tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    with client_worker() as worker:
        gateway = start_gateway(fleet, worker)
        with client.started(gateway.url, home) as url:

            def session(question: str) -> tuple[float, float]:
                printed = client.ask(url, question, home)
                assert any(question.encode() in request.body for request in worker.requests), printed[-4000:]
                told(worker)
                return counted(gateway)

            before, came_before = session("When is high tide?")
            shareable, came = session("Which berth is free?")
        asked = len(worker.requests)
    share = f"{came:.0f} of {shareable:.0f} shareable tokens, {came / max(shareable, 1):.1%}"
    print(f"\n{client.package}: {asked} requests, {share}")
    assert shareable - before >= 512
    assert came - came_before >= LEAST * (shareable - before)
