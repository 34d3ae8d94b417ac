"""Gated delta nets in float32 on a CPU, for test engines: a vLLM plugin.

vLLM's CPU kernels compute them in bfloat16 alone, where an answer depends on what else is in its batch, and exactness
cannot be told from rounding. In their place the plugin puts the formulas that transformers checks its own kernels
against. Scheduler, cache, metadata, pieces and copies stay what they are.
"""

import itertools
from typing import Any
from unittest import mock

import torch
import vllm._custom_ops as ops
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType


def register() -> None:
    """The plugin."""
    ops.fused_gdn_gating_cpu = _gates
    ops.chunk_gated_delta_rule_cpu = _prefill
    ops.fused_sigmoid_gating_delta_rule_update_cpu = _decode
    ops.fused_sigmoid_gating_delta_rule_update_spec_cpu = _verify
    gdn_attention.cpu_gdn_attention_core = _core


def _core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """vLLM's function of this place, without its demand for bfloat16."""
    context = get_forward_context()
    if context.attn_metadata is None:
        return
    layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    metadata = context.attn_metadata[layer.prefix]
    if not metadata.num_actual_tokens:
        return
    width = layer.conv1d.weight.size(-1)
    length = layer.kv_cache[0].size(-1 if gdn_attention.is_conv_state_dim_first() else -2)
    inputs = (layer, metadata, mixed_qkv, b, a, core_attn_out)
    # vLLM's own way to the convolution that knows float32
    with (
        mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=False),
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False),
    ):
        if length > width - 1:  # room for drafts
            gdn_attention._cpu_gdn_attention_spec_aware(*inputs, width, length)
        else:
            gdn_attention._cpu_gdn_attention_nonspec(*inputs)


def _gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Log decay and write strength, (1, tokens, heads)."""
    return (-A_log.float().exp() * softplus(a.float() + dt_bias.float()))[None], b.float().sigmoid()[None]


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **more: Any
) -> tuple[Tensor, None]:
    """Sequence by sequence; states (slots, heads, key, value) are updated where they are."""
    query, key = (_for_each_value_head(tensor, value) for tensor in (query, key))
    outputs = []
    for slot, (start, end) in zip(
        more["initial_state_indices"], itertools.pairwise(more["cu_seqlens"].tolist()), strict=True
    ):
        rows = slice(start, end)
        output, state = torch_chunk_gated_delta_rule(
            *(tensor[:, rows] for tensor in (query, key, value)),
            g=g[:, rows],
            beta=beta[:, rows],
            initial_state=initial_state[slot][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        initial_state[slot] = state[0]
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _decode(q: Tensor, k: Tensor, v: Tensor, initial_state_source: Tensor, **more: Any) -> Tensor:
    """One token for each sequence; returns (sequences, 1, heads, value)."""
    g, beta = _gates(**more)
    slots = more["initial_state_indices"].long()
    q, k = (_for_each_value_head(tensor, v) for tensor in (q, k))
    output, states = torch_recurrent_gated_delta_rule(
        *(tensor.transpose(0, 1) for tensor in (q, k, v)),
        g=g.transpose(0, 1),
        beta=beta.transpose(0, 1),
        initial_state=initial_state_source[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    initial_state_source[slots] = states
    return output


def _verify(q: Tensor, k: Tensor, v: Tensor, initial_state_source: Tensor, **more: Any) -> Tensor:
    """Rows of a token and its drafts, (tokens, heads, value); the state after a row's token i goes to its slot i."""
    g, beta = _gates(**more)
    q, k = (tensor.repeat_interleave(v.shape[1] // tensor.shape[1], dim=1) for tensor in (q, k))
    output = torch.empty_like(v)
    slots_of_rows, accepted_of_rows, bounds = (
        more[name].tolist() for name in ("spec_state_indices", "num_accepted_tokens", "cu_seqlens")
    )
    rows = zip(slots_of_rows, accepted_of_rows, itertools.pairwise(bounds), strict=False)
    for slots, accepted, (start, end) in rows:
        state = initial_state_source[slots[accepted - 1]][None].clone()
        for number, token in enumerate(range(start, end)):
            one = slice(token, token + 1)
            done, state = torch_recurrent_gated_delta_rule(
                *(tensor[one][None] for tensor in (q, k, v)),
                g=g[:, one],
                beta=beta[:, one],
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            output[token] = done[0, 0]
            initial_state_source[slots[number]] = state[0]
    return output


def _for_each_value_head(tensor: Tensor, value: Tensor) -> Tensor:
    return tensor.repeat_interleave(value.shape[2] // tensor.shape[2], dim=2)
