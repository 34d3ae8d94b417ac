"""`seamark worker --explain`: what recurrent states cost in the memory of one model, before anything is started.

Every number comes from vLLM itself: its configuration of the model, its state shapes, its page alignment and its cache
groups. No weight is read and no kernel runs, so it works on a machine without a GPU. Only the layers are stand-ins, as
many and as large as the configuration says.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches import families, kv_connectors, plugin, settings, speculation
from engine_patches.families import RecurrentLayer, Shown
from engine_patches.kv_connectors import WITHOUT, ConnectorLane, Decision
from engine_patches.scheduler import refusals
from engine_patches.scheduler.refusals import Refusal

HERE, GPU = "here", "gpu"  # whose attention kernels decide the length of a block

RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "conv", "short_conv", "kda", "hybrid"})

ATTENTION = frozenset(  # a layer of a `hybrid` has both
    {"full_attention", "attention", "hybrid", "indexed_attention", "deepseek_sparse_attention"}
)

WITHOUT_CACHE = frozenset({"mlp", "moe"})

MIB, GIB = 1 << 20, 1 << 30

EXAMPLE = 10 * GIB  # of cache, where nothing says how much there will be

NO_DRAFTS_ON_A_CPU = (
    "on a CPU vLLM drafts for no hybrid: it copies states with Triton kernels, and would end at the first prompt; "
    "leave --speculative-config away"
)

INDEX_QUANT_BLOCK = 128  # values of an index key in GLM-5.3 that share a scale of four bytes

FEW = 16  # states: fewer than so many shared prefixes and running conversations are soon found again by nobody


class CannotExplain(Exception):
    """vLLM does not know the model, or it has no recurrent states; the message is one sentence."""


SHOWN = {
    Shown.ENGINE: "shown on an engine",
    Shown.INTERPRETER: "shown in the interpreter of a GPU's kernels",
    Shown.READ: "read, and nothing ran",
}

ROUNDED = (families.MAMBA2, families.GDN)  # kinds whose states vLLM can keep in other types than it computes

NOT_INSPECTED = "failed to be inspected"  # of vLLM, whose log says why


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

    @property
    def recurrent_layers(self) -> int:
        """Of all kinds."""
        return sum(self.layers.values())

    @property
    def bytes_in_cache(self) -> int:
        """Of one state, with what fills its blocks up."""
        return self.state_blocks * self.block_bytes

    @property
    def displaced_tokens(self) -> int:
        """Tokens of KV for which the blocks of one state would have room."""
        return self.state_blocks * self.block_tokens // self.attention_groups

    def states_in(self, memory: int, share: float = 1.0) -> int:
        """States that fit into a cache of `memory` bytes, if they may hold `share` of its blocks."""
        return int(share * (memory // self.block_bytes)) // self.state_blocks

    def tokens_in(self, memory: int) -> int:
        """Tokens of KV that fit into a cache of `memory` bytes without any state."""
        return memory // self.block_bytes // self.attention_groups * self.block_tokens


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
            reason = _why_not_imported(reason) or reason
        raise CannotExplain(f"vLLM cannot configure {given.model}: {reason}") from error


def _why_not_imported(reason: str) -> str:
    """What is missing for a model's class, which vLLM inspects in a process of its own; empty if nothing is."""
    from vllm.model_executor.models import ModelRegistry

    for name in re.findall(r"'(\w+)'", reason):
        registered = ModelRegistry.models.get(name)
        try:
            if registered is not None:
                registered.load_model_cls()
        except ModuleNotFoundError as error:
            return f"its class {name} needs {error.name}, which is not installed here"
        except Exception as error:  # of any kind: a module of vLLM's may ask for a device, a compiler, a file
            return f"its class {name} cannot be imported: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def cost_of(config: Any) -> StateCost:
    """The cost of a state under a `VllmConfig`. Aligns its block size, as vLLM does once the layers are there.

    Raises `CannotExplain` if the model is no hybrid, or has layers of a kind that is not known here.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

    text, unit_given = config.model_config.hf_text_config, config.cache_config.prefix_match_unit
    kinds = layer_kinds(text)
    attention = sum(kind in ATTENTION for kind in kinds)
    layers = recurrent_layers(text, kinds)
    if not layers or not attention:
        raise CannotExplain(f"{config.model_config.model} is no hybrid: it has no states to keep beside a KV cache")
    stand_ins = _stand_ins(config, layers, attention)
    config.compilation_config.static_forward_context.update(stand_ins)
    current_platform.update_block_size_for_backend(config)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in stand_ins.items()}
    backends = dict.fromkeys(layer.get_attn_backend() for layer in stand_ins.values())
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(list(backends))]
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    groups = _planning().get_kv_cache_groups(config, specs)
    caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    # Of a group whose layers differ the scheduler is told one.
    told = kv_cache_utils.generate_scheduler_kv_cache_config([caches])
    told_specs = [group.kv_cache_spec for group in told.kv_cache_groups]
    _, unit = kv_cache_utils.resolve_kv_cache_block_sizes(told, config)
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    of_states = [spec for spec in told_specs if isinstance(spec, MambaSpec)]
    # A ring of raw keys is each request's own, and as long for any length of it.
    of_rows = [spec for spec in told_specs if spec.prefix_cacheable and not isinstance(spec, MambaSpec)]
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
        inside=_written_inside(layers, config),
        notes=tuple(_notes(config, layers, None if unit_given else unit)),
    )


def _planning() -> Any:
    """The module in which vLLM groups caches."""
    try:
        from vllm.v1.core import kv_cache_planning as module  # from 0.33 on
    except ImportError:
        from vllm.v1.core import kv_cache_utils as module
    return module


def recurrent_layers(config: Any, kinds: Sequence[str]) -> Mapping[RecurrentLayer, int]:
    """How many layers of each recurrent class vLLM makes of a text config; `kinds`: of its layers.

    Raises `CannotExplain` for layers that are of a kind which is not known here.
    """
    number = sum(kind in RECURRENT for kind in kinds)
    known = families.layers_in(config)
    if number and not known:
        raise CannotExplain(f"the recurrent layers of {config.model_type} are of a kind that is not known here")
    counted = dict.fromkeys(known, number)
    if families.QWEN_NGRAM in counted:  # beside the layers that it belongs to
        counted[families.QWEN_NGRAM] = len(config.ple_layer_ids)
    return {layer: many for layer, many in counted.items() if many}


def _written_inside(layers: Iterable[RecurrentLayer], config: Any) -> bool:
    """Whether the states of all these layers are written inside a pass, as far as a `VllmConfig` tells."""
    from vllm.platforms import current_platform

    if config.parallel_config.use_ubatching or getattr(config.cache_config, "use_replayssm", False):
        return False
    return all(layer.core and (layer.on_rocm or not current_platform.is_rocm()) for layer in layers)


def _block_bytes(group: Any) -> int:
    """Of one block, all layers of a cache group."""
    spec = group.kv_cache_spec
    size: int = spec.page_size_bytes  # of all layers if they differ
    return size if hasattr(spec, "kv_cache_specs") else size * len(group.layer_names)


def _notes(config: Any, layers: Iterable[RecurrentLayer], unit: int | None) -> Iterator[str]:
    """What the stand-ins leave out. `unit`: of matches, in tokens; None if a flag has set it."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    drafts = config.speculative_config
    if drafts is not None and drafts.draft_model_config is not None:
        yield "what the draft head caches of its own is not in these numbers: blocks hold fewer tokens beside it"
    if hasattr(MambaBase, "get_prefill_checkpoint_alignment") and list(layers) == [families.QWEN_GDN]:
        chunk = families.GDN.chunk
        if unit is not None and unit % chunk:
            yield f"where FlashInfer computes prompts, vLLM rounds blocks up to {chunk} tokens: then that is the unit"


