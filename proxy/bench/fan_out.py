"""`seamark bench fan-out`: two groups of eight on two long new prefixes, at once, on an engine that decodes meanwhile.

Exit status 1 if the engine computes a prefix more than once, if followers of a leader that has left fail or differ from
the reference engine, or if unrelated short requests wait longer than without the gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import httpx

from proxy.bench.harness import exact
from proxy.bench.harness.client import (
    COMPLETION,
    MIN_TOKENS,
    Leave,
    Left,
    TimedAnswer,
    complete,
    fresh_tokens,
    judgeable,
    open_client,
    send,
)
from proxy.bench.harness.counters import CpuTime, PassCounter, samples_of
from proxy.bench.harness.ratios import Comparison, Pair
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from proxy.bench.stories import UNIT
from proxy.commands.parser import Parser

FLAGS = (
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--long-prefill-token-threshold", "256"),
    *("--max-model-len", "12288"),
)

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2"}

GATE_OFF = {"SEAMARK_FAN_OUT": "0"}

MOST_COMPUTED = 1.02  # of the prompt tokens that have to be

MOST_DELAY = 1.1  # of short requests, gate on over gate off

PAIRS = 5

LEAVE_SECONDS = 0.3

SETTLE_SECONDS = 30.0

DECODER_TOKENS = 100  # of the prompt of a request that only decodes

DECODING_LINES = 9  # of its stream, after which the log has the line of its prompt's pass

SHORT_TOKENS = 60

SHORT_INTERVAL = 0.2  # seconds

ON, OFF, BASELINE = "Seamark", "Seamark, gate off", "vLLM, unit 16"


@dataclass(frozen=True)
class WavePlan:
    """Which requests make a wave; lengths in tokens."""

    shared: int  # by all prompts of a group
    own: int  # of each prompt behind it
    groups: int = 2
    size: int = 8  # requests of a group
    decoders: int = 4  # unrelated requests that decode all the while
    decoded: int = 11_000  # tokens of their answers: more than a wave takes

    @property
    def ideal(self) -> int:
        """Prompt tokens that have to be computed: each shared part once, up to the last match unit that it fills."""
        found = self.shared // UNIT * UNIT
        return self.groups * (found + self.size * (self.shared - found + self.own))

    def prompts(self, *seed: object) -> list[list[int]]:
        """A request of each group in turn: A, B, A, B, ..."""
        shared = [fresh_tokens(self.shared, *seed, group) for group in range(self.groups)]
        return [
            [*shared[group], *fresh_tokens(self.own, *seed, group, member)]
            for member, group in itertools.product(range(self.size), range(self.groups))
        ]


PLAN = WavePlan(shared=3600, own=50)

WARM_UP = WavePlan(shared=500, own=50, size=4, decoders=2)  # a process's first requests pay for set-up


@dataclass(frozen=True)
class Wave:
    """What became of a wave. Times in seconds."""

    prompts: Sequence[Sequence[int]]
    results: Sequence[TimedAnswer | Left]  # in the same order
    computed: int  # prompt tokens, short requests included
    seconds: float  # until the last answer had ended
    cpu_seconds: float  # of the server and its processes meanwhile, user and system
    short_ttfts: Sequence[float]

    @property
    def answers(self) -> list[TimedAnswer]:
        """The answers to clients that stayed."""
        return [result for result in self.results if isinstance(result, TimedAnswer)]

    @property
    def slow_short(self) -> float:
        """99th percentile of the short requests' times to the first token."""
        return sorted(self.short_ttfts)[math.ceil(0.99 * len(self.short_ttfts)) - 1]


@dataclass(frozen=True)
class WaveLine:
    """One wave on one engine, its answers judged. Times in seconds, lengths in tokens."""

    engine: str
    computed: int
    ideal: int
    left_early: int  # requests whose client left before their first token
    left_later: int
    answered: int
    first_token: float  # median
    seconds: float
    cpu_seconds: float
    differing: int
    largest_error: float  # of a logprob

    @property
    def ratio(self) -> float:
        """Computed over what has to be."""
        return self.computed / self.ideal


class WaveVerdict(NamedTuple):
    """A target, and whether it is met."""

    held: bool
    words: str


