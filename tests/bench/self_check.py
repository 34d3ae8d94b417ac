"""`python -m tests.bench.self_check`: how soon the self-check finds an engine that answers wrongly from its cache.

Clients sample at temperature 1 and pause now and then: first on an honest engine, where nothing may be found, then on
one with each planted defect.
Exit status 1 if honest answers were called different, or a defect was not found within a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness import planted
from proxy.bench.harness.client import CHAT, COMPLETION, judgeable, open_client, send, status_of, tokens_of
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.bench.harness.servers import MATCH_UNITS, MODEL_NAME, NEMOTRON_H, Server, Servers, generated_model, narrator
from proxy.boundaries.token_ids import common_prefix
from proxy.http.json_body import HINT, XARGS

FOUND_SECONDS = 60.0

PAUSE_SECONDS = 40.0  # at most between two bursts; a check ends it

SYSTEM_WORDS = (60, 150, 400, 700)

PARALLEL = 4

FLAGS = ("--self-check-interval", "1")

RESULTS = ("same", "noise", "differs")


@dataclass(frozen=True)
class Phase:
    """What the gateway's self-check found while the engine had `defect`."""

    defect: str  # "none" for an honest engine
    seconds: float  # until it was found, or of all the traffic
    results: Mapping[str, int]
    hints_off: bool
    hints_sent: bool  # in a request afterwards
    reason: str | None  # that this request got

    @property
    def held(self) -> bool:
        """Whether that is as it should be."""
        if self.defect == "none":
            return not self.hints_off and not self.results["differs"] and sum(self.results.values()) > 0
        found = self.hints_off and self.results["differs"] == 1 and self.seconds <= FOUND_SECONDS
        return found and not self.hints_sent and self.reason == "hint_ignored"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.self_check", description="wrong answers, and how soon found"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of honest traffic")
    parser.add_argument("--family", choices=MATCH_UNITS, default=NEMOTRON_H, help="of the generated model")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    say = narrator()
    model = generated_model(say, args.family)
    with tempfile.TemporaryDirectory(prefix="seamark-check-") as name, Servers(Path(name)) as servers:
        folder = Path(name)
        engine = servers.engine("engine", model, environment=planted.environment(folder / "planted"))
        engine.wait_until_ready()
        phases, unit = [], MATCH_UNITS[args.family]
        for number, defect in enumerate(("none", *planted.DEFECTS)):
            say(f"{args.minutes:g} minutes of honest traffic" if defect == "none" else f"planted: {defect}")
            # A gateway of its own, whose traffic does not ask again for what a defect has spoiled in the cache.
            gateway = servers.gateway(engine, flags=FLAGS)
            gateway.wait_until_ready("/ready", seconds=30)
            seconds = 60 * args.minutes if defect == "none" else 2 * FOUND_SECONDS
            phases.append(asyncio.run(watch(engine, gateway, folder / "planted", defect, seconds, number, unit)))
            gateway.stop()
    held = all(phase.held for phase in phases)
    print(json.dumps([asdict(phase) for phase in phases], indent=1) if args.json else render(phases))
    return 0 if held else 1


async def watch(
    engine: Server,
    gateway: Server,
    folder: Path,
    defect: str,
    seconds: float,
    seed: int,
    unit: int,
    enough: float = inf,
) -> Phase:
    """Traffic with pauses through `gateway` for `seconds`, or until its self-check finds that something differs.

    It ends after `enough` checks, too.

    `unit` is the engine's match unit, tokens.
    """
    async with open_client() as client:
        await leave_early_states(client, engine, seed, unit)
        await burst(client, gateway, seed, 0)
        began = time.monotonic()
        with planted.planted(folder, defect) if defect != "none" else nullcontext():
            number = 0
            while time.monotonic() < began + seconds:
                before = await _self_check(client, gateway)
                if before["hints_off"] or before["checked"] >= enough:
                    break
                number += 1
                await burst(client, gateway, seed, number)
                pause_ends = time.monotonic() + PAUSE_SECONDS
                while time.monotonic() < pause_ends:
                    if (await _self_check(client, gateway))["checked"] != before["checked"]:
                        break
                    await asyncio.sleep(0.1)
            found = (await _self_check(client, gateway))["hints_off"]
        took = time.monotonic() - began
        after = await client.post(gateway.url + CHAT, json=_request(seed, 0, 10**6))
        counted = await samples_of(client, gateway)
    return Phase(
        defect,
        took,
        {name: int(counted[f'seamark_self_check_total{{result="{name}"}}']) for name in RESULTS},
        found,
        "x-seamark-boundary" in after.headers,
        after.headers.get("x-seamark-reason"),
    )


async def leave_early_states(client: httpx.AsyncClient, engine: Server, seed: int, unit: int) -> None:
    """Have the engine hold a state one unit before the one where each system prompt ends, for a defect to use."""
    for system in range(len(SYSTEM_WORDS)):
        one, other = [
            await tokens_of(client, engine.url, _request(seed, system, number)["messages"]) for number in (0, 1)
        ]
        early = common_prefix(one, other) // unit * unit - unit
        await send(client, engine.url, COMPLETION, judgeable(one[: early + 1], **{XARGS: {HINT: [early]}}))


async def burst(client: httpx.AsyncClient, gateway: Server, seed: int, number: int) -> None:
    """A few sampled answers on shared system prompts. Raises `httpx.HTTPError` for an error answer."""
    gate = asyncio.Semaphore(PARALLEL)

    async def one(which: int) -> None:
        async with gate:
            body = _request(seed, which % len(SYSTEM_WORDS), 100 * number + which)
            (await client.post(gateway.url + CHAT, json=body)).raise_for_status()

    await asyncio.gather(*(one(which) for which in range(2 * len(SYSTEM_WORDS))))


def _request(seed: int, system: int, number: int) -> Mapping[str, Any]:
    question = f"{QUESTIONS[number % len(QUESTIONS)]} {prose(5 + number % 40, number)}"
    text = prose(SYSTEM_WORDS[system], 1000 * seed + system)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 8, "temperature": 1.0}


async def _self_check(client: httpx.AsyncClient, gateway: Server) -> Mapping[str, Any]:
    return (await status_of(client, gateway.url))["self_check"]


def render(phases: list[Phase]) -> str:
    """A table for people."""
    lines = [f"{'planted':<26}{'seconds':>9}{'same':>7}{'noise':>7}{'differs':>9}  {'hints':<7}{'as it should be'}"]
    for phase in phases:
        counts = "".join(f"{phase.results[name]:>{width}}" for name, width in zip(RESULTS, (7, 7, 9), strict=True))
        hints = "off" if phase.hints_off else "on"
        lines.append(f"{phase.defect:<26}{phase.seconds:>9.1f}{counts}  {hints:<7}{'yes' if phase.held else 'NO'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
