"""Engines of families that `seamark model` does not write, on a CPU: what each finds in its cache, and answers.

Run as `python -m tests.harness.recurrent_engines NAME ...`. Of each family one engine caches, and one does not; the
answers of the second are right. Prompts are token ids, so no model has a tokenizer. Prints a JSON list.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.harness.engines import CPU_PROCESS

VOCABULARY = 4096

ENVIRONMENT = {
    **CPU_PROCESS,
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "seamark",
    "SEAMARK_ENGINE": "1",
}


def mamba2_alone() -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=64,
        state_size=64,
        n_groups=1,
        chunk_size=64,
        expand=2,
        conv_kernel=4,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )


FAMILIES: Mapping[str, tuple[Callable[[], Any], Mapping[str, Any]]] = {
    "mamba2 alone": (mamba2_alone, {}),
}

OWN = (40, 50, 300, 17)  # tokens behind a head that prompts share, one prompt after the other


def written(name: str, folder: Path) -> str:
    """A small random model of a family."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine_patches.commands.model import draw_weights

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name][0](), dtype=torch.float32)
    draw_weights(model, 0, False)
    model.save_pretrained(folder)
    return str(folder)


def answers(model: str, prompts: list[tuple[list[int], int]], **flags: Any) -> tuple[list[tuple[int, list[int]]], Any]:
    """Of each hinted prompt what it found in the cache (tokens) and its answer; and the engine's `Checkpoints`."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=4,
        enforce_eager=True,
        num_gpu_blocks_override=600,
        **flags,
    )
    found = []
    for prompt, hint in prompts:
        parameters = SamplingParams(
            temperature=0, max_tokens=32, ignore_eos=True, detokenize=False, extra_args={"seamark_boundaries": [hint]}
        )
        (output,) = llm.generate({"prompt_token_ids": prompt}, parameters, use_tqdm=False)
        found.append((output.num_cached_tokens, list(output.outputs[0].token_ids)))
    return found, llm.llm_engine.engine_core.engine_core.scheduler.seamark


def run(name: str, folder: Path) -> dict[str, Any]:
    """One family: by length of a head, what each prompt behind it hit; and how many answers differ."""
    draw = random.Random(1)

    def drawn(length: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(length)]

    model = written(name, folder)
    heads = {length: drawn(length) for length in (240, 500)}
    prompts = [(head + drawn(own), length) for length, head in heads.items() for own in OWN]
    hits, checkpoints = answers(model, prompts, enable_prefix_caching=True, **FAMILIES[name][1])
    right, _ = answers(model, prompts, enable_prefix_caching=False)
    return {
        "family": name,
        "refused": checkpoints.refusal.cause if checkpoints.refusal is not None else None,
        "block": checkpoints.block_size,
        "unit": checkpoints.grid.unit,
        "hits": {
            length: [hit for (_, hint), (hit, _) in zip(prompts, hits, strict=True) if hint == length]
            for length in heads
        },
        "wrong": sum(mine != theirs for (_, mine), (_, theirs) in zip(hits, right, strict=True)),
        "written": sum(checkpoints.counters.counts.written.values()),
    }


def main(names: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    with TemporaryDirectory(prefix="seamark-recurrent-") as folder:
        print(json.dumps([run(name, Path(folder) / name) for name in names]))


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
