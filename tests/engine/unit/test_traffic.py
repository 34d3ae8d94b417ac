"""On vLLM's own scheduler: all situations, a little of the random traffic that the audits play at length, its set-up.

More of it, planted defects, and other versions: tests/engine/test_scheduler.py and its neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from engine_patches import ledger, settings
from engine_patches.disk import connector
from engine_patches.disk.files import LoadCost
from engine_patches.scheduler import hooks
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.hooks import LEAVE_WEIGHTS, forget_weights_that_may_change, warn_of_narrow_states
from engine_patches.scheduler.planner import Grid
from tests.harness import adapter_audit, disk_audit, draft_audit, scheduler_audit, situation_audit, transfer_audit
from tests.harness.audit import audited, patched_vllm, random_traffic
from tests.harness.audited_core import UNIT, WEIGHTS, Core
from tests.harness.draft_cores import ANSWERS, HEALED, OWN_SHAPE, OWN_WINDOW, SHARED, faults
from tests.harness.draft_heads import mtp_model
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

# So few blocks that what a state has held is soon what another one is loaded into, and fewer rows than a prompt takes.
DISK: dict[str, Any] = {"blocks": 40, "budget": 128, "running": 4, "rows": 24, "files_bound": 120}

AT_CHUNK_ENDS = {"writes_in_forward": False, "export": False}

# Cores of each audit.
CORES: dict[Any, list[dict[str, Any]]] = {
    scheduler_audit: [
        {},
        TIGHT,
        {**TIGHT, "overlap": True},
        {**TIGHT, "budget": 60, "policy": "priority"},
        AT_CHUNK_ENDS,
        {"unit": 64},
        {"unit": 64, **AT_CHUNK_ENDS},
        {"context_ranks": 2},
        {"index": 16, "blocks": 60, "running": 4},
        {**TIGHT, "attention_groups": 2},
        *(
            {**core, "kv_events": events}
            for core in ({}, {**TIGHT, "blocks": 40}, {"index": 16})
            for events in ("units", "blocks")
        ),
    ],
    adapter_audit: [{}, {"room": 1}],
    transfer_audit: [
        {"blocks": 120},
        {"blocks": 40, "budget": 128, "running": 4},
        {"blocks": 40, "multi": True, "overlap": True},
    ],
    disk_audit: [{}, DISK, {**DISK, "budget": 256, "overlap": True}, {**DISK, "kind": "hanging"}],
}

# Seeds of an audit, and what has to come of it.
ASKED = {
    scheduler_audit: (1, ()),
    adapter_audit: (1, ("adapter_hit_tokens",)),
    transfer_audit: (2, ("read", "written")),
    disk_audit: (3, ("loaded",)),
}


def named(each: Any) -> str:
    return getattr(each, "__name__", str(each)).rpartition(".")[2]


@pytest.mark.parametrize(
    ("module", "core"), [(module, core) for module, cores in CORES.items() for core in cores], ids=named
)
def test_no_traffic_finds_a_wrong_state_or_reads_a_wrong_block(
    model: Path, monkeypatch: pytest.MonkeyPatch, module: Any, core: dict[str, Any]
):
    """And KV events announce what can be resumed, and nothing else."""
    monkeypatch.setattr(LoadCost, "pays", LoadCost.pays)  # what an audit sets is as before behind the test
    for name in ("PATIENCE", "time"):
        monkeypatch.setattr(connector, name, getattr(connector, name))
    (seed, wanted), kind = ASKED[module], core.get("kind", "alone")
    options = {name: value for name, value in core.items() if name != "kind"}
    found = audited(module.scenes, model, options, seeds=[seed], chats=20, kind=kind)
    assert found["errors"] == [] and found["refused"] is None and found["missing"] == 0
    assert all(found[count] > 0 for count in (*wanted, *["announced"] * ("kv_events" in core)))


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
    return mtp_model(family)


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


def spec(states: torch.dtype) -> MambaSpec:
    """Of a layer that keeps its convolution's inputs in bfloat16, and the state itself in `states`."""
    return MambaSpec(block_size=64, shapes=((1,), (1,)), dtypes=(torch.bfloat16, states))


