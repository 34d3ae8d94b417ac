"""`seamark bench fan-out`: two groups of eight on two long new prefixes, at once, on an engine that decodes meanwhile.

Exit status 1 where the engine computes a prefix more than once, where followers of a leader that has gone fail or
differ from the reference engine, or where unrelated short requests wait longer than without the gate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from proxy.bench.client import open_client
from proxy.bench.engines import Fleet, Server
from proxy.bench.models import generated_model
from proxy.bench.progress import narrator
from proxy.bench.ratios import Comparison, Pair
from proxy.bench.samples import samples_of
from proxy.bench.sending import Leave
from proxy.bench.waves import Line, Plan, Wave, judged, right_answers, run_wave

PLAN = Plan(shared=3600, own=50)
WARM_UP = Plan(shared=500, own=50, size=4, decoders=2)  # a process's first requests pay for set-up
FLAGS = (
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "1024", "--long-prefill-token-threshold", "256"),
    *("--max-model-len", "12288"),
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2"}
GATE_OFF = {"SEAMARK_FAN_OUT": "0"}
MOST_COMPUTED = 1.05  # of the prompt tokens that have to be
MOST_DELAY = 1.1  # of short requests, gate on over gate off
PAIRS = 5
LEAVE_SECONDS = 0.3
ON, OFF, BASELINE = "Seamark", "Seamark, gate off", "vLLM, unit 16"


class Verdict(NamedTuple):
    """A target, and whether it is met."""

    held: bool
    words: str


@dataclass(frozen=True)
class FanOut:
    """Everything measured."""

    cold: Sequence[Line]  # one per engine, Seamark first
    left: Line  # Seamark, the first request of each group left by its client
    plan: Plan
    short: Comparison  # p99 of short requests' times to the first token, gate on against off
    followers: int  # held back in all waves
    shorts: int  # short requests timed, on both sides together
    wave_seconds: Pair  # medians of the paired waves

    @property
    def verdicts(self) -> list[Verdict]:
        """The targets."""
        ours = self.cold[0]
        members = self.plan.groups * self.plan.size
        most_after_leaving = MOST_COMPUTED * self.left.ideal + self.plan.groups * self.plan.shared
        exact_lines = all(not line.differing for line in (*self.cold, self.left))
        left_in_time = self.left.left_early == self.plan.groups
        return [
            Verdict(
                ours.ratio <= MOST_COMPUTED,
                f"{ours.computed} prompt tokens computed, {ours.ratio:.3f} of the ideal, at most {MOST_COMPUTED}",
            ),
            Verdict(exact_lines, "every answer equals the reference engine's"),
            Verdict(
                left_in_time and self.left.answered == members - self.plan.groups,
                f"{self.left.left_early} leaders left before their first token, {self.left.answered} others answered",
            ),
            Verdict(  # what the leaders had computed is lost, at most a shared part each
                self.left.computed <= most_after_leaving,
                f"{self.left.computed} prompt tokens computed where the leaders left, at most {most_after_leaving:.0f}",
            ),
            Verdict(
                self.short.held,
                f"{self.short.name}: {self.short.ratio.median:.2f} of the gate off, at most {self.short.limit}",
            ),
        ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="seamark bench fan-out", description="cold fan-outs on a busy engine")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="waves with short requests, on each side")
    parser.add_argument("--json", action="store_true", help="print the report instead of the tables")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error("--pairs: at least one")
    say = narrator()
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-fan-out-") as folder, Fleet(Path(folder)) as fleet:
        result = asyncio.run(measure(fleet, model, PLAN, args.pairs, say))
    print(json.dumps(report(result), indent=1) if args.json else render(result))
    return 0 if all(verdict.held for verdict in result.verdicts) else 1


async def measure(fleet: Fleet, model: Path, plan: Plan, pairs: int, say: Callable[[str], None]) -> FanOut:
    """Gate on and off side by side, then the baseline and the judge."""

    def engine(name: str, mode: str, *flags: str, environment: Mapping[str, str] = {}) -> Server:
        return fleet.engine(name, model, mode, (*FLAGS, *flags), {**ENVIRONMENT, **environment})

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


def leaving_time(cold: Wave) -> float:
    """Seconds after which a leader is in the midst of its prefix."""
    return min(LEAVE_SECONDS, min(answer.ttft for answer in cold.answers) / 2)


def render(result: FanOut) -> str:
    """Tables and verdicts for people."""
    plan = result.plan
    lines = [
        f"{plan.groups} groups of {plan.size}, {plan.shared} shared + {plan.own} own tokens each, cold, at once; "
        f"{plan.decoders} requests decode meanwhile",
        f"  {'engine':<24}{'computed':>10}{'ideal':>8}{'ratio':>7}{'first token':>13}{'all done':>10}{'CPU':>9}"
        f"{'answers':>9}{'differ':>8}{'error':>8}",
    ]
    for line in (*result.cold, result.left):
        lines.append(
            f"  {line.engine:<24}{line.computed:>10}{line.ideal:>8}{line.ratio:>7.2f}{line.first_token:>11.2f} s"
            f"{line.seconds:>8.2f} s{line.cpu_seconds:>7.2f} s"
            f"{line.answered:>9}{line.differing:>8}{line.largest_error:>8.0e}"
        )
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
