"""The recurrent layers whose states can be written inside a pass, and how each is run in pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from engine_patches.forward.segments import PIECES, Segment

logger = logging.getLogger("vllm.seamark")

EXPORTS = "seamark_exports"  # on a layer's cache spec: its states can be written inside a pass


def promise_exports(original: Callable) -> Callable:
    """Replacement of `get_kv_cache_spec`, of a layer that has its own and of the base class of all recurrent layers.

    The spec travels from the worker to the scheduler, so the promise is made where it is kept.
    """

    def get_kv_cache_spec(self, vllm_config):
        spec = original(self, vllm_config)
        if spec is not None and _runs_in_pieces(self, vllm_config):
            object.__setattr__(spec, EXPORTS, True)  # frozen; the mark is no part of its identity
        return spec

    return get_kv_cache_spec


def hold_all_to_the_promise(original: Callable) -> Callable:
    """Replacement of `Executor.get_kv_cache_specs`, one mapping of layers to specs for each worker.

    vLLM goes on with the first worker's spec of a layer. A state is only right if every worker writes its part, so one
    that promises nothing (not patched, or failed closed) takes the promise from all.
    """

    def get_kv_cache_specs(self):
        of_workers = original(self)
        recurrent = [spec for specs in of_workers for spec in specs.values() if isinstance(spec, MambaSpec)]
        promised = [spec for spec in recurrent if getattr(spec, EXPORTS, False)]
        if promised and len(promised) < len(recurrent):
            logger.error("seamark: some layers or workers cannot write states inside a pass: none is asked to")
            for spec in promised:
                object.__setattr__(spec, EXPORTS, False)
        return of_workers

    return get_kv_cache_specs


def _runs_in_pieces(layer: Any, vllm_config: Any) -> bool:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms import current_platform

    # Speculative decoding keeps several states per request, ReplaySSM keeps part of a state as inputs to replay,
    # micro-batches are built from a part of the step's rows.
    if vllm_config.num_speculative_tokens or getattr(vllm_config.cache_config, "use_replayssm", False):
        return False
    if vllm_config.parallel_config.use_ubatching:
        return False
    if current_platform.is_cpu():  # where model runner V2, with a Triton for CPUs, is not patched
        known = not getattr(vllm_config, "use_v2_model_runner", False)
    else:
        known = current_platform.is_cuda() or isinstance(layer, MambaMixer2)  # ROCm has a GDN core of its own
    return known and isinstance(layer, (MambaMixer2, QwenGatedDeltaNetAttention))


def mamba2_in_pieces(original: Callable) -> Callable:
    """Replacement of `MambaMixer2.conv_ssm_forward(projected_states, output)`, which fills `output` by token."""

    def conv_ssm_forward(self, projected_states, output):
        if not _ran_in_pieces(self, original, (projected_states,), output):
            original(self, projected_states, output)

    return conv_ssm_forward


def gdn_in_pieces(original: Callable) -> Callable:
    """Replacement of `QwenGatedDeltaNetAttention._forward_core(mixed_qkv, b, a, core_attn_out)`."""

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        if not _ran_in_pieces(self, original, (mixed_qkv, b, a), core_attn_out):
            original(self, mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)

    return _forward_core


def cpu_gdn_in_pieces(original: Callable) -> Callable:
    """Replacement of the CPU's core of a GDN layer, which is given the layer's metadata."""

    def _cpu_gdn_attention_nonspec(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out):
        pieces = getattr(attn_metadata_i, PIECES, None)
        if pieces is None:
            original(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
            return
        for piece in pieces:
            _run(piece, partial(original, layer, piece.metadata), (mixed_qkv, b, a), core_attn_out)
            piece.keep_states(layer.kv_cache)

    return _cpu_gdn_attention_nonspec


def _ran_in_pieces(layer: Any, core: Callable, inputs: tuple[Any, ...], output: Any) -> bool:
    """Run the core of a layer, `core(layer, *inputs, output)`, piece by piece where the step asks for it.

    The metadata of one piece after the other is put where the layer looks for its own.
    """
    from vllm.forward_context import get_forward_context

    of_layers = get_forward_context().attn_metadata
    metadata = of_layers.get(layer.prefix) if isinstance(of_layers, dict) else None
    pieces = getattr(metadata, PIECES, None)
    if pieces is None:
        return False
    try:
        for piece in pieces:
            of_layers[layer.prefix] = piece.metadata
            _run(piece, partial(core, layer), inputs, output)
            piece.keep_states(layer.kv_cache)
    finally:
        of_layers[layer.prefix] = metadata
    return True


def _run(piece: Segment, core: Callable, inputs: tuple[Any, ...], output: Any) -> None:
    """Run `core(*inputs, output)` on the rows that belong to the piece, and fill the same rows of `output`."""
    if isinstance(piece.tokens, slice):
        core(*(tensor[piece.tokens] for tensor in inputs), output[piece.tokens])
        return
    part = output.index_select(0, piece.tokens)
    core(*(tensor.index_select(0, piece.tokens) for tensor in inputs), part)
    output.index_copy_(0, piece.tokens, part)
