"""On vLLM's own scheduler: every cache key leads to the state it promises, in every situation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.scheduler_process import audit

RINGS, RANK = "rings taken for attention", "a rank taken for all"

ROOM = {"blocks": 200}

TIGHT = {"blocks": 30, "running": 4}


@pytest.mark.parametrize(
    "cores",
    [
        [ROOM, TIGHT, {**TIGHT, "budget": 50}, {**TIGHT, "policy": "priority"}],
        [{**ROOM, "overlap": True}, {**TIGHT, "overlap": True}],
        [{**ROOM, "writes_in_forward": False, "export": False}, {**TIGHT, "writes_in_forward": False, "export": True}],
        [
            {**ROOM, "stages": 2},
            {**TIGHT, "stages": 2},
            {**TIGHT, "stages": 3, "policy": "priority"},
            {**ROOM, "stages": 2, "overlap": True},
            {**TIGHT, "stages": 2, "overlap": True},
            {**ROOM, "stages": 2, "writes_in_forward": False, "export": False},
        ],
        [
            {**ROOM, "context_ranks": 2},
            {**TIGHT, "context_ranks": 2},
            {**TIGHT, "context_ranks": 4, "budget": 50},
            {**TIGHT, "context_ranks": 2, "overlap": True, "policy": "priority"},
            {**ROOM, "context_ranks": 2, "stages": 2},
            {**ROOM, "context_ranks": 2, "attention_groups": 2},
            {**ROOM, "context_ranks": 2, "writes_in_forward": False, "export": False},
        ],
    ],
    ids=[
        "states inside the pass",
        "the next step planned ahead",
        "states at chunk ends",
        "pipeline stages",
        "attention blocks dealt out to ranks",
    ],
)
def test_every_key_leads_to_what_it_promises(model: Path, cores):
    for found in audit("scheduler", model, seeds=[1, 2], chats=80, cores=cores):
        assert found["errors"] == []
        assert found["hit_tokens"] > 400 and (found["ended_late"] > 0) == found["core"].get("overlap", False)


INDEXED = {"index": 16}  # groups of an index, of its ring of raw keys, and of a convolution


def test_beside_an_index_and_its_ring_every_key_leads_to_what_it_promises(model: Path):
    cores = [INDEXED, {"index": 4, "overlap": True}, {**INDEXED, "blocks": 60, "running": 4, "kv_events": "units"}]
    cores += [{**INDEXED, "writes_in_forward": False}]
    for found in audit("scheduler", model, seeds=[1, 2], chats=60, cores=cores):
        assert found["errors"] == [] and found["refused"] is None
        assert found["hit_tokens"] > 400 and found["evicted"] > 20 and found["missing"] == 0


def test_beside_a_ring_every_state_has_a_name_at_any_depth_is_evicted_under_it_and_can_be_pinned(model: Path):
    depths = [112, 640, 1984, 4992]
    for index in (0, 16):
        (found,) = audit(
            "scheduler", model, seeds=[], chats=0, depths=depths, cores=[{"blocks": 600, "index": index, "pins": 0.9}]
        )
        assert found["errors"] == [] and found["refused"] is None
        played = found["played"]
        assert played["held"] == played["pinned"] == played["pinned, then"] == depths
        # Of what was evicted nothing is found, but what the prompt before has just left.
        assert played["held, then"] == [0, *depths[:-1]] and found["evicted"] >= len(depths)
        assert played["names"] >= 2 * len(depths)


def test_the_audit_notices_a_ring_that_is_taken_for_attention_and_a_hit_inside_an_indexs_key(model: Path):
    audited = {"seeds": [1], "chats": 40, "cores": [INDEXED]}
    (found,) = audit("scheduler", model, **audited, planted=[RINGS])
    assert any("and not reported" in error for error in found["errors"])
    (found,) = audit("scheduler", model, **{**audited, "seeds": [2], "cores": [{"index": 64}]})
    assert "no multiple of the 64" in found["refused"]
    assert any("inside what its index has one key for" in error for error in found["errors"])  # vLLM's own hits


def test_the_audit_notices_keys_placed_as_if_a_rank_had_all_of_a_block(model: Path):
    audited = {"seeds": [1], "chats": 40, "planted": [RANK]}
    alone, dealt_out = audit("scheduler", model, **audited, cores=[ROOM, {**ROOM, "context_ranks": 2}])
    assert alone["errors"] == []
    assert any("wrong block" in error for error in dealt_out["errors"])


# As GLM-5.3-Flash on two small GPUs: each request takes a block in each group, be its prompt ever so short.
MANY_GROUPS = {"recurrent_groups": 20, "attention_groups": 3}


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


def test_with_many_groups_and_little_room_every_key_leads_to_what_it_promises(model: Path):
    tight = {**MANY_GROUPS, "blocks": 112}
    cores = [{**MANY_GROUPS, "blocks": 800}, tight, {**tight, "overlap": True}]
    roomy, *others = audit("scheduler", model, seeds=[1, 2], chats=40, cores=cores)
    for found in (roomy, *others):
        assert found["errors"] == [] and found["refused"] is None and found["written"] > 5
    assert roomy["hit_tokens"] > 400


WHOLE_BLOCKS = {"unit": 64}  # as short convolutions have on a GPU, or whoever asks for so coarse a match unit

AT_CHUNK_ENDS = {"writes_in_forward": False, "export": False}


@pytest.mark.parametrize("layers", [{}, {"attention_groups": 0}], ids=["hybrid", "recurrent layers alone"])
def test_states_of_whole_blocks_are_what_they_promise(model: Path, layers):
    """vLLM rounds what it caches down to whole blocks, so that a chunk's end cannot be told by it."""
    cores = [ROOM, {**TIGHT, "budget": 100}, {**ROOM, "overlap": True}, AT_CHUNK_ENDS, {**AT_CHUNK_ENDS, **TIGHT}]
    cores = [{**core, **WHOLE_BLOCKS, **layers} for core in cores]
    for found in audit("scheduler", model, seeds=[1], chats=80, cores=cores):
        assert found["errors"] == [] and found["refused"] is None
        assert found["hit_tokens"] > 400


