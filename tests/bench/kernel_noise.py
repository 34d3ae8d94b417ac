"""`python -m tests.bench.kernel_noise`: the noise floor by the kernels for CUDA, in Triton's interpreter.

As `tests.bench.noise_floor`, with few and short answers, and for Mamba2: its scan, its convolution and its update run
as on a GPU, but for the order of sums inside a product. Everything else of the model is a CPU's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.bench.harness.client import Answer, fresh_tokens
from proxy.bench.harness.servers import NEMOTRON_H, generated_model, narrator
from proxy.fleet.answer_compare import Step
from tests.bench.noise_floor import ALONE, HEAD, PER_HEAD, WORDS, Cell, Prompt, difference, line
from tests.harness.versions import interpreted

ANSWERS, TOKENS = 50, 4

STATES = ("float32", "bfloat16")

UNCACHED, SMALL_STEPS, CACHED, UNIT_16 = ((name,) for name in ("uncached", "small steps", "cached", "unit 16"))

FLAGS: Mapping[Sequence[str], Mapping[str, Any]] = {
    UNCACHED: {"enable_prefix_caching": False},
    SMALL_STEPS: {"enable_prefix_caching": False, "max_num_batched_tokens": 50},
    CACHED: {"enable_prefix_caching": True},
    UNIT_16: {"enable_prefix_caching": True, "prefix_match_unit": 16},
}

CELLS = (
    Cell(ALONE, "reference", UNCACHED),
    Cell("vLLM alone, steps of 50 tokens", "reference", SMALL_STEPS),
    Cell("Seamark, unit 16", "1", UNIT_16, {"SEAMARK_CHUNK_ENDS": "0"}, warmed=True, hinted=True),
    Cell("Seamark, chunk ends", "1", CACHED, {"SEAMARK_CHUNK_ENDS": "1"}, warmed=True, hinted=True),
)


def prompts_of(count: int) -> list[Prompt]:
    """Heads of at most three chunks with several ends each, of tokens drawn at random, the same in each run."""
    draw = random.Random(18)
    heads = [fresh_tokens(draw.randrange(60, 190), "short head", number) for number in range(-(-count // PER_HEAD))]
    ends = range(PER_HEAD)
    prompts = [(head, fresh_tokens(draw.randrange(3, 40), "short end", end)) for head in heads for end in ends]
    return [Prompt(head + end, len(head)) for head, end in prompts[:count]]


def answers_of(model: str, cell: Cell, states: str, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
    """Answers to all prompts, in order, one at a time."""
    asked = [(prompt.tokens, [prompt.shared] if cell.hinted else []) for prompt in prompts]
    if cell.warmed:
        others = [
            ([*prompt.tokens[: prompt.shared], *fresh_tokens(20, "warm", number)], [prompt.shared])
            for number, prompt in enumerate(prompts[::PER_HEAD])
        ]
        asked = [*others, *asked]
    flags = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": states, **FLAGS[cell.flags]}
    wanted = {"prompts": asked, "answer": tokens, "flags": flags, "environment": dict(cell.environment)}
    found = interpreted("engine_kernels", model, cell.mode, json.dumps(wanted), seconds=7200)
    if not min(found["runs"].values()) or found["update"] != "triton":
        raise RuntimeError(f"{cell.name}: a kernel for CUDA did not run: {found['runs']}, {found['update']}")
    return [
        Answer(
            tuple(Step(str(token), {str(token): logprob}) for token, logprob in zip(*pair, strict=True)),
            len(prompt.tokens),
            told["cached"],
            *(0.0, 0.0, 0.0),
        )
        for told, prompt in zip(found["answers"][-len(prompts) :], prompts, strict=True)
        for pair in [(told["tokens"], told["logprobs"])]
    ]


def main(argv: list[str], say: Callable[[str], None] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.kernel_noise",
        description="other answers by rounding alone, by CUDA's kernels",
    )
    parser.add_argument("--answers", type=int, default=ANSWERS, help="per cell")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    args = parser.parse_args(argv)
    say = say or narrator()
    model = str(generated_model(say, NEMOTRON_H))
    prompts = prompts_of(args.answers)
    for states in STATES:
        print(f"\nnemotron_h, bfloat16, states in {states}, kernels for CUDA\n{HEAD}", flush=True)
        base: list[Answer] = []
        for cell in CELLS:
            say(f"states in {states}: {cell.name}")
            answers = answers_of(model, cell, states, prompts, args.tokens)
            base = base or answers
            print(line(cell.name, difference(answers, base)), flush=True)
    print(f"\n{WORDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
