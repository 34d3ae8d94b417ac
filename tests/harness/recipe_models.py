"""Hybrid models and draft heads, those of tests/recipes among them, as far as their caches depend on them; and what
`seamark worker --explain` makes of some.

Figures are those of the published `config.json`, as repeated in public code that loads or sizes the model; where one
was not found a comment says what stands in for it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches import families
from engine_patches.commands.explain import StateCost

Config = Mapping[str, Any]

# The configs of `PUBLISHED`. Those of Qwen3-Next's layers are Qwen3.5's and 3.6's, too.
CONFIGS: Mapping[str, Config] = json.loads((Path(__file__).parents[1] / "data/published.json").read_text())


@dataclass(frozen=True)
class Published:
    """A model's config, as far as its cache depends on it, and the same figures as plain numbers."""

    config: Config
    flags: tuple[str, ...]
    recurrent: int  # layers
    attention: int
    convolution: int  # values of a layer's state, two bytes each
    state: int  # values of a layer's state besides the convolution's
    state_bytes: int  # of each of these
    kv: int  # bytes of one token in one attention layer
    step: int = 16  # a block is a multiple of so many tokens


# A config of the same name, and the figures.
PUBLISHED = {
    name: Published(CONFIGS[name], flags, *figures)
    for name, flags, figures in (
        ("nemotron-3-nano-30b", (), (23, 6, 3 * (64 * 64 + 2 * 8 * 128), 64 * 64 * 128, 4, 2 * 2 * 128 * 2)),
        (
            "nemotron-3-super-120b",
            ("--kv-cache-dtype", "fp8"),
            (40, 8, 3 * (128 * 64 + 2 * 8 * 128), 128 * 64 * 128, 4, 2 * 2 * 128 * 1),
        ),
        ("qwen3-next-80b", (), (36, 12, 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128, 2, 2 * 2 * 256 * 2)),
        (
            "falcon-h1-34b",
            ("--mamba-ssm-cache-dtype", "float32"),
            (72, 72, 3 * (4096 + 2 * 2 * 256), 32 * 128 * 256, 4, 2 * 4 * 128 * 2),
        ),
        ("kimi-linear-48b", (), (20, 7, 3 * 3 * 32 * 128, 32 * 128 * 128, 4, (512 + 64) * 2, 128)),
        ("lfm2-8b", (), (18, 6, 2 * 2048, 0, 2, 2 * 8 * 64 * 2)),
    )
}


def _qwen_text(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, experts: Config) -> Config:
    """The language model of Qwen3.5, 3.6 and 3.8: three gated delta nets, then attention."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": _every(4, layers, "full_attention"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "mtp_num_hidden_layers": 1,
        **experts,
    }


def _experts(number: int, per_token: int, size: int) -> Config:
    sizes = {"moe_intermediate_size": size, "shared_expert_intermediate_size": size}
    return {"num_experts": number, "num_experts_per_tok": per_token, **sizes}


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, experts: Config) -> Config:
    """With `experts`, or else with `intermediate_size`."""
    kind, moe = ("qwen3_5_moe", "Moe") if "num_experts" in experts else ("qwen3_5", "")
    text = _qwen_text(layers, hidden, heads, kv_heads, value_heads, experts)
    return {
        "architectures": [f"Qwen3_5{moe}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {"model_type": f"{kind}_text", **text},
    }


def _every(interval: int, layers: int, attention: str) -> list[str]:
    return [attention if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]


QWEN_27B = _qwen(64, 5120, 24, 4, 48, {"intermediate_size": 17408})

NANO = CONFIGS["nemotron-3-nano-30b"]

ULTRA_ATTENTION = (7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98)  # of 108 layers
_TURNS = itertools.cycle(("mamba", "moe"))

# What a model's folder holds besides: transformers does not know Ling's config, and vLLM has a class of it.
BESIDE_CONFIG = {
    "Ling-3.0-flash": {
        "configuration_bailing_moe_v3.py": """
from vllm.transformers_utils.configs.bailing_moe_v3_vl import BailingMoeV3TextConfig


class BailingMoeV3Config(BailingMoeV3TextConfig):
    pass
