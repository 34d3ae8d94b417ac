"""Sampled answers through a gateway with the self-check, and what that finds of an engine with a planted defect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness import planted
from proxy.bench.harness.client import CHAT, COMPLETION, judgeable, open_client, send, status_of, tokens_of
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.bench.harness.servers import MATCH_UNITS, MODEL_NAME, NEMOTRON_H, Server
from proxy.boundaries.token_ids import common_prefix
from proxy.http.json_body import HINT, XARGS

UNIT = MATCH_UNITS[NEMOTRON_H]  # tokens

PAUSE_SECONDS = 40.0  # at most between two bursts; a check ends it

SYSTEM_WORDS = (60, 150, 400, 700)

PARALLEL = 4

FLAGS = ("--self-check-interval", "1")

RESULTS = ("same", "noise", "differs")


@dataclass(frozen=True)
class Phase:
    """What the gateway's self-check found while the engine had `defect`."""

    defect: str  # "none" for an honest engine
    results: Mapping[str, int]
    hints_off: bool
    hints_sent: bool  # in a request afterwards
    reason: str | None  # that this request got

    @property
    def held(self) -> bool:
        """Whether that is as it should be."""
        if self.defect == "none":
            return not self.hints_off and not self.results["differs"] and sum(self.results.values()) > 0
        found = self.hints_off and self.results["differs"] == 1
        return found and not self.hints_sent and self.reason == "hint_ignored"


async def watch(
    engine: Server, gateway: Server, folder: Path, defect: str, seconds: float, enough: float = inf
) -> Phase:
    """Traffic with pauses through `gateway` for `seconds`, or until its self-check finds that something differs.

    It ends after `enough` checks, too. Nobody has sent its prompts before.
    """
    seed = time.time_ns() % 10**6
    async with open_client() as client:
        await leave_early_states(client, engine, seed)
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
        after = await client.post(gateway.url + CHAT, json=_request(seed, 0, 10**6))
        counted = await samples_of(client, gateway)
    return Phase(
        defect,
        {name: int(counted[f'seamark_self_check_total{{result="{name}"}}']) for name in RESULTS},
        found,
        "x-seamark-boundary" in after.headers,
        after.headers.get("x-seamark-reason"),
    )


async def leave_early_states(client: httpx.AsyncClient, engine: Server, seed: int) -> None:
    """Have the engine hold a state one unit before the one where each system prompt ends, for a defect to use."""
    for system in range(len(SYSTEM_WORDS)):
        one, other = [
            await tokens_of(client, engine.url, _request(seed, system, number)["messages"]) for number in (0, 1)
        ]
        early = common_prefix(one, other) // UNIT * UNIT - UNIT
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
