"""On vLLM's own scheduler, beside a checkpoint directory: whatever happens to files or clients, all is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.scheduler_process import TRAFFIC, audit

# So few blocks that what a state has held is soon what another one is loaded into, and fewer rows than a prompt takes.
TIGHT: dict[str, Any] = {"blocks": 40, "budget": 128, "running": 4, "rows": 24, "files_bound": 120}


@pytest.mark.parametrize(
    ("core", "seeds"),
    [
        ({}, range(7)),
        (TIGHT, range(7, 14)),
        ({**TIGHT, "budget": 256, "overlap": True}, range(14, 20)),
        ({**TIGHT, "stages": 2}, range(20, 23)),
    ],
    ids=["room", "hardly any room", "the next step planned ahead", "pipeline stages"],
)
@TRAFFIC
def test_copies_that_come_late_and_files_that_are_damaged_lead_to_no_wrong_state(model: Path, core, seeds, share):
    seeds = seeds[share]
    (found,) = audit("disk", model, chats=40, seeds=list(seeds), cores=[core])
    print(found)
    assert found["errors"] == [] and found["inside_pass"]
    assert found["loaded"] > 20 * len(seeds) and found["files_refused"] > len(seeds)
    assert found["resets"] == 3 * len(seeds)  # once in each life


def test_beside_decode_context_parallelism_nothing_is_stored_and_that_is_said(model: Path):
    (found,) = audit("disk", model, chats=20, seeds=[1], cores=[{"context_ranks": 2}])
    assert found["errors"] == [] and "decode context parallelism" in found["refused"]
    assert found["loaded"] == 0


@TRAFFIC
def test_two_cores_on_one_directory_take_each_others_states_and_no_wrong_one(model: Path, share):
    seeds = [20, 21, 22][share]
    (found,) = audit("disk", model, chats=40, seeds=seeds, kind="sharing", cores=[TIGHT])
    print(found)
    assert found["errors"] == [] and found["taken"] > 20 * len(seeds)


@TRAFFIC
def test_a_request_that_waits_in_vain_for_a_disk_is_computed_and_what_comes_late_is_no_wrong_state(model: Path, share):
    seeds = [26, 23][share]
    (found,) = audit("disk", model, chats=40, seeds=seeds, kind="hanging", cores=[TIGHT])
    print(found)
    assert found["errors"] == [] and found["given_up"] > 10 and found["loaded"] > 0


def test_a_block_that_is_free_before_it_is_stored_is_found(model: Path):
    (found,) = audit("disk", model, chats=40, seeds=[1], cores=[TIGHT], planted=["at once"])
    assert any("wrong state" in error or "someone else's keys" in error for error in found["errors"])


def test_files_that_are_believed_unread_are_found(model: Path):
    (found,) = audit("disk", model, chats=40, seeds=[1], cores=[{}], planted=["unchecked"])
    assert any("wrong state" in error or "someone else's keys" in error for error in found["errors"])
