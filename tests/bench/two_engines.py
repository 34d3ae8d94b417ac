"""`python -m tests.bench.two_engines`: one mix before two engines, by Seamark's routing and by others', and simulated.

Conversations of teams, each team with a system prompt of its own. All engines have the plugin; behind a router of
others each has a sidecar, so that only the choice differs. First `tests.bench.traces` says which order it expects of
the same mix, with a profile measured here. Last, a worker is killed in the middle and started again. Exit status 1 if
the order of hits is another one, or a request fails that was not in flight at the killed worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.servers import MODEL_NAME, NEMOTRON_H, Server, Servers, generated_model, narrator
from proxy.boundaries.token_ids import common_prefix
from tests.bench.peers import PEERS, Peer
from tests.bench.sidecars import CHAT, MATCH_UNIT, Hits, start_router, text
from tests.bench.traces.formats import read
from tests.bench.traces.replay import Replay
from tests.bench.traces.simulated_fleet import Profile

TEAMS, SESSIONS, USERS = 6, 90, 6

MOST_TURNS = 6

SYSTEM_WORDS = (160, 400)  # of a team; about two tokens each

FIRST_WORDS, LATER_WORDS = 250, 60  # medians of what users say

ANSWER_TOKENS = 16

THINKS = (0.2, 1.5)  # seconds

TRACE_BLOCK = 64  # tokens: the Claude Code format's

LOST_AT = 1 / 3  # of the sessions, after which the worker is killed


@dataclass(frozen=True)
class Session:
    """One conversation: what the user says and how long they think before."""

    team: int
    system: str
    says: Sequence[str]
    thinks: Sequence[float]


@dataclass
class Said:
    """One request, answered or not."""

    began: float  # time.monotonic()
    possible: int  # tokens that a request before had, whichever engine computed them
    cached: int = 0
    first: float = 0.0  # seconds to the first token
    ended: float = 0.0
    error: str = ""
    worker: str = ""


@dataclass
class Played:
    """A round: its requests, in the order of their starts."""

    said: list[Said] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        return efficiency(self.said)

    def wait(self, share: float) -> float:
        """Seconds to the first token at that quantile."""
        waits = sorted(each.first for each in self.said if not each.error)
        return waits[min(len(waits) - 1, int(share * len(waits)))]


def efficiency(said: Sequence[Said]) -> float:
    hits = Hits(sum(each.cached for each in said), sum(each.possible for each in said if not each.error))
    return hits.share


def mix(seed: int) -> list[Session]:
    """The same for the same seed."""
    drawn = random.Random(seed)
    systems = [f"{seed} {team} " + text(drawn, drawn.randint(*SYSTEM_WORDS)) for team in range(TEAMS)]
    sessions = []
    for number in range(SESSIONS):
        turns = min(MOST_TURNS, 1 + int(drawn.expovariate(1 / 2.5)))
        words = [
            min(1500, round(drawn.lognormvariate(0, 0.7) * (LATER_WORDS if turn else FIRST_WORDS)) + 4)
            for turn in range(turns)
        ]
        says = [f"{number} {turn} " + text(drawn, count) for turn, count in enumerate(words)]
        team = drawn.randrange(TEAMS)
        sessions.append(Session(team, systems[team], says, [drawn.uniform(*THINKS) for _ in range(turns)]))
    return sessions


def as_trace(sessions: Sequence[Session], tokenizer: Any, path: Path) -> None:
    """The mix in the Claude Code set's format. Answers are taken to be as long as they may be."""

    def tokens(messages: Sequence[dict[str, str]], *, opened: bool) -> int:
        return len(tokenizer.apply_chat_template(list(messages), add_generation_prompt=opened, return_dict=False))

    with path.open("w") as file:
        for number, session in enumerate(sessions):
            messages = [{"role": "system", "content": session.system}]
            system = tokens(messages, opened=False)
            requests = []
            for said, pause in zip(session.says, session.thinks, strict=True):
                messages.append({"role": "user", "content": said})
                length = tokens(messages, opened=True)
                ids = [number * 10_000 + at for at in range(length // TRACE_BLOCK)]
                requests.append({"in": length, "out": ANSWER_TOKENS, "think_time": pause, "hash_ids": ids})
                messages.append({"role": "assistant", "content": "tide " * (ANSWER_TOKENS // 2)})
            # Equally long system prompts are taken for one: those of two teams must not be.
            row = {"tool_tokens": 0, "system_tokens": system // 8 * 8 + session.team % 8, "requests": requests}
            file.write(json.dumps(row) + "\n")


async def play(
    url: str, sessions: Sequence[Session], tokenizer: Any, lose: Callable[[], None] | None = None, name: str = ""
) -> Played:
    """So many users at once, each one session after the other.

    After some of the sessions `lose` is called, while the worker `name` answers.
    """
    played, waiting, done = Played(), iter(sessions), 0
    is_lost = lose is None

    async def say(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        nonlocal is_lost
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        shared = max((common_prefix(ids, other) for other in played.seen), default=0)
        played.seen.append(ids)
        said = Said(time.monotonic(), min(shared, len(ids) - 1) // MATCH_UNIT * MATCH_UNIT)
        played.said.append(said)
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        words: list[str] = []
        try:
            async with client.stream("POST", url + CHAT, json=body) as answer:
                said.worker = answer.headers.get("x-seamark-worker", "")
                if answer.status_code != 200:
                    said.error = f"status {answer.status_code}"
                ended = False
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        if not is_lost and said.worker == name and done >= int(LOST_AT * len(sessions)):
                            is_lost = True
                            lose()
                        part = json.loads(line[6:])
                        if "error" in part:
                            said.error = "error in the stream"
                        if part.get("choices"):
                            said.first = said.first or time.monotonic() - said.began
                            words.append(part["choices"][0]["delta"].get("content") or "")
                        if usage := part.get("usage"):
                            said.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                if not ended and not said.error:
                    said.error = "the stream broke"
        except httpx.HTTPError as error:
            said.error = type(error).__name__
        said.ended = time.monotonic()
        return "".join(words) or "."

    async def user(client: httpx.AsyncClient) -> None:
        nonlocal done
        for session in waiting:
            messages = [{"role": "system", "content": session.system}]
            for words, pause in zip(session.says, session.thinks, strict=True):
                await asyncio.sleep(pause)
                messages.append({"role": "user", "content": words})
                messages.append({"role": "assistant", "content": await say(client, messages)})
            done += 1

    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(user(client) for _ in range(USERS)))
    return played


def measured(engine: Server) -> Profile:
    """What this engine takes for a pass and for a token, beside an idle neighbour."""

    def seconds(words: int) -> float:
        took = []
        for number in range(3):
            content = f"{words} {number} " + text(random.Random(f"{words} {number}"), words)
            body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
            began = time.monotonic()
            httpx.post(engine.url + CHAT, json=body, timeout=300).raise_for_status()
            took.append(time.monotonic() - began)
        return statistics.median(took)

    def tokens(words: int) -> int:
        content = f"{words} 9 " + text(random.Random(9), words)
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = httpx.post(engine.url + CHAT, json=body, timeout=300).raise_for_status()
        return int(answer.json()["usage"]["prompt_tokens"])

    seconds(50)
    short, long = seconds(50), seconds(1500)
    token = max(1e-6, (long - short) / (tokens(1500) - tokens(50)))
    return Profile(max(0.001, short - tokens(50) * token), token, 0.001, 2048, 8, 1_000_000, 2048)


def started(servers: Servers, model: Path) -> list[Server]:
    engines = [servers.engine(f"engine-{number}", model) for number in (1, 2)]
    for engine in engines:
        engine.wait_until_ready()
    return engines


def round_robin() -> Peer:
    before = PEERS[0]

    def command(port: int, workers: Sequence[str], folder: Path) -> Any:
        told = before.command(port, workers, folder)
        return told._replace(arguments=[*told.arguments, "--policy", "round_robin"])

    return replace(before, command=command)


# By the names of `tests.bench.traces`; None: the gateway itself.
WAYS: dict[str, Callable[[], Peer] | None] = {
    "seamark": None,
    "round-robin": round_robin,
    "cache-aware": lambda: PEERS[1],
}


def compare(servers: Servers, model: Path, folder: Path, rounds: int, tokenizer: Any, say: Any) -> list[str]:
    """Print both tables. Returns what is not as it should be."""
    engines = started(servers, model)
    profile = measured(engines[0])
    sidecars = [servers.gateway(engine, flags=("--sidecar",)) for engine in engines]
    gateway = servers.gateway(*engines)
    for server in (gateway, *sidecars):
        server.wait_until_ready("/ready", seconds=60)
    print(f"a pass {profile.pass_seconds * 1e3:.1f} ms and {profile.token_seconds * 1e3:.3f} ms a token\n")
    print(f"{'way':<14}{'round':>6}{'hits':>8}{'p50 s':>8}{'p99 s':>8}{'requests':>10}{'failed':>8}", flush=True)
    found: dict[str, list[Played]] = {way: [] for way in WAYS}
    for number in range(rounds):
        order = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
        for way in order:
            peer = WAYS[way]
            router = start_router(servers, peer(), sidecars, folder, say) if peer else gateway
            sessions = mix(1000 * number + list(WAYS).index(way) + 1)
            played = asyncio.run(play(router.url, sessions, tokenizer))
            found[way].append(played)
            failed = sum(bool(each.error) for each in played.said)
            print(
                f"{way:<14}{number + 1:>6}{played.efficiency:>8.3f}{played.wait(0.5):>8.2f}{played.wait(0.99):>8.2f}"
                f"{len(played.said):>10}{failed:>8}",
                flush=True,
            )
            if peer:
                router.stop()
    path = folder / "mix.jsonl"
    as_trace(mix(1), tokenizer, path)
    replay = Replay(read(path), profile, 300.0, 0.65, USERS // 2, 1)
    print("\nexpected by `tests.bench.traces` of the same mix")
    expected = {way: replay.run(way, 2) for way in WAYS}
    reached = {way: statistics.median(each.efficiency for each in found[way]) for way in WAYS}
    for way, outcome in expected.items():
        waits = [statistics.median(each.wait(share) for each in found[way]) for share in (0.5, 0.99)]
        print(
            f"{way:<14} hits {outcome.hit_efficiency:.3f}, p50/p99 {outcome.first_token_p50:.2f}/"
            f"{outcome.first_token_p99:.2f} s; reached {reached[way]:.3f}, {waits[0]:.2f}/{waits[1]:.2f} s"
        )
    for server in (*sidecars, gateway, *engines):
        server.stop()
    best_first = [
        sorted(WAYS, key=lambda way: -of[way])
        for of in ({way: outcome.hit_efficiency for way, outcome in expected.items()}, reached)
    ]
    if best_first[0] != best_first[1]:
        return [f"hits: expected {' > '.join(best_first[0])}, reached {' > '.join(best_first[1])}"]
    return []


def lose_one(servers: Servers, model: Path, tokenizer: Any) -> list[str]:
    """A worker is killed in the middle and started again. Returns what is not as it should be."""
    engines = started(servers, model)
    gateway = servers.gateway(*engines, flags=("--health-interval", "0.5"))
    gateway.wait_until_ready("/ready", seconds=60)
    boot = httpx.get(gateway.url + "/seamark/status").json()["workers"][0]["boot"]
    lost, port = engines[0], int(engines[0].url.rsplit(":", 1)[1])
    name = lost.url.removeprefix("http://")
    killed = back = 0.0
    again: list[Server] = []

    def kill() -> None:
        nonlocal killed
        lost.process.kill()
        lost.process.wait()  # until then it may be sent requests, which nobody reads
        killed = time.monotonic()
        again.append(servers.engine("engine-1-again", model, port=port))

    sessions = [*mix(71), *mix(72)]  # enough to go on behind the restart
    wrong: list[str] = []

    async def watched() -> Played:
        async def watch() -> None:
            nonlocal back
            async with httpx.AsyncClient(timeout=10) as client:
                while not back:
                    await asyncio.sleep(0.2)
                    if not again:
                        continue
                    told = (await client.get(gateway.url + "/seamark/status")).json()
                    state = next(each for each in told["workers"] if each["name"] == name)
                    if state["up"] and not state["warming"] and state["boot"] != boot:
                        back = time.monotonic()

        watching = asyncio.create_task(watch())
        played = await play(gateway.url, sessions, tokenizer, kill, name)
        watching.cancel()
        return played

    played = asyncio.run(watched())
    in_flight = [each for each in played.said if each.began < killed < each.ended and each.worker in ("", name)]
    failed = [each for each in played.said if each.error]
    if others := [each for each in failed if each not in in_flight]:
        wrong.append(f"{len(others)} requests failed that were not in flight there: {others[0].error}")
    before = [each for each in played.said if each.ended < killed][len(played.said) // 12 :]
    print(f"\na worker killed: {len(failed)} of {len(in_flight)} in flight there failed, {len(failed)} in all")
    if not back:
        return [*wrong, "the worker that was started again did not come back while requests went on"]
    after = [each for each in played.said if each.began > back]
    at_it = sum(each.worker == name for each in after)
    print(
        f"back after {back - killed:.0f} s; hits before {efficiency(before):.3f} ({len(before)} requests), "
        f"without it {efficiency([e for e in played.said if killed < e.began < back]):.3f}, "
        f"behind it {efficiency(after):.3f} ({len(after)} requests, {at_it} at it)"
    )
    if efficiency(after) < 0.95 * efficiency(before):
        wrong.append("hits did not come back to 95 %")
    return wrong


def main(argv: list[str], say: Callable[[str], None] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.two_engines", description="routing on two engines")
    parser.add_argument("--rounds", type=int, default=3, help="of each way, in turns (3)")
    parser.add_argument("--only", choices=("compare", "kill"), help="one of the two parts")
    args = parser.parse_args(argv)
    say = say or narrator()
    from transformers import AutoTokenizer

    model = generated_model(say, NEMOTRON_H)
    tokenizer = AutoTokenizer.from_pretrained(model)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="seamark-two-engines-") as folder, Servers(Path(folder)) as servers:
        if args.only != "kill":
            wrong += compare(servers, model, Path(folder), args.rounds, tokenizer, say)
        if args.only != "compare":
            wrong += lose_one(servers, model, tokenizer)
    for each in wrong:
        print(f"NOT SO: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
