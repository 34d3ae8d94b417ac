"""`python -m tests.bench.tenants`: what one client can learn of another's prompts from the time to a first token.

Two keys of their own and one that shares with the first, on a real engine behind a gateway with keys. Each round has a
new long prompt: the first key asks it, then a stranger, then the one who shares; and the stranger asks something that
nobody has asked. Exit status 1 if a stranger hits, or a sharer does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.ratios import Comparison, Pair, in_words
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator

WORDS_PER_PROMPT = 1500

ROUNDS = 20

KEYS = {"owner": "sk-owner", "sharer": "sk-sharer", "stranger": "sk-stranger"}


class Asked(NamedTuple):
    """One request."""

    cached_tokens: int
    first_token: float  # seconds


class Round(NamedTuple):
    """One prompt that the owner asks first, and one that nobody asks before the stranger."""

    owner: Asked
    stranger: Asked
    sharer: Asked
    unseen: Asked


def write_keys(path: Path) -> None:
    """Three keys, of which two share."""
    lines = []
    for name, key in KEYS.items():
        lines += [f"[keys.{name}]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
        lines += [] if name == "stranger" else ['share = "team"']
    path.write_text("\n".join(lines))


def measure(gateway: Server, rounds: int, words: int = WORDS_PER_PROMPT, seed: int = 0) -> list[Round]:
    """Ask a gateway that has the keys of `write_keys`."""
    with httpx.Client(timeout=300) as client:

        def ask(name: str, text: str, question: str) -> Asked:
            messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}
            headers = {"authorization": f"Bearer {KEYS[name]}"}
            started = time.perf_counter()
            answer = client.post(gateway.url + "/v1/chat/completions", json=body, headers=headers)
            seconds = time.perf_counter() - started
            answer.raise_for_status()
            return Asked(int(answer.headers["x-seamark-cached"]), seconds)

        found = []
        for number in range(rounds):
            text, other = prose(words, seed + 2 * number), prose(words, seed + 2 * number + 1)
            names = ("owner", "stranger", "sharer")
            found.append(Round(*(ask(name, text, f"{name}?") for name in names), ask("stranger", other, "else?")))
        return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.tenants", description="what keys learn of each other's prompts"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print JSON, and what happens to standard error")
    args = parser.parse_args(argv)
    say = narrator()
    with tempfile.TemporaryDirectory(prefix="seamark-tenants-") as folder, Servers(Path(folder)) as servers:
        write_keys(Path(folder) / "keys.toml")
        engine = servers.engine("seamark", generated_model(say))
        engine.wait_until_ready()
        gateway = servers.gateway(engine, flags=("--api-keys", str(Path(folder) / "keys.toml")))
        gateway.wait_until_ready("/ready", seconds=30)
        measure(gateway, 2, seed=10_000)  # what only first requests pay
        rounds = measure(gateway, args.rounds)
    return report(rounds, args.json)


def report(rounds: Sequence[Round], as_json: bool) -> int:
    """Print it; the exit status."""
    stranger = Comparison("stranger", tuple(Pair(r.stranger.first_token, r.unseen.first_token) for r in rounds), 1.0)
    sharer = Comparison("sharer", tuple(Pair(r.sharer.first_token, r.unseen.first_token) for r in rounds), 1.0)
    wrong = [r for r in rounds if r.stranger.cached_tokens or not r.sharer.cached_tokens]
    if as_json:
        figures = {"stranger": stranger.ratio._asdict(), "sharer": sharer.ratio._asdict(), "wrong": len(wrong)}
        print(json.dumps({"rounds": [each._asdict() for each in rounds], **figures}))
        return bool(wrong)
    print(
        "first token of a prompt that another key has asked, over that of one that nobody has asked (median, quartiles)"
    )
    print(
        f"  a stranger's key      {in_words(stranger.ratio)}   tokens from the cache: 0 wanted, "
        f"{max(r.stranger.cached_tokens for r in rounds)} at most"
    )
    print(
        f"  a key that shares     {in_words(sharer.ratio)}   tokens from the cache: "
        f"{min(r.sharer.cached_tokens for r in rounds)} at least"
    )
    print(
        "NOT HELD: a stranger hits, or a sharer does not" if wrong else "held: strangers never hit, sharers always do"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
