"""Hybrid models by their published figures, and what `seamark worker --explain` makes of them.

`python -m tests.harness.published_models` writes the table in engine_patches/HOW.md of when moving a state pays.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine_patches import families
from engine_patches.commands.explain import StateCost

DOCUMENT = Path(__file__).parents[2] / "engine_patches" / "HOW.md"

BEGIN = "<!-- moving: `python -m tests.harness.published_models` writes this table -->\n"
END = "<!-- /moving -->\n"

MB = 10**6

MEDIA = {"disk, 1 GB/s": 1e9, "disk, 6 GB/s": 6e9, "10 Gbit/s": 1.25e9, "200 Gbit/s": 25e9}  # bytes per second

PACES = (0.5e-3, 0.03e-3)  # seconds of prefill a token: a Spark's of a large model, and a data centre GPU's


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
    wanted = []
    with tempfile.TemporaryDirectory(prefix="seamark-published-") as folder:
        for name, model in MODELS.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"} | model.config))
            wanted.append([str(Path(folder) / name), *model.flags])
        command = [sys.executable, "-c", IN_A_PROCESS]
        done = subprocess.run(
            command, input=json.dumps(wanted), env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        Path(path).name: Explained(
            StateCost(**cost | {"layers": {LAYERS[layer]: many for layer, many in cost["layers"]}}), *more
        )
        for path, (cost, *more) in answers.items()
    }


def worth_moving(cost: StateCost, bytes_per_second: float, token_seconds: float) -> int | None:
    """From how many tokens on it takes less time to move a state, and the attention blocks before it, than to compute
    them; None if never, as a block takes longer to move than its tokens to compute."""
    block_seconds = cost.attention_groups * cost.block_bytes / bytes_per_second
    if block_seconds >= cost.block_tokens * token_seconds:
        return None
    seconds, blocks = cost.bytes_in_cache / bytes_per_second, 0
    while True:
        seconds, blocks = seconds + block_seconds, blocks + 1
        units = math.ceil(round(seconds / token_seconds / cost.match_unit, 9))
        if units * cost.match_unit <= blocks * cost.block_tokens:
            return units * cost.match_unit


def table(costs: Mapping[str, StateCost]) -> str:
    """From how many tokens on a state is worth moving, for each model, medium and pace."""
    lines = [("", "a state, a block of attention", *MEDIA), ("---",) * (2 + len(MEDIA))]
    lines += [(name, _sizes(cost), *(_tokens(cost, rate) for rate in MEDIA.values())) for name, cost in costs.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _sizes(cost: StateCost) -> str:
    block = cost.attention_groups * cost.block_bytes
    return f"{cost.bytes_in_cache / MB:,.1f} MB, {block / MB:,.1f} MB ({cost.block_tokens:,} tokens)"


def _tokens(cost: StateCost, rate: float) -> str:
    found = (worth_moving(cost, rate, pace) for pace in PACES)
    return ", ".join("never" if tokens is None else f"{tokens:,}" for tokens in found)


def with_table(text: str, costs: Mapping[str, StateCost]) -> str:
    """The document with the table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table(costs) + END + rest.partition(END)[2]


if __name__ == "__main__":
    found = {name: each.cost for name, each in explained().items()}
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), found))