""",
    },
}

MODELS: Mapping[str, Config] = {
    "Qwen3.6-35B-A3B": _qwen(40, 2048, 16, 2, 32, _experts(256, 8, 512)),
    "Qwen3.6-27B": QWEN_27B,
    "Qwen3.8-27B": QWEN_27B,
    "Qwen3.5-122B": _qwen(48, 3072, 32, 2, 64, _experts(256, 8, 1024)),
    "Qwen3.5-397B": _qwen(60, 4096, 32, 2, 64, _experts(512, 10, 1024)),
    "Qwen3.8-Flash-Next": {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": {
            "model_type": "qwen4_exp_text",
            **_qwen_text(48, 2560, 24, 2, 48, _experts(512, 10, 640)),
            "hc_count": 4,
            "hc_lowrank": 320,
            "ple_layer_ids": [2],
            "ple_embed_dim": 2560,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 8,
            "split_ngram_parts": 128,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "eos_token_id": 248044,
        },
    },
    "GLM-5.3-Flash": {  # all else is as transformers has it, whose defaults are this model's but for the pool
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text",
            "num_hidden_layers": 45,
            "index_kpool": 4,
            "num_nextn_predict_layers": 1,
        },
    },
    "Nemotron-3-Nano": NANO,
    "Nemotron-3-Nano-Omni": {  # Nano's layers; the encoders of images and sound have no part in the cache
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "nemotron_h_omni",
        "text_config": NANO,
    },
    "Nemotron-3-Super": {
        **CONFIGS["nemotron-3-super-120b"],
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
    "Nemotron-3-Ultra": {
        **{name: value for name, value in NANO.items() if name != "hybrid_override_pattern"},
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "mamba_num_heads": 256,
        "layers_block_type": ["attention" if layer in ULTRA_ATTENTION else next(_TURNS) for layer in range(108)],
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
    # As many layers of each kind; its own figures were not found, and its recipes are as long.
    "Nemotron-3.5-Lightning": {**NANO, "max_position_embeddings": 1048576},
    "Ling-3.0-flash": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "auto_map": {"AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config"},
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_hidden_layers": 42,
        "layer_group_size": 6,  # five to one
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 262144,
        "vocab_size": 157184,
    },
    "Kimi-Linear-48B-A3B": CONFIGS["kimi-linear-48b"],
    "LFM2.5-8B-A1B": CONFIGS["lfm2-8b"],
}


def _head(architecture: str, layer_types: Sequence[str], **figures: Any) -> Config:
    """A draft head of attention alone."""
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "use_sliding_window": "sliding_attention" in layer_types,
        "sliding_window": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 2, 3]},
        "block_size": 16,
        **figures,
    }


SLIDING, FULL = "sliding_attention", "full_attention"

HEADS: Mapping[str, Config] = {
    "Qwen3.8-27B-DFlash2": _head("DFlash2DraftModel", [SLIDING] * 5, hidden_size=5120),
    "Qwen3.6-35B-A3B-DFlash": _head("DFlashDraftModel", [SLIDING] * 4 + [FULL], hidden_size=2048),
    # Of Lightning's head only the method and the number of layers are known.
    "Nemotron-3.5-Lightning-DSpark": _head("Qwen3DSparkModel", [FULL] * 6, hidden_size=2688, vocab_size=131072),
}


def write_models(folder: Path, names: Collection[str | None]) -> None:
    """A folder for each of these models and draft heads, with its config and no weights."""
    for name, config in {**MODELS, **HEADS, **{name: each.config for name, each in PUBLISHED.items()}}.items():
        if name in names:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
            for beside, text in BESIDE_CONFIG.get(name, {}).items():
                (folder / name / beside).write_text(text)


LAYERS = {layer.path: layer for layer in (*families.INSIDE, *families.CUT)}


class Explained(NamedTuple):
    """One model."""

    cost: StateCost
    blocks: int  # of 64 GiB, as vLLM counts them
    report: str
    newest_runner: bool  # vLLM's model runner V2, a GPU's default


# All models in one process, with the block sizes of a GPU; and what vLLM makes of the same cache groups.
IN_A_PROCESS = """
import json, sys
from engine_patches import plugin
from engine_patches.commands import explain
plugin.register()
costs, seen = {}, {}
with explain._gpu_kernels():
    from vllm.v1.core import kv_cache_utils
    get_groups = kv_cache_utils.get_kv_cache_groups
    def record(config, specs):
        seen["groups"] = get_groups(config, specs)
        return seen["groups"]
    kv_cache_utils.get_kv_cache_groups = record
    for folder, *flags in json.load(sys.stdin):
        config = explain.configure([folder, "--enable-prefix-caching", *flags])
        cost = explain.cost_of(config)
        cache = kv_cache_utils.get_kv_cache_config_from_groups(config, seen["groups"], 64 << 30)
        text = "\\n".join(explain.report(cost, None, 0.5))
        layers = [(layer.path, many) for layer, many in cost.layers.items()]
        fields = {**vars(cost), "layers": layers}
        costs[folder] = fields, cache.num_blocks, text, config.use_v2_model_runner
print(json.dumps(costs))
"""


def explained() -> dict[str, Explained]:
    """By model. Raises `subprocess.CalledProcessError`."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "seamark"}
    with tempfile.TemporaryDirectory(prefix="seamark-published-") as folder:
        write_models(Path(folder), PUBLISHED)
        asked = json.dumps([[f"{folder}/{name}", *model.flags] for name, model in PUBLISHED.items()])
        command = [sys.executable, "-c", IN_A_PROCESS]
        done = subprocess.run(command, input=asked, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        Path(path).name: Explained(
            StateCost(**cost | {"layers": {LAYERS[layer]: many for layer, many in cost["layers"]}}), *more
        )
        for path, (cost, *more) in answers.items()
    }
