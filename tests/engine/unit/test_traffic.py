"""All situations, and a little of the random traffic that the audits play at length, on vLLM's own scheduler.

More of it, planted defects, and other versions: tests/engine/test_scheduler.py and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_patches.disk import connector
from engine_patches.disk.load_cost import LoadCost
from proxy.bench.harness.servers import generated_model
from tests.harness import adapter_audit, disk_audit, draft_audit, scheduler_audit, situation_audit, transfer_audit
from tests.harness.audit import audited, patched_vllm
from tests.harness.draft_cores import ANSWERS, HEALED, OWN_SHAPE, OWN_WINDOW, SHARED, faults
from tests.harness.situation_table import EXPECTED, differences


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    with patched_vllm():
        yield


@pytest.mark.parametrize("index", [0, 16], ids=["two kinds of groups", "beside an index, its ring and n-grams"])
def test_what_the_scheduler_does_in_each_situation_is_what_the_table_says(model: Path, index: int):
    found = audited(situation_audit.scenes, model, {"index": index})
    assert differences(found) == [] and found["played"].keys() == EXPECTED.keys()


TIGHT: dict[str, Any] = {"blocks": 30, "running": 4}

CORES: dict[str, dict[str, Any]] = {
    "room": {},
    "little room": TIGHT,
    "planned ahead": {**TIGHT, "overlap": True},
    "by priority": {**TIGHT, "budget": 60, "policy": "priority"},
    "at chunk ends": {"writes_in_forward": False, "export": False},
    "whole blocks": {"unit": 64},
    "whole blocks at chunk ends": {"unit": 64, "writes_in_forward": False, "export": False},
    "ranks": {"context_ranks": 2},
    "an index": {"index": 16, "blocks": 60, "running": 4},
    "two attention groups": {**TIGHT, "attention_groups": 2},
}


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_every_key_leads_to_what_it_promises(model: Path, core: dict[str, Any]):
    found = audited(scheduler_audit.scenes, model, core, seeds=[1], chats=20)
    assert found["errors"] == [] and found["refused"] is None


@pytest.mark.parametrize("core", [{}, {**TIGHT, "blocks": 40}, {"index": 16}], ids=str)
@pytest.mark.parametrize("blocks", ["units", "blocks"])
def test_kv_events_announce_what_can_be_resumed_and_nothing_else(model: Path, core: dict[str, Any], blocks: str):
    found = audited(scheduler_audit.scenes, model, {**core, "kv_events": blocks}, seeds=[1], chats=20)
    assert found["errors"] == [] and found["missing"] == 0 and found["announced"] > 0


@pytest.mark.parametrize("core", [{}, {"room": 1}], ids=["room for two", "room for one"])
def test_nothing_of_other_weights_is_found_however_an_adapter_changes(model: Path, core: dict[str, Any]):
    found = audited(adapter_audit.scenes, model, core, seeds=[1], chats=40)
    assert found["errors"] == [] and found["adapter_hit_tokens"] > 0


@pytest.mark.parametrize(
    "core",
    [{"blocks": 120}, {"blocks": 40, "budget": 128, "running": 4}, {"blocks": 40, "multi": True, "overlap": True}],
    ids=str,
)
def test_prefill_and_decode_apart_find_no_wrong_state_and_read_no_wrong_block(model: Path, core: dict[str, Any]):
    found = audited(transfer_audit.scenes, model, core, seeds=[2], chats=20)
    assert found["errors"] == [] and found["read"] > 0 and found["written"] > 0


# So few blocks that what a state has held is soon what another one is loaded into, and fewer rows than a prompt takes.
LITTLE_DISK: dict[str, Any] = {"blocks": 40, "budget": 128, "running": 4, "rows": 24, "files_bound": 120}


@pytest.mark.parametrize(
    ("core", "how"),
    [
        ({}, {}),
        (LITTLE_DISK, {}),
        ({**LITTLE_DISK, "budget": 256, "overlap": True}, {}),
        (LITTLE_DISK, {"kind": "hanging"}),
    ],
    ids=str,
)
def test_copies_that_come_late_and_files_that_are_damaged_lead_to_no_wrong_state(
    model: Path, monkeypatch: pytest.MonkeyPatch, core: dict[str, Any], how: dict[str, Any]
):
    monkeypatch.setattr(LoadCost, "pays", LoadCost.pays)  # what an audit sets is as before behind the test
    for name in ("PATIENCE", "time"):
        monkeypatch.setattr(connector, name, getattr(connector, name))
    found = audited(disk_audit.scenes, model, core, seeds=[3], chats=20, **how)
    assert found["errors"] == [] and found["loaded"] > 0


DRAFTING: dict[str, dict[str, Any]] = {
    "rows in the target's group": {},
    "planned ahead": {"overlap": True, "blocks": 60, "running": 4},
    "short steps": {"drafts": 5, "budget": 50},
    "hashes that cover what the head reads": {"drop": False},
    "rows in a group of another shape": {"head": OWN_SHAPE},
    "a window": {"head": OWN_WINDOW, "window": 100, "kv_events": "units"},
    "a window shorter than a block": {"head": OWN_WINDOW, "window": 40, "budget": 50, "blocks": 60, "running": 4},
    "windows of several groups": {"head": OWN_WINDOW, "window": 100, "attention_groups": 3, "window_groups": 2},
}


@pytest.fixture(scope="module")
def drafting_model(family: str) -> Path:
    return generated_model(print, family, mtp=True)


@pytest.mark.parametrize("core", DRAFTING.values(), ids=DRAFTING)
def test_whatever_becomes_of_a_draft_every_key_leads_to_what_it_promises(drafting_model: Path, core: dict[str, Any]):
    asked = {"answers": ANSWERS[:1], "shared": SHARED, "healed": HEALED if "window" in core else ()}
    assert faults(audited(draft_audit.scenes, drafting_model, core, seeds=[1], chats=10, **asked)) == []


@pytest.mark.parametrize("core", [{}, {"head": OWN_WINDOW, "window": 100}], ids=str)
def test_on_trial_vllm_caches_by_itself_until_hints_are_opened(drafting_model: Path, core: dict[str, Any]):
    asked = {"drafts": "auto", "answers": ANSWERS, "shared": SHARED, "gate": [250]}
    found = audited(draft_audit.scenes, drafting_model, core, seeds=[1], chats=10, **asked)
    assert found["errors"] == [] and found["written"] == 0 < found["hit_tokens"]
    assert found["ignored"].keys() == {"speculative"}


def test_a_pin_holds_the_rows_of_a_window(drafting_model: Path):
    held_on_purpose = {"head": OWN_WINDOW, "window": 100, "pins": 0.5}
    found = audited(draft_audit.scenes, drafting_model, held_on_purpose, pinned=[300])
    assert all("blocks are held without a request" in error for error in found["errors"]), found["errors"]
