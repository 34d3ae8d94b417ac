"""The recurrent layers whose states can be written inside a pass, and how the core of each runs when they are."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

from engine_patches import ledger, speculation
from engine_patches.families import INSIDE, RecurrentLayer
from engine_patches.footprint import SCAN_STATES, SEGMENTS
from engine_patches.forward.conv_states import run_convolution
from engine_patches.forward.scan_states import run_layer
from engine_patches.forward.segments import Segment
from engine_patches.forward.step_writes import writes_nothing, wrote_states
from engine_patches.ledger import Function

logger = logging.getLogger("vllm.seamark")

BREAKABLE = "vllm.compilation.breakable_cudagraph"

# Of the tensors that the core of a Kimi delta attention takes: those by token behind a dimension of one.
_BEHIND_ONE = ("g1", "beta", "core_attn_out")


class PromisedShapes(tuple[tuple[int, ...], ...]):
    """`shapes` of a layer's cache spec, equal to vLLM's own, with a mark: its states can be written inside a pass.

    The spec travels from the worker to the scheduler, and vLLM copies it on the way (`dataclasses.replace`); what is
    not in a field would be lost.
    """

    __slots__ = ()


def promise(spec: Any) -> None:
    """Mark a `MambaSpec`."""
    object.__setattr__(spec, "shapes", PromisedShapes(spec.shapes))  # frozen


def is_promised(spec: Any) -> bool:
    """Whether the states of a layer with this spec can be written inside a pass."""
    return isinstance(spec.shapes, PromisedShapes)


def promise_writes_in_forward(original: Function) -> Function:
    """Replacement of `get_kv_cache_spec`, of a layer that has its own and of the base class of all recurrent layers.

    The promise is made by the process that keeps it.
    """

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if spec is not None and _writes_in_forward(self, vllm_config) and ledger.rely_on_patches():
            promise(spec)
        return spec

    return get_kv_cache_spec


def require_promise_of_all(original: Function) -> Function:
    """Replacement of `Executor.get_kv_cache_specs`, which returns one mapping of layers to specs for each worker.

    vLLM goes on with the first worker's spec of a layer. A state is only right if every worker writes its part, so a
    worker that promises nothing (not patched, or failed closed) takes the promise from all.
    """

    def get_kv_cache_specs(self: Any) -> Any:
        from vllm.v1.kv_cache_interface import MambaSpec

        of_workers = original(self)
        recurrent = [spec for specs in of_workers for spec in specs.values() if isinstance(spec, MambaSpec)]
        promised = [spec for spec in recurrent if is_promised(spec)]
        if promised and len(promised) < len(recurrent):
            logger.error("seamark: some layers or workers cannot write states inside a pass: none is asked to")
            for spec in promised:
                object.__setattr__(spec, "shapes", tuple(spec.shapes))
        return of_workers

    return get_kv_cache_specs


def _writes_in_forward(layer: Any, vllm_config: Any) -> bool:
    """Whether what runs a layer, and what makes its metadata, are known and replaced."""
    known = next((each for each in INSIDE if _is_a(each.path, layer)), None)
    if known is None or not _is_configured(known, vllm_config):
        return False
    # A class that derives from it may have a core or metadata of its own. Asking for the backend imports the latter's
    # module, the last one that is patched.
    builder = layer.get_attn_backend().get_builder_cls()
    return ledger.is_replaced(getattr(type(layer), known.core, None)) and ledger.is_replaced(builder.build)


def runs_whole_steps(vllm_config: Any) -> bool:
    """Whether layers run over all rows of a step, and keep states whole.

    Micro-batches are built from a part of the rows; ReplaySSM keeps part of a state as inputs to replay.
    """
    replays = getattr(vllm_config.cache_config, "use_replayssm", False)
    return not (replays or vllm_config.parallel_config.use_ubatching)


def _is_configured(known: RecurrentLayer, vllm_config: Any) -> bool:
    from vllm.platforms import current_platform

    if speculation.unsupported(vllm_config) is not None or not runs_whole_steps(vllm_config):
        return False
    if speculation.drafting(vllm_config) and not known.beside_drafts:
        return False
    if current_platform.is_cpu():  # model runner V2, with a Triton for CPUs, is not patched there
        return not getattr(vllm_config, "use_v2_model_runner", False)
    return bool(current_platform.is_cuda()) or known.on_rocm


def _is_a(path: str, layer: Any) -> bool:
    """Whether the layer is one of a "module:Class"; a class that nobody has imported has no layers."""
    module, _, name = path.partition(":")
    return module in sys.modules and isinstance(layer, getattr(sys.modules[module], name, ()))


def mamba2_with_states(original: Function) -> Function:
    """Replacement of `MambaMixer2.conv_ssm_forward(projected_states, output)`, which fills `output` by token."""

    def conv_ssm_forward(self: Any, projected_states: Any, output: Any) -> None:
        metadata = _metadata_of(self)
        states = getattr(metadata, SCAN_STATES, None)
        if states is not None:
            run_layer(self, partial(original, self, projected_states, output), states, metadata, projected_states)
            wrote_states(self.prefix)
        elif not _ran_in_segments(self, original, (projected_states,), output):
            original(self, projected_states, output)

    return conv_ssm_forward


def gdn_in_segments(original: Function) -> Function:
    """Replacement of `_forward_core(mixed_qkv, b, a, core_attn_out)` of Qwen's and OLMo's gated delta nets."""

    def _forward_core(self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        if not _ran_in_segments(self, original, (mixed_qkv, b, a), core_attn_out):
            original(self, mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)

    return _forward_core


def kda_in_segments(original: Function) -> Function:
    """Replacement of `_forward` of a Kimi delta attention, which is called by names and fills `core_attn_out`.

    Where it is decorated as a break in the capture of a graph, a replayed graph calls what is decorated. So that is
    replaced, and decorated again.
    """
    core = getattr(original, "__wrapped__", original)

    def _forward(self: Any, **tensors: Any) -> None:
        by_token = {name: tensor[0] if name in _BEHIND_ONE else tensor for name, tensor in tensors.items()}
        output = by_token.pop("core_attn_out")
        names = (*by_token, "core_attn_out")

        def run(layer: Any, *parts: Any) -> None:
            named = zip(names, parts, strict=True)
            core(layer, **{name: part.unsqueeze(0) if name in _BEHIND_ONE else part for name, part in named})

        if not _ran_in_segments(self, run, tuple(by_token.values()), output):
            core(self, **tensors)

    if core is original:
        return _forward
    decorated: Function = sys.modules[BREAKABLE].eager_break_during_capture(_forward)
    return decorated


def convolution_with_states(original: Function) -> Function:
    """Replacement of what runs a short convolution, `forward_cuda` or `forward_native`, which fills `output`."""

    def forward(self: Any, hidden_states: Any, output: Any) -> Any:
        states = getattr(_metadata_of(self), SCAN_STATES, None)
        if states is not None:
            run_convolution(partial(original, self, hidden_states, output), states)
            wrote_states(self.prefix)
            return None
        if _ran_in_segments(self, original, (hidden_states,), output):
            return None
        return original(self, hidden_states, output)

    return forward


def cpu_gdn_in_segments(original: Function) -> Function:
    """Replacement of the CPU's core of a GDN layer, which is given the layer's metadata."""

    def _cpu_gdn_attention_nonspec(
        layer: Any, attn_metadata_i: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any
    ) -> None:
        segments = getattr(attn_metadata_i, SEGMENTS, None)
        if segments is None:
            original(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)
            return
        for segment in segments:
            _run(segment, partial(original, layer, segment.metadata), (mixed_qkv, b, a), core_attn_out)
            segment.keep_states(layer.kv_cache)
        wrote_states(layer.prefix)

    return _cpu_gdn_attention_nonspec


def cpu_gdn_beside_drafts_in_segments(original: Function) -> Function:
    """Replacement of the same where drafts are configured: its convolution keeps a window of `state_len` tokens."""

    def _cpu_gdn_attention_spec_aware(
        layer: Any, attn_metadata_i: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, width: Any, state_len: Any
    ) -> None:
        segments = getattr(attn_metadata_i, SEGMENTS, None)
        if segments is None:
            original(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out, width, state_len)
            return
        for segment in segments:
            core = partial(original, layer, segment.metadata, width=width, state_len=state_len)
            _run(segment, core, (mixed_qkv, b, a), core_attn_out)
            segment.keep_states(layer.kv_cache)
        wrote_states(layer.prefix)

    return _cpu_gdn_attention_spec_aware


def _metadata_of(layer: Any) -> Any:
    """A layer's metadata; None if the step has no states to write, so that it need not be looked for."""
    if writes_nothing():
        return None
    from vllm.forward_context import get_forward_context

    by_layer = get_forward_context().attn_metadata
    return by_layer.get(layer.prefix) if isinstance(by_layer, dict) else None


