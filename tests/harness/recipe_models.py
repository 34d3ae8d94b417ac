"""The models of the recipes that hybrids are run by, as far as their caches depend on them, and what is said of each.

Figures are those of the published `config.json`, as repeated in public code that loads or sizes the model; where one
was not found a comment says what stands in for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.bench.harness.servers import CACHE
from tests.harness.published_models import MODELS as PUBLISHED
from tests.harness.published_models import NEMOTRON

IMAGE_LIBRARIES = Path(__file__).parent / "image_libraries"

Config = Mapping[str, Any]


def _qwen(layers: int, **figures: int) -> Config:
    """A model of Qwen3.5, 3.6 or 3.8: three gated delta nets, then attention."""
    experts = "num_experts" in figures
    text = {
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": _every(4, layers, "full_attention"),
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "mtp_num_hidden_layers": 1,
        **figures,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if experts else "Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if experts else "qwen3_5",
        "text_config": text,
    }


def _every(interval: int, layers: int, attention: str) -> list[str]:
    return [attention if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]


QWEN_27B = _qwen(
    64,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=24,
    num_key_value_heads=4,
    linear_num_value_heads=48,
)

SUPER = PUBLISHED["nemotron-3-super-120b"].config

NANO = PUBLISHED["nemotron-3-nano-30b"].config

ULTRA_ATTENTION = (7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98)  # of 108 layers


def _ultra_layers() -> list[str]:
    """Mamba2 and experts take turns, and attention stands between them."""
    kinds, turn = [], 0
    for layer in range(108):
        if layer in ULTRA_ATTENTION:
            kinds.append("attention")
        else:
            kinds.append(("mamba", "moe")[turn % 2])
            turn += 1
    return kinds


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
    "Qwen3.6-35B-A3B": _qwen(
        40,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen3.6-27B": QWEN_27B,
    "Qwen3.8-27B": QWEN_27B,
    "Qwen3.5-122B": _qwen(
        48,
        hidden_size=3072,
        num_attention_heads=32,
        num_key_value_heads=2,
        linear_num_value_heads=64,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "Qwen3.5-397B": _qwen(
        60,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=2,
        linear_num_value_heads=64,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "Qwen3.8-Flash-Next": {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": {
            "model_type": "qwen4_exp_text",
            "hidden_size": 2560,
            "num_hidden_layers": 48,
            "layer_types": _every(4, 48, "full_attention"),
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
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
            "max_position_embeddings": 262144,
            "vocab_size": 248320,
            "mtp_num_hidden_layers": 1,
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
    "Nemotron-3-Super": SUPER | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    "Nemotron-3-Ultra": NEMOTRON
    | {
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "mamba_num_heads": 256,
        "layers_block_type": _ultra_layers(),
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
    "Nemotron-3.5-Lightning": NANO,  # as many layers of each kind; its own figures were not found
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
    "Kimi-Linear-48B-A3B": PUBLISHED["kimi-linear-48b"].config,
    "LFM2.5-8B-A1B": PUBLISHED["lfm2-8b"].config,
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

NOT_BESIDE = "beside drafts, states have to be"

INSIDE, INTERPRETED, READ = (
    "inside the pass (shown on an engine)",
    "inside the pass (shown in the interpreter of a GPU's kernels)",
    "inside the pass (read, and nothing ran)",
)


NOT_SERVED = ""  # vLLM starts no hybrid with the recipe's connector


@dataclass(frozen=True)
class Recipe:
    """How a model is run, as far as its cache depends on it; and what is said of its states."""

    model: str
    flags: Sequence[str] = ()
    drafts: Mapping[str, Any] = field(default_factory=dict)  # `--speculative-config`
    connector: str = ""
    states: str = INSIDE
    refused: str = ""  # words of the cause why hints are

    def flags_in(self, folder: Path) -> list[str]:
        """The arguments of `vllm serve` behind the model; `folder`: of the models' folders."""
        flags = ["--enable-prefix-caching", *self.flags]
        if self.drafts:
            head = {"model": str(folder / self.drafts["model"])} if "model" in self.drafts else {}
            flags += ["--speculative-config", json.dumps({**self.drafts, **head})]
        if self.connector:
            flags += ["--kv-transfer-config", json.dumps({"kv_connector": self.connector, "kv_role": "kv_both"})]
        return flags


