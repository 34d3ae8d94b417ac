"""What states cost in real models: computed here from the published figures, by vLLM, and by `--explain`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_patches.commands import explain
from engine_patches.commands.explain import GDN, GIB, CannotExplain, Cost, advice, family_of, layer_kinds, report

NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "max_position_embeddings": 262144,
}

# vLLM's module of Qwen3.5 and 3.6 wants an image library that a CPU has not; their layers are those of Qwen3-Next.
QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}

KIMI_ATTENTION = [4, 8, 12, 16, 20, 24, 27]


@dataclass(frozen=True)
class Published:
    """A model's config, as far as its cache depends on it, and the same figures as plain numbers."""

    config: dict[str, object]
    flags: tuple[str, ...]
    recurrent: int  # layers
    attention: int
    convolution: int  # values of a layer's state, two bytes each
    state: int  # values of a layer's state besides the convolution's
    state_bytes: int  # of each of these
    kv: int  # bytes of one token in one attention layer
    step: int = 16  # a block is a multiple of so many tokens


MODELS = {
    "nemotron-3-nano-30b": Published(
        NEMOTRON
        | {
            "hidden_size": 2688,
            "mamba_num_heads": 64,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
        (),
        *(23, 6, 3 * (64 * 64 + 2 * 8 * 128), 64 * 64 * 128, 4, 2 * 2 * 128 * 2),
    ),
    "nemotron-3-super-120b": Published(
        NEMOTRON
        | {
            "hidden_size": 4096,
            "mamba_num_heads": 128,
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM"
            "*EMEMEMEME",
        },
        ("--kv-cache-dtype", "fp8"),
        *(40, 8, 3 * (128 * 64 + 2 * 8 * 128), 128 * 64 * 128, 4, 2 * 2 * 128 * 1),
    ),
    "qwen3-next-80b": Published(
        QWEN | {"num_hidden_layers": 48},
        (),
        *(36, 12, 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128, 2, 2 * 2 * 256 * 2),
    ),
    "qwen3.5-35b": Published(
        QWEN | {"num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
        ("--mamba-ssm-cache-dtype", "float32"),
        *(30, 10, 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128, 4, 2 * 2 * 256 * 2),
    ),
    "granite-4.0-h-small": Published(
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "hidden_size": 4096,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "vocab_size": 100352,
            "max_position_embeddings": 131072,
        },
        (),
        *(36, 4, 3 * (128 * 64 + 2 * 128), 128 * 64 * 128, 2, 2 * 8 * 128 * 2),
    ),
    "falcon-h1-34b": Published(
        {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "hidden_size": 5120,
            "num_hidden_layers": 72,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
            "vocab_size": 261120,
            "max_position_embeddings": 262144,
        },
        ("--mamba-ssm-cache-dtype", "float32"),
        *(72, 72, 3 * (4096 + 2 * 2 * 256), 32 * 128 * 256, 4, 2 * 4 * 128 * 2),
    ),
    "kimi-linear-48b": Published(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "linear_attn_config": {
                "full_attn_layers": KIMI_ATTENTION,
                "kda_layers": [layer for layer in range(1, 28) if layer not in KIMI_ATTENTION],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_intermediate_size": 1024,
            "vocab_size": 163840,
            "max_position_embeddings": 1048576,
        },
        (),
        *(20, 7, 3 * 3 * 32 * 128, 32 * 128 * 128, 4, (512 + 64) * 2, 128),
    ),
    "lfm2-8b": Published(
        {
            "architectures": ["Lfm2MoeForCausalLM"],
            "model_type": "lfm2_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
            "vocab_size": 65536,
            "max_position_embeddings": 128000,
        },
        (),
        *(18, 6, 2 * 2048, 0, 2, 2 * 8 * 64 * 2),
    ),
}

# All models in one process, with the block sizes of a GPU; and what vLLM makes of the same cache groups.
IN_A_PROCESS = """
import dataclasses, json, sys
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
        costs[folder] = dataclasses.asdict(cost), cache.num_blocks, "\\n".join(explain.report(cost, None, 0.5))
print(json.dumps(costs))
"""


@pytest.fixture(scope="module")
def explained(tmp_path_factory) -> dict[str, tuple[Cost, int, str]]:
    """By model: its cost, the blocks of 64 GiB as vLLM counts them, and the report."""
    folder = tmp_path_factory.mktemp("published")
    wanted = []
    for name, model in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"} | model.config))
        wanted.append([str(folder / name), *model.flags])
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "seamark"}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        input=json.dumps(wanted),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        Path(path).name: (Cost(**cost | {"family": explain.Family(*cost["family"])}), blocks, text)
        for path, (cost, blocks, text) in answers.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_bytes_and_blocks_are_those_of_the_published_figures_and_of_vllm(explained, name):
    model, (cost, blocks, text) = MODELS[name], explained[name]
    page = 2 * model.convolution + model.state_bytes * model.state
    assert (cost.recurrent_layers, cost.attention_layers) == (model.recurrent, model.attention)
    assert cost.state_bytes == model.recurrent * page
    # A block is as long as its KV needs to be as large as a layer's state, and cache groups are as large as the smaller
    # kind has layers.
    tokens = math.ceil(page / (model.step * model.kv)) * model.step
    layers = min(model.recurrent, model.attention)
    assert cost.block_tokens == tokens and cost.block_bytes == layers * tokens * model.kv
    assert cost.state_blocks == math.ceil(model.recurrent / layers) and cost.attention_groups == 1
    assert cost.displaced_tokens == cost.state_blocks * tokens
    assert blocks == 64 * GIB // cost.block_bytes
    assert cost.states_in(64 * GIB) == blocks // cost.state_blocks
    assert f"{cost.displaced_tokens:,} tokens of KV" in text


