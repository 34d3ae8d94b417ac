"""`seamark worker --explain`: what recurrent states cost in the memory of one model, before anything is started.

Every number comes from vLLM itself: its configuration of the model, its state shapes, its page alignment and its cache
groups. No weight is read and no kernel runs, so it works on a machine without a GPU. Only the layers are stand-ins, as
many and as large as the configuration says.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from engine_patches import families, kv_connectors, plugin, settings, speculation
from engine_patches.commands.model_layers import (
    ATTENTION,
    NO_DRAFTS_ON_A_CPU,
    NOT_INSPECTED,
    RECURRENT,
    CannotExplain,
    layer_kinds,
    recurrent_layers,
    stand_ins,
    why_not_imported,
)
from engine_patches.families import RecurrentLayer, Shown
from engine_patches.forward.layers import runs_whole_steps
from engine_patches.kv_connectors import WITHOUT, ConnectorLane, Decision
from engine_patches.scheduler import draft_windows, refusals
from engine_patches.scheduler.refusals import Refusal

HERE, GPU = "here", "gpu"  # whose attention kernels decide the length of a block

MIB, GIB = 1 << 20, 1 << 30

EXAMPLE = 10 * GIB  # of cache, where nothing says how much there will be

LENGTHS = (8_192, 32_768, 131_072)  # of conversations, in tokens

FEW = 16  # states: fewer than so many shared prefixes and running conversations are soon found again by nobody

SHOWN = {
    Shown.ENGINE: "shown on an engine",
    Shown.INTERPRETER: "shown in the interpreter of a GPU's kernels",
    Shown.READ: "read, and nothing ran",
}

ROUNDED = (families.MAMBA2, families.GDN)  # kinds whose states vLLM can keep in other types than it computes


@dataclass(frozen=True)
class StateCost:
    """What vLLM makes of one model, for each GPU (tensor-parallel rank). Bytes and tokens."""

    model: str
    architecture: str
    layers: Mapping[RecurrentLayer, int]  # how many of each, those first that matches follow from
    attention_layers: int
    state_types: tuple[str, ...]  # of the tensors that make up a state of the first
    kv_type: str
    state_bytes: int  # of one state, all layers, as the layers read it
    state_blocks: int  # blocks of the cache that it takes: one for each recurrent cache group
    block_bytes: int  # of one block, all layers of a cache group
    block_tokens: int
    attention_groups: int
    match_unit: int
    inside: bool = True  # whether its states are written inside a pass, as far as the layers decide that
    notes: tuple[str, ...] = ()  # what these numbers leave out
    max_model_len: int = 0
    request_blocks: int = 0  # that vLLM wants for a request of that length before it starts; 0: not asked
    caching_blocks: int = 0  # of these, what a request without prefix caching would not take
    fits_itself: bool = False  # whether vLLM takes the largest `max_model_len` that it has room for
    max_num_seqs: int = 0  # if vLLM starts only with a block for each of them
    blocks: int | None = None  # by --num-gpu-blocks-override

    @property
    def displaced_tokens(self) -> int:
        """Tokens of KV for which the blocks of one state would have room."""
        return self.state_blocks * self.block_tokens // self.attention_groups

    def states_in(self, memory: int, share: float = 1.0) -> int:
        """States that fit into a cache of `memory` bytes, if they may hold `share` of its blocks."""
        return int(share * (memory // self.block_bytes)) // self.state_blocks

    def longest(self, blocks: int) -> int:
        """The largest `max_model_len` with which vLLM starts on a pool of so many blocks; 0 if there is none."""
        rows = -(-self.max_model_len // self.block_tokens) * self.attention_groups
        left = blocks - 1 - (self.request_blocks - rows)  # one block is never handed out
        return max(0, min(self.max_model_len, left // self.attention_groups * self.block_tokens))

    def of_its_own_length(self, blocks: int) -> StateCost:
        """With the context that vLLM takes on a pool of so many blocks, where that is left to it."""
        if not (self.fits_itself and (fits := self.longest(blocks))):
            return self
        rows, fewer = (-(-tokens // self.block_tokens) for tokens in (self.max_model_len, fits))
        less = (rows - fewer) * self.attention_groups
        return replace(self, max_model_len=fits, request_blocks=self.request_blocks - less)

    def warm(self, blocks: int, share: float, tokens: int) -> int:
        """Conversations of so many tokens that a pool holds, each with the state at its end."""
        each = -(-tokens // self.block_tokens) * self.attention_groups + self.state_blocks
        return min((blocks - 1) // each, int(share * blocks) // self.state_blocks)


def configure(arguments: Sequence[str]) -> Any:
    """The `VllmConfig` that `vllm serve` makes of its arguments. Starts nothing.

    Raises `CannotExplain` if vLLM refuses the model or a flag.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="seamark worker --explain")
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    given = parser.parse_args(["serve", *arguments])
    given.model = given.model_tag or given.model  # `serve` takes it as the first argument
    try:
        return AsyncEngineArgs.from_cli_args(given).create_engine_config()
    except Exception as error:  # of any kind: by vLLM, transformers or pydantic
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # pydantic counts its errors first, and describes what it was given at the end of a line
        reason = next((line for line in lines if "Value error, " in line), lines[0]).split(" [type=")[0].strip()
        if NOT_INSPECTED in reason:
            reason = why_not_imported(reason) or reason
        raise CannotExplain(f"vLLM cannot configure {given.model}: {reason}") from error