def layer_kinds(config: Any) -> Sequence[str]:
    """The kind of each layer in a model's text config, one of `RECURRENT`, `ATTENTION` or `WITHOUT_CACHE`.

    Raises `CannotExplain` for a config that does not say, or says something else.
    """
    linear = getattr(config, "linear_attn_config", None) or {}
    if "kda_layers" in linear:  # Kimi-Linear counts from 1
        return ["linear_attention"] * len(linear["kda_layers"]) + ["attention"] * len(linear["full_attn_layers"])
    kinds: Sequence[str] | None = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    size = getattr(config, "layer_group_size", None)
    if not kinds and size:  # Ling: the last layer of each whole group, and all that are left over
        grouped = config.num_hidden_layers // size * size
        recurrent = [(layer + 1) % size and layer < grouped for layer in range(config.num_hidden_layers)]
        return ["linear_attention" if each else "attention" for each in recurrent]
    if not kinds:
        raise CannotExplain(f"the config of {config.model_type} does not say which of its layers are recurrent")
    unknown = sorted(set(kinds) - RECURRENT - ATTENTION - WITHOUT_CACHE)
    if unknown:
        raise CannotExplain(f"layers of the kind {', '.join(unknown)} are not known here ({config.model_type})")
    return kinds


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether a model's `config.json` names recurrent layers beside attention; False if it does not say."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    if {families.GDN, families.KDA} & set(families.kinds_in(text)):
        return True
    kinds = set(text.get("layers_block_type") or text.get("layer_types") or ())
    if kinds:
        return bool(kinds & RECURRENT and kinds & ATTENTION)
    pattern = text.get("hybrid_override_pattern")  # one letter for each layer of Nemotron-H
    if isinstance(pattern, str):
        return {"M", "*"} <= set(pattern)
    if families.kinds_in(text):
        return True
    return bool(text.get("num_attention_heads")) and any(name.startswith("mamba_") for name in text)


