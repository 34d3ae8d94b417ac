"""`seamark bench soak`: random traffic on real engines for minutes or hours, and nothing may be left of it.

Exit status 1 when a request failed, a sampled answer differs from the reference engine's, two salts shared, an engine's
log holds an error, or requests or cache blocks are still held once the traffic has stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from proxy.bench import exact
from proxy.bench.client import Answer, open_client
from proxy.bench.endurance import PARALLEL, REQUEST_SECONDS, Driven, Outcome, Subject, drive_all
from proxy.bench.engines import Fleet
from proxy.bench.models import MATCH_UNITS, NEMOTRON_H, generated_model
from proxy.bench.progress import narrator
from proxy.bench.sending import Left, send
from proxy.bench.traffic import Request, Traffic

TOLD = 5  # failures, differences and log lines that are repeated in full
TIGHT_FLAGS = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")


@dataclass(frozen=True)
class KindLine:
    """The requests of one kind; lengths in tokens."""

    kind: str
    sent: int
    left_early: int  # before the first token
    left_later: int
    failed: int
    judged: int
    differing: int
    largest_error: float  # of a logprob
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Soak:
    """The result for one engine."""

    driven: Driven
    lines: Sequence[KindLine]
    complaints: Sequence[str] = field(default=())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="seamark bench soak", description="random traffic on real engines")
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic, on two engines side by side")
    parser.add_argument("--family", choices=MATCH_UNITS, default=NEMOTRON_H, help="of the generated model")
    parser.add_argument("--seed", type=int, default=1, help="of the stream of requests")
    parser.add_argument("--seeds", action="store_true", help="sampling with seeds too: an upstream crash on CPUs")
    parser.add_argument("--json", action="store_true", help="print the report instead of the tables")
    args = parser.parse_args(argv)
    say = narrator()
    model = generated_model(say, args.family)
    folder = Path(tempfile.mkdtemp(prefix="seamark-soak-"))
    with Fleet(folder) as fleet:
        say("starting two engines: one with room, one with 64 cache blocks and 320 tokens per step")
        engines = {"room": fleet.engine("room", model), "tight": fleet.engine("tight", model, flags=TIGHT_FLAGS)}
        subjects = [Subject(name, engine, fleet.gateway(engine)) for name, engine in engines.items()]
        for subject in subjects:
            subject.engine.wait_until_ready()
            subject.gateway.wait_until_ready("/ready", seconds=30)
        say(f"{args.minutes:g} minutes of traffic, seed {args.seed}")
        driven = asyncio.run(drive_all(subjects, Traffic(args.seed, args.seeds), 60 * args.minutes))
        for server in fleet.servers:
            server.stop()
        say("the reference engine answers the sample")
        reference = fleet.engine("reference", model, "reference", ("--no-enable-prefix-caching",))
        reference.wait_until_ready()
        soaks = asyncio.run(judge_all(driven, reference.url, exact.RULES[args.family]))
    held = not any(soak.complaints for soak in soaks)
    print(json.dumps(report(soaks, args.seed), indent=1) if args.json else "\n\n".join(map(render, soaks)))
    if held:
        shutil.rmtree(folder)
        say("nothing failed, nothing differed, nothing is left")
    else:
        say(f"something is wrong; the servers' logs are in {folder}")
    return 0 if held else 1


async def judge_all(driven: Sequence[Driven], reference: str, rule: exact.Rule = exact.FLOAT32) -> list[Soak]:
    """Compare the judged answers with the reference engine's, asked once for each distinct question."""
    questions = {
        outcome.request.question: outcome.request
        for each in driven
        for outcome in each.outcomes
        if outcome.request.judged and isinstance(outcome.result, Answer)
    }
    gate = asyncio.Semaphore(PARALLEL)
    async with open_client(REQUEST_SECONDS) as client:

        async def right(request: Request) -> Answer:
            async with gate:
                answer = await send(client, reference, request.path, request.body)
                assert isinstance(answer, Answer)
                return answer

        answers = await asyncio.gather(*map(right, questions.values()))
    rights = dict(zip(questions, answers, strict=True))
    return [judge(each, rights, rule) for each in driven]