def test_behind_a_window_nothing_is_kept_and_that_is_said(model: Path):
    cores = [{**ROOM, "window": 128, "export": False}, {**ROOM, "window": 128, **WHOLE_BLOCKS}]
    for found in audit("scheduler", model, seeds=[1], chats=20, cores=cores):
        assert found["errors"] == [] and "sliding window" in found["refused"]


@pytest.mark.parametrize("blocks", ["units", "blocks"])
def test_kv_events_announce_what_can_be_resumed_and_nothing_else(model: Path, blocks):
    events = {"kv_events": blocks}
    cores = [
        {**ROOM, **events},
        {**TIGHT, **events},
        {**TIGHT, **events, "overlap": True, "policy": "priority"},
        {**TIGHT, **events, "writes_in_forward": False, "export": True},
        {**TIGHT, **events, "attention_groups": 2},
    ]
    found = audit("scheduler", model, seeds=[1, 2], chats=60, cores=cores)
    for audited in found:
        assert audited["errors"] == []
        assert audited["missing"] == 0
        assert audited["announced"] > 100 and audited["hit_tokens"] > 300
    assert all(audited["withdrawn"] > 100 for audited in found[1:])


@pytest.mark.parametrize("blocks", ["units", "blocks"])
def test_kv_events_announce_nothing_that_cannot_be_resumed_where_attention_blocks_are_dealt_out(model: Path, blocks):
    """A few states that can be are missing: those at a recurrent block's edge, where they have no attention key."""
    dealt_out = {**TIGHT, "context_ranks": 2, "kv_events": blocks}
    (found,) = audit("scheduler", model, seeds=[1, 2], chats=60, cores=[dealt_out])
    assert found["errors"] == []
    assert found["announced"] > 50 and found["missing"] < found["announced"] / 10


def test_the_audit_notices_kv_events_of_what_cannot_be_resumed(model: Path):
    """vLLM's own events of a hybrid."""
    audited = {"seeds": [1, 2], "chats": 60, "cores": [{**ROOM, "kv_events": "0"}]}
    (found,) = audit("scheduler", model, **audited)
    assert any("lead to no state" in error for error in found["errors"])


def test_the_audit_notices_evictions_without_an_event(model: Path):
    audited = {"seeds": [1], "chats": 60, "cores": [TIGHT]}
    (complete,) = audit("scheduler", model, **audited)
    (silent,) = audit("scheduler", model, **audited, without=["evicted-states"])
    assert complete["evicted"] > 20 and complete["errors"] == []
    assert any("reported as stored" in error for error in silent["errors"]) and not silent["evicted"]


# A request preempted in the very step that was to compute it leaves keys of what is never computed; seeds that show it.
PREEMPTED = {
    "seeds": [127, 147],
    "chats": 50,
    "cores": [
        {"policy": "priority", "blocks": 26, "running": 4, "budget": 90, "overlap": True},
        {"policy": "priority", "blocks": 20, "running": 5, "budget": 200},
    ],
}


def test_keys_of_what_was_never_computed_are_taken_back(model: Path):
    for found in audit("scheduler", model, **PREEMPTED):
        assert found["errors"] == []


@pytest.mark.parametrize(
    ("without", "audited"),
    [
        ("true-states", {"seeds": [1, 2], "chats": 60, "cores": [ROOM]}),
        (
            "block-edge-stop",
            {"seeds": [1, 2], "chats": 60, "cores": [{**ROOM, "writes_in_forward": False, "export": True}]},
        ),
        ("preempted-keys", PREEMPTED),
    ],
)
def test_the_audit_notices_what_is_left_out(model: Path, without, audited):
    for found in audit("scheduler", model, **audited, without=[without]):
        assert any("wrong" in error for error in found["errors"])