@dataclass(frozen=True)
class FanOut:
    """Everything measured."""

    cold: Sequence[WaveLine]  # one per engine, Seamark first
    left: WaveLine  # Seamark, the first request of each group left by its client
    plan: WavePlan
    short: Comparison  # p99 of short requests' times to the first token, gate on against off
    followers: int  # held back in all waves
    shorts: int  # short requests timed, on both sides together
    wave_seconds: Pair  # medians of the paired waves

    @property
    def verdicts(self) -> list[WaveVerdict]:
        """The targets."""
        ours = self.cold[0]
        members = self.plan.groups * self.plan.size
        most_after_leaving = MOST_COMPUTED * self.left.ideal + self.plan.groups * self.plan.shared
        exact_lines = all(not line.differing for line in (*self.cold, self.left))
        left_in_time = self.left.left_early == self.plan.groups
        return [
            WaveVerdict(
                ours.ratio <= MOST_COMPUTED,
                f"{ours.computed} prompt tokens computed, {ours.ratio:.3f} of the ideal, at most {MOST_COMPUTED}",
            ),
            WaveVerdict(exact_lines, "every answer equals the reference engine's"),
            WaveVerdict(
                left_in_time and self.left.answered == members - self.plan.groups,
                f"{self.left.left_early} leaders left before their first token, {self.left.answered} others answered",
            ),
            WaveVerdict(  # what the leaders had computed is lost, at most a shared part each
                self.left.computed <= most_after_leaving,
                f"{self.left.computed} prompt tokens computed where the leaders left, at most {most_after_leaving:.0f}",
            ),
            WaveVerdict(
                self.short.held,
                f"{self.short.name}: {self.short.ratio.median:.2f} of the gate off, at most {self.short.limit}",
            ),
        ]


async def run_wave(
    client: httpx.AsyncClient,
    server: Server,
    plan: WavePlan,
    *seed: object,
    leave: Leave | None = None,
    short: bool = False,
) -> Wave:
    """Send a wave nobody has seen to an idle engine. `leave`: of the first request of each group.

    `short`: unrelated short requests arrive in a steady rhythm while it runs.
    """
    prompts = plan.prompts(*seed)
    async with decoding(client, server, plan, *seed):
        passes, cpu = PassCounter(server.log), CpuTime(server.process.pid)
        cpu_before = cpu.seconds()
        sent = time.perf_counter()
        arriving = asyncio.create_task(short_requests(client, server, *seed)) if short else None
        results = await asyncio.gather(
            *(
                send(client, server.url, COMPLETION, body(prompt, plan.shared), leave if index < plan.groups else None)
                for index, prompt in enumerate(prompts)
            )
        )
        seconds, cpu_seconds = time.perf_counter() - sent, cpu.seconds() - cpu_before
        short_ttfts = []
        if arriving is not None:
            arriving.cancel()  # no more of them; those on the way are waited for
            short_ttfts = await arriving
    await until_idle(client, server)
    return Wave(prompts, results, passes.so_far().prompt_tokens, seconds, cpu_seconds, short_ttfts)


def body(prompt: Sequence[int], shared: int) -> Mapping[str, object]:
    """A streamed greedy completion with everything a comparison needs, hinted at the end of its shared part."""
    return judgeable(prompt, vllm_xargs={"seamark_boundaries": [shared]}, stream=True)


