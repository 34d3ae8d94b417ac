"""On vLLM's own scheduler, with drafts: every cache key leads to the state it promises, whatever becomes of a draft."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.bench.harness.servers import generated_model
from tests.harness.draft_cores import ANSWERS, CORES, HEADS, SHARED, WINDOWED, expected_hits, faults
from tests.harness.draft_defects import A_UNIT_EARLY, REPLAY_TRUSTED, SHORT_REPLAYS
from tests.harness.scheduler_process import audit as run_audit

ALL = [*CORES, *HEADS]


@pytest.fixture(scope="module")
def drafting_model(family: str) -> str:
    return str(generated_model(print, family, mtp=True))


@pytest.fixture(scope="module")
def found(drafting_model: str) -> list[dict[str, Any]]:
    return audit(drafting_model, seeds=[1], answers=ANSWERS, shared=SHARED, cores=[*ALL, WINDOWED])


def audit(model: str, **wanted: Any) -> list[dict[str, Any]]:
    return run_audit("draft", model, chats=30, **wanted)


@pytest.mark.parametrize("number", range(len(ALL)), ids=[", ".join(f"{k} {v}" for k, v in c.items()) for c in ALL])
def test_every_key_leads_to_what_it_promises(found: list[dict[str, Any]], number: int):
    assert faults(found[number]) == []
    for right in range(ALL[number].get("drafts", 3) + 1):
        assert found[number][f"{right} drafts right"]


def test_requests_were_preempted_and_states_evicted(found: list[dict[str, Any]]):
    assert sum(core["preempted"] for core in found) > 20
    assert sum(core["evicted"] for core in found) > 200


@pytest.mark.on_request
@pytest.mark.parametrize("seed", range(2, 12))
def test_every_key_leads_to_what_it_promises_in_more_traffic(drafting_model: str, seed: int):
    cores = audit(drafting_model, seeds=[seed], chats=120, answers=[*range(130, 160)], shared=SHARED, cores=ALL)
    assert [fault for core in cores for fault in faults(core)] == []


def test_rows_of_a_draft_head_are_foreign_only_without_the_drop(found: list[dict[str, Any]]):
    foreign = {core["core"].get("drop", True): core["foreign_rows"] for core in found if core["found_rows"] > 1000}
    assert foreign[True] == 0 and foreign[False] > 0


def test_no_hint_is_used_beside_a_draft_head_with_a_sliding_window(found: list[dict[str, Any]]):
    """vLLM then finds prefixes in whole blocks alone. What it does there by itself is as right as ever."""
    windowed = found[-1]
    assert windowed["errors"] == [] and not windowed["enabled"]
    assert windowed["ignored"].keys() == {"speculative"}


def test_more_tokens_are_shared_than_used_only_where_a_head_reads_them():
    assert [expected_hits({}, length) for length in (160, 163, 176)] == [144, 144, 160]
    assert [expected_hits({"drop": False}, length) for length in (160, 163, 176)] == [160, 160, 176]


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
