"""`python -m tests.bench.sidecars`: a router of others before two engines, with a sidecar beside each and without.

Prompts that share a beginning, and conversations that go on. Without: vLLM alone (SEAMARK_ENGINE=reference, with its
prefix caching). Also whether what an endpoint picker scrapes is there, and whether aborts, errors and heartbeats come
through both hops. Exit status 1 if one of these is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from proxy.bench.harness.servers import MODEL_NAME, NEMOTRON_H, Server, Servers, generated_model, narrator
from proxy.boundaries.token_ids import common_prefix
from proxy.commands.render_server import free_port
from tests.bench.peers import PEERS, START_SECONDS, Peer, environment_of

HEADS, USERS, TURNS = 8, 6, 3  # prompts, who share each, and what each of them says

AT_ONCE = 4

MATCH_UNIT = 16

CHAT = "/v1/chat/completions"

WORDS = ("tide", "berth", "pilot", "anchor", "harbour", "lantern", "signal", "ledger", "captain", "cargo", "quay")

SCRAPED = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


@dataclass
class Hits:
    """Tokens of some requests."""

    delivered: int = 0
    possible: int = 0  # shared with one sent before, whichever engine has that

    @property
    def share(self) -> float:
        return self.delivered / self.possible if self.possible else 0.0


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


async def converse(url: str, tokenizer: Any, seed: int) -> tuple[Hits, Hits]:
    """First turns, and later ones: what was hit."""
    draw = random.Random(seed)
    chats = [
        [{"role": "system", "content": f"{seed} {head} " + text(random.Random(f"{seed} {head}"), 250)}]
        for _ in range(USERS)
        for head in range(HEADS)
    ]
    draw.shuffle(chats)
    first, later, seen, turns = Hits(), Hits(), [], asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=300) as client:

        async def say(messages: list[dict[str, str]], number: int, hits: Hits) -> None:
            async with turns:
                messages.append({"role": "user", "content": f"{number} {text(draw, 12)}"})
                body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 8, "temperature": 0}
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                shared = max((common_prefix(ids, other) for other in seen), default=0)
                seen.append(ids)  # who comes while it is computed can wait for it
                hits.possible += min(shared, len(ids) - 1) // MATCH_UNIT * MATCH_UNIT
                answer = await client.post(url + CHAT, json=body)
                answer.raise_for_status()
                told = answer.json()
                hits.delivered += (told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"] or "."})

        for turn in range(TURNS):
            for number in range(0, len(chats), AT_ONCE):
                batch = enumerate(chats[number : number + AT_ONCE], number)
                await asyncio.gather(*(say(chat, each, later if turn else first) for each, chat in batch))
    return first, later


def start_router(servers: Servers, peer: Peer, workers: Sequence[Server], folder: Path, say: Any) -> Server:
    port = free_port()
    (script, *arguments), variables = peer.command(port, [worker.url for worker in workers], folder)
    server = servers.start(peer.name, port, [str(environment_of(peer, say) / "bin" / script), *arguments], variables)
    server.wait_until_ready(peer.health, START_SECONDS)
    return server


def scraped(engine: Server, sidecar: Server) -> str:
    """Empty if the sidecar shows every family of its engine, and what a picker looks for; else what is missing."""

    def names(server: Server) -> set[str]:
        return {family.name for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text)}

    missing = (names(engine) | set(SCRAPED)) - names(sidecar)
    return f"missing at /metrics: {', '.join(sorted(missing))}" if missing else ""


async def aborted(router: Server, engines: Sequence[Server]) -> str:
    """Empty if a stream that its client leaves ends in the engine."""
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Go on."}], "stream": True}
    async with httpx.AsyncClient(timeout=60) as client:
        async with client.stream(
            "POST", router.url + CHAT, json={**body, "max_tokens": 4000, "ignore_eos": True}
        ) as got:
            async for _ in got.aiter_lines():
                break
        for _ in range(100):
            texts = [(await client.get(engine.url + "/metrics")).text for engine in engines]
            lines = [line for told in texts for line in told.splitlines() if line.startswith(SCRAPED[1])]
            if all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines):
                return ""
            await asyncio.sleep(0.2)
    return "a stream that its client left goes on in the engine"


def refused(router: Server, engine: Server) -> str:
    """Empty if errors come through with the engine's status; sglang-router gives them words of its own."""
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "?"}]}
    for body in ({**chat, "temperature": 9}, {**chat, "max_tokens": 10**6}):
        there, here = (httpx.post(server.url + CHAT, json=body, timeout=60) for server in (engine, router))
        if there.status_code != here.status_code:
            return f"{json.dumps(body)}: {here.status_code}, from the engine {there.status_code}"
    return ""


async def beating(router: Server) -> str:
    """Empty if comments come while a long prompt is computed."""
    messages = [{"role": "user", "content": text(random.Random(3), 1200)}]
    body = {"model": MODEL_NAME, "messages": messages, "stream": True, "max_tokens": 1}
    async with httpx.AsyncClient(timeout=120) as client, client.stream("POST", router.url + CHAT, json=body) as got:
        if got.status_code != 200:
            return f"a long prompt is answered with {got.status_code}"
        async for line in got.aiter_lines():
            if line.startswith(":"):
                return ""
    return "no heartbeat came through"


def measure(servers: Servers, model: Path, folder: Path, say: Callable[[str], None]) -> list[str]:
    """Print the table; what is not as it should be."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    wrong: list[str] = []
    print(f"{'router':<16}{'beside vLLM':<14}{'shared prompts':>15}{'later turns':>13}", flush=True)
    seed = 0
    for mode, name in (("reference", "nothing"), ("1", "sidecar")):
        engines = [servers.engine(f"{name}-{number}", model, mode) for number in (1, 2)]
        for engine in engines:
            engine.wait_until_ready()
        behind = engines
        if mode == "1":
            flags = ("--sidecar", "--heartbeat", "0.05")
            behind = [servers.gateway(engine, flags=flags) for engine in engines]
            for sidecar in behind:
                sidecar.wait_until_ready("/ready", seconds=60)
            wrong += filter(None, map(scraped, engines, behind))
        for peer in PEERS[:2]:
            seed += 1
            router = start_router(servers, peer, behind, folder, say)
            first, later = asyncio.run(converse(router.url, tokenizer, seed))
            print(f"{peer.name:<16}{name:<14}{first.share:>15.3f}{later.share:>13.3f}", flush=True)
            if mode == "1":
                found = (
                    asyncio.run(aborted(router, engines)),
                    refused(router, engines[0]),
                    asyncio.run(beating(router)),
                )
                wrong += [f"{peer.name}: {each}" for each in found if each]
            router.stop()
        for server in (*behind, *engines):
            server.stop()
    return wrong


def main(argv: list[str], say: Callable[[str], None] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sidecars", description="routers before sidecars")
    parser.parse_args(argv)
    say = say or narrator()
    model = generated_model(say, NEMOTRON_H)
    with tempfile.TemporaryDirectory(prefix="seamark-sidecars-") as folder, Servers(Path(folder)) as servers:
        wrong = measure(servers, model, Path(folder), say)
    print("\nshare: tokens from a cache over those that some request before had; of first turns, and of later ones")
    for each in wrong:
        print(f"NOT SO: {each}")
    if not wrong:
        print("the picker's figures, aborts, errors and heartbeats come through both hops")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