@contextlib.asynccontextmanager
async def decoding(client: httpx.AsyncClient, server: Server, plan: WavePlan, *seed: object) -> AsyncIterator[None]:
    """Unrelated requests that generate one token after the other for as long as the context lasts.

    Raises `RuntimeError` if one of them came to its end before, `httpx.HTTPStatusError` if it was refused.
    """

    async def one(number: int, began: asyncio.Future[None]) -> None:
        prompt = fresh_tokens(DECODER_TOKENS, *seed, "decoder", number)
        request = {"prompt": prompt, "max_tokens": plan.decoded, "ignore_eos": True, "stream": True}
        async with client.stream("POST", server.url + COMPLETION, json={"model": MODEL_NAME, **request}) as response:
            response.raise_for_status()
            lines = 0
            async for _ in response.aiter_lines():
                lines += 1
                if lines == DECODING_LINES:
                    began.set_result(None)

    begun = [asyncio.get_running_loop().create_future() for _ in range(plan.decoders)]
    tasks = [asyncio.create_task(one(number, began)) for number, began in enumerate(begun)]
    try:
        for task, began in zip(tasks, begun, strict=True):
            await asyncio.wait((task, began), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        yield
        if any(task.done() for task in tasks):
            raise RuntimeError("a request that was to decode all the while has ended")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def short_requests(client: httpx.AsyncClient, server: Server, *seed: object) -> list[float]:
    """Times to the first token of requests that arrive in a steady rhythm until the task is cancelled."""
    on_the_way: list[asyncio.Task[TimedAnswer | Left]] = []
    began = time.perf_counter()
    with contextlib.suppress(asyncio.CancelledError):
        for number in itertools.count():
            request = {"prompt": fresh_tokens(SHORT_TOKENS, *seed, "short", number), "max_tokens": 1, "stream": True}
            on_the_way.append(asyncio.create_task(send(client, server.url, COMPLETION, request)))
            await asyncio.sleep(began + (number + 1) * SHORT_INTERVAL - time.perf_counter())
    return [answer.ttft for answer in await asyncio.gather(*on_the_way) if isinstance(answer, TimedAnswer)]


async def until_idle(client: httpx.AsyncClient, server: Server) -> None:
    """Return once the engine runs nothing. Raises `TimeoutError` if it goes on for `SETTLE_SECONDS`."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            found = await samples_of(client, server)
            if found.get("vllm:num_requests_running") == found.get("vllm:num_requests_waiting") == 0:
                return
            await asyncio.sleep(0.1)


RightAnswers = Mapping[tuple[int, ...], TimedAnswer]


async def right_answers(
    client: httpx.AsyncClient, reference: Server, plan: WavePlan, waves: Sequence[Wave]
) -> RightAnswers:
    """The reference engine's answers to all prompts of `waves`."""
    prompts = list({tuple(prompt) for wave in waves for prompt in wave.prompts})
    hint = {"seamark_boundaries": [plan.shared]}
    answers = (complete(client, reference.url, prompt, vllm_xargs=hint, stream=True) for prompt in prompts)
    return dict(zip(prompts, await asyncio.gather(*answers), strict=True))


def judged(engine: str, plan: WavePlan, wave: Wave, right: RightAnswers) -> WaveLine:
    """Compare the answers of a wave with the right ones."""
    differences = []
    for prompt, result in zip(wave.prompts, wave.results, strict=True):
        if isinstance(result, TimedAnswer):
            difference = exact.compare(result, right[tuple(prompt)])
            is_whole = len(result.steps) == MIN_TOKENS
            differences.append(difference if is_whole else exact.Difference(len(result.steps), 0.0))
    left = [result for result in wave.results if isinstance(result, Left)]
    return WaveLine(
        engine,
        computed=wave.computed,
        ideal=plan.ideal,
        left_early=sum(not result.events for result in left),
        left_later=sum(result.events > 0 for result in left),
        answered=len(wave.answers),
        first_token=statistics.median(answer.ttft for answer in wave.answers),
        seconds=wave.seconds,
        cpu_seconds=wave.cpu_seconds,
        differing=sum(not difference.exact for difference in differences),
        largest_error=max(difference.largest_error for difference in differences),
    )


def leaving_time(cold: Wave) -> float:
    """Seconds after which a leader is in the midst of its prefix."""
    return min(LEAVE_SECONDS, min(answer.ttft for answer in cold.answers) / 2)


async def measure(servers: Servers, model: Path, plan: WavePlan, pairs: int, say: Callable[[str], None]) -> FanOut:
    """Gate on and off side by side, then the baseline and the judge."""

    def engine(name: str, mode: str, *flags: str, environment: Mapping[str, str] = {}) -> Server:
        return servers.engine(name, model, mode, (*FLAGS, *flags), {**ENVIRONMENT, **environment})

    async with open_client(600) as client:
        say("starting two engines: gate on, gate off")
        on, off = engine("gate-on", "1"), engine("gate-off", "1", environment=GATE_OFF)
        cold = {}
        for name, server in ((ON, on), (OFF, off)):
            server.wait_until_ready()
            await run_wave(client, server, WARM_UP, "warm up")
            say(f"{name}: a cold wave")
            cold[name] = await run_wave(client, server, plan, "cold")
        leave = Leave(seconds=leaving_time(cold[ON]))
        say(f"the leaders' clients leave after {leave.seconds:.2f} s")
        left = await run_wave(client, on, plan, "left", leave=leave)
        short_waves = []
        for number in range(pairs):
            say(f"short requests meanwhile, pair {number + 1} of {pairs}")
            sides = {}
            for server in (on, off) if number % 2 else (off, on):
                sides[server.name] = await run_wave(client, server, plan, "short", number, short=True)
            short_waves.append((sides[on.name], sides[off.name]))
        followers = (await samples_of(client, on)).get('seamark_followers_total{fate="held"}', 0)
        on.stop()
        off.stop()
        say("starting two engines: vLLM with match unit 16, the reference")
        baseline = engine("baseline", "reference", "--prefix-match-unit", "16")
        reference = engine("reference", "reference", "--no-enable-prefix-caching")
        baseline.wait_until_ready()
        await run_wave(client, baseline, WARM_UP, "warm up")
        cold[BASELINE] = await run_wave(client, baseline, plan, "cold")
        baseline.stop()
        reference.wait_until_ready()
        say("the reference engine answers")
        right = await right_answers(client, reference, plan, [*cold.values(), left])
    return FanOut(
        cold=[judged(name, plan, wave, right) for name, wave in cold.items()],
        left=judged(f"{ON}, leaders leave", plan, left, right),
        plan=plan,
        short=Comparison(
            "p99 time to the first token of short requests",
            tuple(Pair(ours.slow_short, theirs.slow_short) for ours, theirs in short_waves),
            MOST_DELAY,
        ),
        followers=int(followers),
        shorts=sum(len(wave.short_ttfts) for pair in short_waves for wave in pair),
        wave_seconds=Pair(
            *(statistics.median(wave.seconds for wave in side) for side in zip(*short_waves, strict=True))
        ),
    )


def render(result: FanOut) -> str:
    """Tables and verdicts for people."""
    plan = result.plan
    lines = [
        f"{plan.groups} groups of {plan.size}, {plan.shared} shared + {plan.own} own tokens each, cold, at once; "
        f"{plan.decoders} requests decode meanwhile",
        f"  {'engine':<24}{'computed':>10}{'ideal':>8}{'ratio':>7}{'first token':>13}{'all done':>10}{'CPU':>9}"
        f"{'answers':>9}{'differ':>8}{'error':>8}",
    ]
    lines += [
        f"  {line.engine:<24}{line.computed:>10}{line.ideal:>8}{line.ratio:>7.2f}{line.first_token:>11.2f} s"
        f"{line.seconds:>8.2f} s{line.cpu_seconds:>7.2f} s"
        f"{line.answered:>9}{line.differing:>8}{line.largest_error:>8.0e}"
        for line in (*result.cold, result.left)
    ]
    lines += [
        f"  followers held back in all of Seamark's waves: {result.followers}",
        "",
        "short requests meanwhile, p99 of their time to the first token",
        f"  {'pair':<6}{'gate on':>11}{'gate off':>11}{'on/off':>9}",
    ]
    for number, pair in enumerate(result.short.pairs, 1):
        lines.append(f"  {number:<6}{pair.ours * 1000:>8.0f} ms{pair.theirs * 1000:>8.0f} ms{pair.ratio:>9.2f}")
    wave = result.wave_seconds
    lines.append(f"  {result.shorts} short requests; the waves took {wave.ours:.2f} s and {wave.theirs:.2f} s (median)")
    lines.append("")
    lines += [f"{'held    ' if verdict.held else 'NOT HELD'}  {verdict.words}" for verdict in result.verdicts]
    return "\n".join(lines)


def report(result: FanOut) -> Mapping[str, object]:
    """Everything measured, for machines; times in seconds, lengths in tokens."""
    return {
        "held": all(verdict.held for verdict in result.verdicts),
        "plan": {**vars(result.plan), "ideal": result.plan.ideal},
        "waves": [{**vars(line), "ratio": line.ratio} for line in (*result.cold, result.left)],
        "short_p99": [{**pair._asdict(), "ratio": pair.ratio} for pair in result.short.pairs],
        "short_p99_ratio": result.short.ratio._asdict(),
        "short_requests": result.shorts,
        "wave_seconds": result.wave_seconds._asdict(),
        "followers_held": result.followers,
        "verdicts": [verdict._asdict() for verdict in result.verdicts],
    }


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark bench fan-out", description="cold fan-outs on a busy engine")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="waves with short requests, on each side")
    parser.add_argument("--shared", type=int, default=PLAN.shared, metavar="TOKENS", help=f"of a group ({PLAN.shared})")
    parser.add_argument("--json", action="store_true", help="print the report instead of the tables")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error("--pairs: at least one")
    if not MIN_TOKENS <= args.shared <= PLAN.shared:
        parser.error(f"--shared: {MIN_TOKENS} to {PLAN.shared}")
    say = narrator()
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-fan-out-") as folder, Servers(Path(folder)) as servers:
        result = asyncio.run(measure(servers, model, replace(PLAN, shared=args.shared), args.pairs, say))
    print(json.dumps(report(result), indent=1) if args.json else render(result))
    return 0 if all(verdict.held for verdict in result.verdicts) else 1