def _stand_ins(config: Any, layers: Mapping[RecurrentLayer, int], attention: int) -> dict[str, Any]:
    """Layers by name that answer vLLM's questions about their cache as the model's own would.

    `attention`: how many layers of a model have attention.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.utils.torch_utils import get_kv_cache_torch_dtype
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    model_class = _class_of(model)
    kv_type = get_kv_cache_torch_dtype(cache.cache_dtype, model.dtype)
    with set_current_vllm_config(config):
        backend = get_attn_backend(model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla)

    class Recurrent(MambaBase):  # type: ignore[misc]  # vLLM is untyped to mypy
        mamba_type: Any = None

        def __init__(self, layer: RecurrentLayer, state: StateOf) -> None:
            self.mamba_type = MambaAttentionBackendEnum[layer.kind.backend]
            self.state = state

        @property
        def is_kv_cache_tp_replicated(self) -> bool:
            return self.state.replicated

        def get_state_shape(self) -> Any:
            return self.state.shapes

        def get_state_dtype(self) -> Any:
            return self.state.dtypes

    class Attention(AttentionLayerBase):  # type: ignore[misc]
        def get_attn_backend(self) -> Any:
            return backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            sizes = dict(
                block_size=cache.block_size,
                num_kv_heads=model.get_num_kv_heads(parallel),
                head_size=model.get_head_size(),
                dtype=kv_type,
                kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
            )
            if model.use_mla:
                return MLAAttentionSpec(cache_dtype_str=cache.cache_dtype, **sizes)
            return backend.customize_spec(FullAttentionSpec(**sizes))

    found: dict[str, Any] = {}
    for (layer, many), state in zip(layers.items(), _states_of(model_class, config), strict=False):
        for number in range(many):
            found[f"layers.{number}.{layer.name}"] = Recurrent(layer, state)
    for number in range(attention):
        found[f"layers.{number}.attention"] = Attention()
        with set_current_vllm_config(config):  # where these enter themselves
            found |= _index_of(config, f"layers.{number}.indexer")
    return found


def _class_of(model: Any) -> Any:
    """The class that vLLM makes of a `ModelConfig`. Raises `CannotExplain` if it cannot be imported."""
    from vllm.model_executor.models import ModelRegistry

    try:
        return ModelRegistry.resolve_model_cls(model.architecture, model_config=model)[0]
    except ValueError as error:  # of a class that vLLM once inspected elsewhere, and remembers
        reason = _why_not_imported(str(error)) or _first_line(error)
        raise CannotExplain(f"vLLM cannot configure {model.model}: {reason}") from error


class StateOf(NamedTuple):
    """The tensors of one layer's state."""

    shapes: Any
    dtypes: Any
    replicated: bool = False  # on each tensor-parallel rank


