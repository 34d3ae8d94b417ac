"""How a scheduler is set up, what it says of its model's states when it starts, and what it counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from engine_patches import ledger, settings
from engine_patches.scheduler import preflight
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.hooks import (
    LEAVE_WEIGHTS,
    forget_weights_that_may_change,
    warn_of_narrow_states,
)
from engine_patches.scheduler.preflight import PreflightFailed
from tests.harness.audit import patched_vllm, random_traffic
from tests.harness.audited_core import UNIT, WEIGHTS, Core


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


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with patched_vllm():
        yield


@pytest.fixture
def made(patched: None, model: Path) -> Iterator[Callable[..., Core]]:
    """A core with the options of `Core`."""
    with mock.patch.dict(os.environ):
        yield lambda **options: Core(str(model), **options)


def test_states_lie_where_a_kernels_chunks_end_if_they_are_written_inside_a_pass(made, monkeypatch):
    monkeypatch.setenv(settings.CHUNK_ENDS, "1")
    aligned, cut = (made(writes_in_forward=each).scheduler.seamark.grid for each in (True, False))
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
    def fails(*, windows: bool) -> None:
        raise PreflightFailed(f"an evicted state is found, windows: {windows}")

    monkeypatch.setattr(preflight, "run", fails)
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
