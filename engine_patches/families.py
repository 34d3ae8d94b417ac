"""Kinds of recurrent states, and vLLM's layers that have them. The table in README.md is made of it.

A layer with a `core` here writes states inside a pass: that method is replaced in each layer of a model, by the kind of
its states (`forward/layers.py`), and where a class has another one, its layers promise nothing. For any other layer a
chunk is cut at each state.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Shown(enum.StrEnum):
    """How it was shown that answers are those of an engine without a cache."""

    ENGINE = "engine"  # a real one on a CPU
    INTERPRETER = "interpreter"  # a whole engine, its kernels in Triton's interpreter
    READ = "read"  # of vLLM's source, and applied to it; nothing ran


class StateKind(NamedTuple):
    name: str
    backend: str  # in vLLM's `MambaAttentionBackendEnum`
    chunk: int = 1  # tokens that every kernel vLLM has for it computes at once, from where a pass begins; 1: any


MAMBA2 = StateKind("Mamba2", "MAMBA2")  # its kernels' chunks are configured
GDN = StateKind("gated delta net", "GDN_ATTN", chunk=64)
KDA = StateKind("KDA", "GDN_ATTN", chunk=64)
SHORT_CONV = StateKind("short convolution", "SHORT_CONV")
NGRAM_CONV = StateKind("convolution of n-grams", "SHORT_CONV")
MAMBA1 = StateKind("Mamba1", "MAMBA1")
LINEAR = StateKind("linear attention", "LINEAR")

KINDS = (MAMBA2, GDN, KDA, SHORT_CONV, NGRAM_CONV, MAMBA1, LINEAR)


class RecurrentLayer(NamedTuple):
    """A class of vLLM's."""

    path: str  # "module:Class"
    kind: StateKind
    shown: Shown
    core: str = ""  # its method that is replaced; empty: its states are not written inside a pass
    core_on_cpu: str = ""  # if that is another one
    on_rocm: bool = False  # whether the replaced method is the one that runs there, too
    drafts: bool = False  # whether the rows that verify drafts are known to keep their states then

    @property
    def name(self) -> str:
        return self.path.rpartition(":")[2]

    @property
    def cores(self) -> Sequence[str]:
        return tuple(filter(None, (self.core, self.core_on_cpu)))


_LAYERS = "vllm.model_executor.layers.mamba"

MAMBA2_MIXER = RecurrentLayer(
    f"{_LAYERS}.mamba_mixer2:MambaMixer2", MAMBA2, Shown.ENGINE, "conv_ssm_forward", on_rocm=True, drafts=True
)

QWEN_GDN = RecurrentLayer(
    f"{_LAYERS}.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention", GDN, Shown.ENGINE, "_forward_core", drafts=True
)

OLMO_GDN = RecurrentLayer(
    f"{_LAYERS}.gdn.olmo_gdn_linear_attn:OlmoHybridGatedDeltaNetAttention", GDN, Shown.INTERPRETER, "_forward_core"
)

KIMI_KDA = RecurrentLayer(
    f"{_LAYERS}.gdn.kimi_gdn_linear_attn:KimiGatedDeltaNetAttention", KDA, Shown.INTERPRETER, "_forward", drafts=True
)

# Their cores take rows that verify drafts from the metadata that Kimi-Linear's does; K3's comes of its own builder.
K3_KDA = RecurrentLayer("vllm.models.kimi_k3.nvidia.kda:KimiK3DeltaAttention", KDA, Shown.READ, "_forward", drafts=True)

GLM_KDA = RecurrentLayer(
    "vllm.models.glm5next.common.kda:Glm5NextLinearAttention", KDA, Shown.READ, "_forward", drafts=True
)

LING_KDA = RecurrentLayer(
    "vllm.model_executor.models.bailing_moe_v3:BailingMoeV3KimiDeltaAttention", KDA, Shown.READ, "_forward", drafts=True
)