def _states_of(model_class: Any, config: Any) -> Sequence[StateOf]:
    """The state of each kind of recurrent layer, in the order of `families.layers_in`."""
    if hasattr(model_class, "get_mamba_specs_from_config"):
        specs = model_class.get_mamba_specs_from_config(config)
        return [StateOf(spec.shapes, spec.dtypes, spec.tp_replicated) for spec in specs]
    shapes, dtypes = model_class.get_mamba_state_shape_from_config, model_class.get_mamba_state_dtype_from_config
    return [StateOf(shapes(config), dtypes(config))]


def _index_of(config: Any, prefix: str) -> dict[str, Any]:
    """The caches of a compressed attention index, vLLM's own classes: its keys, and the ring of raw ones."""
    import torch

    text, cache = config.model_config.hf_text_config, config.cache_config
    if getattr(text, "indexer_compress_ratio", None):
        from vllm.models.qwen4_exp.common.qsa_cache import QSACompressedKeyCache, QSAKeyStateCache

        common = dict(
            head_size=text.indexer_head_dim,
            cache_config=cache,
            vllm_config=config,
            compress_ratio=text.indexer_compress_ratio,
        )
        keys, ring = f"{prefix}.compressed_key_cache", f"{prefix}.raw_key_cache"
        kind = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
        compressed = kind[config.attention_config.resolve_indexer_kv_dtype("bf16")]
        positions = config.model_config.uses_mrope
        return {
            keys: QSACompressedKeyCache(dtype=compressed, prefix=keys, **common),
            ring: QSAKeyStateCache(dtype=kind["bf16"], cache_rope_positions=positions, prefix=ring, **common),
        }
    if getattr(text, "index_kpool", None):
        from vllm.models.glm5next.common.attention import Glm5NextIndexerCache, Glm5NextTailCache

        common = dict(cache_config=cache, index_kpool=text.index_kpool)
        keys, ring, width = f"{prefix}.k_cache", f"{prefix}.tail_cache", text.index_head_dim
        scales = width // INDEX_QUANT_BLOCK * 4
        return {
            keys: Glm5NextIndexerCache(head_dim=width + scales, dtype=torch.uint8, prefix=keys, **common),
            ring: Glm5NextTailCache(head_dim=width, dtype=torch.bfloat16, prefix=ring, **common),
        }
    return {}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _gpu_kernels() -> Iterator[None]:
    """On a machine without a GPU: block sizes as vLLM chooses them with FlashAttention on one, in this process."""
    import vllm.config.vllm
    import vllm.platforms
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    here = vllm.platforms.current_platform
    with_triton = vllm.config.vllm.HAS_TRITON

    class WithGpuKernels(type(here)):  # type: ignore[misc]
        check_and_update_config: Any = classmethod(Platform.check_and_update_config.__func__)
        update_block_size_for_backend: Any = classmethod(Platform.update_block_size_for_backend.__func__)

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
            mla = attn_selector_config.use_mla
            chosen = AttentionBackendEnum.TRITON_MLA if mla else AttentionBackendEnum.FLASH_ATTN
            path: str = chosen.get_path()
            return path

    vllm.platforms.current_platform = WithGpuKernels()
    vllm.config.vllm.HAS_TRITON = True  # decides between the model runners
    try:
        yield
    finally:
        vllm.platforms.current_platform = here
        vllm.config.vllm.HAS_TRITON = with_triton


