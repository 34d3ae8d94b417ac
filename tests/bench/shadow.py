"""`python -m tests.bench.shadow`: what shadow mode says was lost, beside what the plugin then saves.

First vLLM untouched, the gateway before it in shadow; then vLLM with the plugin. One request at a time, streamed, each
timed by its client. Exit status 1 when the estimate of seconds is more than a quarter off.

The cache's blocks are as long as those of large hybrids. With the toy model's own of 384 tokens vLLM 0.32 as it is
would die on a CPU of longer prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.client import Answer, Messages, ask, open_client, status_of
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.bench.harness.servers import NEMOTRON_H, Server, Servers, generated_model, narrator

BLOCK = ("--block-size", "4224")  # tokens

# Words of the system prompts that requests share, and of the text before each question.
SYSTEM_WORDS, OWN_WORDS = (150, 420, 800, 1400, 2200), (10, 60, 200)

TURNS = 3  # of one conversation on each system prompt

ANSWER_TOKENS = 2

WITHIN = 0.25

JUDGED_SECONDS = 120.0


@dataclass(frozen=True)
class Comparison:
    """Sums over all requests; tokens, and seconds to the first token."""

    requests: int
    lost_tokens: int  # by the shadow
    saved_tokens: int  # cached with the plugin, less those cached without it
    lost_seconds: float
    saved_seconds: float
    learnt: Mapping[str, float]  # by the shadow
    reasons: Mapping[str, Mapping[str, float]]
    held: bool

    @property
    def off(self) -> float:
        """The estimate's error, a share of what was really saved."""
        return self.lost_seconds / self.saved_seconds - 1 if self.saved_seconds > 0 else float("inf")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.shadow", description="shadow mode's estimate and the truth"
    )
    parser.add_argument("--questions", type=int, default=2, metavar="N", help="on each system prompt")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="as many system prompts of each length")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    say = narrator()
    model = generated_model(say, NEMOTRON_H)
    prompts = traffic(args.rounds, args.questions)
    with tempfile.TemporaryDirectory(prefix="seamark-shadow-") as folder:
        say(f"vLLM untouched, {len(prompts)} requests through the gateway in shadow")
        with engine_and_gateway(Path(folder), "alone", model, "0", ("--shadow",)) as (engine, gateway):
            alone, shadow = asyncio.run(ask_each(engine, gateway, prompts, in_shadow=True))
        say("vLLM with the plugin, the same requests")
        with engine_and_gateway(Path(folder), "plugin", model, "1", ()) as (engine, gateway):
            patched, _ = asyncio.run(ask_each(engine, gateway, prompts, in_shadow=False))
    found = compare(alone, patched, shadow)
    print(json.dumps({**asdict(found), "off": found.off}, indent=1) if args.json else render(found))
    return 0 if found.held else 1


def traffic(rounds: int, questions: int) -> list[Messages]:
    """Questions on shared system prompts, those of one prompt apart from each other, and short conversations."""
    shared = [prose(words, 1000 * number + words) for number in range(rounds) for words in SYSTEM_WORDS]
    prompts: list[Messages] = []
    for question in range(questions):
        for number, text in enumerate(shared):
            words = OWN_WORDS[(question + number) % len(OWN_WORDS)]
            own = f"{QUESTIONS[question % len(QUESTIONS)]} {prose(words, question)}"
            prompts.append([{"role": "system", "content": text}, {"role": "user", "content": own}])
    for number, text in enumerate(shared):
        chat: list[Mapping[str, Any]] = [{"role": "system", "content": text}]
        for turn in range(TURNS):
            chat.append({"role": "user", "content": prose(OWN_WORDS[turn % len(OWN_WORDS)], 77 * number + turn)})
            prompts.append(list(chat))
            chat.append({"role": "assistant", "content": prose(OWN_WORDS[-1], 99 * number + turn)})
    return prompts


