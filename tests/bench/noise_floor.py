"""`python -m tests.bench.noise_floor`: how often an answer comes out other when only the rounding differs.

In bfloat16 the same prompt may give another answer in another batch, after another division into chunks, or behind a
prefix from the cache: vLLM alone does that. Its own differences are the floor. Seamark's, at several match units, stand
beside it. All answers of a model are compared with those of vLLM alone, without a cache, one prompt at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from proxy.bench.harness.client import Answer, complete, fresh_tokens, open_client
from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT, Servers, generated_model, narrator

ANSWERS, TOKENS = 500, 32

SHARED = range(60, 700)  # tokens of a head

OWN = range(3, 60)  # tokens behind it

PER_HEAD = 10  # prompts

PARALLEL = 8

CACHED = ("--enable-prefix-caching",)

UNCACHED = ("--no-enable-prefix-caching",)


class Prompt(NamedTuple):
    tokens: Sequence[int]
    shared: int  # of them


class Cell(NamedTuple):
    """One way to run the same prompts."""

    name: str
    mode: str  # SEAMARK_ENGINE
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    parallel: int = PARALLEL
    warmed: bool = False  # each head has been sent before, with another end
    hinted: bool = False


ALONE = "vLLM alone, one at a time"

CELLS = (
    Cell(ALONE, "reference", UNCACHED, parallel=1),
    Cell("vLLM alone, eight at once", "reference", UNCACHED),
    Cell("vLLM alone, steps of 200 tokens", "reference", (*UNCACHED, "--max-num-batched-tokens", "200"), parallel=1),
    Cell("vLLM alone, its own cache", "reference", CACHED, parallel=1, warmed=True),
    Cell("Seamark, unit 16", "1", (*CACHED, "--prefix-match-unit", "16"), {"SEAMARK_CHUNK_ENDS": "0"}, 1, True, True),
    Cell("Seamark, unit 64", "1", (*CACHED, "--prefix-match-unit", "64"), {"SEAMARK_CHUNK_ENDS": "0"}, 1, True, True),
    Cell("Seamark, chunk ends", "1", CACHED, {"SEAMARK_CHUNK_ENDS": "1"}, 1, True, True),
    Cell("Seamark, eight at once", "1", CACHED, warmed=True, hinted=True),
)

MODELS = {
    "nemotron_h, bfloat16, states in float32": (NEMOTRON_H, ("--mamba-ssm-cache-dtype", "float32")),
    "nemotron_h, bfloat16, states in bfloat16": (NEMOTRON_H, ("--mamba-ssm-cache-dtype", "bfloat16")),
    "qwen3_next, bfloat16, states in float32": (QWEN3_NEXT, ("--mamba-ssm-cache-dtype", "float32")),
}


@dataclass(frozen=True)
class Difference:
    """The answers of a cell beside those that it is compared with."""

    answers: int
    other: int  # answers with another token in them
    first_token: Sequence[float]  # differences of the first token's log probability, where it is the same
    prompt_tokens: int
    cached_tokens: int

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the share of other answers, 95 % (Wilson, 1927)."""
        n, z = self.answers, 1.96
        share = self.other / n
        middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return max(0.0, middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def prompts_of(count: int) -> list[Prompt]:
    """The prompts: heads with several ends each, all of tokens drawn at random, the same in each run."""
    rng = random.Random(18)
    heads = [fresh_tokens(rng.choice(SHARED), "head", number) for number in range(math.ceil(count / PER_HEAD))]
    prompts = [(head, fresh_tokens(rng.choice(OWN), "own", number)) for head in heads for number in range(PER_HEAD)]
    return [Prompt(head + own, len(head)) for head, own in prompts[:count]]


async def answers_of(url: str, cell: Cell, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
    """Answers to all prompts, in order."""
    gate = asyncio.Semaphore(cell.parallel)
    async with open_client() as client:

        async def one(prompt: Prompt, length: int) -> Answer:
            fields = {"vllm_xargs": {"seamark_boundaries": [prompt.shared]}} if cell.hinted else {}
            async with gate:
                return await complete(client, url, prompt.tokens, max_tokens=length, **fields)

        if cell.warmed:
            for number, prompt in enumerate(prompts[::PER_HEAD]):
                other = [*prompt.tokens[: prompt.shared], *fresh_tokens(20, "warm", number)]
                await one(Prompt(other, prompt.shared), 1)
        return list(await asyncio.gather(*(one(prompt, tokens) for prompt in prompts)))


def difference(answers: Sequence[Answer], base: Sequence[Answer]) -> Difference:
    """Compare token by token."""
    other, first_token = 0, []
    for answer, expected in zip(answers, base, strict=True):
        ours, theirs = answer.steps, expected.steps
        other += [step.token for step in ours] != [step.token for step in theirs]
        token = theirs[0].token
        if ours[0].token == token:
            first_token.append(abs(ours[0].top[token] - theirs[0].top[token]))
    total = sum(answer.prompt_tokens for answer in answers)
    return Difference(len(answers), other, first_token, total, sum(answer.cached_tokens or 0 for answer in answers))


def line(name: str, found: Difference) -> str:
    """A row of the table."""
    low, high = found.interval
    deltas = found.first_token or [math.nan]
    share = f"{found.other:>5} of {found.answers}  {100 * low:5.1f}..{100 * high:.1f} %"
    return (
        f"{name:<34}{share:>28}{statistics.fmean(deltas):>12.1e}{max(deltas):>10.1e}"
        f"{100 * found.cached_tokens / found.prompt_tokens:>8.0f} %"
    )


HEAD = f"{'':<34}{'other answers, 95 %':>28}{'first token':>12}{'at most':>10}{'cached':>10}"

WORDS = (
    "first token: mean difference of its log probability, where it is the same token. cached: prompt tokens that were\n"
    "resumed from a state. Random weights and random tokens: near ties are more frequent than in real text."
)


def main(argv: list[str], say: Callable[[str], None] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.noise_floor", description="other answers by rounding alone, vLLM's and Seamark's"
    )
    parser.add_argument("--answers", type=int, default=ANSWERS, help="per cell")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (repeat)")
    parser.add_argument("--cell", metavar="WORD", action="append", help="only cells with this word in their name")
    args = parser.parse_args(argv)
    say = say or narrator()
    prompts = prompts_of(args.answers)
    words = args.cell or [""]
    cells = [cell for cell in CELLS if cell.name == ALONE or any(word in cell.name for word in words)]
    for model in args.model or MODELS:
        family, flags = MODELS[model]
        folder = generated_model(say, family)
        print(f"\n{model}\n{HEAD}", flush=True)
        base: list[Answer] = []
        for cell in cells:
            say(f"{model}: {cell.name}")
            with Servers(Path(tempfile.mkdtemp(prefix="seamark-noise-"))) as servers:
                every = ["--dtype", "bfloat16", *flags, *cell.flags]
                engine = servers.engine("engine", folder, cell.mode, every, cell.environment)
                engine.wait_until_ready()
                answers = asyncio.run(answers_of(engine.url, cell, prompts, args.tokens))
            base = base or answers
            print(line(cell.name, difference(answers, base)), flush=True)
    print(f"\n{WORDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