def cost_of(config: Any) -> StateCost:
    """The cost of a state under a `VllmConfig`. Aligns its block size, as vLLM does once the layers are there.

    Raises `CannotExplain` if the model is no hybrid, or has layers of a kind that is not known here.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

    try:
        from vllm.v1.core import kv_cache_planning as planning  # from 0.33 on
    except ImportError:
        planning = kv_cache_utils

    text, unit_given = config.model_config.hf_text_config, config.cache_config.prefix_match_unit
    kinds = layer_kinds(text)
    attention = sum(kind in ATTENTION for kind in kinds)
    layers = recurrent_layers(text, kinds)
    if not layers or not attention:
        raise CannotExplain(f"{config.model_config.model} is no hybrid: it has no states to keep beside a KV cache")
    layers_of_cache = stand_ins(config, layers, attention + head_layers(config))
    config.compilation_config.static_forward_context.update(layers_of_cache)
    current_platform.update_block_size_for_backend(config)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers_of_cache.items()}
    backends = dict.fromkeys(layer.get_attn_backend() for layer in layers_of_cache.values())
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(list(backends))]
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    groups = planning.get_kv_cache_groups(config, specs)
    caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    # Of a group whose layers differ the scheduler is told one.
    told = kv_cache_utils.generate_scheduler_kv_cache_config([caches])
    told_specs = [group.kv_cache_spec for group in told.kv_cache_groups]
    _, unit = kv_cache_utils.resolve_kv_cache_block_sizes(told, config)
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    of_states = [spec for spec in told_specs if isinstance(spec, MambaSpec)]
    # A ring of raw keys is each request's own, and as long for any length of it.
    of_rows = [spec for spec in told_specs if spec.prefix_cacheable and not isinstance(spec, MambaSpec)]
    per_request = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, caches)  # of one block
    resident = (-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in of_states)
    alone = (1 + spec.num_speculative_blocks for spec in of_states)
    scheduler, graphs = config.scheduler_config, config.compilation_config.cudagraph_mode
    bounded = graphs is not None and graphs.has_full_cudagraphs() and not config.model_config.enforce_eager
    has_cores = all(layer.core and (layer.on_rocm or not current_platform.is_rocm()) for layer in layers)
    cache = config.cache_config
    return StateCost(
        model=config.model_config.model,
        architecture=config.model_config.architecture,
        layers=layers,
        attention_layers=attention,
        state_types=tuple(_name(dtype) for dtype in states[0].dtypes),
        kv_type=_name(config.model_config.dtype) if cache.cache_dtype == "auto" else cache.cache_dtype,
        state_bytes=sum(spec.real_page_size_bytes for spec in states),
        state_blocks=len(of_states),
        block_bytes=max(map(_block_bytes, groups)),
        block_tokens=cache.block_size,
        attention_groups=len(of_rows),
        match_unit=unit,
        inside=has_cores and runs_whole_steps(config),
        notes=(*unserved_stages(config, kinds), *_notes(config, layers, None if unit_given else unit)),
        max_model_len=config.model_config.max_model_len,
        fits_itself=config.model_config.original_max_model_len == -1,
        request_blocks=round(1 / per_request),
        caching_blocks=sum(resident) - sum(alone),
        max_num_seqs=scheduler.max_num_seqs if bounded else 0,
        blocks=cache.num_gpu_blocks_override,
    )


def head_layers(config: Any) -> int:
    """Attention layers of an MTP head, which are as the model's own; 0 for any other head, whose layers differ."""
    drafts = config.speculative_config
    if drafts is None or drafts.method != "mtp" or families.compression_in(config.model_config.hf_text_config) > 1:
        return 0
    return int(getattr(drafts.draft_model_config.hf_config, "n_predict", None) or 0)


