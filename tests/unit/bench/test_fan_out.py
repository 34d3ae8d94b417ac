"""`seamark bench fan-out`: its groups of requests, and what it says of its measurements."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from proxy.bench import fan_out
from proxy.bench.fan_out import (
    FanOut,
    WaveLine,
    WavePlan,
)
from proxy.bench.harness.ratios import Comparison, Pair

PLAN = WavePlan(shared=2000, own=30, size=4, decoders=2, decoded=6000)


def test_groups_are_interleaved_and_share_what_they_are_to_share():
    prompts = PLAN.prompts("any")
    assert len(prompts) == 8 and {len(prompt) for prompt in prompts} == {2030}
    first, second, third, fourth = prompts[:4]
    assert first[:2000] == third[:2000] != second[:2000] == fourth[:2000]
    assert first[2000:] != third[2000:]
    assert PLAN.prompts("any") == prompts and PLAN.prompts("other") != prompts
    assert PLAN.ideal == 2 * (2000 + 4 * 30)
    assert replace(PLAN, shared=487).ideal == 2 * (480 + 4 * (7 + 30))  # nobody finds a part of a match unit


def result(computed: int = 8000, differing: int = 0, p99: float = 0.1) -> FanOut:
    """A made-up run, well but for the arguments."""
    plan = WavePlan(shared=3600, own=50)
    ours = WaveLine("Seamark", computed, plan.ideal, 0, 0, 16, 1.0, 2.0, 1.5, 0, 1e-6)
    left = replace(ours, engine="leaders leave", computed=9000, left_early=2, answered=14, differing=differing)
    short = Comparison("p99", (Pair(p99, 0.1),) * 5, fan_out.MOST_DELAY)
    return FanOut([ours, replace(ours, engine="gate off", computed=29600)], left, plan, short, 28, 50, Pair(2.0, 6.0))


@pytest.mark.parametrize(
    ("made_up", "failing"),
    [
        (result(), []),
        (result(computed=8500), ["8500 prompt tokens computed, 1.062 of the ideal, at most 1.02"]),
        (result(differing=1), ["every answer equals the reference engine's"]),
        (result(p99=0.12), ["p99: 1.20 of the gate off, at most 1.1"]),
        (
            replace(result(), left=replace(result().left, left_early=1, answered=14)),
            ["1 leaders left before their first token, 14 others answered"],
        ),
        (
            replace(result(), left=replace(result().left, computed=26412)),
            ["26412 prompt tokens computed where the leaders left, at most 15360"],
        ),
    ],
)
def test_what_is_not_as_good_as_it_has_to_be_is_told(made_up: FanOut, failing):
    printed = fan_out.render(made_up).splitlines()
    assert [line.removeprefix("NOT HELD  ") for line in printed if line.startswith("NOT HELD")] == failing
    told = json.loads(json.dumps(fan_out.report(made_up)))
    assert told["held"] is not bool(failing)
    assert told["waves"][1]["ratio"] == 3.7
