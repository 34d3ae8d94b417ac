"""When a cure of vLLM's own defects takes hold, and what it leaves alone."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from engine_patches.forward.cpu_scan import kernel_in_runs
from engine_patches.upstream_fixes import (
    keep_enlarged_block_size,
    states_at_chunk_ends,
)

PLATFORM_DEFAULT = 128


@pytest.mark.parametrize(
    ("before", "mode", "after"),
    [
        (384, "align", 384),
        (None, "align", PLATFORM_DEFAULT),  # nobody has chosen one yet
        (64, "align", PLATFORM_DEFAULT),
        (384, "none", PLATFORM_DEFAULT),
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


def test_a_scan_whose_kernel_is_not_cut_returns_no_states():
    def _mamba_chunk_scan_combined_fwd_cpu(x, **options):
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="no longer calls its kernel"):
        states_at_chunk_ends(_mamba_chunk_scan_combined_fwd_cpu)(
            torch.zeros(3),
            return_intermediate_states=True,
            cu_chunk_seqlens=torch.tensor([0, 2, 3]),
            seq_idx=torch.tensor([0, 0]),
        )
