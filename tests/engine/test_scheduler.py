"""On vLLM's own scheduler: every cache key leads to the state it promises, in every situation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_patches.scheduler import fan_out
from tests.harness.fan_out_audit import PACES, UNIT, Cell, mixed, table
from tests.harness.scheduler_process import audit

ROOM = {"blocks": 200}

TIGHT = {"blocks": 30, "running": 4}

AT_CHUNK_ENDS = {"writes_in_forward": False, "export": False}

INDEXED = {"index": 16}  # groups of an index, of its ring of raw keys, and of a convolution

# As GLM-5.3-Flash on two small GPUs: each request takes a block in each group, be its prompt ever so short.
MANY_GROUPS = {"recurrent_groups": 20, "attention_groups": 3}

DEALT_OUT = {"context_ranks": 2}

# As short convolutions have on a GPU, or whoever asks for so coarse a match unit. vLLM rounds what it caches down to
# whole blocks, so that a chunk's end cannot be told by it.
WHOLE_BLOCKS = [ROOM, {**TIGHT, "budget": 100}, {**ROOM, "overlap": True}, AT_CHUNK_ENDS, {**AT_CHUNK_ENDS, **TIGHT}]

CORES: dict[str, list[dict[str, Any]]] = {
    "states inside the pass": [ROOM, TIGHT, {**TIGHT, "budget": 50}, {**TIGHT, "policy": "priority"}],
    "the next step planned ahead": [{**ROOM, "overlap": True}, {**TIGHT, "overlap": True}],
    "states at chunk ends": [{**ROOM, **AT_CHUNK_ENDS}, {**TIGHT, "writes_in_forward": False, "export": True}],
    "pipeline stages": [
        {**ROOM, "stages": 2},
        {**TIGHT, "stages": 2},
        {**TIGHT, "stages": 3, "policy": "priority"},
        {**ROOM, "stages": 2, "overlap": True},
        {**TIGHT, "stages": 2, "overlap": True},
        {**ROOM, "stages": 2, **AT_CHUNK_ENDS},
    ],
    "attention blocks dealt out to ranks": [
        {**ROOM, **DEALT_OUT},
        {**TIGHT, **DEALT_OUT},
        {**TIGHT, "context_ranks": 4, "budget": 50},
        {**TIGHT, **DEALT_OUT, "overlap": True, "policy": "priority"},
        {**ROOM, **DEALT_OUT, "stages": 2},
        {**ROOM, **DEALT_OUT, "attention_groups": 2},
        {**ROOM, **DEALT_OUT, **AT_CHUNK_ENDS},
    ],
    "an index and its ring": [
        INDEXED,
        {"index": 4, "overlap": True},
        {**INDEXED, "blocks": 60, "running": 4, "kv_events": "units"},
        {**INDEXED, "writes_in_forward": False},
    ],
    "whole blocks": [{**core, "unit": 64} for core in WHOLE_BLOCKS],
    "whole blocks of recurrent layers alone": [{**core, "unit": 64, "attention_groups": 0} for core in WHOLE_BLOCKS],
    "many groups": [{**MANY_GROUPS, "blocks": 800}],
}


@pytest.mark.parametrize("cores", CORES.values(), ids=CORES)
def test_every_key_leads_to_what_it_promises(model: Path, cores):
    for found in audit("scheduler", model, seeds=[1, 2], chats=60, cores=cores):
        assert found["errors"] == [] and found["refused"] is None and found["missing"] == 0
        assert found["hit_tokens"] > 400 and (found["ended_late"] > 0) == found["core"].get("overlap", False)


def test_with_many_groups_and_little_room_every_key_leads_to_what_it_promises(model: Path):
    tight = {**MANY_GROUPS, "blocks": 112}
    for found in audit("scheduler", model, seeds=[1, 2], chats=40, cores=[tight, {**tight, "overlap": True}]):
        assert found["errors"] == [] and found["refused"] is None and found["written"] > 5


def test_beside_a_ring_every_state_has_a_name_at_any_depth_is_evicted_under_it_and_can_be_pinned(model: Path):
    depths = [112, 640, 1984, 4992]
    cores = [{"blocks": 600, "index": index, "pins": 0.9} for index in (0, 16)]
    for found in audit("scheduler", model, seeds=[], chats=0, depths=depths, cores=cores):
        assert found["errors"] == [] and found["refused"] is None
        played = found["played"]["deep prompts"]
        assert played["held"] == played["pinned"] == played["pinned, then"] == depths
        # Of what was evicted nothing is found, but what the prompt before has just left.
        assert played["held, then"] == [0, *depths[:-1]] and found["evicted"] >= len(depths)
        assert played["names"] >= 2 * len(depths)


def test_a_tiny_prompt_that_takes_a_third_of_the_cache_is_served_as_early_as_without_states(model: Path):
    cores = [{**MANY_GROUPS, "blocks": 70}, {**MANY_GROUPS, "blocks": 70, "overlap": True}]
    for found in audit("scheduler", model, seeds=[], chats=0, tiny=True, cores=cores):
        assert found["errors"] == [] and found["refused"] is None
        kept, none = found["played"]["kept"], found["played"]["none"]
        assert kept["held"] == none["held"] == 23  # of 69
        late = {name: kept["began"][name] - step for name, step in none["began"].items()}
        assert len(late) == 60 and not any(late[name] for name in late if name.split()[1] in ("0", "1", "2"))
        # vLLM copies what a request resumes inside of, so a hit takes 20 blocks more for a step.
        assert max(late.values()) <= sum(hit > 0 for hit in kept["hits"])
        assert not any(none["hits"]) and kept["hits"][-5:] == [32] * 5


def test_behind_a_window_nothing_is_kept_and_that_is_said(model: Path):
    cores = [{**ROOM, "window": 128, "export": False}, {**ROOM, "window": 128, "unit": 64}]
    for found in audit("scheduler", model, seeds=[1], chats=20, cores=cores):
        assert found["errors"] == [] and "sliding window" in found["refused"]


@pytest.mark.parametrize("blocks", ["units", "blocks"])
def test_kv_events_announce_what_can_be_resumed_and_nothing_else(model: Path, blocks):
    cores = [
        ROOM,
        TIGHT,
        {**TIGHT, "overlap": True, "policy": "priority"},
        {**TIGHT, "writes_in_forward": False, "export": True},
        {**TIGHT, "attention_groups": 2},
        {**TIGHT, **DEALT_OUT},
    ]
    audited = {"seeds": [1, 2], "chats": 60, "cores": [{**core, "kv_events": blocks} for core in cores]}
    *found, dealt_out = audit("scheduler", model, **audited)
    for each in found:
        assert each["errors"] == [] and each["missing"] == 0
        assert each["announced"] > 100 and each["hit_tokens"] > 300
    assert all(each["withdrawn"] > 100 for each in found[1:])
    # A few that can be resumed are missing: those at a recurrent block's edge, where they have no attention key.
    assert dealt_out["errors"] == []
    assert dealt_out["announced"] > 50 and dealt_out["missing"] < dealt_out["announced"] / 10


# A request preempted in the very step that was to compute it leaves keys of what is never computed; seeds that show it.
PREEMPTED = {
    "seeds": [127, 147],
    "cores": [
        {"policy": "priority", "blocks": 26, "running": 4, "budget": 90, "overlap": True},
        {"policy": "priority", "blocks": 20, "running": 5, "budget": 200},
    ],
}


def test_keys_of_what_was_never_computed_are_taken_back(model: Path):
    for found in audit("scheduler", model, chats=50, **PREEMPTED):
        assert found["errors"] == []


NOTICED: dict[str, tuple[str, dict[str, Any]]] = {
    "a ring that is taken for attention": (
        "and not reported",
        {"cores": [INDEXED], "planted": ["rings taken for attention"]},
    ),
    "a hit inside an index's key, vLLM's own": (
        "inside what its index has one key for",
        {"seeds": [2], "cores": [{"index": 64}]},
    ),
    "keys placed as if a rank had all of a block": (
        "wrong block",
        {"cores": [{**ROOM, **DEALT_OUT}], "planted": ["a rank taken for all"]},
    ),
    "KV events of what cannot be resumed, vLLM's own": ("lead to no state", {"cores": [{**ROOM, "kv_events": "0"}]}),
    "evictions without an event": ("reported as stored", {"cores": [TIGHT], "without": ["evicted-states"]}),
    "vLLM's keys of blocks that were passed": ("wrong", {"cores": [ROOM], "without": ["true-states"]}),
    "a chunk past a block's edge": (
        "wrong",
        {"cores": [{**ROOM, "writes_in_forward": False, "export": True}], "without": ["block-edge-stop"]},
    ),
    "keys of what was never computed": ("wrong", {**PREEMPTED, "without": ["preempted-keys"]}),
}


@pytest.mark.parametrize(("words", "audited"), NOTICED.values(), ids=NOTICED)
def test_the_audit_notices_what_is_wrong(model: Path, words, audited):
    for found in audit("scheduler", model, **{"seeds": [1, 2], "chats": 50, **audited}):
        assert any(words in error for error in found["errors"])


def test_the_audit_notices_rows_that_are_copied_before_they_are_written(model: Path):
    (found,) = audit("situation", model, without=["written-rows"], cores=[{}])
    assert {error.partition(":")[0] for error in found["errors"]} == {
        "the same prompt twice in one step",
        "rows evicted and their state kept",
        "rows of the second attention group evicted",
        "a connector looks up in its own way",
    }


# LoRA adapters that change under their names.
ADAPTERS = [{}, {"room": 1}, {"blocks": 40, "running": 2, "budget": 100}, {"overlap": True, "room": 1}]


def test_nothing_of_other_weights_is_found_however_an_adapter_changes(model: Path):
    for found in audit("adapter", model, seeds=[1, 2], chats=100, cores=ADAPTERS):
        print(found)
        assert found["errors"] == []
        assert found["adapter_hit_tokens"] > 2000


@pytest.mark.parametrize("without", ["adapter-", "adapter-lookup"])
def test_the_audit_notices_states_of_old_weights(model: Path, without):
    """vLLM's own hashes, or none of a request's hashes looked at again when its turn comes."""
    found = audit("adapter", model, seeds=[1, 2], chats=100, without=[without], cores=ADAPTERS[1:3])
    print(found)
    assert any(each["errors"] for each in found)


# Cold fan-outs at a set pace.
MOST_WORSE = 1.02  # a mean first token with the gate over that without


@pytest.fixture(scope="module")
def simulated(model: Path):
    cells = [*table(), *mixed()]
    found = audit("fan_out", model, cores=[cell._asdict() for cell in cells])
    return [(cell, each["played"]) for cell, each in zip(cells, found, strict=True)]


def ratio(sides) -> float:
    return sides["on"]["first_token"] / sides["off"]["first_token"]


def test_no_mean_first_token_is_later_with_the_gate_than_without(simulated):
    assert [(cell, ratio(sides)) for cell, sides in simulated if ratio(sides) > MOST_WORSE] == []


def test_a_prefix_is_computed_once_where_all_who_wait_save_more_than_a_pass(simulated):
    for cell, sides in simulated[: len(table())]:
        if not counts(cell):
            assert sides["on"]["computed"] == sides["off"]["computed"]
        else:
            assert sides["on"]["computed"] <= 1.02 * cell.ideal
            assert sides["off"]["computed"] >= 1.5 * cell.ideal
            assert ratio(sides) <= 0.8


def test_a_single_follower_with_little_to_gain_runs_along(simulated):
    alone = [(cell, sides) for cell, sides in simulated if cell.followers == 1 and not cell.strangers]
    assert [sides["on"] == sides["off"] for cell, sides in alone] == [not counts(cell) for cell, _ in alone]


def counts(cell: Cell) -> bool:
    """Whether all followers together save more than 1.5 passes, and time that counts: less where they save many."""
    found = cell.shared // UNIT * UNIT
    floor, token = PACES[cell.pace]
    seconds = cell.followers * found * token
    is_clear = found >= fan_out.CLEAR_TOKENS and seconds >= fan_out.CLEAR_MARGIN * floor
    least = fan_out.CLEAR_SAVING_SECONDS if is_clear else fan_out.MIN_SAVING_SECONDS
    return seconds >= max(fan_out.MARGIN * floor, least)
