"""The recurrent layers whose states can be written inside a pass, and how the core of each runs when they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from engine_patches import families, ledger, speculation
from engine_patches.families import INSIDE, RecurrentLayer, StateKind
from engine_patches.footprint import SCAN_STATES, SEGMENTS
from engine_patches.forward.conv_states import keep_ngram_states, plan_conv_states, plan_ngram_states, run_convolution
from engine_patches.forward.scan_states import plan_scan_states, run_layer
from engine_patches.forward.segments import Segment, plan_segments, take_states_over
from engine_patches.forward.step_writes import writes_nothing, wrote_states
from engine_patches.ledger import LAYERS, Function, Platform, Shape, inside, ours, replacement
from engine_patches.settings import logger

BREAKABLE = "vllm.compilation.breakable_cudagraph"

# Of the tensors that the core of a Kimi delta attention takes: those by token behind a dimension of one.
_BEHIND_ONE = ("g1", "beta", "core_attn_out")


class PromisedShapes(tuple[tuple[int, ...], ...]):
    """`shapes` of a layer's cache spec, equal to vLLM's own, with a mark: its states can be written inside a pass.

    The spec travels from the worker to the scheduler, and vLLM copies it on the way (`dataclasses.replace`), by fields.
    """

    __slots__ = ()


def promise(spec: Any) -> None:
    object.__setattr__(spec, "shapes", PromisedShapes(spec.shapes))  # frozen


def is_promised(spec: Any) -> bool:
    return isinstance(spec.shapes, PromisedShapes)


@ours(
    "promise-of-all",
    "vllm.v1.executor.abstract:Executor.get_kv_cache_specs",
    why="a worker that cannot write states inside a pass must keep all others from being asked to",
)
def require_promise_of_all(self: Any, *, original: Function) -> Any:
    """Replacement of `Executor.get_kv_cache_specs`, which returns one mapping of layers to specs for each worker.

    A state is only right if every worker writes its part, so one that promises nothing takes the promise from all.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    of_workers = original(self)
    recurrent = [spec for specs in of_workers for spec in specs.values() if isinstance(spec, MambaSpec)]
    promised = [spec for spec in recurrent if is_promised(spec)]
    if promised and len(promised) < len(recurrent):
        logger.error("seamark: some layers or workers cannot write states inside a pass: none is asked to")
        for spec in promised:
            object.__setattr__(spec, "shapes", tuple(spec.shapes))
    return of_workers


def _planning(builder: type) -> Callable[[Function], Function] | None:
    """What makes the `build` of a class of builders plan states; None if it is not known."""
    for of_class in builder.__mro__:
        if (path := f"{of_class.__module__}:{of_class.__name__}") in BUILDERS:
            return BUILDERS[path]
        if "build" in vars(of_class):
            return None
    return None


def _writes_in_forward(layer: Any, vllm_config: Any) -> bool:
    """Whether what runs a layer, and what makes its metadata, are known."""
    known = _known(layer)
    if known is None or not _is_configured(known, vllm_config):
        return False
    # A class that derives from it may have a core or metadata of its own. Asking for the backend imports the latter's
    # module, the last one that is looked at.
    builder = layer.get_attn_backend().get_builder_cls()
    of_class = _class_at(known.path)
    cores_are_known = all(
        getattr(type(layer), core, None) is vars(of_class)[core] and _is_vllms(of_class, core) for core in known.cores
    )
    return cores_are_known and _planning(builder) is not None and _is_vllms(builder, "build")


def _is_vllms(of_class: type, name: str) -> bool:
    """Whether a class has a function of vLLM's own: another plugin may have replaced it since its shape was checked."""
    owner = next(each for each in of_class.__mro__ if name in vars(each))
    return bool(vars(owner)[name].__module__ == owner.__module__)


def _known(layer: Any) -> RecurrentLayer | None:
    """What a layer is one of; a class that nobody has imported has no layers."""
    return next((each for each in INSIDE if isinstance(layer, _class_at(each.path))), None)


def _class_at(path: str) -> Any:
    """The class at "module:Class"; an empty tuple if nobody has imported it."""
    module, _, name = path.partition(":")
    return getattr(sys.modules.get(module), name, ())


def runs_whole_steps(vllm_config: Any) -> bool:
    """Whether layers run over all rows of a step (no micro-batches), and keep states whole (ReplaySSM keeps inputs)."""
    replays = getattr(vllm_config.cache_config, "use_replayssm", False)
    return not (replays or vllm_config.parallel_config.use_ubatching)


def _is_configured(known: RecurrentLayer, vllm_config: Any) -> bool:
    from vllm.platforms import current_platform

    if speculation.unsupported(vllm_config) is not None or not runs_whole_steps(vllm_config):
        return False
    if speculation.drafting(vllm_config) and not known.drafts:
        return False
    if current_platform.is_cpu():  # model runner V2, with a Triton for CPUs, is not patched there
        return not getattr(vllm_config, "use_v2_model_runner", False)
    return bool(current_platform.is_cuda()) or known.on_rocm


