"""`python -m tests.bench.agent_traces DIR`: recorded requests of real agents, sent again through the gateway.

DIR holds one `NAME.jsonl.gz` (or `.jsonl`) for each agent, a request a line: `kind`, `n`, `label` (agent/session),
`method`, `url`, `headers`, `body`. Each request goes through the gateway to our worker, and to vLLM alone. The oracle
is the longest prefix in tokens shared with any earlier request of the trace. Texts belong to others and stay there.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import open_client
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.servers import MATCH_UNITS, MODEL_NAME, NEMOTRON_H, Server, Servers, generated_model, narrator
from proxy.boundaries.token_ids import common_prefix
from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from proxy.observability.reasons import NEAR_UNITS

MATCH_UNIT = MATCH_UNITS[NEMOTRON_H]

HITS = "vllm:prefix_cache_hits_total"

LEAST_SHARE = 0.995  # of what could be found, divergences that were met for the first time left out

SHAREABLE = 512  # tokens; with more of them a request must not get less than from vLLM alone

NEAR_END = 64  # tokens: a request that follows another one to here continues it

LENGTH = 131_072  # tokens

FLAGS = ("--max-model-len", str(LENGTH), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")

ENVIRONMENT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}

EXPLAINED_SECONDS = 5.0

# Of a recorded connection, not of its request; keys belong to their owners.
DROPPED = frozenset(
    ("host", "content-length", "connection", "accept-encoding", "authorization", "x-api-key", "transfer-encoding")
)

ANSWER_LENGTH = {RESPONSES: "max_output_tokens"}

WORDS = (
    "oracle: tokens shared with an earlier request of the trace, in whole match units. delivered: of them, from the\n"
    "cache. known: the same without requests that part from all earlier ones where none did before, and not at an\n"
    "earlier one's end. plain: vLLM alone (SEAMARK_ENGINE=reference). below: requests with more than 512 shareable\n"
    "tokens that got less than from vLLM alone. wrong: a request that got everything (but for less than two match\n"
    "units) and does not say hit, or says hit and lost more."
)


class Recorded(NamedTuple):
    """One request of a trace."""

    number: int
    label: str
    target: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition("?")[0]


class Replayed(NamedTuple):
    """What became of one request; tokens."""

    number: int
    label: str
    prompt: int
    shared: int  # with the nearest earlier request
    nearest: int | None  # its number
    nearest_prompt: int
    oracle: int
    delivered: int
    plain: int  # cached by vLLM alone
    reason: str
    sent: str  # x-seamark-boundary
    first: bool  # it parts from all others where none did before

    @property
    def lost(self) -> int:
        """What could have been found and was not."""
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
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
        for entry in map(json.loads, lines):
            target = str(entry.get("url"))
            where = target.partition("?")[0]
            if entry["kind"] != "request" or entry["method"] != "POST" or where not in (CHAT, MESSAGES, RESPONSES):
                continue
            body = json.loads(entry["body"])
            length = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
            body |= {"model": MODEL_NAME, ANSWER_LENGTH.get(where, length): 1}
            headers = {name: value for name, value in entry["headers"] if name.lower() not in DROPPED}
            yield Recorded(entry["n"], entry["label"], target, headers, body)


class Replay:
    """Sends traces to both engines and knows what each request could have shared."""

    def __init__(self, http: httpx.AsyncClient, gateway: Server, ours: Server, plain: Server) -> None:
        self._http = http
        self._gateway = gateway
        self._ours = ours
        self._plain = plain

    async def replay(self, name: str, requests: Sequence[Recorded], say: Callable[[str], None]) -> Trace:
        """One trace from its first request to its last."""
        trace = Trace(name)
        before: list[tuple[Replayed, list[int]]] = []
        for request in requests:
            ids = await self._tokens(request)
            answer = await self._send(self._gateway, request)
            if answer.status_code != 200 or not ids:
                trace.failures.append(f"#{request.number}: {answer.status_code} {answer.text[:200]}")
                continue
            told = await self._explanation(answer.headers["x-request-id"])
            hits = (await samples_of(self._http, self._plain))[HITS]
            plain = await self._send(self._plain, request)
            if plain.status_code != 200:
                trace.failures.append(f"#{request.number}, vLLM alone: {plain.status_code} {plain.text[:200]}")
            hits = (await samples_of(self._http, self._plain))[HITS] - hits
            sent = answer.headers.get("x-seamark-boundary", "")
            done = _judged(request, ids, before, int(hits), told, sent)
            before.append((done, ids))
            trace.requests.append(done)
            say(f"#{done.number} {done.label}: {done.delivered} of {done.oracle}, plain {done.plain}, {done.reason}")
        return trace

    async def _send(self, server: Server, request: Recorded) -> httpx.Response:
        content = json.dumps(request.body, ensure_ascii=False).encode()
        return await self._http.post(server.url + request.target, content=content, headers=dict(request.headers))

    async def _tokens(self, request: Recorded) -> list[int]:
        body = {name: value for name, value in request.body.items() if name not in ("stream", "stream_options")}
        answer = await self._http.post(f"{self._ours.url}{request.path}/render", json=body)
        ids: list[int] = answer.json().get("token_ids") or [] if answer.status_code == 200 else []
        return ids

    async def _explanation(self, request_id: str) -> Mapping[str, Any]:
        """What the gateway says of a request once it is accounted for. Raises `RuntimeError` if it never is."""
        deadline = time.monotonic() + EXPLAINED_SECONDS
        while time.monotonic() < deadline:
            answer = await self._http.get(f"{self._gateway.url}/seamark/requests/{request_id}")
            if answer.status_code == 200 and (told := answer.json()).get("reason") is not None:
                return dict(told)
            await asyncio.sleep(0.05)
        raise RuntimeError(f"the gateway does not explain request {request_id}: {answer.text[:300]}")


def _judged(
    request: Recorded,
    ids: list[int],
    before: Sequence[tuple[Replayed, list[int]]],
    plain: int,
    told: Mapping[str, Any],
    sent: str,
) -> Replayed:
    lengths = [common_prefix(ids, other) for _, other in before]
    shared = max(lengths, default=0)
    # Where several earlier ones share as much, this one may continue any of them.
    alike = [each for (each, _), length in zip(before, lengths, strict=True) if length == shared]
    nearest = min(alike, key=lambda each: each.prompt) if shared else None
    continues = nearest is not None and shared >= nearest.prompt - NEAR_END
    parted = {each.shared // MATCH_UNIT for each in alike}
    return Replayed(
        number=request.number,
        label=request.label,
        prompt=len(ids),
        shared=shared,
        nearest=nearest.number if nearest else None,
        nearest_prompt=nearest.prompt if nearest else 0,
        oracle=min(shared, len(ids) - 1) // MATCH_UNIT * MATCH_UNIT,
        delivered=told.get("delivered") or 0,
        plain=plain,
        reason=told["reason"],
        sent=sent,
        first=shared > 0 and not continues and shared // MATCH_UNIT not in parted,
    )


async def measure(
    paths: Sequence[Path], template: Path | None, most: int | None, say: Callable[[str], None]
) -> list[Trace]:
    """Both engines, and every trace; `most` requests of each."""
    model = generated_model(say)
    flags = (*FLAGS, "--chat-template", str(template)) if template else FLAGS
    found = []
    with tempfile.TemporaryDirectory(prefix="seamark-traces-") as folder, Servers(Path(folder)) as servers:
        say("starting Seamark and vLLM alone")
        ours = servers.engine("seamark", model, flags=flags, environment=ENVIRONMENT)
        plain = servers.engine("plain", model, "reference", flags, ENVIRONMENT)
        for engine in (ours, plain):
            engine.wait_until_ready()
        async with open_client(600) as http:
            for path in paths:
                gateway = servers.gateway(ours)  # agents do not know of each other
                gateway.wait_until_ready("/ready", seconds=60)
                requests = list(recorded(path))[:most]
                say(f"{path.name}: {len(requests)} requests")
                replay = Replay(http, gateway, ours, plain)
                found.append(await replay.replay(path.name.partition(".")[0], requests, say))
                gateway.stop()
    return found


def render(traces: Sequence[Trace]) -> str:
    """A line for each agent, then what was lost and why, then the verdicts."""
    head = f"{'agent':<18}{'requests':>9}{'tokens':>10}{'oracle':>10}{'delivered':>11}{'known':>8}{'plain':>8}"
    lines = [head + f"{'below':>7}{'wrong':>7}"]
    for trace in traces:
        tokens, oracle = (sum(getattr(each, name) for each in trace.requests) for name in ("prompt", "oracle"))
        shares = trace.share(), trace.share(known=True), trace.share(plain=True)
        below, wrong = (sum(getattr(each, name) for each in trace.requests) for name in ("below_plain", "reason_wrong"))
        cells = f"{len(trace.requests):>9}{tokens:>10}{oracle:>10}{shares[0]:>11.1%}{shares[1]:>8.1%}{shares[2]:>8.1%}"
        lines.append(f"{trace.name:<18}{cells}{below:>7}{wrong:>7}")
    for trace in traces:
        lines += [
            f"  {trace.name} {_loss(each)}"
            for each in trace.requests
            if each.lost >= NEAR_UNITS * MATCH_UNIT or each.reason_wrong
        ]
        reasons = Counter(each.reason for each in trace.requests)
        lines.append(f"  {trace.name}: " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()))
    for trace in traces:
        lines.append(f"{'NOT HELD' if trace.complaints else 'held'}: {trace.name}: {'; '.join(trace.complaints)}")
    return "\n".join(lines)


def _loss(each: Replayed) -> str:
    where = f"parts from #{each.nearest} at {each.shared} of its {each.nearest_prompt}"
    kind = ", met for the first time" if each.first else ""
    lost = f"lost {each.lost} of {each.oracle}, {each.reason}"
    return f"#{each.number} {each.label}: {lost}, {where}{kind}; sent {each.sent}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.agent_traces", description="recorded requests of agents, sent again"
    )
    parser.add_argument("folder", type=Path, help="of the traces")
    parser.add_argument("--agent", action="append", metavar="NAME", help="only this trace (repeat); default: all")
    parser.add_argument("--template", type=Path, metavar="FILE", help="chat template; default: the generated model's")
    parser.add_argument("--requests", type=int, metavar="N", help="of each trace, the first ones; default: all")
    args = parser.parse_args(argv)
    paths = [*sorted(args.folder.glob("*.jsonl")), *sorted(args.folder.glob("*.jsonl.gz"))]
    paths = [path for path in paths if args.agent is None or path.name.partition(".")[0] in args.agent]
    if not paths:
        parser.error(f"{args.folder}: no such trace")
    template = args.template.resolve() if args.template else None
    traces = asyncio.run(measure(paths, template, args.requests, narrator()))
    print(f"{render(traces)}\n\n{WORDS}")
    return 1 if any(trace.complaints for trace in traces) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
