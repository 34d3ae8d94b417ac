"""Engines of a family that `seamark model` does not write, LFM2's short convolutions, on a CPU.

Run as `python -m tests.harness.short_convolutions`. One engine caches. The other one computes each prompt up to its
hint first, as vLLM alone would at a block's edge; what its layers hold there is right. Attention rounds by how many
tokens a step has, so states are compared, bit for bit. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_patches.scheduler.cache_keys import key_at
from tests.harness.engines import CPU_PROCESS

VOCABULARY = 4096

ENVIRONMENT = {**CPU_PROCESS, "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "seamark", "SEAMARK_ENGINE": "1"}

HEAD = 240  # tokens that prompts share

OWN = (40, 50, 200, 17)  # tokens behind it, one prompt after the other


def write_model(folder: Path) -> None:
    """A small random one. Attention comes last, or all states behind it would be rounded as it is."""
    import torch
    from transformers import AutoModelForCausalLM, Lfm2Config

    from engine_patches.commands.model import draw_weights

    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "conv", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        conv_L_cache=3,
        conv_dim=128,
        conv_dim_out=128,
        conv_bias=False,
        block_dim=128,
        block_ff_dim=256,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, 0, False)
    model.save_pretrained(folder)


def asked(model: Path, prompts: list[list[int]], *, cut: bool) -> tuple[list[tuple[int, list[Any]]], Any]:
    """Of each prompt the tokens it found, and the states that are cached for its head; the engine's `Checkpoints`.

    `cut`: each has a salt of its own, and is computed up to its hint first.
    """
    from vllm import LLM, SamplingParams

    from tests.harness import started_engines

    if cut:
        from engine_patches.forward import layers
        from engine_patches.scheduler.step_time import StepTime

        layers._writes_in_forward = lambda *_: False
        StepTime.tokens_worth = lambda *_, **__: 0.0  # type: ignore[method-assign]  # each cut is worth it
    started_engines.note("lfm2")
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=4,
        enforce_eager=True,
        num_gpu_blocks_override=600,
        enable_prefix_caching=True,
    )
    core = llm.llm_engine.engine_core.engine_core
    admit, requests = core.scheduler.add_request, list[Any]()
    core.scheduler.add_request = lambda request: (requests.append(request), admit(request))
    hinted = SamplingParams(temperature=0, max_tokens=4, detokenize=False, extra_args={"seamark_boundaries": [HEAD]})
    found = []
    for number, prompt in enumerate(prompts):
        salt = {"cache_salt": f"alone {number}"} if cut else {}
        (output,) = llm.generate({"prompt_token_ids": prompt, **salt}, hinted, use_tqdm=False)
        found.append((output.num_cached_tokens, _states_at(core, requests[-1], HEAD)))
    return found, core.scheduler.seamark


def _states_at(core: Any, request: Any, position: int) -> list[Any]:
    """What each recurrent layer has in the block that is cached for a position; empty if none is."""
    keys = core.scheduler.seamark.states.keys
    if not keys.is_cached(request, position):
        return []
    layers = core.model_executor.driver_worker.worker.model_runner.compilation_config.static_forward_context
    groups = core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    found = []
    for group in keys.recurrent:
        key = key_at(request, position, keys.grid.unit, group)
        block = keys.pool.cached_block_hash_to_block.get_one_block(key).block_id
        found += [part[block].tolist() for name in groups[group].layer_names for part in layers[name].kv_cache]
    return found


def main() -> None:
    os.environ.update(ENVIRONMENT)
    draw = random.Random(1)
    head, *own = ([draw.randrange(VOCABULARY) for _ in range(length)] for length in (HEAD, *OWN))
    prompts = [head + tail for tail in own]
    with TemporaryDirectory(prefix="seamark-lfm2-") as name:
        write_model(Path(name))
        found, checkpoints = asked(Path(name), prompts, cut=False)
        right, _ = asked(Path(name), prompts, cut=True)
    compared = [(mine, theirs) for (_, mine), (_, theirs) in zip(found, right, strict=True) if theirs]
    told = {
        "refused": checkpoints.refusal.cause if checkpoints.refusal is not None else None,
        "unit": checkpoints.grid.unit,
        "writes_in_forward": checkpoints.writes_in_forward,
        "hits": [hit for hit, _ in found],
        "compared": len(compared),
        "wrong": sum(mine != theirs for mine, theirs in compared),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
