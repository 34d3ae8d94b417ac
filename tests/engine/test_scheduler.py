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
    "KV events": [
        {**core, "kv_events": events}
        for events in ("units", "blocks")
        for core in (
            *(ROOM, TIGHT, {**TIGHT, "overlap": True, "policy": "priority"}),
            *({**TIGHT, "writes_in_forward": False}, {**TIGHT, "attention_groups": 2}, {**TIGHT, **DEALT_OUT}),
        )
    ],
}


@pytest.mark.parametrize("cores", CORES.values(), ids=CORES)
def test_every_key_leads_to_what_it_promises(model: Path, cores):
    for found in audit("scheduler", model, seeds=[1, 2], chats=60, cores=cores):
        core = found["core"]
        assert found["errors"] == [] and found["refused"] is None
        assert found["hit_tokens"] > 300 and (found["ended_late"] > 0) == core.get("overlap", False)
        assert (found["announced"] > 50) == ("kv_events" in core)
        # Where rows are dealt out, a few that can be resumed are missing: at a recurrent block's edge without a key. So
        # they are where chunks are cut for states, once others have computed anew what was evicted before them.
        may_miss = "context_ranks" in core or "writes_in_forward" in core
        assert found["missing"] <= found["announced"] / 10 * may_miss


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


# So few blocks that what a state has held is soon what another one is loaded into, and fewer rows than a prompt takes.
DISK: dict[str, Any] = {"blocks": 40, "budget": 128, "running": 4, "rows": 24, "files_bound": 120}

APART: dict[str, Any] = {"blocks": 40, "budget": 128, "running": 4}

# So few blocks that what a state has held is soon what a prefill is loaded into.
TIGHTEST: dict[str, Any] = {"blocks": 20, "budget": 256, "running": 6, "overlap": True}

LOADED = {"loaded": 20, "files_refused": 1}

READ = {"read": 25, "hit_tokens": 200, "written": 20}

# Of an audit: seeds, cores, what else is asked for, and more than what of each count has to come of a seed.
TRAFFIC: dict[str, tuple[str, list[int], list[dict[str, Any]], dict[str, Any], dict[str, int]]] = {
    "disk, room": ("disk", [*range(7)], [{}], {}, LOADED),
    "disk, hardly any room": ("disk", [*range(7, 14)], [DISK], {}, LOADED),
    "disk, planned ahead": ("disk", [*range(14, 20)], [{**DISK, "budget": 256, "overlap": True}], {}, LOADED),
    "disk, pipeline stages": ("disk", [20, 21, 22], [{**DISK, "stages": 2}], {}, LOADED),
    "disk of two cores": ("disk", [20, 21, 22], [DISK], {"kind": "sharing"}, {"taken": 20}),
    "disk that hangs": ("disk", [26, 23], [DISK], {"kind": "hanging"}, {"given_up": 5, "loaded": 0}),
    "prefill and decode apart": ("transfer", [*range(7)], [APART, {**APART, "multi": True}], {}, READ),
    "prefill and decode apart, planned ahead": (
        *("transfer", [9, 7, 8, 10, 11, 12, 13]),
        *([{"blocks": 120, "overlap": True}, {**APART, "overlap": True}, TIGHTEST], {}, READ),
    ),
    "prefill and decode apart, loads that fail": (
        *("transfer", [*range(14, 20)]),
        *([{**APART, "failing": 0.3}, {**TIGHTEST, "failing": 0.3}], {}, READ),
    ),
    # That change under their names.
    "adapters": (
        *("adapter", [1, 2], [{}, {"room": 1}, {"blocks": 40, "running": 2, "budget": 100}]),
        *({"chats": 100}, {"adapter_hit_tokens": 100}),
    ),
    "adapters, planned ahead": ("adapter", [1], [{"overlap": True, "room": 1}], {}, {"adapter_hit_tokens": 100}),
}


