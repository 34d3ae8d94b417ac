"""Whatever happens to a checkpoint directory: nothing wrong, no start that hangs, no hit lost to a neighbour's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.scheduler_process import run_forked

FORMS = ("Mamba2", "gated delta net")


@pytest.mark.parametrize("form", [FORMS[0], pytest.param(FORMS[1], marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "when",
    ["at a start", *(pytest.param(when, marks=pytest.mark.thorough) for when in ("each file", "while it runs"))],
)
def test_a_damage_costs_what_it_hit_and_is_healed_and_what_is_not_ours_stays(model: Path, form, when):
    found = run_forked("damage_audit", str(model), form, when)
    print(f"{form}, {when}: {len(found)} damages, {sum(map(len, found.values()))} wrong")
    assert len(found) >= 23 and {name: wrong for name, wrong in found.items() if wrong} == {}
