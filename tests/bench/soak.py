"""`python -m tests.bench.soak`: random traffic on real engines for minutes or hours, after which nothing may be left.

Exit status 1 when a request failed, a sampled answer differs from the reference engine's, two salts shared, an engine's
log holds an error, or requests or cache blocks are still held once the traffic has stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

from proxy.bench.harness import exact
from proxy.bench.harness.client import Left, TimedAnswer, open_client, send
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.servers import MATCH_UNITS, NEMOTRON_H, Server, Servers, generated_model, narrator
from tests.bench.traffic import Request, Traffic

SHOWN = 5  # failures, differences and log lines that are repeated in full

TIGHT_FLAGS = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")

# More than an engine runs at once, so that requests wait, and are left while they wait.
PARALLEL = 12

REQUEST_SECONDS = 120.0

SETTLE_SECONDS = 30.0

# What must be zero on an engine's /metrics, and on its gateway's, when nothing is going on.
ENGINE_ZEROS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

GATEWAY_ZEROS = ("seamark_inflight",)

COUNTED = {
    "preemptions": "vllm:num_preemptions_total",
    "resumed from a state": "seamark_checkpoint_hits_total",
    "states written": "seamark_checkpoints_written_total",
}

_BAD_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback \(most recent call last\)")


class Subject(NamedTuple):
    """An engine under test and the gateway in front of it."""

    name: str
    engine: Server
    gateway: Server


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    request: Request
    result: TimedAnswer | Left | None = None
    failure: str = ""

    @property
    def shared_wrongly(self) -> bool:
        """Whether something came from the cache that nobody with this salt had put there."""
        return self.request.must_miss and isinstance(self.result, TimedAnswer) and bool(self.result.cached_tokens)


@dataclass(frozen=True)
class Driven:
    """Everything seen of one engine while and after the traffic ran."""

    name: str
    seconds: float
    outcomes: Sequence[Outcome]
    counted: Mapping[str, int]
    leftovers: Mapping[str, float | None]  # what should have been zero in the end; None: not to be had
    log_lines: Sequence[str]  # that name an error


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


async def drive_all(
    subjects: Sequence[Subject], traffic: Traffic, seconds: float, events: int | None = None
) -> list[Driven]:
    """The same stream of requests on every engine, side by side."""
    return list(await asyncio.gather(*(drive(subject, traffic, seconds, events) for subject in subjects)))


async def drive(subject: Subject, traffic: Traffic, seconds: float, events: int | None = None) -> Driven:
    """Send `traffic` for `seconds`, at most so many events of it, then wait until the engine holds nothing."""
    servers = (subject.engine, subject.gateway)
    log_sizes = [server.log.stat().st_size for server in servers]
    began = time.monotonic()
    numbers = iter(range(events)) if events is not None else itertools.count()
    outcomes: list[Outcome] = []
    async with open_client(REQUEST_SECONDS) as client:
        before = await counters(client, subject)

        async def sender() -> None:
            for number in numbers:
                if time.monotonic() > began + seconds or subject.engine.process.poll() is not None:
                    return
                event = traffic.event(number)
                if event.at_once:
                    outcomes.extend(await asyncio.gather(*(one(client, subject, it) for it in event.requests)))
                else:
                    outcomes.extend([await one(client, subject, request) for request in event.requests])

        await asyncio.gather(*(sender() for _ in range(PARALLEL)))
        leftovers = await settled(client, subject)
        after = await counters(client, subject)
    return Driven(
        name=subject.name,
        seconds=time.monotonic() - began,
        outcomes=outcomes,
        counted={name: int(after[name] - before[name]) for name in COUNTED},
        leftovers=leftovers,
        log_lines=[line for server, size in zip(servers, log_sizes, strict=True) for line in bad_lines(server, size)],
    )


async def one(client: httpx.AsyncClient, subject: Subject, request: Request) -> Outcome:
    """Send one request to the gateway or to the engine."""
    url = (subject.gateway if request.through_gateway else subject.engine).url
    try:
        answer = await send(client, url, request.path, request.body, request.leave)
    except (RuntimeError, httpx.HTTPError, ValueError, LookupError) as error:
        return Outcome(request, failure=f"{type(error).__name__}: {error}")
    if isinstance(answer, TimedAnswer) and not request.judged:
        answer = answer._replace(steps=())  # hours of them would fill the memory
    return Outcome(request, answer)


def resident_bytes(group: int) -> int:
    """Resident bytes of a process group, shared pages counted for each process; 0 if /proc does not say."""
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                pages += int((process / "statm").read_text().split()[1])
        except OSError:
            continue  # it has ended meanwhile
    return pages * os.sysconf("SC_PAGE_SIZE")


async def settled(client: httpx.AsyncClient, subject: Subject) -> Mapping[str, float | None]:
    """What should be zero and is not for `SETTLE_SECONDS`, None if nothing answers; empty when all is well."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        engine, gateway = await samples_of(client, subject.engine), await samples_of(client, subject.gateway)
        values = {name: engine.get(name) for name in ENGINE_ZEROS} | {name: gateway.get(name) for name in GATEWAY_ZEROS}
        leftovers = {name: value for name, value in values.items() if value != 0}
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        await asyncio.sleep(0.2)


async def counters(client: httpx.AsyncClient, subject: Subject) -> Mapping[str, float]:
    """The engine's counters that show whether the traffic has reached the corners."""
    found = await samples_of(client, subject.engine)
    return {name: found[metric] for name, metric in COUNTED.items()}


