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
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from proxy.bench.harness.client import TimedAnswer, open_client, send
from proxy.bench.harness.exact import Difference, compare
from proxy.bench.harness.servers import Server, Servers, generated_model, narrator
from tests.bench.traffic import Request, Traffic
from tests.harness.bench_clients import Left, send_and_leave
from tests.harness.counters import samples_of

# More than an engine runs at once, so that requests wait, and are left while they wait.
PARALLEL = 12

REQUEST_SECONDS = 120.0

SETTLE_SECONDS = 30.0

TIED = 0.01  # of the answers that may take the other side of a tie

# What must be zero on the pages of an engine and its gateway when nothing is going on.
ZEROS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "seamark_inflight")

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
    def is_judged(self) -> bool:
        """Whether its answer is to be that of the reference engine."""
        return self.request.judged and isinstance(self.result, TimedAnswer)


@dataclass(frozen=True)
class Driven:
    """Everything seen of one engine while and after the traffic ran."""

    name: str
    seconds: float
    outcomes: Sequence[Outcome]
    counted: Mapping[str, int]
    leftovers: Mapping[str, float | None]  # what should have been zero in the end; None: not to be had
    log_lines: Sequence[str]  # that name an error


@dataclass
class KindLine:
    """The requests of one kind; lengths in tokens."""

    kind: str
    sent: int = 0
    left_early: int = 0  # before the first token
    left_later: int = 0
    failed: int = 0
    judged: int = 0
    differing: int = 0
    largest_error: float = 0.0  # of a logprob
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Soak:
    """The result for one engine."""

    driven: Driven
    lines: Sequence[KindLine]
    complaints: Sequence[str]


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
        before = await samples_of(client, subject.engine)

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
        after = await samples_of(client, subject.engine)
    return Driven(
        name=subject.name,
        seconds=time.monotonic() - began,
        outcomes=outcomes,
        counted={name: int(after[metric] - before[metric]) for name, metric in COUNTED.items()},
        leftovers=leftovers,
        log_lines=[line for server, size in zip(servers, log_sizes, strict=True) for line in bad_lines(server, size)],
    )


async def one(client: httpx.AsyncClient, subject: Subject, request: Request) -> Outcome:
    """Send one request to the gateway or to the engine."""
    url = (subject.gateway if request.through_gateway else subject.engine).url
    try:
        answer = await send_and_leave(client, url, request.path, request.body, request.leave)
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
        found = {**await samples_of(client, subject.engine), **await samples_of(client, subject.gateway)}
        leftovers = {name: found.get(name) for name in ZEROS if found.get(name) != 0}
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        await asyncio.sleep(0.2)


def bad_lines(server: Server, offset: int) -> list[str]:
    """Lines of the log after byte `offset` that name an error."""
    with server.log.open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").splitlines()
    return [f"{server.name}: {line}" for line in lines if _BAD_LINE.search(line)]


async def judge_all(driven: Sequence[Driven], reference: str) -> list[Soak]:
    """Compare the judged answers with the reference engine's, asked once for each distinct question."""
    outcomes = [outcome for each in driven for outcome in each.outcomes if outcome.is_judged]
    questions = {outcome.request.question: outcome.request for outcome in outcomes}
    gate = asyncio.Semaphore(PARALLEL)
    async with open_client(REQUEST_SECONDS) as client:

        async def right(request: Request) -> TimedAnswer:
            async with gate:
                return await send(client, reference, request.path, request.body)

        answers = await asyncio.gather(*map(right, questions.values()))
    rights = dict(zip(questions, answers, strict=True))
    return [judge(each, rights) for each in driven]