@pytest.mark.parametrize(("name", "seeds", "cores", "asked", "least"), TRAFFIC.values(), ids=TRAFFIC)
@pytest.mark.parametrize(
    "share",
    [pytest.param(slice(1), id="a seed"), pytest.param(slice(None), id="all seeds", marks=pytest.mark.thorough)],
)
def test_no_traffic_finds_a_wrong_state_or_reads_a_wrong_block(model: Path, name, seeds, cores, asked, least, share):
    """Copies that come late, files that are damaged, clients that leave, caches that are emptied, other weights."""
    seeds = seeds[share]
    for found in audit(name, model, seeds=seeds, cores=cores, **{"chats": 60 if name == "transfer" else 40, **asked}):
        print(found)
        assert found["errors"] == [] and found["inside_pass"]
        assert {count: found[count] for count, each in least.items() if found[count] <= each} == {}
        assert found["resets"] or name != "disk"


def test_beside_decode_context_parallelism_nothing_is_stored_and_that_is_said(model: Path):
    (found,) = audit("disk", model, chats=20, seeds=[1], cores=[{"context_ranks": 2}])
    assert found["errors"] == [] and "decode context parallelism" in found["refused"]
    assert found["loaded"] == 0


WRONG = ("wrong", "someone else's keys")

# What an audit says, of what.
NOTICED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a ring that is taken for attention": (
        ("and not reported",),
        {"cores": [INDEXED], "planted": ["rings taken for attention"]},
    ),
    "a hit inside an index's key, vLLM's own": (
        ("inside what its index has one key for",),
        {"seeds": [2], "cores": [{"index": 64}]},
    ),
    "keys placed as if a rank had all of a block": (
        WRONG,
        {"cores": [{**ROOM, **DEALT_OUT}], "planted": ["a rank taken for all"]},
    ),
    "KV events of what cannot be resumed, vLLM's own": (
        ("lead to no state",),
        {"cores": [{**ROOM, "kv_events": "0"}]},
    ),
    "evictions without an event": (("reported as stored",), {"cores": [TIGHT], "without": ["evicted-states"]}),
    "vLLM's keys of blocks that were passed": (WRONG, {"cores": [ROOM], "without": ["true-states"]}),
    "a chunk past a block's edge": (
        WRONG,
        {"cores": [{**ROOM, "writes_in_forward": False, "export": True}], "without": ["block-edge-stop"]},
    ),
    "keys of what was never computed": (WRONG, {**PREEMPTED, "without": ["preempted-keys"]}),
    "disk: a block that is free before it is stored": (WRONG, {"cores": [DISK], "planted": ["at once"]}),
    "disk: files that are believed unread": (WRONG, {"cores": [{}], "planted": ["unchecked"]}),
    "transfer: a block that is loaded into before its last state is written": (
        WRONG,
        {"seeds": [4, 8], "cores": [{**APART, "overlap": True}], "planted": ["at once"]},
    ),
    "transfer: a prefill of another prompt": (
        WRONG,
        {"seeds": [2], "cores": [{"blocks": 120}], "planted": ["content"]},
    ),
    "adapter: vLLM's own hashes": (WRONG, {"cores": [{"room": 1}], "without": ["adapter-"]}),
    "adapter: no hashes are looked at again": (WRONG, {"cores": [{"room": 1}], "without": ["adapter-lookup"]}),
}


@pytest.mark.parametrize(("words", "asked"), NOTICED.values(), ids=NOTICED)
def test_the_audit_notices_what_is_wrong(model: Path, request: pytest.FixtureRequest, words, asked):
    name, colon, _ = request.node.callspec.id.partition(":")
    for found in audit(name if colon else "scheduler", model, **{"seeds": [1, 2], "chats": 60, **asked}):
        assert any(word in error for word in words for error in found["errors"]), found


def test_the_audit_notices_rows_that_are_copied_before_they_are_written(model: Path):
    (found,) = audit("situation", model, without=["written-rows"], cores=[{}])
    assert {error.partition(":")[0] for error in found["errors"]} == {
        "the same prompt twice in one step",
        "rows evicted and their state kept",
        "rows of the second attention group evicted",
        "a connector looks up in its own way",
    }


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
