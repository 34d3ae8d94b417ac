"""Families of models by the kind of their recurrent states, told by a model's name or by its `config.json`.

A `config.json` is read where it lies on this machine; nothing is fetched. What is told of a config is what the plugin
makes of it (tests/engine/unit/test_outlook.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from proxy.config_files import read_file
from proxy.errors import SettingsError
from proxy.http.json_body import loads


class KnownFamily(NamedTuple):
    """Models whose states are alike. Several words, types or fields stand with spaces between them."""

    states: str  # what they are called; empty: there are none
    words: str  # of which a model's name has one
    unit: int = 16  # tokens of which a hit is a multiple, unless a flag says otherwise
    types: str = ""  # beginnings of a config's `model_type`
    fields: str = ""  # of a config, which only this family has
    with_drafts: bool = True  # whether hints are given with speculative decoding
    inside: bool = True  # whether its states are kept inside a pass; otherwise each costs one


QWEN, MAMBA2 = "qwen3-next qwen3-coder-next qwen3.5 qwen3.6 qwen3.8", "mamba_num_heads mamba_n_heads n_mamba_heads"
NEMOTRON = "nemotron-3 nemotron-h nemotron-nano-9b nemotron-nano-12b"
KIMI = "linear_attn_config short_conv_kernel_size"

FAMILIES = (
    KnownFamily("gated delta nets and n-grams", "flash-next qwen4-exp", 64, "qwen4_exp"),
    KnownFamily("gated delta nets", QWEN, 64, "qwen3_next qwen3_5", "linear_num_value_heads"),
    KnownFamily("gated delta nets of Olmo", "olmo-hybrid", 64, "olmo_hybrid", with_drafts=False),
    KnownFamily("KDA", "glm-5.3-flash ling-3 kimi-linear kimi-k3", 64, "kimi_linear kimi_k3 glm5_next alice_ai", KIMI),
    KnownFamily(
        "Mamba2", f"{NEMOTRON} granite-4.0-h falcon-h1 bamba zamba2", 16, "nemotron_h falcon_h1 bamba zamba2", MAMBA2
    ),
    KnownFamily("short convolutions", "lfm2", fields="conv_L_cache", with_drafts=False),
    KnownFamily("Mamba1", "jamba", fields="mamba_dt_rank", with_drafts=False, inside=False),
    KnownFamily(
        *("linear attention", "ling-2.5 ring-2.5 minimax-text minimax-m1", 16, "minimax_text minimax_m1"),
        *("layer_group_size", False, False),
    ),
)

ATTENTION = KnownFamily(
    "",
    "gpt-oss llama-3 mistral- ministral deepseek-v3 deepseek-r1 glm-4.5 glm-4.6 glm-4.7 gemma-3 gemma-4 qwen2 qwen2.5 "
    "qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-30b qwen3-32b qwen3-235b qwen3-coder-30b qwen3-coder-480b "
    "qwen3-vl",
)

# In a config of layers that may keep a state, known here or not.
_MAYBE_RECURRENT = re.compile("mamba|ssm|conv|linear|recurr|rwkv|lru|delta|hyena|hybrid|block_type|attn_type", re.I)

# vLLM's parser of a model's tool calls, by a part of its name.
TOOL_PARSERS = {
    "qwen3-next": "hermes",
    "qwen3-coder": "qwen3_xml",
    "qwen3.": "qwen3_xml",
    "nemotron-3": "qwen3_xml",
    "glm-5.3": "glm47",
    "granite-4": "granite4",
    "lfm2": "lfm2",
}


class FoundFamily(NamedTuple):
    family: KnownFamily | None  # None: not known
    source: str  # what told it


def family_of(model: str, caches: Sequence[Path] = ()) -> FoundFamily:
    """By the config of a model given as a folder; else by its name; else by its config in one of the `caches`."""
    if (own := _config_in(Path(os.path.expanduser(model)))) and (family := _of_config(own)):
        return FoundFamily(family, str(own))
    name = model.lower().replace("_", "-")
    for family in (*FAMILIES, ATTENTION):
        if re.search(rf"(?<![a-z0-9])(?:{'|'.join(map(re.escape, family.words.split()))})(?!\d)", name):
            return FoundFamily(family, "the model's name")
    for cache in caches:
        if (path := _cached(model, cache)) and (family := _of_config(path)):
            return FoundFamily(family, str(path))
    return FoundFamily(None, "")


def hugging_face_caches(*environments: Mapping[str, str]) -> Iterator[Path]:
    """Folders in which models lie that were fetched before."""
    for variables in environments:
        home = variables.get("HF_HOME") or f"{variables.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        hub = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
        yield Path(os.path.expanduser(hub))


def _cached(model: str, cache: Path) -> Path | None:
    """The newest config of a model, named ORGANISATION/NAME, that lies in a cache."""
    if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)?", model, re.ASCII):
        return None
    folder = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    with suppress(OSError):
        found = [path for each in folder.iterdir() if (path := _config_in(each))]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)
    return None


def _config_in(folder: Path) -> Path | None:
    path = folder / "config.json"
    return path if os.path.isfile(path) else None  # which takes any name, as long ones


def _of_config(path: Path) -> KnownFamily | None:
    try:
        config = loads(read_file("config.json", path))
        text = config.get("text_config") or config.get("llm_config") or config
        kind, layers = str(text.get("model_type") or config.get("model_type")), " ".join(text.get("layer_types") or ())
    except (SettingsError, ValueError, TypeError, AttributeError):
        return None
    for family in FAMILIES:
        if kind.startswith((*family.types.split(),)):
            return family
    told = layers or " ".join((kind, *text))  # of layers that are named, no other field counts
    if text.get("num_attention_heads") and not _MAYBE_RECURRENT.search(told):
        return ATTENTION
    return next((family for family in FAMILIES if any(map(text.get, family.fields.split()))), None)