def judge(driven: Driven, rights: Mapping[str, Answer], rule: exact.Rule = exact.FLOAT32) -> Soak:
    """Add up what happened to the requests of each kind; `rights` are the reference's answers by question."""
    differing: list[str] = []
    lines = []
    everything: list[exact.Difference] = []
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in driven.outcomes:
        by_kind.setdefault(outcome.request.kind, []).append(outcome)
    for kind in sorted(by_kind):
        outcomes = by_kind[kind]
        differences: list[exact.Difference] = []
        for outcome in outcomes:
            if outcome.request.judged and isinstance(outcome.result, Answer):
                wanted = rights[outcome.request.question]
                difference = exact.compare(outcome.result, wanted)
                if len(outcome.result.steps) < len(wanted.steps):
                    difference = exact.Difference(len(outcome.result.steps), difference.largest_error)
                differences.append(difference)
                if not rule.accepts(difference):
                    differing.append(f"{_told(outcome)}: {difference}")
        everything += differences
        answers = [outcome.result for outcome in outcomes if isinstance(outcome.result, Answer)]
        left = [outcome.result for outcome in outcomes if isinstance(outcome.result, Left)]
        lines.append(
            KindLine(
                kind,
                sent=len(outcomes),
                left_early=sum(not it.events for it in left),
                left_later=sum(it.events > 0 for it in left),
                failed=sum(bool(outcome.failure) for outcome in outcomes),
                judged=len(differences),
                differing=sum(not rule.accepts(difference) for difference in differences),
                largest_error=max((difference.largest_error for difference in differences), default=0.0),
                prompt_tokens=sum(answer.prompt_tokens for answer in answers),
                cached_tokens=sum(answer.cached_tokens or 0 for answer in answers),
            )
        )
    if not differing and not rule.accepts_all(everything):
        differing.append(f"more than {rule.share:.0%} of {len(everything)} answers took the other side of a tie")
    return Soak(driven, lines, complaints(driven, differing))


def complaints(driven: Driven, differing: Sequence[str]) -> list[str]:
    """What went wrong, in words."""
    failed = [f"{_told(outcome)}: {outcome.failure}" for outcome in driven.outcomes if outcome.failure]
    shared = [
        f"{_told(outcome)}: {outcome.result.cached_tokens} tokens from the cache"
        for outcome in driven.outcomes
        if outcome.shared_wrongly
    ]
    found = []
    for title, entries in (
        ("requests failed", failed),
        ("answers differ from the reference engine's", differing),
        ("requests with a salt of their own shared", shared),
        ("lines of the logs speak of an error", driven.log_lines),
        ("gauges are not back at zero", [f"{name}: {value}" for name, value in driven.leftovers.items()]),
    ):
        if entries:
            found.append(f"{len(entries)} {title}:")
            found += [f"  {entry}" for entry in entries[:TOLD]]
    if not any(outcome.request.judged and isinstance(outcome.result, Answer) for outcome in driven.outcomes):
        found.append("no answer was judged")
    return found


def _told(outcome: Outcome) -> str:
    request = outcome.request
    prompt = request.body.get("prompt")
    size = f"{len(prompt)} tokens" if prompt else f"{len(request.body['messages'])} messages"
    fields = {name: value for name, value in request.body.items() if name not in ("prompt", "messages")}
    return f"{request.kind}, {size}, {json.dumps(fields)}"


def render(soak: Soak) -> str:
    """A table for people."""
    driven = soak.driven
    total = KindLine(
        "all",
        *(sum(getattr(line, name) for line in soak.lines) for name in ("sent", "left_early", "left_later", "failed")),
        *(sum(getattr(line, name) for line in soak.lines) for name in ("judged", "differing")),
        max((line.largest_error for line in soak.lines), default=0.0),
        *(sum(getattr(line, name) for line in soak.lines) for name in ("prompt_tokens", "cached_tokens")),
    )
    lines = [f"{driven.name}, {driven.seconds:.0f} s"]
    lines.append(
        f"  {'kind':<16}{'sent':>7}{'left early':>12}{'mid-stream':>12}{'failed':>8}{'judged':>8}{'differ':>8}"
        f"{'error':>10}{'prompt tokens':>15}{'cached':>8}"
    )
    for line in (*soak.lines, total):
        cached = line.cached_tokens / max(1, line.prompt_tokens)
        lines.append(
            f"  {line.kind:<16}{line.sent:>7}{line.left_early:>12}{line.left_later:>12}{line.failed:>8}{line.judged:>8}"
            f"{line.differing:>8}{line.largest_error:>10.0e}{line.prompt_tokens:>15}{cached:>8.0%}"
        )
    lines.append("  " + ", ".join(f"{name} {count}" for name, count in driven.counted.items()))
    first, last = (value / 2**20 for value in driven.memory)
    lines.append(f"  memory (resident) first third {first:.0f} MiB, last third {last:.0f} MiB, {last / first - 1:+.1%}")
    lines.append(f"  left over: {', '.join(driven.leftovers) or 'nothing'}; logs: {len(driven.log_lines)} errors")
    lines += [f"  {complaint}" for complaint in soak.complaints]
    return "\n".join(lines)


def report(soaks: Sequence[Soak], seed: int) -> Mapping[str, object]:
    """Everything but the single answers, for machines."""
    engines = []
    for soak in soaks:
        figures = {name: getattr(soak.driven, name) for name in ("name", "seconds", "counted", "leftovers")}
        memory = soak.driven.memory._asdict()
        engines.append({**figures, "memory": memory, "kinds": [asdict(line) for line in soak.lines]})
        engines[-1]["complaints"] = list(soak.complaints)
    return {"seed": seed, "held": not any(soak.complaints for soak in soaks), "engines": engines}
