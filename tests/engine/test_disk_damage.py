"""Whatever happens to a checkpoint directory: nothing wrong, no start that hangs, no hit lost to a neighbour's file."""

from __future__ import annotations

from pathlib import Path

from tests.harness.scheduler_process import run_forked


def test_a_damage_costs_what_it_hit_and_is_healed_and_what_is_not_ours_stays(model: Path):
    found = run_forked("damage_audit", str(model))
    assert len(found) >= 40 and {name: wrong for name, wrong in found.items() if wrong} == {}
