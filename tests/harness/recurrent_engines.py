"""Engines of families that `seamark model` does not write, on a CPU: what each finds in its cache, and answers.

Run as `python -m tests.harness.recurrent_engines NAME ...`; with `NAME: DEFECT` the engine that caches has a defect. Of
each family one engine caches, and one does not; the answers of the second are right. Prompts are token ids, so no model
has a tokenizer. Prints a JSON list.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from engine_patches.scheduler.cache_keys import key_at
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


def short_convolutions() -> Any:
    """Attention comes last: on a CPU it rounds by how many tokens a step has, and so would all states behind it."""
    from transformers import Lfm2Config

    return Lfm2Config(
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


class Family(NamedTuple):
    config: Callable[[], Any]
    flags: Mapping[str, Any] = {}
    heads: tuple[int, ...] = (240, 500)  # tokens that prompts share
    own: tuple[int, ...] = (40, 50, 300, 17)  # tokens behind each of them, one prompt after the other
    cut: bool = False  # prompts at their heads where nothing is cached, since these layers' neighbours round by that


MAMBA2_ALONE, SHORT_CONVOLUTIONS = "mamba2 alone", "short convolutions"

FAMILIES: Mapping[str, Family] = {
    MAMBA2_ALONE: Family(mamba2_alone),
    SHORT_CONVOLUTIONS: Family(short_convolutions, heads=(240,), own=(40, 50, 200, 17), cut=True),
}

STALE = "a stale block"

LOGPROB_BOUND = 1e-4  # as of all exactness checks in float32


def written(name: str, folder: Path) -> str:
    """A small random model of a family."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine_patches.commands.model import draw_weights

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name].config(), dtype=torch.float32)
    draw_weights(model, 0, False)
    model.save_pretrained(folder)
    return str(folder)


def answers(
    model: str, prompts: list[tuple[list[int], int]], *, cut: bool = False, **flags: Any
) -> tuple[list[tuple[Any, ...]], Any]:
    """Of each hinted prompt what it found in the cache (tokens), its answer, and the log probabilities of that; and the
    engine's `Checkpoints`. `cut`: each prompt has a salt of its own, and is computed up
    to its hint first, as vLLM alone would at a block's edge.
    """
    from vllm import LLM, SamplingParams

    if cut:
        from engine_patches.forward import layers
        from engine_patches.scheduler.step_time import StepTime

        layers._writes_in_forward = lambda *_: False
        StepTime.tokens_worth = lambda *_, **__: 0.0  # type: ignore[method-assign]  # each cut is worth it
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
    core = llm.llm_engine.engine_core.engine_core
    admit = core.scheduler.add_request
    requests: list[Any] = []
    core.scheduler.add_request = lambda request: (requests.append(request), admit(request))
    found = []
    for number, (prompt, hint) in enumerate(prompts):
        parameters = SamplingParams(
            temperature=0,
            max_tokens=32,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            extra_args={"seamark_boundaries": [hint]},
        )
        salt = {"cache_salt": f"alone {number}"} if cut else {}
        (output,) = llm.generate({"prompt_token_ids": prompt, **salt}, parameters, use_tqdm=False)
        answer = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        states = _states_at(core, requests[-1], hint) if "enable_prefix_caching" in flags else []
        found.append((output.num_cached_tokens, list(answer.token_ids), logprobs, states))
    return found, core.scheduler.seamark


def _states_at(core: Any, request: Any, position: int) -> list[Any]:
    """What each recurrent layer has in the block that is cached for a position; empty if none is."""
    keys = getattr(core.scheduler.seamark.states, "keys", None)
    if keys is None or not keys.is_cached(request, position):
        return []
    layers = core.model_executor.driver_worker.worker.model_runner.compilation_config.static_forward_context
    groups = core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    found = []
    for group in keys.recurrent:
        key = key_at(request, position, keys.grid.unit, group)
        block = keys.pool.cached_block_hash_to_block.get_one_block(key).block_id
        found += [part[block].tolist() for name in groups[group].layer_names for part in layers[name].kv_cache]
    return found


def _equal(found: tuple[Any, ...], right: tuple[Any, ...], *, cut: bool) -> bool:
    """Where prompts are cut, attention rounds by that: there the states themselves are compared, bit for bit."""
    _, tokens, logprobs, states = found
    if cut:
        return bool(states) and states == (right[3] or states)
    same = zip(logprobs, right[2], strict=True)
    return bool(tokens == right[1]) and all(abs(mine - theirs) < LOGPROB_BOUND for mine, theirs in same)


def run(name: str, folder: Path, defect: str = "") -> dict[str, Any]:
    """One family: by length of a head, what each prompt behind it hit; and how many answers differ.

    Or states, where prompts are cut for those that are right.
    """
    draw = random.Random(1)
    family = FAMILIES[name]

    def drawn(length: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(length)]

    model = written(name, folder)
    heads = {length: drawn(length) for length in family.heads}
    prompts = [(head + drawn(own), length) for length, head in heads.items() for own in family.own]
    if defect == STALE:
        from engine_patches.forward import conv_states

        conv_states.Windows.keep = lambda self, *_: None  # type: ignore[method-assign]
    hits, checkpoints = answers(model, prompts, enable_prefix_caching=True, **family.flags)
    right, _ = answers(model, prompts, cut=family.cut, enable_prefix_caching=family.cut, **family.flags)
    return {
        "family": name,
        "refused": checkpoints.refusal.cause if checkpoints.refusal is not None else None,
        "block": checkpoints.block_size,
        "unit": checkpoints.grid.unit,
        "writes_in_forward": checkpoints.writes_in_forward,
        "hits": {
            length: [hit for (_, hint), (hit, *_) in zip(prompts, hits, strict=True) if hint == length]
            for length in heads
        },
        "compared": sum(bool(states) for *_, states in right) if family.cut else len(prompts),
        "wrong": sum(not _equal(found, mine, cut=family.cut) for found, mine in zip(hits, right, strict=True)),
        "written": sum(checkpoints.counters.counts.written.values()),
    }


def main(names: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    with TemporaryDirectory(prefix="seamark-recurrent-") as folder:
        given = [name.partition(": ")[::2] for name in names]
        print(json.dumps([run(name, Path(folder) / name, defect) for name, defect in given]))


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
