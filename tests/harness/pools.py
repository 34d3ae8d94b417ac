"""The table of pools in deploy/SPARK.md, reckoned as by `seamark worker --explain`: `python -m tests.harness.pools`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.harness.recipe_models import Explained, explained

DOCUMENT = Path(__file__).parents[2] / "deploy" / "SPARK.md"
MARK = "<!-- pools: `python -m tests.harness.pools` writes this table -->"

MEMORY, UTILIZATION, BITS, SHARE = 128 * 10**9, 0.8, 4.5, 0.5  # of a Spark; and of a parameter in NVFP4

NAMES = {
    "nemotron-3-nano-30b": "Nemotron-3 Nano 30B",
    "nemotron-3-super-120b": "Nemotron-3 Super 120B, fp8 KV",
    "qwen3-next-80b": "Qwen3-Next 80B",
    "falcon-h1-34b": "Falcon-H1 34B",
    "kimi-linear-48b": "Kimi-Linear 48B",
}


def table(models: Mapping[str, Explained]) -> str:
    lines = [
        "| model | cache | blocks | context | at once | warm at 32,768 | at 131,072 | caching costs |",
        "|---" * 8 + "|",
    ]
    for name, shown in NAMES.items():
        cost = models[name].cost
        size = int(MEMORY * UTILIZATION - int(name.rpartition("-")[2][:-1]) * 10**9 * BITS / 8)
        blocks = size // cost.block_bytes
        warm = [f"{cost.warm(blocks, SHARE, tokens):,}" for tokens in (32_768, 131_072)]
        costs = cost.caching_blocks * cost.block_tokens // cost.attention_groups
        at_once = f"{blocks / cost.request_blocks:.1f}"
        cells = [
            shown,
            f"{size / 2**30:.0f} GiB",
            f"{blocks:,}",
            f"{cost.max_model_len:,}",
            at_once,
            *warm,
            f"{costs:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(text: str, made: str) -> str:
    return re.sub(rf"{re.escape(MARK)}\n(?:\|.*\n)*", lambda _: f"{MARK}\n{made}\n", text)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), table(explained())))
