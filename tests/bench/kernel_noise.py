"""`python -m tests.bench.kernel_noise`: the noise floor of `noise_floor`, with vLLM's kernels for CUDA.

They run in Triton's interpreter on a CPU, in engines with narrow models (`tests/harness/kernel_engine.py`), so the
answers are few and short. All answers of a model are compared with those of vLLM alone, without a cache, one prompt at
a time. Each cell's result is kept as soon as it is known; a run that was ended goes on from there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxy.bench.harness.client import fresh_tokens
from proxy.bench.harness.servers import CACHE, NEMOTRON_H, QWEN3_NEXT, narrator
from tests.bench.noise_floor import ALONE, HEAD, PER_HEAD, Difference, Prompt, line
from tests.harness.kernel_engine import version
from tests.harness.versions import interpreted

ANSWERS, TOKENS = 50, 8

SHARED = range(70, 230)  # tokens of a head

OWN = range(3, 40)  # tokens behind it

SECONDS = 3600.0  # that a cell may take, on a busy machine

RESULTS = "kernel-noise.json"

UNCACHED: Mapping[str, Any] = {"enable_prefix_caching": False}


def cached(unit: int | None = None) -> Mapping[str, Any]:
    return {"enable_prefix_caching": True, "prefix_match_unit": unit}


class Cell(NamedTuple):
    """One way to run the same prompts."""

    name: str
    mode: str  # SEAMARK_ENGINE
    options: Mapping[str, Any]  # of the engine
    environment: Mapping[str, str] = {}
    parallel: int = 1


SEAMARK = "1"

ANYWHERE, AT_CHUNK_ENDS = {"SEAMARK_CHUNK_ENDS": "0"}, {"SEAMARK_CHUNK_ENDS": "1"}

CELLS = (
    Cell(ALONE, "reference", UNCACHED),
    Cell("Seamark, unit 16", SEAMARK, cached(16), ANYWHERE),
    Cell("Seamark, unit 64", SEAMARK, cached(64), ANYWHERE),
    Cell("Seamark, chunk ends", SEAMARK, cached(16), AT_CHUNK_ENDS),
    Cell("vLLM alone, its own cache", "reference", cached()),
    Cell("vLLM alone, eight at once", "reference", UNCACHED, parallel=8),
    Cell("vLLM alone, steps of 100 tokens", "reference", {**UNCACHED, "max_num_batched_tokens": 100}),
)

MODELS = {
    f"{family}, bfloat16, states in {states}": (family, states)
    for states in ("float32", "bfloat16")
    for family in (NEMOTRON_H, QWEN3_NEXT)
}


def prompts_of(count: int) -> list[Prompt]:
    """As `noise_floor.prompts_of`, shorter."""
    rng = random.Random(18)
    heads = [fresh_tokens(rng.choice(SHARED), "head", number) for number in range(-(-count // PER_HEAD))]
    prompts = [(head, fresh_tokens(rng.choice(OWN), "own", number)) for head in heads for number in range(PER_HEAD)]
    return [Prompt(head + own, len(head)) for head, own in prompts[:count]]


def run(family: str, states: str, cell: Cell, prompts: Sequence[Prompt], tokens: int) -> dict[str, Any]:
    """What an engine of its own has answered, as `kernel_engine` prints it."""
    hinted, warmed = cell.mode == SEAMARK, bool(cell.options["enable_prefix_caching"])
    asked = [(list(prompt.tokens), [prompt.shared] if hinted else []) for prompt in prompts]
    warm = [
        ([*whole[: prompt.shared], *fresh_tokens(20, "warm", number)], hint)
        for number, (prompt, (whole, hint)) in enumerate(zip(prompts[::PER_HEAD], asked[::PER_HEAD], strict=True))
    ]
    wanted = {
        "prompts": asked,
        "warm": warm if warmed else [],
        "tokens": tokens,
        "parallel": cell.parallel,
        "options": dict(cell.options),
        "environment": dict(cell.environment),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(wanted, file)
        file.flush()
        found: dict[str, Any] = interpreted("kernel_engine", family, states, cell.mode, file.name, seconds=SECONDS)
    if cell.mode == SEAMARK and not found["writes_in_forward"]:
        raise SystemExit(f"{cell.name}: the plugin does not write states inside a pass here")
    return found


def difference(answers: Sequence[Any], base: Sequence[Any], prompts: Sequence[Prompt]) -> Difference:
    """Compare token by token. An answer: its tokens, the log probability of the first one, tokens from the cache."""
    pairs = list(zip(answers, base, strict=True))
    return Difference(
        answers=len(answers),
        other=sum(ours[0] != theirs[0] for ours, theirs in pairs),
        first_token=[abs(ours[1] - theirs[1]) for ours, theirs in pairs if ours[0][0] == theirs[0][0]],
        prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        cached_tokens=sum(answer[2] for answer in answers),
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.kernel_noise",
        description="other answers by rounding alone, with the kernels for CUDA in Triton's interpreter",
    )
    parser.add_argument("--answers", type=int, default=ANSWERS, help="per cell")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (repeat)")
    parser.add_argument("--cell", metavar="WORD", action="append", help="only cells with this word in their name")
    parser.add_argument("--results", type=Path, default=CACHE / RESULTS, help="file in which results are kept")
    args = parser.parse_args(argv)
    say, prompts = narrator(), prompts_of(args.answers)
    words = args.cell or [""]
    cells = [cell for cell in CELLS if cell.name == ALONE or any(word in cell.name for word in words)]
    kept: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
    for model in args.model or MODELS:
        family, states = MODELS[model]
        print(f"\n{model}\n{HEAD}", flush=True)
        base: list[Any] = []
        for cell in cells:
            key = f"{version()}: {model}, {args.answers} x {args.tokens}: {cell}"
            if key not in kept:
                say(f"{model}: {cell.name}")
                kept[key] = run(family, states, cell, prompts, args.tokens)
                args.results.parent.mkdir(exist_ok=True)
                args.results.write_text(json.dumps(kept))
            base = base or kept[key]["answers"]
            print(line(cell.name, difference(kept[key]["answers"], base, prompts)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
