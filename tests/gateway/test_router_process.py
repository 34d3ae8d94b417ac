"""`python -m tests.bench.traces` before another router's own process: simulated workers that answer HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.bench import peers
from tests.bench.peers import Command, Peer
from tests.bench.traces.__main__ import main
from tests.bench.traces.formats import TraceRequest, read
from tests.bench.traces.policies import POLICIES
from tests.bench.traces.replay import hint_of
from tests.bench.traces.router_process import PROGRAMS, HttpFleet, Program, text_of
from tests.bench.traces.simulated_fleet import PROFILES, Fleet

TRACES = Path(__file__).parents[1] / "data" / "traces"

ROUND_ROBIN = "tests.harness.round_robin_router"

SMG = "smg-program"

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
def replaced(monkeypatch, tmp_path) -> Callable[..., Program]:
    """Another program in place of smg's."""
    monkeypatch.setattr(peers, "environment_of", lambda peer, say: tmp_path)

    def replace(*command: str) -> Program:
        def arguments(port: int, workers: Sequence[str], folder: Path) -> Command:
            return Command([*command, "--port", str(port), "--worker-urls", *workers])

        program = Program(Peer("smg", "", arguments), text_of)
        monkeypatch.setitem(PROGRAMS, SMG, program)
        return program

    return replace


@pytest.fixture
def round_robin(replaced) -> Program:
    return replaced(sys.executable, "-m", ROUND_ROBIN)


def test_requests_are_served_by_the_workers_that_a_process_chose_and_hit_there(round_robin):
    sessions = read(TRACES / "claude_code.jsonl.gz").sessions
    requests = [request for session in sessions[:2] for request in session[:8]]
    simulated = Fleet(3, PROFILES["datacentre"], POLICIES["round-robin"](3, 0), hint_of)
    in_turn(simulated, requests)
    simulated.run(FOREVER)
    fleet = HttpFleet(3, PROFILES["datacentre"], hint_of, SPEED)
    in_turn(fleet, requests)
    played = fleet.play(round_robin, FOREVER, print)
    assert played.failed == 0
    assert [(done.request, done.worker, done.hit) for done in fleet.executions] == [
        (done.request, done.worker, done.hit) for done in simulated.executions
    ]
    assert any(done.hit for done in fleet.executions)
    waits, expected = ([done.first_token_seconds for done in each.executions] for each in (fleet, simulated))
    assert waits == pytest.approx(expected)


def test_a_program_has_a_row_beside_the_simulated_ones_and_is_ended(round_robin, capsys):
    flags = [str(TRACES / "claude_code.jsonl.gz"), "--workers", "2", "--users", "1", "--seconds", "120"]
    flags += ["--speed", "60", "--policy", "round-robin", "--policy", SMG]
    assert main(flags) == 0
    assert rows(capsys.readouterr().out) == [["2", "round-robin"], ["2", SMG]]
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if ROUND_ROBIN in child.cmdline()]


def test_without_a_program_that_serves_one_line_says_so_and_the_other_rows_stand(replaced, capsys):
    replaced(sys.executable, "-c", "raise SystemExit('no such flag')")
    flags = [str(TRACES / "claude_code.jsonl.gz"), "--workers", "2", "--users", "1", "--seconds", "60"]
    assert main([*flags, "--policy", SMG, "--policy", "session", "--json"]) == 0
    printed = capsys.readouterr()
    assert [outcome["policy"] for outcome in json.loads(printed.out)["outcomes"]] == ["session"]
    assert sum("smg-program has no row: smg ended with 1" in line for line in printed.err.splitlines()) == 1


def test_requests_that_a_process_fails_are_told(replaced):
    requests = read(TRACES / "mooncake_conversation.jsonl.gz").requests[:6]
    fleet = HttpFleet(2, PROFILES["datacentre"], hint_of, SPEED)
    for at, request in enumerate(requests):
        fleet.send(request, float(at))
    played = fleet.play(replaced(sys.executable, "-m", ROUND_ROBIN, "--fail-every", "3"), FOREVER, print)
    assert len(fleet.executions) == 4
    assert played.remarks("smg")[0] == "smg failed 2 requests: 503 no worker"


@pytest.mark.on_request
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["smg", "vllm-router"])
def test_a_routers_own_program_keeps_the_hits_that_are_simulated(name, capsys):
    flags = [str(TRACES / "mooncake_conversation.jsonl.gz"), "--workers", "4", "--seconds", "120", "--json"]
    assert main([*flags, "--policy", name, "--policy", f"{name}-program", "--load", "0.8"]) == 0
    printed = capsys.readouterr()
    simulated, real = json.loads(printed.out)["outcomes"]
    assert "failed" not in printed.err
    assert real["requests"] == simulated["requests"]
    assert abs(real["hit_efficiency"] - simulated["hit_efficiency"]) < 0.05
