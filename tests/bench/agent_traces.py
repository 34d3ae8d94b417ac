"""`python -m tests.bench.agent_traces DIR`: recorded requests of real agents, sent again through the gateway.

DIR holds one `NAME.jsonl.gz` for each agent, a request a line: `kind`, `n`, `label` (agent/session), `method`, `url`,
`headers`, `body`. Each request goes through the gateway to our worker, and to vLLM alone. The oracle is the longest
prefix in tokens shared with any earlier request of the trace. Texts belong to others and stay there.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import open_client
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.servers import MATCH_UNITS, MODEL_NAME, NEMOTRON_H, Server, Servers, generated_model, narrator
from proxy.boundaries.divergence import common_prefix
from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses
from proxy.observability.reasons import NEAR_UNITS

MATCH_UNIT = MATCH_UNITS[NEMOTRON_H]

HITS = "vllm:prefix_cache_hits_total"

LEAST_SHARE = 0.995  # of what could be found, divergences that were met for the first time left out

SHAREABLE = 512  # tokens; with more of them a request must not get less than from vLLM alone

NEAR_END = 64  # tokens: a request that follows another one to here continues it

FLAGS = (
    *("--block-size", "1600", "--max-model-len", "131072"),  # blocks of Qwen3.8-27B's size
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)

ENVIRONMENT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}

EXPLAINED_SECONDS = 5.0

# Of a recorded connection, not of its request; keys belong to their owners.
DROPPED = frozenset(
    ("host", "content-length", "connection", "accept-encoding", "authorization", "x-api-key", "transfer-encoding")
)

WORDS = """
oracle: tokens shared with an earlier request of the trace, in whole match units. delivered: of them, from the cache.
known: the same without requests that part from all earlier ones where none did before, and not at an earlier one's end.
plain: vLLM alone (SEAMARK_ENGINE=reference). below: requests with more than 512 shareable tokens that got less than
from vLLM alone. wrong: a request that got everything (but for less than two match units) and does not say hit, or says
hit and lost more."""


class Recorded(NamedTuple):
    """One request of a trace."""

    number: int
    label: str
    target: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class Replayed(NamedTuple):
    """What became of one request; tokens."""

    number: int
    label: str
    prompt: int
    shared: int  # with the nearest earlier request
    nearest: int | None  # its number
    delivered: int
    plain: int  # cached by vLLM alone
    reason: str
    first: bool  # it parts from all others where none did before

    @property
    def oracle(self) -> int:
        return min(self.shared, self.prompt - 1) // MATCH_UNIT * MATCH_UNIT

    @property
    def lost(self) -> int:
        return self.oracle - min(self.delivered, self.oracle)

    @property
    def below_plain(self) -> bool:
        """Whether vLLM alone would have done better."""
        return self.oracle > SHAREABLE and self.delivered < min(self.plain, self.oracle)

    @property
    def is_short(self) -> bool:
        """Whether it lost anything that counts: states are not kept nearer to each other than `NEAR_UNITS`."""
        return self.lost >= NEAR_UNITS * MATCH_UNIT

    @property
    def reason_wrong(self) -> bool:
        """Whether its reason contradicts what it got."""
        return bool(self.oracle) and (self.reason == "hit") == self.is_short


@dataclass
class Trace:
    """One agent."""

    name: str
    requests: list[Replayed] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def share(self, known: bool = False, plain: bool = False) -> float:
        """Delivered over possible; `known` as the table says it, `plain` by vLLM alone."""
        counted = [each for each in self.requests if not (known and each.first)]
        possible = sum(each.oracle for each in counted)
        got = sum(min(each.plain if plain else each.delivered, each.oracle) for each in counted)
        return got / possible if possible else 1.0

    @property
    def complaints(self) -> list[str]:
        """What does not hold."""
        found = [f"{self.share(known=True):.1%} delivered"] if self.share(known=True) < LEAST_SHARE else []
        found += [f"#{each.number} below vLLM alone" for each in self.requests if each.below_plain]
        found += [f"#{each.number} says {each.reason}" for each in self.requests if each.reason_wrong]
        return found + self.failures


def recorded(path: Path) -> Iterator[Recorded]:
    """The chats of a trace, in order. Each is asked for a single token."""
    with gzip.open(path, "rt") as lines:
        for entry in map(json.loads, lines):
            where = str(entry.get("url")).partition("?")[0]
            if entry["kind"] != "request" or entry["method"] != "POST" or where not in (CHAT, MESSAGES, RESPONSES):
                continue
            body = json.loads(entry["body"])
            length = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
            body |= {"model": MODEL_NAME, "max_output_tokens" if where == RESPONSES else length: 1}
            headers = {name: value for name, value in entry["headers"] if name.lower() not in DROPPED}
            yield Recorded(entry["n"], entry["label"], entry["url"], headers, body)


def conversations(folder: Path) -> list[list[str]]:
    """Of all traces, each as its turns: chats of texts, in JSON."""
    found = defaultdict[str, list[str]](list)
    for request in itertools.chain.from_iterable(map(recorded, sorted(folder.glob("*.jsonl.gz")))):
        chat = chat_in(request.target.partition("?")[0], dict(request.body), StoredResponses(0))
        for message in chat.messages:
            if isinstance(parts := message.get("content"), list):
                message["content"] = "".join(part.get("text", "") for part in parts)
        turn = {"model": "m", "messages": chat.messages, "tools": chat.body.get("tools"), "max_tokens": 1}
        found[request.label[: request.label.index("/") + 2]].append(json.dumps(turn))
    return list(found.values())


@dataclass
class Replay:
    """Sends traces to both engines and knows what each request could have shared."""

    http: httpx.AsyncClient
    gateway: Server
    ours: Server
    plain: Server

    async def replay(self, name: str, requests: Sequence[Recorded]) -> Trace:
        trace, say = Trace(name), narrator()
        before: list[tuple[Replayed, list[int]]] = []
        for request in requests:
            ids = await self._tokens(request)
            answer = await self._send(self.gateway, request)
            if answer.status_code != 200 or not ids:
                trace.failures.append(f"#{request.number}: {answer.status_code} {answer.text[:200]}")
                continue
            told = await self._explanation(answer.headers["x-request-id"])
            hits = (await samples_of(self.http, self.plain))[HITS]
            (await self._send(self.plain, request)).raise_for_status()
            hits = (await samples_of(self.http, self.plain))[HITS] - hits
            done = judged(request, ids, before, int(hits), told)
            before.append((done, ids))
            trace.requests.append(done)
            say(f"#{done.number} {done.label}: {done.delivered} of {done.oracle}, plain {done.plain}, {done.reason}")
        return trace

    async def _send(self, server: Server, request: Recorded) -> httpx.Response:
        content = json.dumps(request.body, ensure_ascii=False).encode()
        return await self.http.post(server.url + request.target, content=content, headers=dict(request.headers))

    async def _tokens(self, request: Recorded) -> list[int]:
        body = {name: value for name, value in request.body.items() if name not in ("stream", "stream_options")}
        answer = await self.http.post(f"{self.ours.url}{request.target.partition('?')[0]}/render", json=body)
        ids: list[int] = answer.json().get("token_ids") or [] if answer.status_code == 200 else []
        return ids

    async def _explanation(self, request_id: str) -> Mapping[str, Any]:
        """What the gateway says of a request once it is accounted for. Raises `TimeoutError` if it never is."""
        async with asyncio.timeout(EXPLAINED_SECONDS):
            while True:
                answer = await self.http.get(f"{self.gateway.url}/seamark/requests/{request_id}")
                if answer.status_code == 200 and (told := answer.json()).get("reason") is not None:
                    return dict(told)
                await asyncio.sleep(0.05)


def judged(
    request: Recorded, ids: list[int], before: Sequence[tuple[Replayed, list[int]]], plain: int, told: Mapping[str, Any]
) -> Replayed:
    """A request with these tokens that came behind these others, of which vLLM alone found `plain`."""
    lengths = [common_prefix(ids, other) for _, other in before]
    shared = max(lengths, default=0)
    # Where several earlier ones share as much, this one may continue any of them.
    alike = [each for (each, _), length in zip(before, lengths, strict=True) if length == shared]
    nearest = min(alike, key=lambda each: each.prompt) if shared else None
    continues = nearest is not None and shared >= nearest.prompt - NEAR_END
    parted = {each.shared // MATCH_UNIT for each in alike}
    first = shared > 0 and not continues and shared // MATCH_UNIT not in parted
    number, delivered = nearest.number if nearest else None, told.get("delivered") or 0
    return Replayed(request.number, request.label, len(ids), shared, number, delivered, plain, told["reason"], first)


async def measure(paths: Sequence[Path], template: Path | None, most: int | None) -> list[Trace]:
    """Both engines, and every trace; `most` requests of each."""
    say = narrator()
    model = generated_model(say)
    flags = (*FLAGS, "--chat-template", str(template)) if template else FLAGS
    found = []
    with tempfile.TemporaryDirectory(prefix="seamark-traces-") as folder, Servers(Path(folder)) as servers:
        ours = servers.engine("seamark", model, flags=flags, environment=ENVIRONMENT)
        plain = servers.engine("plain", model, "reference", flags, ENVIRONMENT)
        for engine in (ours, plain):
            engine.wait_until_ready()
        async with open_client(600) as http:
            for path in paths:
                gateway = servers.gateway(ours)  # agents do not know of each other
                gateway.wait_until_ready("/ready", seconds=60)
                say(path.name)
                replay = Replay(http, gateway, ours, plain)
                found.append(await replay.replay(path.name.partition(".")[0], list(recorded(path))[:most]))
                gateway.stop()
    return found


def render(traces: Sequence[Trace]) -> str:
    """A line for each agent, then what was lost and why, then the verdicts."""
    lines = [
        f"{'agent':<18}{'requests':>9}{'tokens':>10}{'oracle':>10}{'delivered':>11}{'known':>8}{'plain':>8}"
        f"{'below':>7}{'wrong':>7}"
    ]
    for trace in traces:
        sums = {name: sum(getattr(it, name) for it in trace.requests) for name in ("prompt", "oracle", "below_plain")}
        shares = f"{trace.share():>11.1%}{trace.share(known=True):>8.1%}{trace.share(plain=True):>8.1%}"
        lines.append(
            f"{trace.name:<18}{len(trace.requests):>9}{sums['prompt']:>10}{sums['oracle']:>10}{shares}"
            f"{sums['below_plain']:>7}{sum(each.reason_wrong for each in trace.requests):>7}"
        )
    for trace in traces:
        lines += [
            f"  {trace.name} #{each.number} {each.label}: lost {each.lost} of {each.oracle}, {each.reason}, parts from "
            f"#{each.nearest} at {each.shared}{', met for the first time' if each.first else ''}"
            for each in trace.requests
            if each.is_short or each.reason_wrong
        ]
        reasons = Counter(each.reason for each in trace.requests)
        lines.append(f"  {trace.name}: " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()))
        lines.append(f"{'NOT HELD' if trace.complaints else 'held'}: {trace.name}: {'; '.join(trace.complaints)}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.agent_traces", description="recorded requests of agents, sent again"
    )
    parser.add_argument("folder", type=Path, help="of the traces")
    parser.add_argument("--agent", action="append", metavar="NAME", help="only this trace (repeat); default: all")
    parser.add_argument("--template", type=lambda name: Path(name).resolve(), metavar="FILE", help="chat template")
    parser.add_argument("--requests", type=int, metavar="N", help="of each trace, the first ones; default: all")
    args = parser.parse_args(argv)
    paths = sorted(args.folder.glob("*.jsonl.gz"))
    paths = [path for path in paths if args.agent is None or path.name.partition(".")[0] in args.agent]
    if not paths:
        parser.error(f"{args.folder}: no such trace")
    traces = asyncio.run(measure(paths, args.template, args.requests))
    print(render(traces), WORDS, sep="\n")
    return 1 if any(trace.complaints for trace in traces) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
