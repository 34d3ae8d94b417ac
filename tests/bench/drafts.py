"""`python -m tests.bench.drafts`: what engines that draft tokens find in the cache, vLLM alone and with Seamark.

On a CPU, with generated models that have a random head, stand-ins for the kernels that a CPU lacks, and an oracle that
makes drafts right. Exit status 1 if an answer is not what vLLM gives without drafts and cache, if a hit is not what is
owed, or if a prompt takes more passes than with vLLM alone and the same drafts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT, generated_model
from tests.harness.draft_engines import LENGTHS, MTP, NGRAM, RESENT, TEACHING, Engine, wanted
from tests.harness.scheduler_process import run_apart

RIGHT = Engine("right", mode="reference", caching=False, hints=False)

ENGINES = (
    RIGHT,
    Engine("vLLM, no drafts", mode="reference", hints=False),
    Engine("vLLM, MTP", mode="reference", hints=False, speculation=MTP, oracle="right"),
    Engine("Seamark, MTP, no hints", hints=False, speculation=MTP, oracle="right"),
    Engine("Seamark, MTP", speculation=MTP, oracle="right"),
    Engine("vLLM, n-gram", mode="reference", hints=False, speculation=NGRAM, oracle="right"),
    Engine("Seamark, n-gram", speculation=NGRAM, oracle="right"),
)

ALIGNMENT = {NEMOTRON_H: 16, QWEN3_NEXT: 64}  # tokens, on whose multiples states lie

BESIDE = {"Seamark, MTP": "vLLM, MTP", "Seamark, n-gram": "vLLM, n-gram"}  # who has the same drafts


def owed(family: str, engine: Mapping[str, Any], shared: int) -> int:
    """Tokens that a hinted prompt finds of those it shares."""
    return max(shared - int(engine["ahead"]), 0) // ALIGNMENT[family] * ALIGNMENT[family]


def run(family: str, traffic: str) -> dict[str, Mapping[str, Any]]:
    """What each engine answers to a traffic, by name."""
    # Whether a follower is held depends on what a pass costs here.
    engines = [replace(engine, traffic=traffic, learns_times=traffic == "fan outs") for engine in ENGINES]
    found = run_apart("draft_engines", str(generated_model(print, family, mtp=True)), wanted(*engines))
    return {engine.name: each for engine, each in zip(engines, found, strict=True)}


def wrong_answers(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Engines whose answers differ from those without drafts and cache."""
    right = {tuple(answer["prompt"]): answer["tokens"] for answer in found["right"]["answers"]}
    wrong = []
    for name, engine in found.items():
        if "error" in engine:
            return [f"{name}: {engine['error']}"]
        differ = sum(right.get(tuple(answer["prompt"])) != answer["tokens"] for answer in engine["answers"])
        if differ:
            wrong.append(f"{name}: {differ} of {len(engine['answers'])} answers differ")
    return wrong


def table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[object]]) -> str:
    head = f"{title:<26}" + "".join(f"{column:>9}" for column in columns)
    return "\n".join(
        [head, *(f"{name:<26}" + "".join(f"{cell!s:>9}" for cell in cells) for name, cells in rows.items())]
    )


def examine(family: str) -> list[str]:
    """Print a family's tables; returns what did not hold."""
    wrongs: list[str] = []
    found = run(family, "resends")
    wrongs += wrong_answers(found)
    # The second of each two.
    rows = {name: [answer["cached"] for answer in engine["answers"][1::2]] for name, engine in found.items()}
    rows.pop("right")
    print(table(f"{family}: sent again", [f"{length:,}" for length in RESENT], rows))

    found = run(family, "pairs")
    wrongs += wrong_answers(found)
    per_length = len(found["right"]["answers"]) // len(LENGTHS)
    rows, passes = {}, {}
    for name, engine in found.items():
        hits = [answer["cached"] for answer in engine["answers"]]
        rows[name] = [hits[number * per_length + 1] for number in range(len(LENGTHS))]
        passes[name] = sum(answer["passes"] for answer in engine["answers"])
        if name in BESIDE:
            for number, length in enumerate(LENGTHS):
                due = owed(family, engine, length)
                if set(hits[number * per_length + 1 : (number + 1) * per_length]) != {due}:
                    wrongs.append(f"{family}, {name}: of {length} shared tokens {due} are owed")
    rows.pop("right")
    print(table("shared with another", [f"{length:,}" for length in LENGTHS], rows))

    found = run(family, "fan outs")
    wrongs += wrong_answers(found)
    fans = {name: engine["answers"][TEACHING:] for name, engine in found.items()}
    steps = {name: sum(answer["passes"] for answer in answers) for name, answers in fans.items()}
    computed = {
        name: sum(len(answer["prompt"]) - answer["cached"] for answer in answers) for name, answers in fans.items()
    }
    rows = {name: [passes[name], steps[name], f"{computed[name]:,}"] for name in found if name != "right"}
    print(table("passes: alone, eight", ["prompts", "fan-out", "computed"], rows))
    for name, beside in BESIDE.items():
        if passes[name] > passes[beside] or steps[name] > steps[beside]:
            wrongs.append(f"{family}, {name}: more passes than {beside}")
    return wrongs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.drafts", description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=(NEMOTRON_H, QWEN3_NEXT), help="only this one")
    args = parser.parse_args(argv)
    wrongs = [wrong for family in ([args.family] if args.family else ALIGNMENT) for wrong in examine(family)]
    print("\n".join(wrongs or ["held"]))
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