def _block_bytes(group: Any) -> int:
    """Of one block, all layers of a cache group."""
    spec = group.kv_cache_spec
    size: int = spec.page_size_bytes  # of all layers if they differ
    return size if hasattr(spec, "kv_cache_specs") else size * len(group.layer_names)


def unserved_stages(config: Any, kinds: Sequence[str]) -> Iterator[str]:
    """Pipeline stages that vLLM does not serve, or not everywhere; `kinds`: of all of the model's, in their order.

    A stage without attention leaves its blocks short or wants another layout (vllm#51752, #54710); one without a
    recurrent layer ends at the first prompt, or with the model runner V2 at the start.
    """
    from vllm.distributed.utils import get_pp_indices

    stages = config.parallel_config.pipeline_parallel_size
    for stage in range(stages if config.cache_config.mamba_cache_mode == "align" else 0):
        first, end = get_pp_indices(len(kinds), stage, stages)
        for what, wanted, can in (("recurrent", RECURRENT, "cannot"), ("attention", ATTENTION, "may not")):
            if not wanted & set(kinds[first:end]):
                lacks = f"pipeline stage {stage} (layers {first} to {end - 1}) has no {what} layer"
                yield f"vLLM {can} serve this: {lacks}; VLLM_PP_LAYER_PARTITION deals them out otherwise"