def judge(driven: Driven, rights: Mapping[str, TimedAnswer]) -> Soak:
    """Add up what happened to the requests of each kind; `rights` are the reference's answers by question."""
    differing: list[str] = []
    everything: list[Difference] = []
    lines: dict[str, KindLine] = {}
    for outcome in driven.outcomes:
        line, result = lines.setdefault(outcome.request.kind, KindLine(outcome.request.kind)), outcome.result
        line.sent += 1
        line.failed += bool(outcome.failure)
        if isinstance(result, Left):
            line.left_early += not result.events
            line.left_later += result.events > 0
        if isinstance(result, TimedAnswer):
            line.prompt_tokens += result.prompt_tokens
            line.cached_tokens += result.cached_tokens or 0
        if not outcome.is_judged:
            continue
        wanted = rights[outcome.request.question]
        difference = compare(result, wanted)
        if len(result.steps) < len(wanted.steps):
            difference = Difference(len(result.steps), difference.largest_error)
        everything.append(difference)
        line.judged += 1
        line.largest_error = max(line.largest_error, difference.largest_error)
        if not difference.exact:
            line.differing += 1
            differing.append(f"{_in_words(outcome)}: {difference}")
    if not differing and sum(difference.position is not None for difference in everything) > TIED * len(everything):
        differing.append(f"more than {TIED:.0%} of {len(everything)} answers took the other side of a tie")
    return Soak(driven, [lines[kind] for kind in sorted(lines)], complaints(driven, differing))


def complaints(driven: Driven, differing: Sequence[str]) -> list[str]:
    """What went wrong, in words."""
    failed = [f"{_in_words(outcome)}: {outcome.failure}" for outcome in driven.outcomes if outcome.failure]
    shared = [
        f"{_in_words(outcome)}: {outcome.result.cached_tokens} tokens from the cache"
        for outcome in driven.outcomes
        if outcome.request.must_miss and isinstance(outcome.result, TimedAnswer) and outcome.result.cached_tokens
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
            found += [f"  {entry}" for entry in entries[:5]]
    if not any(outcome.is_judged for outcome in driven.outcomes):
        found.append("no answer was judged")
    return found


def _in_words(outcome: Outcome) -> str:
    request = outcome.request
    prompt = request.body.get("prompt")
    size = f"{len(prompt)} tokens" if prompt else f"{len(request.body['messages'])} messages"
    fields = {name: value for name, value in request.body.items() if name not in ("prompt", "messages")}
    return f"{request.kind}, {size}, {json.dumps(fields)}"


def render(soak: Soak) -> str:
    driven, columns = soak.driven, [name for name in KindLine.__dataclass_fields__ if name != "kind"]
    lines = [f"{driven.name}, {driven.seconds:.0f} s", f"  {'kind':<16}" + "".join(f"{it:>14}" for it in columns)]
    lines += [f"  {it.kind:<16}" + "".join(f"{getattr(it, name):>14.6g}" for name in columns) for it in soak.lines]
    lines.append("  " + ", ".join(f"{name} {count}" for name, count in driven.counted.items()))
    return "\n".join([*lines, *(f"  {complaint}" for complaint in soak.complaints)])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description="random traffic on real engines")
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic, on two engines side by side")
    parser.add_argument("--seed", type=int, default=1, help="of the stream of requests")
    args = parser.parse_args(argv)
    say = narrator()
    model = generated_model(say)
    folder = Path(tempfile.mkdtemp(prefix="seamark-soak-"))
    with Servers(folder) as servers:
        say("starting two engines: one with room, one with 64 cache blocks and 320 tokens per step")
        tight = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")
        engines = {"room": servers.engine("room", model), "tight": servers.engine("tight", model, flags=tight)}
        subjects = [Subject(name, engine, servers.gateway(engine)) for name, engine in engines.items()]
        for subject in subjects:
            subject.engine.wait_until_ready()
            subject.gateway.wait_until_ready("/ready", seconds=30)
        say(f"{args.minutes:g} minutes of traffic, seed {args.seed}")
        driven = asyncio.run(drive_all(subjects, Traffic(args.seed), 60 * args.minutes))
        for server in servers.started:
            server.stop()
        say("the reference engine answers the sample")
        reference = servers.engine("reference", model, "reference", ("--no-enable-prefix-caching",))
        reference.wait_until_ready()
        soaks = asyncio.run(judge_all(driven, reference.url))
    print("\n\n".join(map(render, soaks)))
    if any(soak.complaints for soak in soaks):
        say(f"something is wrong; the servers' logs are in {folder}")
        return 1
    say("nothing failed, nothing differed, nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