def bad_lines(server: Server, offset: int) -> list[str]:
    """Lines of the log after byte `offset` that name an error."""
    with server.log.open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").splitlines()
    return [f"{server.name}: {line}" for line in lines if _BAD_LINE.search(line)]


async def judge_all(driven: Sequence[Driven], reference: str, rule: exact.Rule = exact.FLOAT32) -> list[Soak]:
    """Compare the judged answers with the reference engine's, asked once for each distinct question."""
    questions = {
        outcome.request.question: outcome.request
        for each in driven
        for outcome in each.outcomes
        if outcome.request.judged and isinstance(outcome.result, TimedAnswer)
    }
    gate = asyncio.Semaphore(PARALLEL)
    async with open_client(REQUEST_SECONDS) as client:

        async def right(request: Request) -> TimedAnswer:
            async with gate:
                answer = await send(client, reference, request.path, request.body)
                assert isinstance(answer, TimedAnswer)
                return answer

        answers = await asyncio.gather(*map(right, questions.values()))
    rights = dict(zip(questions, answers, strict=True))
    return [judge(each, rights, rule) for each in driven]


def judge(driven: Driven, rights: Mapping[str, TimedAnswer], rule: exact.Rule = exact.FLOAT32) -> Soak:
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
            if outcome.request.judged and isinstance(outcome.result, TimedAnswer):
                wanted = rights[outcome.request.question]
                difference = exact.compare(outcome.result, wanted)
                if len(outcome.result.steps) < len(wanted.steps):
                    difference = exact.Difference(len(outcome.result.steps), difference.largest_error)
                differences.append(difference)
                if not rule.accepts(difference):
                    differing.append(f"{_in_words(outcome)}: {difference}")
        everything += differences
        answers = [outcome.result for outcome in outcomes if isinstance(outcome.result, TimedAnswer)]
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
    failed = [f"{_in_words(outcome)}: {outcome.failure}" for outcome in driven.outcomes if outcome.failure]
    shared = [
        f"{_in_words(outcome)}: {outcome.result.cached_tokens} tokens from the cache"
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
            found += [f"  {entry}" for entry in entries[:SHOWN]]
    if not any(outcome.request.judged and isinstance(outcome.result, TimedAnswer) for outcome in driven.outcomes):
        found.append("no answer was judged")
    return found


def _in_words(outcome: Outcome) -> str:
    request = outcome.request
    prompt = request.body.get("prompt")
    size = f"{len(prompt)} tokens" if prompt else f"{len(request.body['messages'])} messages"
    fields = {name: value for name, value in request.body.items() if name not in ("prompt", "messages")}
    return f"{request.kind}, {size}, {json.dumps(fields)}"


def render(soak: Soak) -> str:
    """A table for people."""
    driven = soak.driven
    lines = [f"{driven.name}, {driven.seconds:.0f} s"]
    lines.append(
        f"  {'kind':<16}{'sent':>7}{'left early':>12}{'mid-stream':>12}{'failed':>8}{'judged':>8}{'differ':>8}"
        f"{'error':>10}{'prompt tokens':>15}{'cached':>8}"
    )
    for line in soak.lines:
        cached = line.cached_tokens / max(1, line.prompt_tokens)
        lines.append(
            f"  {line.kind:<16}{line.sent:>7}{line.left_early:>12}{line.left_later:>12}{line.failed:>8}{line.judged:>8}"
            f"{line.differing:>8}{line.largest_error:>10.0e}{line.prompt_tokens:>15}{cached:>8.0%}"
        )
    lines.append("  " + ", ".join(f"{name} {count}" for name, count in driven.counted.items()))
    lines.append(f"  left over: {', '.join(driven.leftovers) or 'nothing'}; logs: {len(driven.log_lines)} errors")
    lines += [f"  {complaint}" for complaint in soak.complaints]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description="random traffic on real engines")
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic, on two engines side by side")
    parser.add_argument("--family", choices=MATCH_UNITS, default=NEMOTRON_H, help="of the generated model")
    parser.add_argument("--seed", type=int, default=1, help="of the stream of requests")
    parser.add_argument("--seeds", action="store_true", help="sampling with seeds too: an upstream crash on CPUs")
    args = parser.parse_args(argv)
    say = narrator()
    model = generated_model(say, args.family)
    folder = Path(tempfile.mkdtemp(prefix="seamark-soak-"))
    with Servers(folder) as servers:
        say("starting two engines: one with room, one with 64 cache blocks and 320 tokens per step")
        engines = {"room": servers.engine("room", model), "tight": servers.engine("tight", model, flags=TIGHT_FLAGS)}
        subjects = [Subject(name, engine, servers.gateway(engine)) for name, engine in engines.items()]
        for subject in subjects:
            subject.engine.wait_until_ready()
            subject.gateway.wait_until_ready("/ready", seconds=30)
        say(f"{args.minutes:g} minutes of traffic, seed {args.seed}")
        driven = asyncio.run(drive_all(subjects, Traffic(args.seed, args.seeds), 60 * args.minutes))
        for server in servers.started:
            server.stop()
        say("the reference engine answers the sample")
        reference = servers.engine("reference", model, "reference", ("--no-enable-prefix-caching",))
        reference.wait_until_ready()
        soaks = asyncio.run(judge_all(driven, reference.url, exact.RULES[args.family]))
    held = not any(soak.complaints for soak in soaks)
    print("\n\n".join(map(render, soaks)))
    if held:
        shutil.rmtree(folder)
        say("nothing failed, nothing differed, nothing is left")
    else:
        say(f"something is wrong; the servers' logs are in {folder}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
