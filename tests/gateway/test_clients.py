"""The clients of deploy/clients.md, the real programs: two sessions each, and what the second one hits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from proxy.bench.harness.servers import Server, Servers
from tests.harness.client_environments import CLIENT_STREAMS, CLIENTS, MODEL, Client, flat_template
from tests.harness.gateways import metric, start_gateway, told
from tests.harness.recording_worker import recording_worker

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(1200)]

LEAST = 0.9  # of what the second session shares with the first


class Counted(NamedTuple):
    """By the gateway's own counters, in tokens."""

    prompt: float
    shareable: float
    came: float


def counted(gateway: Server) -> Counted:
    names = ("prompt", "shareable", "shareable_cached")
    return Counted(*(metric(gateway, f"seamark_{name}_tokens_total") for name in names))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_second_session_of_a_client_hits_what_it_shares(client: Client, fleet: Servers, tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    scripted = {"models": (MODEL,), "template": flat_template, "hits": True, "streams": CLIENT_STREAMS}
    with recording_worker(**scripted) as worker:
        gateway = start_gateway(fleet, worker)
        with client.started(gateway.url, home) as url:

            def session(question: str) -> Counted:
                printed = client.ask(url, question, home)
                assert any(question.encode() in request.body for request in worker.requests), printed[-4000:]
                told(worker)
                return counted(gateway)

            first = session("When is high tide?")
            both = session("Which berth is free?")
    second = Counted(*(after - before for before, after in zip(first, both, strict=True)))
    came = (
        f"{second.came:.0f} of {second.shareable:.0f} shareable tokens ({second.came / max(second.shareable, 1):.1%})"
    )
    print(f"\n{client.package}, second session: {came}; {second.prompt:.0f} prompt tokens")
    assert second.shareable >= 512
    assert second.came >= LEAST * second.shareable