def memory_for_cache(config: Any) -> tuple[int, str] | None:
    """Bytes of cache that the configuration leaves on each GPU, and where the number comes from; None if unknown."""
    from vllm.platforms import current_platform

    cache = config.cache_config
    if cache.kv_cache_memory_bytes:
        return cache.kv_cache_memory_bytes, "as configured"
    weights = [file.stat().st_size for file in Path(config.model_config.model).glob("*.safetensors")]
    if current_platform.is_cpu() or not weights:
        return None
    try:
        total = current_platform.get_device_total_memory()
    except Exception:  # NVML does not tell the memory that a GPU shares with the CPU
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = int(total * cache.gpu_memory_utilization) - sum(weights) // config.parallel_config.tensor_parallel_size
    return max(
        0, left
    ), f"{cache.gpu_memory_utilization:.0%} of {_amount(total)} without the weights; activations need some"


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
    size, source = memory or (EXAMPLE, "for example: --kv-cache-memory-bytes was not given")
    kept = cost.states_in(size, share)
    rows = [
        ("architecture", cost.architecture),
        ("layers", ", ".join((*_counted(cost.layers), f"{cost.attention_layers} attention"))),
        ("states", how_states_are_written(cost)),
        ("one state", f"{_amount(cost.state_bytes)} in {' and '.join(dict.fromkeys(cost.state_types))}"),
        ("in the cache", f"{_amount(cost.bytes_in_cache)}: {cost.state_blocks} blocks of {_amount(cost.block_bytes)}"),
        ("cache block", f"{cost.block_tokens:,} tokens of KV in {cost.kv_type}"),
        ("match unit", f"{cost.match_unit:,} tokens"),
        ("a state displaces", f"{cost.displaced_tokens:,} tokens of KV"),
        ("cache", f"{_amount(size)} ({source})"),
        ("which holds", f"{cost.tokens_in(size):,} tokens of KV, or {cost.states_in(size):,} states"),
        ("states may take", f"{share:.0%} of it ({settings.STATE_SHARE}): {kept:,} states"),
    ]
    if connector.names:
        rows.append(("KV connector", ", ".join(connector.names)))
    if drafts:
        rows.append(("drafts", drafts))
    if refusal is not None:
        rows.append(("hints", f"refused: {refusal.cause}"))
    yield cost.model
    for name, value in rows:
        yield f"  {name:<18}{value}"
    for line in (*advice(cost, kept), *about(connector), *cost.notes):
        yield f"  * {line}"


def _counted(layers: Mapping[RecurrentLayer, int]) -> Iterator[str]:
    for layer, many in layers.items():
        yield f"{many} recurrent ({layer.kind.name})"


def how_states_are_written(cost: StateCost) -> str:
    """Inside a pass, or at a pass for each; and how it is known that this is right."""
    written = "inside the pass" if cost.inside else "cut: a pass for each"
    return f"{written} ({SHOWN[families.shown_of(cost.layers)]})"


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
    if head_slides(config):
        return Refusal(
            refusals.SPECULATIVE,
            "vLLM finds no prefix between cache blocks, since a layer of the draft head has a sliding window",
        )
    beside_drafts = all(layer.beside_drafts for layer in cost.layers)
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


def explained(arguments: Sequence[str], kernels: str) -> list[str]:
    """What a command line of `vllm serve` would cost, as lines of text; `kernels`: `HERE`, or `GPU` as on one.

    Raises `CannotExplain`.
    """
    with _gpu_kernels() if kernels == GPU else contextlib.nullcontext():
        config = configure(arguments)
        if kernels == GPU:
            config.device_config.device_type = "cuda"  # of which no question is asked before an engine starts
        connector = kv_connectors.decide(config)
        cost, memory, share = cost_of(config), memory_for_cache(config), settings.state_share()
        lines = list(report(cost, memory, share, connector, drafts_of(config), refusal_of(config, cost)))
        if drafts_of(config) and config.device_config.device_type == "cpu":
            lines.append(f"  * {NO_DRAFTS_ON_A_CPU}")
    return lines


def main(arguments: Sequence[str], kernels: str) -> int:
    """Print what `explained` says; exit status 1 if that cannot be said."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # an error is said here, in one sentence
    plugin.register()
    try:
        lines = explained(arguments, kernels)
    except CannotExplain as error:
        print(f"seamark worker: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _amount(size: int) -> str:
    """Bytes as a number with a unit."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