def _mtp(tokens: int) -> Mapping[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": tokens}


def _head_of(method: str, head: str, tokens: int) -> Mapping[str, Any]:
    return {"method": method, "model": head, "num_speculative_tokens": tokens}


def _kv(dtype: str) -> tuple[str, str]:
    return "--kv-cache-dtype", dtype


def _tp(ranks: int) -> tuple[str, str]:
    return "--tensor-parallel-size", str(ranks)


FP8 = _kv("fp8")

SSM32 = "--mamba-ssm-cache-dtype", "float32"

DFLASH2 = "Qwen3.8-27B-DFlash2"


def _qwen_27b(*flags: str, drafts: int = 0, window: int = 0, model: str = "Qwen3.8-27B") -> Recipe:
    if window:
        return Recipe(model, flags, _head_of("dflash", DFLASH2, window))
    return Recipe(model, flags, _mtp(drafts) if drafts else {})


def _flash_next(*flags: str, drafts: int) -> Recipe:
    return Recipe("Qwen3.8-Flash-Next", flags, _mtp(drafts), "", INTERPRETED)


def _glm(*flags: str, drafts: int) -> Recipe:
    return Recipe("GLM-5.3-Flash", flags, _mtp(drafts), "", READ)


LIGHTNING = Recipe(
    "Nemotron-3.5-Lightning",
    (*FP8, "--mamba-ssm-cache-dtype", "float16"),
    _head_of("dspark", "Nemotron-3.5-Lightning-DSpark", 7),
)

A3B = "Qwen3.6-35B-A3B"

# By the numbers of the recipes. Flags of forks are left out.
RECIPES: Mapping[int, Recipe] = {
    1: Recipe(A3B, FP8),
    2: _qwen_27b(*FP8),
    3: Recipe(A3B, FP8),
    4: Recipe(A3B, (*FP8, "--block-size", "128"), _mtp(4)),
    5: _qwen_27b(*FP8, drafts=3),
    6: _qwen_27b(window=7),
    7: _qwen_27b(*FP8, *_tp(2), window=8),
    8: _flash_next(*FP8, "--block-size", "16", drafts=4),
    9: _flash_next(*FP8, *_tp(2), drafts=4),
    10: _flash_next(*_tp(4), drafts=3),
    11: _flash_next(*FP8, drafts=3),
    12: _flash_next(*FP8, *_tp(2), drafts=3),
    13: _glm(*_kv("nvfp4_ds_mla"), *_tp(2), "--block-size", "256", drafts=3),
    14: _glm(*_kv("fp8_ds_mla"), *_tp(4), drafts=5),
    15: _glm(*_kv("fp8_e4m3"), *_tp(2), "--block-size", "2304", drafts=4),
    16: Recipe("Nemotron-3-Super", (*FP8, *SSM32), _mtp(3)),
    17: Recipe("Nemotron-3-Super", (*FP8, *SSM32)),
    18: Recipe("Nemotron-3-Nano", FP8),
    19: Recipe("Nemotron-3-Nano-Omni", FP8),
    20: LIGHTNING,
    21: LIGHTNING,
    22: Recipe("Nemotron-3-Ultra", (*FP8, *SSM32, *_tp(4)), _mtp(4)),
    23: Recipe("Qwen3.5-397B", (*FP8, *_tp(2))),
    24: Recipe("Qwen3.5-397B", ("--pipeline-parallel-size", "3")),
    25: Recipe("Qwen3.5-122B", _tp(2)),
    26: Recipe(A3B, FP8, _mtp(3)),
    27: Recipe(A3B, _tp(2), _head_of("dflash", f"{A3B}-DFlash", 15)),
    28: _qwen_27b(*FP8, drafts=2, model="Qwen3.6-27B"),
    29: _qwen_27b(drafts=2),
    30: _qwen_27b(*_kv("fp8_e4m3"), drafts=3),
    31: _qwen_27b(drafts=4),
    32: _qwen_27b(window=7),
    33: Recipe("Qwen3.6-27B", _kv("int8_per_token_head"), _mtp(3), "LMCacheMPConnector", states=NOT_SERVED),
    34: Recipe("Ling-3.0-flash", (*_tp(4), "--trust-remote-code"), _mtp(3), "", READ),
    35: Recipe("Kimi-Linear-48B-A3B", _tp(4), states=INTERPRETED),
    36: Recipe("LFM2.5-8B-A1B"),
}

# Nobody's: of what is refused beside drafts.
NOT_TRIED = Recipe(
    "LFM2.5-8B-A1B", drafts={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}, refused=NOT_BESIDE
)

# Each command line in turn, as on a GPU: as it stands, and without a trial of hints beside drafts.
IN_A_PROCESS = """
import json, os, sys
from engine_patches import plugin
from engine_patches.commands import explain
plugin.register()
said = []
for arguments in json.load(sys.stdin):
    each = []
    for switch in "auto", "1":
        os.environ["SEAMARK_DRAFTS"] = switch
        try:
            each.append("\\n".join(explain.explained(arguments, explain.GPU)))
        except explain.CannotExplain as error:
            each.append(f"cannot: {error}")
    said.append(each)
print(json.dumps(said))
"""


def write_models(folder: Path, names: Collection[str | None]) -> None:
    """A folder for each of these models and draft heads, with its config and no weights."""
    for name, config in {**MODELS, **HEADS}.items():
        if name in names:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
            for beside, text in BESIDE_CONFIG.get(name, {}).items():
                (folder / name / beside).write_text(text)


def explained(recipes: Sequence[Recipe]) -> list[tuple[str, str]]:
    """What is said of each, as it stands and without a trial. Raises `subprocess.CalledProcessError`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(IMAGE_LIBRARIES), os.environ.get("PYTHONPATH", ""))),
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "seamark",
        "VLLM_CACHE_ROOT": str(
            (CACHE / "recipe-models").resolve()
        ),  # what is found with these libraries is not for other runs
    }
    with tempfile.TemporaryDirectory(prefix="seamark-recipes-") as given:
        folder = Path(given)
        write_models(folder, {recipe.model for recipe in recipes} | {recipe.drafts.get("model") for recipe in recipes})
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS],
            input=json.dumps([[str(folder / each.model), *each.flags_in(folder)] for each in recipes]),
            env={**environment, "HF_MODULES_CACHE": str(folder / "modules")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [(standing, switched) for standing, switched in json.loads(done.stdout.splitlines()[-1])]
