"""Which layers a model is made of by its config, and layers that stand in for them before vLLM's questions.

A stand-in says of its cache what the model's own layer would; it has no weights, and nothing of it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from engine_patches import families
from engine_patches.families import RecurrentLayer

RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "conv", "short_conv", "kda", "hybrid"})

ATTENTION = frozenset(  # a layer of a `hybrid` has both
    {"full_attention", "attention", "hybrid", "indexed_attention", "deepseek_sparse_attention"}
)

WITHOUT_CACHE = frozenset({"mlp", "moe"})

INDEX_QUANT_BLOCK = 128  # values of an index key in GLM-5.3 that share a scale of four bytes

NOT_INSPECTED = "failed to be inspected"  # of vLLM, whose log says why

NO_DRAFTS_ON_A_CPU = (
    "on a CPU vLLM drafts for no hybrid: it copies states with Triton kernels, and would end at the first prompt; "
    "leave --speculative-config away"
)


class CannotExplain(Exception):
    """vLLM does not know the model, or it has no recurrent states; the message is one sentence."""


def layer_kinds(config: Any) -> Sequence[str]:
    """The kind of each layer in a model's text config, in order: one of `RECURRENT`, `ATTENTION` or `WITHOUT_CACHE`.

    Raises `CannotExplain` for a config that does not say, or says something else.
    """
    linear = getattr(config, "linear_attn_config", None) or {}
    if "kda_layers" in linear:  # Kimi-Linear counts from 1
        kda, layers = set(linear["kda_layers"]), len(linear["kda_layers"]) + len(linear["full_attn_layers"])
        return ["linear_attention" if layer in kda else "attention" for layer in range(1, layers + 1)]
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


def stand_ins(config: Any, layers: Mapping[RecurrentLayer, int], attention: int) -> dict[str, Any]:
    """Layers by name that answer vLLM's questions about their cache as the model's own would.

    `attention`: how many layers of a model have attention.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
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

        def __init__(self, layer: RecurrentLayer, state: Any) -> None:
            self.kind, self.mamba_type = layer.kind, MambaAttentionBackendEnum[layer.kind.backend]
            self.state = state

        @property
        def is_kv_cache_tp_replicated(self) -> bool:
            return bool(self.state.tp_replicated)

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            spec = super().get_kv_cache_spec(vllm_config)
            exports = self.kind is families.MAMBA2 and "get_kv_cache_spec" in vars(MambaMixer2)  # from 0.32 on
            return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1) if exports else spec

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
        reason = why_not_imported(str(error)) or first_line(error)
        raise CannotExplain(f"vLLM cannot configure {model.model}: {reason}") from error


def _states_of(model_class: Any, config: Any) -> Sequence[Any]:
    """vLLM's specification of the state of each kind of recurrent layer, in the order of `families.layers_in`."""
    if hasattr(model_class, "get_mamba_specs_from_config"):
        specs: Sequence[Any] = model_class.get_mamba_specs_from_config(config)
        return specs
    shapes, dtypes = model_class.get_mamba_state_shape_from_config, model_class.get_mamba_state_dtype_from_config
    return [SimpleNamespace(shapes=shapes(config), dtypes=dtypes(config), tp_replicated=False)]


def _index_of(config: Any, prefix: str) -> dict[str, Any]:
    """The caches of a compressed attention index, vLLM's own classes: its keys, and the ring of raw ones."""
    import torch

    text, cache = config.model_config.hf_text_config, config.cache_config
    if getattr(text, "indexer_compress_ratio", None):
        from vllm.models.qwen4_exp.common.qsa_cache import QSACompressedKeyCache, QSAKeyStateCache

        common = dict(head_size=text.indexer_head_dim, cache_config=cache, vllm_config=config)
        common["compress_ratio"] = text.indexer_compress_ratio
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


def why_not_imported(reason: str) -> str:
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
            return f"its class {name} cannot be imported: {first_line(error)}"
    return ""


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