def _ran_in_segments(layer: Any, core: Function, inputs: tuple[Any, ...], output: Any) -> bool:
    """Run the core of a layer, `core(layer, *inputs, output)`, segment by segment if the step asks for it.

    The layer looks up its metadata by its name, so the metadata of one segment after the other is put there.
    """
    metadata = _metadata_of(layer)
    segments = getattr(metadata, SEGMENTS, None)
    if segments is None:
        return False
    from vllm.forward_context import get_forward_context

    by_layer = get_forward_context().attn_metadata
    try:
        for segment in segments:
            by_layer[layer.prefix] = segment.metadata
            _run(segment, partial(core, layer), inputs, output)
            segment.keep_states(layer.kv_cache)
    finally:
        by_layer[layer.prefix] = metadata
    wrote_states(layer.prefix)
    return True


def _run(segment: Segment, core: Function, inputs: tuple[Any, ...], output: Any) -> None:
    """Run `core(*inputs, output)` on the segment's tokens, and fill the same rows of `output`."""
    tokens = segment.tokens
    if isinstance(tokens, slice):
        core(*(tensor[tokens] for tensor in inputs), output[tokens])
        return
    part = output.index_select(0, tokens)
    core(*(tensor.index_select(0, tokens) for tensor in inputs), part)
    output.index_copy_(0, tokens, part)