@contextlib.contextmanager
def engine_and_gateway(
    folder: Path, name: str, model: Path, mode: str, flags: Sequence[str]
) -> Iterator[tuple[Server, Server]]:
    """An engine with `SEAMARK_ENGINE=mode` and a gateway before it, ready."""
    with Servers(folder) as servers:
        engine = servers.engine(name, model, mode, BLOCK)
        gateway = servers.gateway(engine, flags=flags)
        engine.wait_until_ready()
        gateway.wait_until_ready("/ready", seconds=30)
        yield engine, gateway


async def ask_each(
    engine: Server, gateway: Server, prompts: Sequence[Messages], in_shadow: bool
) -> tuple[list[Answer], Mapping[str, Any]]:
    """Their answers, one after another, and what the gateway's shadow has to say in the end.

    `in_shadow`: each waits until the one before is judged, so that what is timed is the engine alone.
    """
    async with open_client() as client:
        for number in range(3):  # what an engine does once, it does now; not through the gateway, which is to learn
            text = prose(200, 5000 + number)
            await ask(client, engine.url, [{"role": "user", "content": text}], ANSWER_TOKENS, cache_salt="warm-up")
        answers = []
        for messages in prompts:
            answers.append(await ask(client, gateway.url, messages, ANSWER_TOKENS))
            shadow = await _judged(client, gateway, len(answers) if in_shadow else 0)
        return answers, shadow


async def _judged(client: httpx.AsyncClient, gateway: Server, requests: int) -> Mapping[str, Any]:
    """The shadow's status once it has judged so many. Raises `RuntimeError` if that takes too long."""
    deadline = time.monotonic() + JUDGED_SECONDS
    while True:
        shadow = (await status_of(client, gateway.url))["shadow"]
        if sum(shadow["requests"].values()) >= requests:
            return shadow
        if time.monotonic() > deadline:
            raise RuntimeError(f"the shadow judged {shadow['requests']} of {requests}")
        await asyncio.sleep(0.1)


def compare(alone: Sequence[Answer], patched: Sequence[Answer], shadow: Mapping[str, Any]) -> Comparison:
    """The shadow's estimate beside the difference between the two engines."""
    estimate = shadow["plugin_would_save"]
    found = Comparison(
        requests=len(alone),
        lost_tokens=estimate["tokens"],
        saved_tokens=sum(answer.cached_tokens or 0 for answer in patched)
        - sum(answer.cached_tokens or 0 for answer in alone),
        lost_seconds=estimate["seconds"],
        saved_seconds=sum(answer.ttft for answer in alone) - sum(answer.ttft for answer in patched),
        learnt=next(iter(shadow["learnt"].values()), {}),
        reasons=shadow["lost"],
        held=False,
    )
    return Comparison(**{**asdict(found), "held": abs(found.off) <= WITHIN})


def render(found: Comparison) -> str:
    """A table for people."""
    lines = [
        f"{found.requests} requests, one at a time",
        f"{'':<24}{'shadow says lost':>18}{'the plugin saves':>18}{'off':>8}",
        f"{'prompt tokens':<24}{found.lost_tokens:>18,}{found.saved_tokens:>18,}"
        f"{found.lost_tokens / max(1, found.saved_tokens) - 1:>+8.1%}",
        f"{'seconds to first token':<24}{found.lost_seconds:>18.2f}{found.saved_seconds:>18.2f}{found.off:>+8.1%}",
    ]
    if learnt := found.learnt:
        first, later = (learnt["token_seconds"] * (1 + learnt["growth"] * position) for position in (0, 4000))
        floor = 1e3 * learnt["floor_seconds"]
        lines.append(
            f"learnt: {floor:.1f} ms a prompt, {1e6 * first:.0f} us its first token, {1e6 * later:.0f} us its 4,000th"
        )
    lines += [
        f"  {reason}: {loss['tokens']:,} tokens, {loss['seconds']:.2f} s" for reason, loss in found.reasons.items()
    ]
    return "\n".join([*lines, f"within {WITHIN:.0%}: {'yes' if found.held else 'NO'}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
