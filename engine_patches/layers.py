"""The recurrent layers whose states can be written inside a pass, and how each is run in pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from engine_patches.pieces import PIECES, Piece

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
        metadata, of_layers = _metadata_of(self.prefix)
        if metadata is None or not hasattr(metadata, PIECES):
            return original(self, projected_states, output)
        with _Swap(of_layers, self.prefix, metadata) as swap:
            for piece in swap.pieces():
                _run(piece, lambda inputs, out: original(self, *inputs, out), (projected_states,), output)
                piece.keep_states(self.kv_cache)
        return None

    return conv_ssm_forward


def gdn_in_pieces(original: Callable) -> Callable:
    """Replacement of `QwenGatedDeltaNetAttention._forward_core(mixed_qkv, b, a, core_attn_out)`."""

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        metadata, of_layers = _metadata_of(self.prefix)
        if metadata is None or not hasattr(metadata, PIECES):
            return original(self, mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
        with _Swap(of_layers, self.prefix, metadata) as swap:
            for piece in swap.pieces():
                _run(piece, lambda inputs, out: original(self, *inputs, out), (mixed_qkv, b, a), core_attn_out)
                piece.keep_states(self.kv_cache)
        return None

    return _forward_core


def cpu_gdn_in_pieces(original: Callable) -> Callable:
    """Replacement of the CPU's core of a GDN layer, which is given the layer's metadata."""

    def _cpu_gdn_attention_nonspec(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out):
        pieces = getattr(attn_metadata_i, PIECES, None)
        if pieces is None:
            return original(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
        for piece in pieces:

            def core(inputs: Any, out: Any, piece: Piece = piece) -> None:
                original(layer, piece.metadata, *inputs, out)

            _run(piece, core, (mixed_qkv, b, a), core_attn_out)
            piece.keep_states(layer.kv_cache)
        return None

    return _cpu_gdn_attention_nonspec


def _metadata_of(prefix: str) -> tuple[Any, Any]:
    from vllm.forward_context import get_forward_context

    of_layers = get_forward_context().attn_metadata
    return (of_layers.get(prefix), of_layers) if isinstance(of_layers, dict) else (None, None)


class _Swap:
    """Puts the metadata of one piece after the other where the layer looks for its own."""

    def __init__(self, of_layers: dict[str, Any], prefix: str, metadata: Any) -> None:
        self._of_layers, self._prefix, self._metadata = of_layers, prefix, metadata

    def __enter__(self) -> _Swap:
        return self

    def __exit__(self, *exception: object) -> None:
        self._of_layers[self._prefix] = self._metadata

    def pieces(self):
        for piece in getattr(self._metadata, PIECES):
            self._of_layers[self._prefix] = piece.metadata
            yield piece


def _run(piece: Piece, core: Callable, inputs: tuple[Any, ...], output: Any) -> None:
    """Run `core` on the rows of `inputs` that belong to the piece, and fill the same rows of `output`."""
    if isinstance(piece.tokens, slice):
        core(tuple(tensor[piece.tokens] for tensor in inputs), output[piece.tokens])
        return
    part = output.index_select(0, piece.tokens)
    core(tuple(tensor.index_select(0, piece.tokens) for tensor in inputs), part)
    output.index_copy_(0, piece.tokens, part)
