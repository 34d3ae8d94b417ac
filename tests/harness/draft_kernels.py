"""What vLLM lacks to run a hybrid with drafts on a CPU, in torch: for test engines only.

Mamba2's two kernels for CPUs ignore the counts of accepted drafts, without a word, and the copies of states between
blocks that align mode makes with drafts are Triton kernels. Here are all three as vLLM's Triton kernels define them.
`install` takes the names of those to put in place; gated delta nets have a float32 path of their own
(`float32_delta.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

CONVOLUTION, STATE_UPDATE, COPIES = "convolution", "state update", "copies"

ALL = (CONVOLUTION, STATE_UPDATE, COPIES)


def register() -> None:
    """The plugin."""
    install()


def install(parts: Collection[str] = ALL) -> None:
    """Put these parts in place, in this process, before an engine is made."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import CPUSSUBackend
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    if CONVOLUTION in parts:
        mamba_mixer2.causal_conv1d_update = _beside(mamba_mixer2.causal_conv1d_update, convolve)
    if STATE_UPDATE in parts:
        plain = CPUSSUBackend.__call__
        CPUSSUBackend.__call__ = lambda self, *args, **options: (
            plain(self, *args, **options) if options.get("num_accepted_tokens") is None else update(*args, **options)
        )
    if COPIES in parts:
        for name in ("initialize_from_forward_context", "run_fused_precopy", "run_fused_postprocess"):
            setattr(MambaSpecDecodeGPUContext, name, getattr(Copies, name))


def _beside(plain: Any, with_drafts: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        chosen = plain if options.get("num_accepted_tokens") is None else with_drafts
        return chosen(*args, **options)

    return run


def convolve(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Mamba2's convolution of rows of several tokens; `x`: (tokens, channels).

    `conv_state`: (blocks, channels, width - 1 + drafts), a row's inputs before its tokens, from the offset of its last
    accepted one on; then the window is moved on by one token, and the row's own inputs put behind.
    """
    width = weight.shape[1]
    out = torch.empty_like(x)
    blocks = conv_state_indices[:, 0] if conv_state_indices.dim() == 2 else conv_state_indices
    for block, accepted, rows in zip(
        blocks.tolist(), num_accepted_tokens.tolist(), _rows(query_start_loc), strict=False
    ):
        window = conv_state[block, :, accepted - 1 : accepted + width - 2]
        inputs = torch.cat([window, x[rows].T.to(window.dtype)], dim=-1)
        done = conv1d(inputs[None], weight[:, None].to(inputs.dtype), bias, groups=len(inputs))[0]
        out[rows] = (silu(done) if activation else done).T.to(out.dtype)
        conv_state[block, :, : inputs.shape[1] - 1] = inputs[:, 1:]
    return out


def update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    out: Tensor,
    state_batch_indices: Tensor,
    num_accepted_tokens: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> None:
    """Mamba2's recurrence over rows of several tokens; `x`, `out`: (tokens, heads, head size).

    A row goes on from its block of the last accepted token, and leaves the state after its token i in its block i.
    """
    decay, skip, bias = A[:, 0, 0].float(), D[:, 0].float(), dt_bias[:, 0].float()
    repeated = x.shape[1] // B.shape[1]
    for blocks, accepted, rows in zip(
        state_batch_indices.tolist(), num_accepted_tokens.tolist(), _rows(cu_seqlens), strict=False
    ):
        running = state[blocks[accepted - 1]].float()
        for number, token in enumerate(range(rows.start, rows.stop)):
            step = softplus(dt[token, :, 0].float() + bias)
            into, out_of = (each[token].float().repeat_interleave(repeated, 0) for each in (B, C))
            value = x[token].float()
            running = running * torch.exp(decay * step)[:, None, None]
            running = running + (step[:, None] * value)[:, :, None] * into[:, None, :]
            out[token] = ((running * out_of[:, None, :]).sum(-1) + skip[:, None] * value).to(out.dtype)
            state[blocks[number]] = running.to(state.dtype)


def _rows(starts: Tensor) -> list[slice]:
    bounds = starts.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


class Copies:
    """Methods of `MambaSpecDecodeGPUContext`: states that move between blocks, and the window of the convolution.

    Columns are of a request's block table. A state in use lies `bias` columns behind its column; of a convolution it
    is its own column's window, `bias` tokens on.
    """

    # Set by vLLM's class.
    is_initialized: bool
    block_size: int
    mamba_group_ids: list[int]
    num_accepted_tokens_out: Tensor

    def initialize_from_forward_context(
        self: Any, kv_cache_config: Any, forward_context: Any, copy_funcs: Any, block_tables: Any, *_: Any
    ) -> None:
        """Remember the states of all layers: cache group, tensor, whether it is a convolution's."""
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec
        from vllm.v1.worker.mamba_utils import _get_mamba_spec_for_layer

        if self.is_initialized:
            return
        self.is_initialized = True
        # The table is a view of as many rows as there are requests now; all of its rows lie behind it.
        self.tables = block_tables
        self.states = []
        for number, group in enumerate(self.mamba_group_ids):
            cache_group = kv_cache_config.kv_cache_groups[group]
            for layer in cache_group.layer_names:
                kind = _get_mamba_spec_for_layer(cache_group, layer).mamba_type
                for state, copy_func in zip(forward_context[layer].kv_cache, copy_funcs[kind], strict=False):
                    self.states.append((number, state, copy_func is get_conv_copy_spec))

    def run_fused_precopy(
        self: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, idx_mapping: Any
    ) -> None:
        """Before a pass: the running state moves where the pass's column changes."""
        for number in range(num_reqs if self.is_initialized else 0):
            row = number if idx_mapping is None else int(idx_mapping[number])
            source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
            if source >= 0 and source != target:
                _copy(self, row, source, target, int(token_bias_gpu[row]))

    def run_fused_postprocess(
        self: Any, num_reqs: int, num_accepted_tokens_gpu: Any, mamba_state_idx_gpu: Any, **of_step: Any
    ) -> None:
        """After sampling: where accepted tokens reached a block's edge, the edge's state goes to the edge's column."""
        if not self.is_initialized:
            return
        self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
        for row in range(num_reqs):
            accepted, source = int(num_accepted_tokens_gpu[row]), int(mamba_state_idx_gpu[row])
            computed, scheduled, drafts = (
                int(of_step[f"num_{name}_tokens_gpu"][row]) for name in ("computed", "scheduled", "draft")
            )
            before = computed + scheduled - drafts
            edge = (before + accepted - 1) // self.block_size * self.block_size
            if edge < before:
                continue
            target = edge // self.block_size - 1
            if source == target:
                self.num_accepted_tokens_out[row] = 1
            if source != target or edge > before:
                _copy(self, row, source, target, edge - before)


def _copy(context: Any, row: int, source: int, target: int, bias: int) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    for group, state, convolves in context.states:
        table = context.tables[group]
        blocks = table.as_strided((row + 1, table.shape[1]), table.stride())[row]
        into = state[blocks[target]]
        if not convolves:
            into.copy_(state[blocks[source + bias]].clone())
            continue
        along = -1 if is_conv_state_dim_first() else 0
        left = into.shape[along] - bias
        into.narrow(along, 0, left).copy_(state[blocks[source]].narrow(along, bias, left).clone())
