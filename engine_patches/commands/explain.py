"""`seamark worker --explain`: what recurrent states cost in the memory of one model, before anything is started.

Every number comes from vLLM itself: its configuration of the model, its state shapes, its page alignment and its cache
groups. No weight is read and no kernel runs, so it works on a machine without a GPU. Only the layers are stand-ins, as
many and as large as the configuration says.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches import families, kv_connectors, plugin, settings, speculation
from engine_patches.kv_connectors import WITHOUT, ConnectorLane, Decision
from engine_patches.scheduler import refusals
from engine_patches.scheduler.refusals import Refusal

HERE, GPU = "here", "gpu"  # whose attention kernels decide the length of a block

RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "conv", "short_conv", "kda", "hybrid"})

ATTENTION = frozenset({"full_attention", "attention", "hybrid"})  # a layer of a `hybrid` has both

WITHOUT_CACHE = frozenset({"mlp", "moe"})

MIB, GIB = 1 << 20, 1 << 30

EXAMPLE = 10 * GIB  # of cache, where nothing says how much there will be

NO_DRAFTS_ON_A_CPU = (
    "on a CPU vLLM drafts for no hybrid: it copies states with Triton kernels, and would end at the first prompt; "
    "leave --speculative-config away"
)

FEW = 16  # states: fewer than so many shared prefixes and running conversations are soon found again by nobody


class CannotExplain(Exception):
    """vLLM does not know the model, or it has no recurrent states; the message is one sentence."""


class CacheFamily(NamedTuple):
    """Models whose recurrent layers are computed by the same kernels."""

    name: str
    kernels: str  # in vLLM's `MambaAttentionBackendEnum`
    in_segments: bool = False  # its states can be written inside a pass


MAMBA2 = CacheFamily("Mamba2", "MAMBA2", in_segments=True)

GDN = CacheFamily("gated delta net", "GDN_ATTN", in_segments=True)

OTHERS = {  # by an attribute that only the family's configs have
    "linear_attn_config": CacheFamily("KDA", "GDN_ATTN"),
    "linear_num_value_heads": CacheFamily("gated delta net", "GDN_ATTN"),
    "conv_L_cache": CacheFamily("short convolution", "SHORT_CONV"),
    "mamba_dt_rank": CacheFamily("Mamba1", "MAMBA1"),
}


@dataclass(frozen=True)
class StateCost:
    """What vLLM makes of one model, for each GPU (tensor-parallel rank). Bytes and tokens."""

    model: str
    recurrent_layers: int
    attention_layers: int
    family: CacheFamily
    state_types: tuple[str, ...]  # of the tensors that make up a state
    kv_type: str
    state_bytes: int  # of one state, all layers, as the layers read it
    state_blocks: int  # blocks of the cache that it takes: one for each recurrent cache group
    block_bytes: int  # of one block, all layers of a cache group
    block_tokens: int
    attention_groups: int
    match_unit: int

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
        raise CannotExplain(f"vLLM cannot configure {given.model}: {reason}") from error


def cost_of(config: Any) -> StateCost:
    """The cost of a state under a `VllmConfig`. Aligns its block size, as vLLM does once the layers are there.

    Raises `CannotExplain` if the model is no hybrid, or has layers of a kind that is not known here.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

    kinds = layer_kinds(config.model_config.hf_text_config)
    recurrent, attention = (sum(kind in which for kind in kinds) for which in (RECURRENT, ATTENTION))
    if not recurrent or not attention:
        raise CannotExplain(f"{config.model_config.model} is no hybrid: it has no states to keep beside a KV cache")
    layers = _stand_ins(config, kinds)
    config.compilation_config.static_forward_context.update(layers)
    current_platform.update_block_size_for_backend(config)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    backends = dict.fromkeys(layer.get_attn_backend() for layer in layers.values())
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(list(backends))]
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    of_states = [group for group in groups if isinstance(group.kv_cache_spec, MambaSpec)]
    spec = of_states[0].kv_cache_spec
    cache = config.cache_config
    caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    _, unit = kv_cache_utils.resolve_kv_cache_block_sizes(caches, config)
    return StateCost(
        model=config.model_config.model,
        recurrent_layers=recurrent,
        attention_layers=attention,
        family=family_of(config.model_config.hf_text_config),
        state_types=tuple(_name(dtype) for dtype in spec.dtypes),
        kv_type=_name(config.model_config.dtype) if cache.cache_dtype == "auto" else cache.cache_dtype,
        state_bytes=recurrent * spec.real_page_size_bytes,
        state_blocks=len(of_states),
        block_bytes=spec.page_size_bytes * max(len(group.layer_names) for group in groups),
        block_tokens=cache.block_size,
        attention_groups=len(groups) - len(of_states),
        match_unit=unit,
    )