def _notes(config: Any, layers: Iterable[RecurrentLayer], unit: int | None) -> Iterator[str]:
    """What the stand-ins leave out. `unit`: of matches, in tokens; None if a flag has set it."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    drafts = config.speculative_config
    if drafts is not None and drafts.draft_model_config is not None and not head_layers(config):
        yield "what the draft head caches of its own is not in these numbers: blocks hold fewer tokens beside it"
    if config.cache_config.cache_dtype.endswith("_ds_mla"):
        yield f"{config.cache_config.cache_dtype} packs a token's row to a size that depends on the GPU: blocks differ"
    chunk, by_flashinfer = families.GDN.chunk, hasattr(MambaBase, "get_prefill_checkpoint_alignment")
    if by_flashinfer and list(layers) == [families.QWEN_GDN] and unit is not None and unit % chunk:
        yield f"where FlashInfer computes prompts, vLLM rounds blocks up to {chunk} tokens: then that is the unit"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _gpu_kernels() -> Iterator[None]:
    """On a machine without a GPU: block sizes as vLLM chooses them with FlashAttention on one, in this process."""
    import vllm.config.vllm
    import vllm.platforms
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class WithGpuKernels(type(vllm.platforms.current_platform)):  # type: ignore[misc]
        check_and_update_config: Any = classmethod(Platform.check_and_update_config.__func__)
        update_block_size_for_backend: Any = classmethod(Platform.update_block_size_for_backend.__func__)

        @classmethod
        def support_static_graph_mode(cls) -> bool:
            return True

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
            mla = attn_selector_config.use_mla
            chosen = AttentionBackendEnum.TRITON_MLA if mla else AttentionBackendEnum.FLASH_ATTN
            path: str = chosen.get_path()
            return path

    runners = mock.patch.object(vllm.config.vllm, "HAS_TRITON", True)  # decides between them
    with mock.patch.object(vllm.platforms, "current_platform", WithGpuKernels()), runners:
        yield


def memory_for_cache(config: Any, cost: StateCost, given: int | None = None) -> tuple[int, str] | None:
    """Bytes of cache that the configuration leaves on each GPU, and where the number comes from; None if unknown.

    `given`: bytes of memory of a GPU, if it is not the one here.
    """
    from vllm.platforms import current_platform

    cache = config.cache_config
    if cost.blocks:
        return cost.blocks * cost.block_bytes, "--num-gpu-blocks-override"
    if cache.kv_cache_memory_bytes:
        return cache.kv_cache_memory_bytes, "as configured"
    drafts = config.speculative_config
    models = {config.model_config.model}
    if drafts is not None and drafts.draft_model_config is not None:
        models.add(drafts.draft_model_config.model)
    sizes = [weights_in(model) for model in models]
    if not all(sizes) or (given is None and current_platform.is_cpu()):
        return None
    try:
        total = given or current_platform.get_device_total_memory()
    except Exception:  # NVML does not tell the memory that a GPU shares with the CPU
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = int(total * cache.gpu_memory_utilization) - sum(sizes) // config.parallel_config.tensor_parallel_size
    share = f"{cache.gpu_memory_utilization:.0%} of {_amount(total)}"
    return max(0, left), f"at most: {share} without the weights; activations need some"


def weights_in(model: str) -> int:
    """Bytes of a model's weights, as its folder or the Hugging Face cache here tells them; 0 if neither does."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        folder = Path(found).parent if isinstance(found, str) else folder
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def report(
    cost: StateCost,
    memory: tuple[int, str] | None,
    share: float,
    connector: Decision = WITHOUT,
    drafts: str = "",
    refusal: Refusal | None = None,
) -> Iterator[str]:
    """The cost as lines of text. `memory`: bytes of cache and where the number comes from.

    `drafts`: method and number, empty without; `refusal`: of hints.
    """
    unknown = "for example: give --kv-cache-memory-bytes, or --gpu-memory and a model whose weights are here"
    size, source = memory or (EXAMPLE, unknown)
    kept, in_cache = cost.states_in(size, share), cost.state_blocks * cost.block_bytes
    tokens = size // cost.block_bytes // cost.attention_groups * cost.block_tokens
    recurrent = [f"{many} recurrent ({layer.kind.name})" for layer, many in cost.layers.items()]
    inside = cost.inside and connector.lane is not ConnectorLane.CHUNK_ENDS
    written = "inside the pass" if inside else "cut: a pass for each"
    hints = f"refused: {refusal.cause}" if refusal is not None else ""
    if not hints and drafts and settings.drafts() == settings.AUTO:
        hints = f"on trial at first, then beside the drafts ({settings.DRAFTS}={settings.AT_ONCE}: at once)"
    rows = [
        ("architecture", cost.architecture),
        ("layers", ", ".join([*recurrent, f"{cost.attention_layers} attention"])),
        ("states", f"{written} ({SHOWN[families.shown_of(cost.layers)]})"),
        ("one state", f"{_amount(cost.state_bytes)} in {' and '.join(dict.fromkeys(cost.state_types))}"),
        ("in the cache", f"{_amount(in_cache)}: {cost.state_blocks} blocks of {_amount(cost.block_bytes)}"),
        ("cache block", f"{cost.block_tokens:,} tokens of KV in {cost.kv_type}"),
        ("match unit", f"{cost.match_unit:,} tokens"),
        ("a state displaces", f"{cost.displaced_tokens:,} tokens of KV"),
        ("cache", f"{_amount(size)} ({source})"),
        ("which holds", f"{tokens:,} tokens of KV, or {cost.states_in(size):,} states"),
        *(pool_rows(cost, size // cost.block_bytes, share) if cost.request_blocks else ()),
        ("states may take", f"{share:.0%} of it ({settings.STATE_SHARE}): {kept:,} states"),
        ("KV connector", ", ".join(connector.names)),
        ("drafts", drafts),
        ("hints", hints),
    ]
    yield cost.model
    yield from (f"  {name:<18}{value}" for name, value in rows if value)
    stops = will_not_start(cost, size // cost.block_bytes) if memory else ()
    for line in (*stops, *advice(cost, kept), *about(connector), *cost.notes):
        yield f"  * {line}"


def pool_rows(cost: StateCost, blocks: int, share: float) -> Iterator[tuple[str, str]]:
    """What a cache of so many blocks is good for, as lines of the report."""
    cost = cost.of_its_own_length(blocks)
    at_once = f"{blocks / cost.request_blocks:.2f} requests of {cost.max_model_len:,} tokens"
    yield "at once", f"{at_once}: {cost.request_blocks:,} of {blocks:,} blocks each"
    lengths = [length for length in LENGTHS if length <= cost.max_model_len] or [cost.max_model_len]
    warm = ", ".join(f"{cost.warm(blocks, share, length):,} of {length:,} tokens" for length in lengths)
    yield "stay warm", f"conversations with a state each: {warm}"
    if cost.max_num_seqs:
        yield "--max-num-seqs", f"{blocks:,} at most, since vLLM wants a block for each"
    tokens = cost.caching_blocks * cost.block_tokens // cost.attention_groups
    if tokens:
        yield "caching costs", f"{tokens:,} tokens of context: each request holds {cost.caching_blocks} blocks more"


def will_not_start(cost: StateCost, blocks: int) -> Iterator[str]:
    """What vLLM refuses once the weights are loaded (vllm#49064, #46778), and what it takes."""
    more, fits = "more memory for the cache", cost.longest(blocks)
    if cost.request_blocks > blocks - 1 and not (cost.fits_itself and fits):
        cure = f"--max-model-len {fits} fits" if fits else more
        length = f"--max-model-len {cost.max_model_len} wants {cost.request_blocks:,} blocks"
        yield f"vLLM will not start: {length}, and {blocks - 1:,} can be had: {cure}"
    if cost.max_num_seqs > blocks:
        yield f"vLLM will not start: --max-num-seqs {cost.max_num_seqs} is more than its blocks: give {blocks} or less"


def advice(cost: StateCost, kept: int) -> Iterator[str]:
    """What to choose for this family and these types. `kept`: states that the cache may hold."""
    if not cost.inside:
        yield "states of these layers cost a pass each: one is kept only if a hit on it is worth that"
    elif next(iter(cost.layers)).kind in ROUNDED and cost.state_types[-1] != "float32":
        yield f"--mamba-ssm-cache-dtype float32 keeps states whole: in {cost.state_types[-1]} each one is rounded"
    if kept < FEW:
        yield f"room for {kept} states is little: more memory for the cache, or a larger {settings.STATE_SHARE}"


def about(connector: Decision) -> Iterator[str]:
    """What configured KV connectors change."""
    if connector.lane is ConnectorLane.NOT_SERVED:
        yield connector.reason
    elif connector.lane is ConnectorLane.CHUNK_ENDS:
        yield f"{connector.reason}: a state costs a pass; beside NixlConnector it costs none"


def refusal_of(config: Any, cost: StateCost) -> Refusal | None:
    """Why hints would be refused under a `VllmConfig`, as far as it tells."""
    if head_slides(config) and not draft_windows.can_be_left_out():
        return Refusal(
            refusals.SPECULATIVE,
            "vLLM finds no prefix between cache blocks, since a layer of the draft head has a sliding window",
        )
    beside_drafts = all(layer.drafts for layer in cost.layers)
    in_pass = cost.inside and (beside_drafts or not speculation.drafting(config))
    return refusals.by_configuration(config, in_pass=in_pass)


def head_slides(config: Any) -> bool:
    """Whether a draft head has layers with a sliding window: those have a cache group of their own."""
    drafts = config.speculative_config
    if drafts is None or drafts.draft_model_config is None:
        return False
    head = drafts.draft_model_config.hf_text_config
    slides = "sliding_attention" in (getattr(head, "layer_types", None) or ())
    return slides or bool((getattr(head, "dflash_config", None) or {}).get("use_swa"))


def drafts_of(config: Any) -> str:
    """Method and number of drafts under a `VllmConfig`; empty without."""
    if not speculation.drafting(config):
        return ""
    return f"{config.speculative_config.method}, {config.num_speculative_tokens} tokens"


def explained(arguments: Sequence[str], kernels: str, gpu_memory: int | None = None) -> list[str]:
    """What a command line of `vllm serve` would cost, as lines of text; `kernels`: `HERE`, or `GPU` as on one.

    `gpu_memory`: bytes of each GPU, if it is not the one here.

    Raises `CannotExplain`.
    """
    with _gpu_kernels() if kernels == GPU else contextlib.nullcontext():
        config = configure(arguments)
        if kernels == GPU:
            config.device_config.device_type = "cuda"  # of which no question is asked before an engine starts
        connector = kv_connectors.decide(config)
        cost, share = cost_of(config), settings.state_share()
        memory = memory_for_cache(config, cost, gpu_memory)
        lines = list(report(cost, memory, share, connector, drafts_of(config), refusal_of(config, cost)))
        if drafts_of(config) and config.device_config.device_type == "cpu":
            lines.append(f"  * {NO_DRAFTS_ON_A_CPU}")
    return lines


def main(arguments: Sequence[str], kernels: str, gpu_memory: int | None = None) -> int:
    """Print what `explained` says; exit status 1 if that cannot be said."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # an error is said here, in one sentence
    plugin.register()
    try:
        lines = explained(arguments, kernels, gpu_memory)
    except CannotExplain as error:
        print(f"seamark worker: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _amount(size: int) -> str:
    """Bytes as a number with a unit."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