QWEN_NGRAM = RecurrentLayer(
    "vllm.models.qwen4_exp.nvidia.ple_layer:Qwen4ExpPLELayer",
    NGRAM_CONV,
    Shown.INTERPRETER,
    "_short_conv_dilated_dispatch",
    drafts=True,
)

# Beside drafts neither it nor OLMo's was tried: no head is known for their models.
SHORT_CONVOLUTION = RecurrentLayer(
    f"{_LAYERS}.short_conv:ShortConv", SHORT_CONV, Shown.ENGINE, "forward_cuda", "forward_native"
)

INSIDE = (MAMBA2_MIXER, QWEN_GDN, OLMO_GDN, KIMI_KDA, K3_KDA, GLM_KDA, LING_KDA, QWEN_NGRAM, SHORT_CONVOLUTION)

MAMBA_MIXER = RecurrentLayer(f"{_LAYERS}.mamba_mixer:MambaMixer", MAMBA1, Shown.READ)

LINEAR_ATTENTION = RecurrentLayer(f"{_LAYERS}.linear.base:LinearAttention", LINEAR, Shown.READ)

CUT = (
    MAMBA_MIXER,
    LINEAR_ATTENTION,
    RecurrentLayer("vllm.models.kimi_k3.amd.kda:KimiK3DeltaAttention", KDA, Shown.READ),
    RecurrentLayer("vllm.models.qwen4_exp.amd.ple_layer:Qwen4ExpPLELayer", NGRAM_CONV, Shown.READ),
)

_BY_MODEL_TYPE = {  # the beginning of a text config's `model_type`
    "qwen3_next": (QWEN_GDN,),
    "qwen3_5": (QWEN_GDN,),
    "qwen4_exp": (QWEN_GDN, QWEN_NGRAM),
    "olmo_hybrid": (OLMO_GDN,),
    "kimi_linear": (KIMI_KDA,),
    "kimi_k3": (K3_KDA,),
    "glm5_next": (GLM_KDA,),
    "alice_ai": (KIMI_KDA,),
}

_BY_ATTRIBUTE = {  # that only the configs of this kind have
    "linear_attn_config": (KIMI_KDA,),
    "short_conv_kernel_size": (LING_KDA,),  # Ling-3.0, whose type is that of Ling-2.5, too
    "layer_group_size": (LINEAR_ATTENTION,),  # Ling-2.5
    "linear_num_value_heads": (QWEN_GDN,),
    "conv_L_cache": (SHORT_CONVOLUTION,),
    "mamba_dt_rank": (MAMBA_MIXER,),
    "mamba_num_heads": (MAMBA2_MIXER,),
    "mamba_n_heads": (MAMBA2_MIXER,),
    "n_mamba_heads": (MAMBA2_MIXER,),
}


def layers_in(config: Any) -> Sequence[RecurrentLayer]:
    """The recurrent layers of a model by its text config, the one that its matches follow from first; or none."""
    told: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    if (told.get("linear_attn_config") or {}).get("use_full_rank_gate"):
        return (K3_KDA,)  # its text config has the type of Kimi-Linear's
    model_type = str(told.get("model_type", ""))
    for beginning, layers in _BY_MODEL_TYPE.items():
        if model_type.startswith(beginning):
            return layers
    return next((layers for attribute, layers in _BY_ATTRIBUTE.items() if told.get(attribute)), ())


def kinds_in(config: Any) -> Sequence[StateKind]:
    """The kinds of states of a model, by its text config, as `layers_in` has them."""
    return tuple(dict.fromkeys(layer.kind for layer in layers_in(config)))


def shown_of(layers: Iterable[RecurrentLayer]) -> Shown:
    """How a model was shown: as that of its layers which was shown least."""
    return max((layer.shown for layer in layers), key=list(Shown).index)


def compression_in(config: Any) -> int:
    """Tokens that the attention index of a model keeps one key for, by its text config; 1 without one."""
    told: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    return int(told.get("indexer_compress_ratio") or told.get("index_kpool") or 1)