@replacement
def mamba2_with_states(self: Any, projected_states: Any, output: Any, *, original: Function) -> None:
    """Replacement of `MambaMixer2.conv_ssm_forward(projected_states, output)`, which fills `output` by token."""
    metadata = _metadata_of(self)
    states = getattr(metadata, SCAN_STATES, None)
    if states is not None:
        run_layer(self, partial(original, self, projected_states, output), states, metadata, projected_states)
        wrote_states(self.prefix)
    elif not _ran_in_segments(self, original, (projected_states,), output):
        original(self, projected_states, output)


@replacement
def gdn_in_segments(self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, *, original: Function) -> None:
    """Replacement of `_forward_core(mixed_qkv, b, a, core_attn_out)` of Qwen's and OLMo's gated delta nets."""
    if not _ran_in_segments(self, original, (mixed_qkv, b, a), core_attn_out):
        original(self, mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)


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


@replacement
def convolution_with_states(self: Any, hidden_states: Any, output: Any, *, original: Function) -> Any:
    """Replacement of what runs a short convolution, `forward_cuda` or `forward_native`, which fills `output`."""
    states = getattr(_metadata_of(self), SCAN_STATES, None)
    if states is not None:
        run_convolution(partial(original, self, hidden_states, output), states)
        wrote_states(self.prefix)
        return None
    if _ran_in_segments(self, original, (hidden_states,), output):
        return None
    return original(self, hidden_states, output)


@inside(
    "gdn-core-cpu",
    f"{LAYERS}.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
    why="the recurrent core runs segment by segment and keeps the states between",
    parameters="layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out",
    mentions=("state_indices_tensor = attn_metadata_i.non_spec_state_indices_tensor", "layer.kv_cache[1]"),
    on=Platform.CPU,
)
@inside(
    "gdn-core-cpu-drafts",
    f"{LAYERS}.ops.cpu.gdn_attention:_cpu_gdn_attention_spec_aware",
    why="the same where drafts are configured",
    parameters="layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out, width, state_len",
    mentions=("spec_sequence_masks = attn_metadata_i.spec_sequence_masks", "conv_buf = _conv_buffer_view(layer)"),
    on=Platform.CPU,
)
def cpu_gdn_in_segments(layer: Any, metadata: Any, *inputs: Any, original: Function) -> None:
    segments = getattr(metadata, SEGMENTS, None)
    if segments is None:
        original(layer, metadata, *inputs)
        return
    # `window`: width and length of the convolution's state, of the core for engines that draft.
    mixed_qkv, b, a, core_attn_out, *window = inputs

    def core(of_segment: Any, *tensors: Any) -> None:
        original(layer, of_segment, *tensors, *window)

    for segment in segments:
        _run(segment, partial(core, segment.metadata), (mixed_qkv, b, a), core_attn_out)
        segment.keep_states(layer.kv_cache)
    wrote_states(layer.prefix)


def _metadata_of(layer: Any) -> Any:
    """A layer's metadata; None if the step has no states to write, so that it need not be looked for."""
    if writes_nothing():
        return None
    from vllm.forward_context import get_forward_context

    by_layer = get_forward_context().attn_metadata
    return by_layer.get(layer.prefix) if isinstance(by_layer, dict) else None


def _ran_in_segments(layer: Any, core: Function, inputs: tuple[Any, ...], output: Any) -> bool:
    """Run `core(layer, *inputs, output)` by segments, if the step asks for it, whose metadata the layer looks up."""
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


class Core(NamedTuple):
    """How the core of a kind of layers is replaced, and what it must look like for that, as in `Shape`."""

    build: Callable[[Function], Function]
    parameters: str | None
    mentions: tuple[str, ...]


CORES: Mapping[StateKind, Core] = {
    families.MAMBA2: Core(
        mamba2_with_states,
        "self, projected_states, output",
        (
            "attn_metadata = attn_metadata_raw.get(self.prefix)",
            "self.kv_cache[1]",
            "projected_states[..., self.tped_intermediate_size :]",
            "[self.tped_conv_size, self.tped_dt_size]",
            "[num_decode_tokens, num_prefill_tokens]",
            "= mamba_chunk_scan_combined_varlen(",
        ),
    ),
    families.GDN: Core(
        gdn_in_segments, "self, mixed_qkv, b, a, core_attn_out", (".get(self.prefix)", "= self.kv_cache")
    ),
    families.KDA: Core(
        kda_in_segments, None, (".get(self.prefix)", "core_attn_out[0, :num_actual_tokens]", "= self.kv_cache")
    ),
    families.NGRAM_CONV: Core(
        keep_ngram_states, "self, inputs, residual, outer_residual, metadata, conv_state, conv_weights", ()
    ),
    families.SHORT_CONV: Core(convolution_with_states, "self, hidden_states, output", (".get(self.prefix)",)),
}

