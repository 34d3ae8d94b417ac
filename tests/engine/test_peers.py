"""On vLLM's own schedulers and tiers: workers that take states from each other or a directory, each block checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scheduler_process import run_apart

ROOM: dict[str, Any] = {"rows": 60, "blocks": 120}

# So few blocks and rows that both are evicted all the time.
TIGHT: dict[str, Any] = {"rows": 30, "blocks": 40, "budget": 128, "running": 4}


# As many seeds in turn as it takes until so much came from elsewhere: what one brings depends on the machine.
SEEDS = list(range(1, 21))
LOADED = {"loaded": 40, "hit_tokens": 4_000}
FROM_PEERS = {**LOADED, "from_peers": 20}


def enough(found: dict[str, Any], least: dict[str, int]) -> bool:
    return all(found[name] > number for name, number in least.items())


def audit(model: Path, **wanted: Any) -> dict[str, Any]:
    (found,) = run_apart("peer_audit", str(model), json.dumps(wanted))
    return found


@pytest.mark.parametrize(
    "core", [ROOM, TIGHT, {**TIGHT, "overlap": True}], ids=["room", "tight", "the next step planned ahead"]
)
def test_states_of_another_worker_are_those_of_the_prompt_and_no_block_is_lost(model: Path, core):
    found = audit(model, seeds=SEEDS, chats=60, cores=[core], enough=FROM_PEERS)
    assert found["errors"] == [] and enough(found, FROM_PEERS)


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_worker_goes_on_alone_when_the_one_that_is_writing_to_it_dies_or_hangs(model: Path, end: str):
    found = audit(model, seeds=[1], chats=40, cores=[ROOM], end=end)
    assert found["errors"] == [] and found["from_peers"] > 0
    assert found["lost"] > 0 or end == "hangs"  # which is noticed later


def test_rows_in_each_others_places_are_seen(model: Path):
    found = audit(model, seeds=[2], chats=60, cores=[ROOM], planted=["rows"])
    assert any("wrong state" in error or "someone else's keys" in error for error in found["errors"])


def test_states_of_a_directory_that_two_workers_share_are_those_of_the_prompt(model: Path, tmp_path: Path):
    found = audit(model, seeds=SEEDS, chats=60, cores=[{**TIGHT, "directory": str(tmp_path)}], enough=LOADED)
    assert found["errors"] == [] and enough(found, LOADED)
