"""`python -m tests.bench.adapters`: a LoRA adapter changes under its name before real engines, again and again.

Each round replaces its weights and loads them, in place from the same or another path, or after an unload; through the
gateway, or at each worker directly. Then prompts that share a head are asked for, and the head's first question of the
round before. Every answer has to be what the same worker says under a salt for which nothing is cached. The gateway has
a response cache that answers any model, and a pinned prompt; workers keep states in a directory. Exit status 1 if an
answer differs, or requests of one generation share no states.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from tests.harness.lora_adapters import ENVIRONMENT, FLAGS, write_adapter

ANSWERS = 200

SHARED = (200, 700, 2000)  # tokens, more or less: a word each

ASKED = 4  # answers of a round, of which the second and third share their head with the first of their generation

CHAT = "/v1/chat/completions"

WORDS = ("harbour", "tide", "berth", "pilot", "crane", "cargo", "rope", "anchor", "signal", "lamp", "fog", "quay")

WAYS = ("in place", "another path", "unloaded", "in place at the workers", "unloaded at the workers")


@dataclass
class Found:
    """What the answers were like."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)  # tokens, of those that share their head with one of their generation

    @property
    def missed(self) -> int:
        """Requests that found nothing of their generation."""
        return self.hits.count(0)


class Adapter:
    """One adapter named `ada`, and how it gets other weights."""

    def __init__(self, folder: Path, gateway: Server, workers: Sequence[Server]) -> None:
        self._folder, self._gateway, self._workers = folder, gateway, workers
        self._paths = 1
        self._seed = 0
        self._is_loaded = False

    def change(self, way: str) -> None:
        """Give it other weights."""
        self._seed += 1
        self._paths += way == "another path"
        path = write_adapter(self._folder / f"ada{self._paths}", self._seed)
        for server in self._workers if way.endswith("at the workers") else (self._gateway,):
            if way.startswith("unloaded") and self._is_loaded:
                self._post(server, "unload", {"lora_name": "ada"})
            in_place = {"load_inplace": True} if self._is_loaded and not way.startswith("unloaded") else {}
            self._post(server, "load", {"lora_name": "ada", "lora_path": str(path), **in_place})
        self._is_loaded = True

    def _post(self, server: Server, act: str, body: dict[str, Any]) -> None:
        httpx.post(f"{server.url}/v1/{act}_lora_adapter", json=body, timeout=300).raise_for_status()


def chat(head: str, question: str, **fields: Any) -> dict[str, Any]:
    """Greedy; the adapter's."""
    messages = [{"role": "system", "content": head}, {"role": "user", "content": question}]
    return {"model": "ada", "messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}


def ask(server: Server, body: dict[str, Any]) -> tuple[str, int, str]:
    """Text, tokens from the cache, and the worker that answered, if the server names one."""
    answer = httpx.post(server.url + CHAT, json=body, headers={"x-seamark-cache": "allow"}, timeout=300)
    answer.raise_for_status()
    told = answer.json()
    details = told["usage"].get("prompt_tokens_details") or {}
    text = told["choices"][0]["message"]["content"]
    return text, details.get("cached_tokens") or 0, answer.headers.get("x-seamark-worker", "")


def run(folder: Path, answers: int, workers: int, say: Callable[[str], None], ways: Sequence[str] = WAYS) -> Found:
    """So many answers, before so many workers."""
    with Servers(folder) as servers:
        model = generated_model(say)
        disk = ("--checkpoint-dir", str(folder / "states"))
        flags = (*disk, *FLAGS, "--max-cpu-loras", "2", "--dtype", "float32")
        fleet = [servers.engine(f"worker{n}", model, flags=flags, environment=ENVIRONMENT) for n in range(workers)]
        gateway = servers.gateway(*fleet, flags=("--response-cache", str(2**24), "--response-cache-models", "*"))
        for server in fleet:
            server.wait_until_ready()
        gateway.wait_until_ready("/ready", 60)
        say("servers are up")
        return _rounds(Adapter(folder, gateway, fleet), gateway, fleet, answers, ways, say)


def _rounds(
    adapter: Adapter,
    gateway: Server,
    fleet: Sequence[Server],
    answers: int,
    ways: Sequence[str],
    say: Callable[[str], None],
) -> Found:
    found, draw = Found(), random.Random(1)
    heads = [" ".join(draw.choices(WORDS, k=length)) for length in SHARED]
    by_name = {server.url.split("://")[1]: server for server in fleet}
    number = 0
    while found.answers < answers:
        way, head = ways[number % len(ways)], heads[number % len(heads)]
        adapter.change(way)
        if not number:
            pin = {"name": "rules", "body": chat(heads[1], "Tide?")}
            httpx.post(gateway.url + "/seamark/prefixes", json=pin, timeout=300)
        for asked in range(ASKED):
            # The last one was asked in the round before, too: nothing of its answer then may come back.
            body = chat(head, f"Berth {number}.{asked}?" if asked < ASKED - 1 else "Tide?")
            text, cached, name = ask(gateway, body)
            right, _, _ = ask(by_name.get(name, fleet[0]), {**body, "cache_salt": uuid.uuid4().hex})
            found.answers += 1
            if text != right:
                found.wrong.append(f"round {number}, {way}, {len(head.split())} words, answer {asked}: {cached} cached")
            if len(fleet) == 1 and asked:
                found.hits.append(cached)
        ask(gateway, {**chat(head, f"Berth {number}?"), "model": MODEL_NAME})
        number += 1
        say(f"{found.answers} answers, {len(found.wrong)} wrong; {way}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.adapters", description=__doc__)
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), options.answers, options.workers, narrator())
    print(json.dumps({"answers": found.answers, "wrong": found.wrong, "hits": found.hits, "missed": found.missed}))
    return int(bool(found.wrong or found.missed))


if __name__ == "__main__":
    sys.exit(main())
