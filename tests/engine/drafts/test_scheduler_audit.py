"""On vLLM's own scheduler, with drafts: every cache key leads to the state it promises, whatever becomes of a draft."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.draft_cores import (
    ANSWERS,
    CORES,
    HEADS,
    HEALED,
    OWN_WINDOW,
    PREEMPTING,
    SHARED,
    TIGHT,
    WINDOWS,
    faults,
)
from tests.harness.draft_heads import mtp_model
from tests.harness.scheduler_process import audit as run_audit

ALL = [*CORES, *HEADS]


@pytest.fixture(scope="module")
def drafting_model(family: str) -> str:
    return str(mtp_model(family))


def audit(model: str, **wanted: Any) -> list[dict[str, Any]]:
    return run_audit("draft", model, **{"chats": 30, **wanted})


SOME = [{}, TIGHT, {"drop": False}, PREEMPTING, HEADS[3]]


@pytest.mark.parametrize(
    "cores", [SOME, pytest.param(ALL, marks=pytest.mark.thorough)], ids=["some cores", "all cores"]
)
def test_every_key_leads_to_what_it_promises_and_rows_of_a_head_are_foreign_only_without_the_drop(
    drafting_model: str, cores: list[dict[str, Any]]
):
    found = audit(drafting_model, seeds=[1], answers=ANSWERS, shared=SHARED, cores=cores)
    assert [fault for core in found for fault in faults(core)] == []
    for core in found:
        assert all(core[f"{right} drafts right"] for right in range(core["core"].get("drafts", 3) + 1))
    assert sum(core["preempted"] for core in found) > 5 and sum(core["evicted"] for core in found) > 50
    # With it, `faults` looks for them.
    assert any(core["foreign_rows"] for core in found if not core["core"].get("drop", True))


@pytest.mark.parametrize(
    "cores", [WINDOWS[::5], pytest.param(WINDOWS, marks=pytest.mark.on_request)], ids=["some cores", "all cores"]
)
def test_rows_of_a_head_with_a_window_follow_a_hit(drafting_model: str, cores: list[dict[str, Any]]):
    """They are its own prefix's, or zeros; where there is room, nearly all hits find them."""
    found = audit(drafting_model, seeds=[1, 2], answers=ANSWERS, shared=SHARED, healed=HEALED, cores=cores)
    assert [fault for core in found for fault in faults(core)] == []
    held, others = (
        sum(core[rows] for core in found if "blocks" not in core["core"] for rows in kinds)
        for kinds in (("held",), ("zeroed", "healed"))
    )
    assert held >= 0.95 * (held + others) > 20


WINDOW = {"healed": [300], "seeds": [1], "cores": [WINDOWS[0]]}

# What is planted, in which traffic, and what the audit says then.
NOTICED: dict[str, tuple[dict[str, Any], str]] = {
    "computed again, an answer's blocks are registered as if it were generated": (
        {"answers": [150], "cores": [{"budget": 50}]},
        "leads to a wrong block",
    ),
    "a state is a unit early": ({"shared": [163], "cores": [{}]}, "leads to a wrong block"),
    "a preempted request may compute as few tokens again as a step verifies": (
        {"answers": [136, 138, 140], "cores": [{"budget": 20}]},
        "from a wrong state",
    ),
    "blocks that hold zeros carry keys of a window": (WINDOW, "leads to rows that nobody computed"),
    "a window's rows are found before they are computed": (WINDOW, "leads to"),
    "a hit takes any block of a window": (WINDOW, "leads to rows that nobody computed"),
    "a hit takes what is held of a window": (WINDOW, "the engine dies"),
}


@pytest.mark.parametrize("defect", [*NOTICED, "vLLM's own keys of passed blocks"])
def test_the_audit_notices_defects(drafting_model: str, defect: str):
    vllms_own = {"without": ["true-states"], "answers": [150], "cores": [{"budget": 50}]}, "leads to a wrong block"
    wanted, error = NOTICED.get(defect, vllms_own)
    (core,) = audit(drafting_model, **wanted, planted=[defect] if defect in NOTICED else [])
    assert any(error in each for each in core["errors"]), core["errors"]


def test_without_what_it_relies_on_vllm_caches_beside_a_window_as_it_does_alone(drafting_model: str):
    """The check on a toy window fails where no rows are kept. The head's groups then decide hits again."""
    alone = {"head": OWN_WINDOW, "export": False}
    lost = ["no rows of a window are kept, and none are computed again"]
    cores = [alone, {**alone, "overlap": True}]
    found = audit(drafting_model, planted=lost, seeds=[1], answers=ANSWERS, cores=cores)
    for core in found:
        assert core["errors"] == [] and core["hit_tokens"] > 0
        assert not core["enabled"] and "the rows before a hit are found in" in core["refused"]