def cost(**changes: object) -> Cost:
    figures = {
        "model": "toy",
        "recurrent_layers": 4,
        "attention_layers": 2,
        "family": explain.MAMBA2,
        "state_types": ("bfloat16", "float32"),
        "kv_type": "bfloat16",
        "state_bytes": 100,
        "state_blocks": 2,
        "block_bytes": 60,
        "block_tokens": 32,
        "attention_groups": 1,
        "match_unit": 16,
    }
    return Cost(**figures | changes)


def test_states_are_counted_in_whole_blocks_and_their_share_in_blocks_too():
    toy = cost()
    assert toy.bytes_in_cache == 120 and toy.displaced_tokens == 64
    assert toy.states_in(60 * 7 + 59) == 3 and toy.states_in(60 * 7, 0.5) == 1
    assert toy.tokens_in(60 * 7 + 59) == 7 * 32


def test_what_is_not_known_is_said():
    (line,) = [line for line in report(cost(), None, 0.5) if "  cache  " in line]
    assert "for example" in line and "--kv-cache-memory-bytes" in line
    (line,) = [line for line in report(cost(), (5 * GIB, "as configured"), 0.5) if "  cache  " in line]
    assert "5.0 GiB (as configured)" in line


@pytest.mark.parametrize(
    ("changes", "kept", "said"),
    [
        ({}, 100, ""),
        ({"state_types": ("bfloat16", "bfloat16")}, 100, "--mamba-ssm-cache-dtype float32"),
        ({"family": GDN, "state_types": ("bfloat16", "bfloat16")}, 100, "--mamba-ssm-cache-dtype float32"),
        ({"family": explain.OTHERS["conv_L_cache"]}, 100, "a pass each"),
        ({}, 3, "room for 3 states"),
    ],
)
def test_the_advice_fits_the_family_and_the_types(changes, kept, said):
    lines = list(advice(cost(**changes), kept))
    assert len(lines) == bool(said) and said in "".join(lines)


class Config:
    """A model's text config."""

    def __init__(self, model_type: str, **given: object) -> None:
        self.model_type = model_type
        vars(self).update(given)


def test_a_config_of_an_unknown_kind_is_refused_in_one_sentence():
    with pytest.raises(CannotExplain, match="does not say which of its layers"):
        layer_kinds(Config("toy"))
    with pytest.raises(CannotExplain, match="sliding_attention"):
        layer_kinds(Config("toy", layer_types=["sliding_attention", "mamba"]))
    with pytest.raises(CannotExplain, match="not known here"):
        family_of(Config("toy"))


def test_a_model_that_vllm_does_not_know_gets_one_sentence_and_nothing_is_started(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "architectures": ["Nobody"]}))
    command = [sys.executable, "-m", "engine_patches", "worker", "--explain", "--model", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("seamark worker: vLLM cannot configure") and "unheard_of" in line
