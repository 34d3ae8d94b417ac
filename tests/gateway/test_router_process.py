"""`python -m tests.bench.traces` before another router's own process: simulated workers that answer HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.bench.peers import PEERS, environment_of
from tests.bench.traces import router_process
from tests.bench.traces.__main__ import main
from tests.bench.traces.formats import TraceRequest, read
from tests.bench.traces.policies import POLICIES
from tests.bench.traces.replay import hint_of
from tests.bench.traces.router_process import HttpFleet
from tests.bench.traces.simulated_fleet import PROFILES, Fleet

TRACES = Path(__file__).parents[1] / "data" / "traces"

ROUND_ROBIN = [sys.executable, "-m", "tests.harness.round_robin_router"]

SPEED = 200.0

FOREVER = 1e6  # simulated seconds


def in_turn(fleet: Fleet, requests: Sequence[TraceRequest]) -> None:
    """Each is sent when the answer before is complete."""
    waiting = iter(requests[1:])

    def ended(execution: object, now: float) -> None:
        if (request := next(waiting, None)) is not None:
            fleet.send(request, now)

    fleet.on_end = ended
    fleet.send(requests[0], 0.0)


def rows(out: str) -> list[list[str]]:
    return [line.split()[:2] for line in out.splitlines() if line.split()[:1] in (["2"], ["4"])]


@pytest.fixture
def installed(monkeypatch) -> Callable[[list[str] | None], None]:
    """What is taken for the user's smg."""
    return lambda command: monkeypatch.setattr(router_process, "installed", lambda: command)


def test_requests_are_served_by_the_workers_that_a_process_chose_and_hit_there():
    sessions = read(TRACES / "claude_code.jsonl.gz").sessions
    requests = [request for session in sessions[:2] for request in session[:8]]
    simulated = Fleet(3, PROFILES["datacentre"], POLICIES["round-robin"](3, 0), hint_of)
    in_turn(simulated, requests)
    simulated.run(FOREVER)
    fleet = HttpFleet(3, PROFILES["datacentre"], hint_of, SPEED)
    in_turn(fleet, requests)
    played = fleet.play(ROUND_ROBIN, FOREVER)
    assert played.failed == 0
    assert [(done.request, done.worker, done.hit) for done in fleet.executions] == [
        (done.request, done.worker, done.hit) for done in simulated.executions
    ]
    assert any(done.hit for done in fleet.executions)
    waits, expected = ([done.first_token_seconds for done in each.executions] for each in (fleet, simulated))
    assert waits == pytest.approx(expected)


def test_a_process_has_a_row_beside_the_simulated_ones_and_is_ended(installed, capsys):
    installed(ROUND_ROBIN)
    flags = [str(TRACES / "claude_code.jsonl.gz"), "--workers", "2", "--users", "1", "--seconds", "120"]
    flags += ["--speed", "60", "--policy", "round-robin", "--policy", router_process.NAME]
    assert main(flags) == 0
    assert rows(capsys.readouterr().out) == [["2", "round-robin"], ["2", "smg"]]
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if ROUND_ROBIN[-1] in child.cmdline()]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (None, "smg is not installed here, and has no row (pip install smg)"),
        (
            [sys.executable, "-c", "raise SystemExit('no such flag')"],
            "smg has no row: smg ended with 1",
        ),
    ],
)
def test_without_a_process_that_serves_one_line_says_so_and_the_other_rows_stand(command, told, installed, capsys):
    installed(command)
    flags = [str(TRACES / "claude_code.jsonl.gz"), "--workers", "2", "--users", "1", "--seconds", "60"]
    assert main([*flags, "--policy", router_process.NAME, "--policy", "session", "--json"]) == 0
    printed = capsys.readouterr()
    assert [outcome["policy"] for outcome in json.loads(printed.out)["outcomes"]] == ["session"]
    assert sum(told in line for line in printed.err.splitlines()) == 1


def test_requests_that_a_process_fails_are_told():
    requests = read(TRACES / "mooncake_conversation.jsonl.gz").requests[:6]
    fleet = HttpFleet(2, PROFILES["datacentre"], hint_of, SPEED)
    for at, request in enumerate(requests):
        fleet.send(request, float(at))
    played = fleet.play([*ROUND_ROBIN, "--fail-every", "3"], FOREVER)
    assert len(fleet.executions) == 4
    assert played.remarks[0] == "smg failed 2 requests: 503 no worker"


@pytest.mark.on_request
@pytest.mark.timeout(1200)
def test_smgs_own_process_keeps_the_hits_that_are_simulated(installed, capsys):
    installed([str(environment_of(PEERS[1], lambda _: None) / "bin" / "smg"), "launch"])
    flags = [str(TRACES / "mooncake_conversation.jsonl.gz"), "--workers", "4", "--seconds", "120", "--json"]
    assert main([*flags, "--policy", "cache-aware", "--policy", router_process.NAME, "--load", "0.8"]) == 0
    simulated, real = json.loads(capsys.readouterr().out)["outcomes"]
    assert real["requests"] == simulated["requests"]
    assert abs(real["hit_efficiency"] - simulated["hit_efficiency"]) < 0.05