@pytest.mark.parametrize(
    ("states", "named"),
    [
        ([torch.float32], None),
        ([torch.float16, torch.bfloat16], "kept in bfloat16, float16:"),
    ],
)
def test_states_that_are_rounded_are_named_once_with_the_flag_that_keeps_them_whole(engine_log, states, named):
    warn_of_narrow_states([spec(each) for each in states])
    assert len(engine_log.messages) == (named is not None)
    for line in engine_log.messages:
        assert named in line and "--mamba-ssm-cache-dtype float32" in line


@pytest.fixture
def made(model: Path) -> Iterator[Callable[..., Core]]:
    """A core with the options of `Core`."""
    with mock.patch.dict(os.environ):
        yield lambda **options: Core(str(model), **options)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("blocks", "longest", "named"), [(20, 1024, 960), (20, 960, None), (21, 1024, None)])
def test_a_cache_that_cannot_hold_the_longest_prompt_is_named_with_the_length_that_it_holds(
    made, engine_log, blocks, longest, named, overlap
):
    core = made(blocks=blocks, longest=longest, export=False, overlap=overlap)
    request = core.request("long", range(longest - 1), [500])
    for _ in range(50):
        core.step()
    assert request.is_finished() == (named is None) and core.errors == []
    assert [f"--max-model-len {named} fits" in line for line in engine_log.messages] == [True] * (named is not None)


def test_states_lie_where_a_kernels_chunks_end_if_they_are_written_inside_a_pass(made, monkeypatch):
    monkeypatch.setenv(settings.CHUNK_ENDS, "1")
    cores = [made(writes_in_forward=each).scheduler for each in (True, False)]
    aligned, cut = (core.seamark.grid for core in cores)
    managers = [core.kv_cache_manager.coordinator.single_type_managers for core in cores]
    # Where each costs a pass, vLLM's own are asked for, too.
    assert [any(getattr(each, "shared_prefix_checkpoint", False) for each in some) for some in managers] == [
        False,
        True,
    ]
    assert aligned.unit == cut.unit == cut.alignment == UNIT < aligned.alignment and aligned.alignment % UNIT == 0


def refused(core: Core) -> str:
    """Why hints are refused; vLLM then caches as it does alone."""
    checkpoints = core.scheduler.seamark
    assert checkpoints.states is None and checkpoints.gate is None and not checkpoints.writes_in_forward
    assert core.scheduler.mamba_has_prefill_checkpoint_blocks
    assert checkpoints.refusal.reason == "no_states"
    random_traffic(core, seed=1, chats=4)
    core.drain()
    assert core.errors == []
    return str(checkpoints.refusal.cause)


def test_a_cache_that_behaves_otherwise_is_left_to_vllm(made, monkeypatch):
    monkeypatch.setattr(hooks, "preflight", lambda *, windows: f"an evicted state is found, windows: {windows}")
    assert refused(made()).endswith("preflight check: an evicted state is found, windows: False")


def test_patches_that_were_taken_back_are_not_relied_on(made, monkeypatch):
    monkeypatch.setattr(ledger, "_live", False)
    assert "patches were taken back" in refused(made())


@pytest.mark.parametrize(
    ("method", "may_change"), [*((method, False) for method in LEAVE_WEIGHTS), ("reload_weights", True), (print, True)]
)
def test_calls_that_may_change_the_weights_are_told(method, may_change):
    told: list[bool] = []
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(seamark=SimpleNamespace(weights_may_change=lambda: told.append(True)))
    )
    call = forget_weights_that_may_change(lambda self, *given, **named: (given, named, list(told)))
    # Before it is made: what it changes is changed when it returns.
    assert call(engine, method, 1, args=2) == ((method, 1), {"args": 2}, [True] * may_change)
    for other in (SimpleNamespace(), SimpleNamespace(scheduler=SimpleNamespace())):
        assert call(other, method)[0] == (method,)
    assert told == [True] * may_change


def test_a_checkpoints_forgets_its_weights_and_closes_what_keeps_states_beyond_the_cache():
    closed: list[str] = []
    states = SimpleNamespace(store=SimpleNamespace(close=closed.append), keys=None)
    checkpoints = Checkpoints(Grid(UNIT, UNIT), 64, states, weights=WEIGHTS)
    checkpoints.weights_may_change()
    assert not checkpoints.weights.name and closed == [checkpoints.weights.unknown] and "changed" in closed[0]
    never_known = Checkpoints(Grid(UNIT, UNIT), 64)
    before = never_known.weights
    never_known.weights_may_change()
    assert never_known.weights is before
