"""When a cure of vLLM's own defects takes hold, and what it leaves alone."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from engine_patches.forward.cpu_scan import kernel_in_runs
from engine_patches.ledger import ShapeMismatch
from engine_patches.upstream_fixes import (
    copy_largest_view_first,
    keep_enlarged_block_size,
    states_at_chunk_ends,
    store_checkpoints_without_triton,
)

PLATFORM_DEFAULT = 128


@pytest.mark.parametrize(
    ("before", "mode", "after"),
    [
        (384, "align", 384),
        (None, "align", PLATFORM_DEFAULT),  # nobody has chosen one yet
        (64, "align", PLATFORM_DEFAULT),
        (384, "none", PLATFORM_DEFAULT),
        (PLATFORM_DEFAULT, "align", PLATFORM_DEFAULT),
    ],
)
def test_an_enlarged_block_size_outlives_the_platforms_default(before, mode, after):
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=before, mamba_cache_mode=mode))

    def reset(cls, vllm_config):
        vllm_config.cache_config.block_size = PLATFORM_DEFAULT

    keep_enlarged_block_size(reset)(None, config)
    assert config.cache_config.block_size == after


HEADS, HEAD_SIZE, STATE_SIZE = 2, 4, 8

# Four rows, of chunks of so many tokens.
ROWS = [[5, 3, 9], [4], [7], [2, 6]]


def scan_inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) - 0.5

    x, dt = random(tokens, HEADS, HEAD_SIZE), random(tokens, HEADS)
    return [x, dt, -random(HEADS).abs(), random(tokens, 1, STATE_SIZE), random(tokens, 1, STATE_SIZE)]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_cpus_scan_returns_the_state_at_each_chunks_end(resumed, monkeypatch):
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import _mamba_chunk_scan_combined_fwd_cpu as scan

    lengths = [sum(chunks) for chunks in ROWS]
    inputs = scan_inputs(sum(lengths))
    starts = [0, *itertools.accumulate(lengths)]
    initial = torch.rand(len(ROWS), HEADS, HEAD_SIZE, STATE_SIZE) if resumed else None
    how = {"D": torch.rand(HEADS), "dt_bias": torch.rand(HEADS), "dt_softplus": True, "state_dtype": torch.float32}
    calls = []
    kernel = ops.mamba_chunk_scan_fwd_cpu

    def counted(out, *args):
        calls.append(len(out))
        kernel(out, *args)

    monkeypatch.setattr(ops, "mamba_chunk_scan_fwd_cpu", kernel_in_runs(counted))

    def run(scan, part: slice, of_rows: slice, bounds: list[int], **options):
        x, dt, A, B, C = inputs
        out = torch.zeros(len(x[part]), HEADS, HEAD_SIZE)
        begun = None if initial is None else initial[of_rows]
        states = scan(
            x[part], dt[part], A, B[part], C[part], 8, out,
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32), initial_states=begun, **how, **options,
        )  # fmt: skip
        return states, out

    chunks = [length for row in ROWS for length in row]
    _, whole = run(scan, slice(None), slice(None), starts)
    calls.clear()
    states, out = run(
        states_at_chunk_ends(scan),
        slice(None),
        slice(None),
        starts,
        cu_chunk_seqlens=torch.tensor([0, *itertools.accumulate(chunks)]),
        seq_idx=torch.tensor([number for number, row in enumerate(ROWS) for _ in row]),
        return_intermediate_states=True,
    )
    assert calls == [5, 3, 9 + 4 + 7 + 2, 6]  # chunks of different rows run at once
    assert torch.allclose(out, whole, atol=1e-6)
    expected = []
    for number, row in enumerate(ROWS):
        for end in itertools.accumulate(row):
            part = slice(starts[number], starts[number] + end)
            expected.append(run(scan, part, slice(number, number + 1), [0, end])[0])
    assert torch.allclose(states, torch.cat(expected), atol=1e-6)


def test_a_scan_that_is_another_is_refused_and_one_that_is_not_asked_for_chunk_ends_is_vllms_own():
    def _mamba_chunk_scan_combined_fwd_cpu(x, *args, **options):
        return x, args, options

    scan = states_at_chunk_ends(_mamba_chunk_scan_combined_fwd_cpu)
    assert scan(1, 2, seq_idx=3) == (1, (2,), {"seq_idx": 3})
    assert scan(1, return_intermediate_states=False) == (1, (), {"return_intermediate_states": False})
    chunks = {"cu_chunk_seqlens": torch.tensor([0, 2, 3]), "seq_idx": torch.tensor([0, 0])}
    with pytest.raises(RuntimeError, match="no longer calls its kernel"):
        scan(torch.zeros(3), return_intermediate_states=True, **chunks)
    with pytest.raises(ShapeMismatch, match="the scan on a CPU is kernel_in_runs"):
        states_at_chunk_ends(kernel_in_runs)


def test_of_caches_at_one_address_the_largest_is_copied():
    small, large = (torch.zeros(size, dtype=torch.int8) for size in (2, 5))
    copy = copy_largest_view_first(lambda caches, *more: ([cache.nbytes for cache in caches], *more))
    assert copy((small, large, small), 7, ["a copy"]) == ([5, 2, 2], 7, ["a copy"])
    assert copy((small, large), 7, []) == ([], 7, []), "nothing is copied, nothing is sorted"


def test_a_checkpoint_is_exported_from_a_rows_own_tokens_and_chunk():
    """Of three rows the second asks for none."""
    checkpoint = SimpleNamespace(checkpoint_offsets=torch.tensor([4, 0, 3]), state_indices=torch.tensor([2, 0, 3]))
    x = torch.arange(20).expand(2, 20)  # by channel and token
    conv_state, ssm_state = torch.full((4, 2, 5), -1), torch.full((4, 1), -1)
    store_checkpoints_without_triton(None)(
        checkpoint,
        torch.tensor([1, 0, 2]),
        x,
        conv_state,
        torch.tensor([[10], [11], [12]]),
        ssm_state,
        torch.tensor([0, 6, 9, 20]),
        state_len=3,
    )
    untouched = [[-1] * 5] * 2
    assert conv_state.tolist() == [untouched, untouched, [[1, 2, 3, -1, -1]] * 2, [[9, 10, 11, -1, -1]] * 2]
    assert ssm_state.flatten().tolist() == [-1, -1, 11, 12]
