"""On vLLM's own scheduler, with drafts: every cache key leads to the state it promises, whatever becomes of a draft."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.bench.harness.servers import generated_model
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
from tests.harness.draft_defects import (
    A_UNIT_EARLY,
    ANY_BLOCK,
    KEYS_TOO_SOON,
    NULLS_INSIDE,
    REPLAY_TRUSTED,
    ROWS_LOST,
    SHORT_REPLAYS,
    ZEROS_KEYED,
)
from tests.harness.scheduler_process import audit as run_audit

ALL = [*CORES, *HEADS]


@pytest.fixture(scope="module")
def drafting_model(family: str) -> str:
    return str(generated_model(print, family, mtp=True))


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


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"planted": [REPLAY_TRUSTED], "answers": [150], "cores": [{"budget": 50}]}, "leads to a wrong block"),
        ({"planted": [A_UNIT_EARLY], "shared": [163], "cores": [{}]}, "leads to a wrong block"),
        ({"planted": [SHORT_REPLAYS], "answers": [136, 138, 140], "cores": [{"budget": 20}]}, "from a wrong state"),
        ({"without": ["true-states"], "answers": [150], "cores": [{"budget": 50}]}, "leads to a wrong block"),
    ],
    ids=["replays are trusted", "a unit early", "short replays", "vLLM's own keys of passed blocks"],
)
def test_the_audit_notices_defects(drafting_model: str, wanted: dict[str, Any], error: str):
    (core,) = audit(drafting_model, **wanted)
    assert any(error in each for each in core["errors"])


@pytest.mark.parametrize(
    ("defect", "error"),
    [
        (ZEROS_KEYED, "leads to rows that nobody computed"),
        (KEYS_TOO_SOON, "leads to"),
        (ANY_BLOCK, "leads to rows that nobody computed"),
        (NULLS_INSIDE, "the engine dies"),
    ],
)
def test_the_audit_notices_defects_of_windows(drafting_model: str, defect: str, error: str):
    (core,) = audit(drafting_model, planted=[defect], healed=[300], seeds=[1], cores=[WINDOWS[0]])
    assert any(error in each for each in core["errors"]), core["errors"]


def test_without_what_it_relies_on_vllm_caches_beside_a_window_as_it_does_alone(drafting_model: str):
    """The check on a toy window fails where no rows are kept. The head's groups then decide hits again."""
    alone = {"head": OWN_WINDOW, "export": False}
    found = audit(
        drafting_model, planted=[ROWS_LOST], seeds=[1], answers=ANSWERS, cores=[alone, {**alone, "overlap": True}]
    )
    for core in found:
        assert core["errors"] == [] and core["hit_tokens"] > 0
        assert not core["enabled"] and "the rows before a hit are found in" in core["refused"]