CORE_SHAPES = (
    *(
        Shape(f"{layer.path}.{core}", CORES[layer.kind].parameters, CORES[layer.kind].mentions, where=layer.path)
        for layer in INSIDE
        for core in layer.cores
    ),
    Shape(
        f"{families.QWEN_NGRAM.path}._short_conv",
        mentions=("conv_state = conv_state[..., -state_capacity:]", "inputs=inputs"),
        where=families.QWEN_NGRAM.path,
    ),
    Shape(f"{families.SHORT_CONVOLUTION.path}.forward_cuda", mentions=("= causal_conv1d_fn(",)),
    Shape(
        f"{families.SHORT_CONVOLUTION.path}.forward_native", mentions=("causal_conv1d_fn_cpu as causal_conv1d_torch",)
    ),
)

_BACKENDS = "vllm.v1.attention.backends"

BASE_BUILDER = f"{_BACKENDS}.mamba_attn:BaseMambaAttentionMetadataBuilder"
MAMBA2_BUILDER = f"{_BACKENDS}.mamba2_attn:Mamba2AttentionMetadataBuilder"
GDN_BUILDER = f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder"
K3_BUILDER = "vllm.models.kimi_k3.nvidia.kda_metadata:KimiK3KDAMetadataBuilder"
NGRAM_BUILDER = f"{_BACKENDS}.short_conv_attn:PleShortConvAttentionMetadataBuilder"
SHORT_CONV_BUILDER = f"{_BACKENDS}.short_conv_attn:ShortConvAttentionMetadataBuilder"  # its `build` is its base's

# What makes the `build` of a class plan states.
BUILDERS: Mapping[str, Callable[[Function], Function]] = {
    MAMBA2_BUILDER: plan_scan_states,
    GDN_BUILDER: plan_segments,
    K3_BUILDER: plan_segments,
    NGRAM_BUILDER: plan_ngram_states,
    SHORT_CONV_BUILDER: plan_conv_states,
}

_BUILD = ("common_prefix_len: int", "common_attn_metadata: CommonAttentionMetadata")
_TAKE_OVER = "self, metadata, blk_table, slot_mapping"

BUILDER_SHAPES = (
    *(
        Shape(f"{builder}.build", mentions=_BUILD, where=builder)
        for builder in (BASE_BUILDER, MAMBA2_BUILDER, GDN_BUILDER, K3_BUILDER, NGRAM_BUILDER)
    ),
    Shape(f"{BASE_BUILDER}.update_block_table", _TAKE_OVER),
    Shape(f"{GDN_BUILDER}.update_block_table", _TAKE_OVER),
    Shape(f"{MAMBA2_BUILDER}.update_block_table", _TAKE_OVER, where=f"{MAMBA2_BUILDER}.update_block_table"),
    Shape(
        f"{BASE_BUILDER}._compute_chunk_metadata",
        mentions=("if this_num_computed % chunk_size != 0:", "n_chunks = cdiv(this_new_tokens, chunk_size)"),
    ),
    Shape(
        f"{NGRAM_BUILDER}.build",
        mentions=("torch.cat((decode_req_idx_cpu, prefill_req_idx_cpu))",),
        where=NGRAM_BUILDER,
    ),
)


@inside(
    "promise",
    f"{LAYERS}.abstract:MambaBase.get_kv_cache_spec",
    why="a worker says that it writes states inside a pass, and does: the recurrent layers of its model get cores "
    "of ours",
    relies_on=CORE_SHAPES,
    also=tuple(f"{layer.path}.{core}" for layer in INSIDE for core in layer.cores),
)
def promise_writes_in_forward(self: Any, vllm_config: Any, *, original: Function) -> Any:
    """Replacement of `MambaBase.get_kv_cache_spec`: whoever promises replaces the layer's own core, and keeps it."""
    spec, known = original(self, vllm_config), _known(self)
    if spec is not None and known and _writes_in_forward(self, vllm_config) and ledger.rely_on_patches():
        for core in known.cores:
            if core not in vars(self):  # vLLM asks more than once
                setattr(self, core, MethodType(CORES[known.kind].build(getattr(type(self), core)), self))
        promise(spec)
    return spec


@inside(
    "builders",
    "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders",
    why="a recurrent layer has to know where in a step's tokens the states are that it hands out, and each cache "
    "group writes its states into blocks of its own",
    parameters="self, vllm_config, device, kernel_block_size, num_metadata_builders",
    mentions=("builder_cls = self.backend.get_builder_cls()", "self.metadata_builders = ["),
    relies_on=BUILDER_SHAPES,
    also=tuple(BUILDERS),
)
def plan_where_metadata_is_made(self: Any, *args: Any, original: Function, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for builder in self.metadata_builders:
        of_class = type(builder)
        plan = _planning(of_class)
        if plan is not None:
            builder.build = MethodType(plan(of_class.build), builder)
            builder.update_block_table = MethodType(take_states_over(of_class.update_block_table), builder)
