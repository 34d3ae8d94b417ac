"""Rounds of chats at workers with a checkpoint directory, or another tier, that are killed in between."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import TimedAnswer, complete, open_client
from proxy.bench.harness.exact import FLOAT32, compare
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import Server, Servers
from tests.harness.transfer_engine import Prompt, prompts_of, two_round_chats

BLOCK, UNIT = 384, 16  # tokens, of the generated model

KEEP_ALL = ("--checkpoint-keep", "all")

STAGING_ROWS = 200  # of vLLM's own tier: more than a prompt takes


class Round(NamedTuple):
    """What a round of prompts came to."""

    answers: list[TimedAnswer]

    @property
    def hits(self) -> int:
        """Tokens from a cache or a tier."""
        return sum(answer.cached_tokens or 0 for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.prompt_tokens for answer in self.answers)

    def differing(self, right: Round) -> int:
        """Answers that are not the ones of `right`."""
        pairs = zip(self.answers, right.answers, strict=True)
        return sum(not FLOAT32.accepts(compare(answer, wanted)) for answer, wanted in pairs)

    def first_token_over(self, other: Round) -> float:
        """Seconds to the first token as a share of those of `other`, the median of all prompts."""
        pairs = zip(self.answers, other.answers, strict=True)
        return statistics.median(answer.ttft / cold.ttft for answer, cold in pairs)


def rounds_of(tokenizer: Any) -> tuple[list[Prompt], list[Prompt]]:
    """20 chats of two turns on five system prompts, hinted as the gateway does."""
    first, second = two_round_chats()
    return prompts_of(tokenizer, first), prompts_of(tokenizer, second)


def ask(server: Server, prompts: Sequence[Prompt]) -> Round:
    """One after the other: none waits for another."""

    async def ask_each() -> Round:
        answers = []
        async with open_client(240) as client:
            for prompt in prompts:
                hint = {"seamark_boundaries": prompt["hint"]}
                answers.append(await complete(client, server.url, prompt["ids"], vllm_xargs=hint, stream=True))
        return Round(answers)

    return asyncio.run(ask_each())


class Chats(NamedTuple):
    """Two rounds of prompts, and the answers of an engine that caches nothing."""

    first: list[Prompt]
    second: list[Prompt]
    right_first: Round
    right_second: Round


def chats_answered_by(server: Server, tokenizer: Any) -> Chats:
    """The chats of `rounds_of`; what the server answers is right."""
    first, second = rounds_of(tokenizer)
    return Chats(first, second, ask(server, first), ask(server, second))


def counted(server: Server) -> dict[str, float]:
    """The worker's own counters, by name and by `name{reason}`; other labels are summed up."""
    sums: dict[str, float] = {}
    for line in httpx.get(server.url + "/metrics", timeout=30).text.splitlines():
        if found := re.match(r"(seamark_\w+)(\{[^}]*\})? (\S+)$", line):
            reason = re.search(r'reason="(\w+)"', found[2] or "")
            for name in {found[1], f"{found[1]}{{{reason[1]}}}" if reason else found[1]}:
                sums[name] = sums.get(name, 0.0) + float(found[3])
    return sums


def kill(server: Server) -> None:
    """Without a word."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def start(
    fleet: Servers, model: Path, name: str, folder: Path | None = None, *flags: str, mode: str = "1", **environment: str
) -> Server:
    """A worker that is ready, with a checkpoint directory if a folder is given."""
    directory = ("--checkpoint-dir", str(folder)) if folder is not None else ()
    server = fleet.engine(name, model, mode, (*directory, *flags), environment)
    server.wait_until_ready()
    return server


def uncached(fleet: Servers, model: Path) -> Server:
    """A worker that computes each prompt in full."""
    return start(fleet, model, "uncached", None, "--no-enable-prefix-caching", mode="reference")


def stock_tier(folder: Path) -> tuple[str, ...]:
    """Flags for vLLM's own connector and file tier, with the copies on a CPU that vLLM leaves out."""
    extra = {
        "spec_name": "CheckpointSpec",
        "spec_module_path": "engine_patches.disk.copies",
        "staging_rows": STAGING_ROWS,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ("--kv-transfer-config", json.dumps(transfer))


def plugin(folder: Path, function: str) -> Mapping[str, str]:
    """Environment of an engine whose disk is as one of `tests.harness.disk_defects` has it."""
    return plugin_environment(folder / "plugins", {"seamark_disk": f"tests.harness.disk_defects:{function}"})


def written(folder: Path, pattern: str = "*.state") -> list[Path]:
    """The files, once there are some and no further one comes for five seconds: nobody tells of the last one."""
    while True:
        files = list(folder.rglob(pattern))
        time.sleep(5)
        if files and len(list(folder.rglob(pattern))) == len(files):
            return files


def stored_killed_and_asked(fleet: Servers, model: Path, chats: Chats, folder: Path, loads: Mapping[str, str]) -> Round:
    """The second round of an engine that starts on what another one had stored when it was killed."""
    first = start(fleet, model, "first", folder, *KEEP_ALL, **loads)
    assert ask(first, chats.first).differing(chats.right_first) == 0
    written(folder)
    kill(first)

    second = start(fleet, model, "second", folder, *KEEP_ALL, **loads)
    after = ask(second, chats.second)
    told = counted(second)
    kill(second)
    assert after.differing(chats.right_second) == 0 and after.hits >= 0.99 * 13_456
    assert told["seamark_checkpoint_hits_total"] == 20 and told["seamark_checkpoint_hit_tokens_total"] == after.hits
    return after


def blocks_for(prompts: Sequence[Prompt], answers: Sequence[TimedAnswer]) -> set[tuple[str, int]]:
    """What a directory has to hold for the positions that answers began at: each state and attention block once."""
    return {
        each
        for prompt, answer in zip(prompts, answers, strict=True)
        for each in _blocks_at(prompt["ids"], answer.cached_tokens or 0)
    }


def _blocks_at(ids: Sequence[int], position: int) -> Iterator[tuple[str, int]]:
    if position:
        yield from ((state, hash(tuple(ids[:position]))) for state in ("one group's state", "the other's"))
        for end in {*range(BLOCK, position + 1, BLOCK), position}:
            yield "attention", hash(tuple(ids[:end]))