def layer_kinds(config: Any) -> Sequence[str]:
    """The kind of each layer in a model's text config, one of `RECURRENT`, `ATTENTION` or `WITHOUT_CACHE`.

    Raises `CannotExplain` for a config that does not say, or says something else.
    """
    linear = getattr(config, "linear_attn_config", None)
    if linear:  # Kimi-Linear counts from 1
        return ["linear_attention"] * len(linear["kda_layers"]) + ["attention"] * len(linear["full_attn_layers"])
    kinds: Sequence[str] | None = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
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
    return bool(text.get("num_attention_heads")) and any(name.startswith("mamba_") for name in text)


def _stand_ins(config: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Layers by name that answer vLLM's questions about their cache as the model's own would."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.models import ModelRegistry
    from vllm.utils.torch_utils import get_kv_cache_torch_dtype
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    kv_type = get_kv_cache_torch_dtype(cache.cache_dtype, model.dtype)
    with set_current_vllm_config(config):
        backend = get_attn_backend(model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla)

    class Recurrent(MambaBase):  # type: ignore[misc]  # vLLM is untyped to mypy
        mamba_type = MambaAttentionBackendEnum[family_of(model.hf_text_config).kernels]

        def get_state_shape(self) -> Any:
            return model_class.get_mamba_state_shape_from_config(config)

        def get_state_dtype(self) -> Any:
            return model_class.get_mamba_state_dtype_from_config(config)

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

    layers: dict[str, Any] = {}
    for number, kind in enumerate(kinds):
        if kind in RECURRENT:
            layers[f"layers.{number}.recurrent"] = Recurrent()
        if kind in ATTENTION:
            layers[f"layers.{number}.attention"] = Attention()
    return layers


def family_of(config: Any) -> CacheFamily:
    """Which family's recurrent layers a text config describes; `CannotExplain` for one that is not known here."""
    if families.GDN in families.kinds_in(config):
        return GDN
    for attribute, family in OTHERS.items():
        if getattr(config, attribute, None):
            return family
    if getattr(config, "mamba_num_heads", None) or getattr(config, "mamba_n_heads", None):
        return MAMBA2
    raise CannotExplain(f"the recurrent layers of {config.model_type} are of a kind that is not known here")


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
        ("layers", f"{cost.recurrent_layers} recurrent ({cost.family.name}), {cost.attention_layers} attention"),
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
    yield cost.model
    for name, value in rows:
        yield f"  {name:<18}{value}"
    refused = [f"hints are refused: {refusal.cause}"] if refusal is not None else []
    for line in (*refused, *advice(cost, kept), *about(connector)):
        yield f"  * {line}"


def advice(cost: StateCost, kept: int) -> Iterator[str]:
    """What to choose for this family and these types. `kept`: states that the cache may hold."""
    if not cost.family.in_segments:
        yield "states of this family cost a pass each: one is kept only if a hit on it is worth that"
    elif cost.state_types[-1] != "float32":
        yield f"--mamba-ssm-cache-dtype float32 keeps states whole: in {cost.state_types[-1]} each one is rounded"
    if kept < FEW:
        yield f"room for {kept} states is little: more memory for the cache, or a larger {settings.STATE_SHARE}"


def about(connector: Decision) -> Iterator[str]:
    """What configured KV connectors change."""
    if connector.lane is ConnectorLane.NOT_SERVED:
        yield connector.reason
    elif connector.lane is ConnectorLane.CHUNK_ENDS:
        yield f"{connector.reason}: a state costs a pass; beside NixlConnector it costs none"


def drafts_of(config: Any) -> str:
    """Method and number of drafts under a `VllmConfig`; empty without."""
    if not speculation.drafting(config):
        return ""
    return f"{config.speculative_config.method}, {config.num_speculative_tokens} tokens"


def main(arguments: Sequence[str], kernels: str) -> int:
    """Print what a state costs under a command line of `vllm serve`; exit status 1 if that cannot be said.

    `kernels`: `HERE`, or `GPU` for block sizes as on one.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # an error is said here, in one sentence
    plugin.register()
    try:
        with _gpu_kernels() if kernels == GPU else contextlib.nullcontext():
            config = configure(arguments)
            if kernels == GPU:
                config.device_config.device_type = "cuda"  # of which no question is asked before an engine starts
            connector = kv_connectors.decide(config)
            cost, memory, share = cost_of(config), memory_for_cache(config), settings.state_share()
            refusal = refusals.by_configuration(config, in_pass=cost.family.in_segments)
            lines = list(report(cost, memory, share, connector, drafts_of(config), refusal))
            if drafts_of(config) and config.device_config.device_type == "cpu":
                lines.append(f"  * {NO_DRAFTS_ON_A_CPU}")
    except CannotExplain as error:
        print(f"seamark worker: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _amount(size: int) -> str:
    """Bytes as a number with a unit."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
