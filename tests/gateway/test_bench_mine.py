"""`seamark bench mine` before a server that says what a test wants: hits, errors, an end in time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from proxy.bench import mine
from proxy.bench.harness.servers import free_port
from proxy.bench.mine import PAIR, MinedReply, Stack, verdict
from proxy.boundaries.divergence import common_prefix
from tests.harness.recording_worker import serving

TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "Tide."}}]}\n\n'

SMALL, REQUESTS = ("--lengths", "50", "200", "--pairs", "2"), 2 + 2 * 4 + 4 + 4


@dataclass(eq=False)
class OpenAIServer:
    """One token for each word, and as many from the cache as an earlier prompt began with, in whole units."""

    unit: int = 1  # tokens
    caches: bool = True
    details: bool = True
    constant: bool = False  # the same prompt_tokens for every prompt
    header: bool = False  # hits in x-seamark-cached alone
    key: str | None = None
    context: int | None = None
    hang_after: int | None = None  # requests
    loading: int = 0  # questions for the model until it is there
    broken: bytes = b""  # instead of the stream
    drafts: tuple[int, int] | None = None  # steps and accepted tokens that each answer adds to the engine's counters
    workers: tuple[str, ...] = ()  # of a gateway: it has their addresses, and no counters
    keys: list[str | None] = field(default_factory=list)  # that came with questions for the counters
    requests: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[list[str]] = field(default_factory=list)
    order: list[OpenAIServer] = field(default_factory=list)  # of answers, of another one too if it has the same

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            answer: Response = JSONResponse({"error": {"message": "no"}}, 401)
        elif request.url.path == "/v1/models" and self.loading:
            self.loading -= 1
            answer = JSONResponse({"error": {"message": "no worker is ready"}}, 503, {"retry-after": "5"})
        elif request.url.path == "/v1/models":
            entry = {"id": "tide-7b"} | ({"max_model_len": self.context} if self.context else {})
            answer = JSONResponse({"data": [entry, {"id": "other"}]})
        elif request.url.path == "/metrics":
            self.keys.append(request.headers.get("authorization"))
            answer = Response(self._counters())
        elif request.url.path == "/seamark/status" and self.workers:
            answer = JSONResponse({"workers": [{"url": url} for url in self.workers]})
        elif not request.url.path.startswith("/v1/"):
            answer = JSONResponse({}, 404)
        else:
            self.requests.append(await request.json())
            if self.hang_after is not None and len(self.requests) > self.hang_after:
                await receive()  # until the client goes
            answer = self._answer(self.requests[-1])
        await answer(scope, receive, send)

    def _answer(self, request: Mapping[str, Any]) -> Response:
        if request["model"] != "tide-7b":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        words = " ".join(f"<{entry['role']}> {entry['content']}" for entry in request["messages"]).split()
        cached = max((common_prefix(words, old) for old in self.prompts), default=0)
        cached = cached // self.unit * self.unit if self.caches else 0
        self.prompts.append(words)
        self.order.append(self)
        usage: dict[str, Any] = {"prompt_tokens": 7 if self.constant else len(words), "completion_tokens": 1}
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        more = {"x-seamark-cached": str(cached)} if self.header else {}
        stream = TOKEN + b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
        return Response(self.broken or stream, 200, more, "text/event-stream")

    def _counters(self) -> str:
        if self.workers:
            return "seamark_inflight 0\n"
        counted = {"num_requests_running": 0}
        if self.drafts is not None:
            names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
            counted |= {name: each * len(self.requests) for name, each in zip(names, self.drafts, strict=True)}
        return "".join(f'vllm:{name}{{engine="0"}} {value}.0\n' for name, value in counted.items())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> OpenAIServer:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return OpenAIServer()


@pytest.fixture
def url(server: OpenAIServer) -> Iterator[str]:
    with serving(server) as found:
        yield found


@pytest.fixture
def ran(url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`ran(*flags)`: what the command makes of the server; of another address by `of`."""

    def ran(*flags: str, of: str = url, short: bool = True) -> Ran:
        status = mine.main(["--base-url", of, *(SMALL if short else ()), *flags])
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return ran


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def verdict(self) -> str:
        return self.out.strip().splitlines()[-1] if self.status == 0 else self.err

    @property
    def drafts(self) -> str:
        (line,) = (line.strip() for line in self.out.splitlines() if "drafts" in line)
        return line


def test_a_server_that_caches_hits_and_the_plan_is_kept(server, ran):
    said = ran()
    assert said.verdict.startswith("A second request with the same system prompt hits: 100% of it")
    assert "model tide-7b" in said.out and said.out.count("100%") == 3 and said.drafts == "no drafts"
    first, *lines = said.err.splitlines()
    assert f"{REQUESTS} requests with about 2,900 prompt tokens" in first and len(server.requests) == REQUESTS
    assert 2900 <= sum(len(prompt) for prompt in server.prompts) <= 1.5 * 2900
    told = re.compile(r" *(.+): [\d,]+ of [\d,]+ tokens found, first token after [\d.]+ s")
    found = [told.fullmatch(line)[1] for line in lines]
    shapes = ("pair at 50 tokens", "pair at 200 tokens", "fan-out at 200 tokens", "conversation at 200 tokens")
    assert Counter(found) == {"a short prompt": 2, **dict.fromkeys(shapes, 4)}
    systems = [request["messages"][0]["content"] for request in server.requests]
    assert [systems.count(one) for one in dict.fromkeys(systems)] == [1, 1, 2, 2, 4, 4, 2, 2]  # every prefix is new


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"caches": False}, "does not hit: 0% of it"),
        ({"unit": 128}, "hits in part"),  # blocks longer than a prompt
        ({"details": False, "header": True}, "hits: 100% of it"),
        ({"details": False}, "This server does not report hits, "),
        ({"loading": 3}, "hits: 100% of it"),
    ],
    ids=str,
)
def test_a_verdict_is_what_the_server_told_of_its_cache(server, ran, monkeypatch, change, said):
    monkeypatch.setattr(mine, "ASK_AGAIN_SECONDS", 0.01)
    vars(server).update(change)
    done = ran()
    assert done.status == 0 and said in done.verdict and server.loading == 0
    assert ("has no model yet; waiting" in done.err) == ("loading" in change)
    unknown = change == {"details": False}
    assert ("--enable-prompt-tokens-details" in done.out and done.out.count("not reported") == 3) == unknown


def test_the_lengths_asked_for_are_met_by_the_servers_own_count(ran):
    (stack,) = json.loads(ran("--json").out)["stacks"]
    shared = {name: entry["shared"] for name, entry in stack["lengths"].items()}
    assert shared == {"50": pytest.approx(50, abs=3), "200": pytest.approx(200, abs=3)}
    (conversation,) = (each["replies"] for each in stack["rounds"] if each["shape"] == "conversation")
    turns = [turn["prompt_tokens"] for turn in conversation]
    assert turns == sorted(turns) and conversation[-1]["cached_tokens"] >= turns[-2]


def test_two_stacks_are_asked_in_turns_and_side_by_side(server, ran):
    other = OpenAIServer(caches=False)
    server.order = other.order = order = []
    with serving(other) as other_url:
        said = ran("--against", other_url)
    assert "finds 100% of it in this stack's cache and 0% in the other's" in said.verdict
    assert said.out.count("this / other") == 2
    # Both sides of a pair, one after the other: each goes first in every other round.
    assert order[4:12] == [server, server, other, other] * 2
    assert order[-8:] == [other, other, server, server] * 2
    assert not {tuple(prompt) for prompt in server.prompts[2:]} & {tuple(prompt) for prompt in other.prompts[2:]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"broken": TOKEN + b"data: [DONE]\n\n"}, "streams no usage"),
        ({"constant": True}, "counts 7 tokens in a prompt that is 300 words longer"),
        ({"broken": b'data: {"error": {"message": "out of blocks"}}\n\n'}, "breaks its stream off: out of blocks"),
        ({"broken": b"data: [DONE]\n\n"}, "streams no token"),
        ({"broken": b"data: 7\n\n"}, "streams what is no JSON object"),
        ({"context": 400}, "the context of 400 tokens is too short"),
        ({"loading": 1_000_000}, "names no model (status 503)"),
        ({"key": "right"}, "wants a key (status 401): --api-key-file"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_said(server, ran, monkeypatch, change, said):
    monkeypatch.setattr(mine, "ASK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(mine, "LOADING_SECONDS", 0.05)
    vars(server).update(change)
    done = ran(short=False)
    assert done.status == 1 and said in done.err


def test_an_address_without_a_server_or_a_model_that_is_not_served_is_said(url, ran):
    for nobody in (f"127.0.0.1:{free_port()}", "http://"):
        said = ran(of=nobody)
        assert said.status == 1 and "no server answers at http" in said.err and "Traceback" not in said.err
    said = ran("--model", "tide-8b", of=url + "/v1")
    assert f"{url} serves no model 'tide-8b', but tide-7b, other; did you mean tide-7b?" in said.err


def test_a_key_comes_from_a_file_or_from_the_environment(server, ran, tmp_path, monkeypatch):
    server.key = "right"
    key = tmp_path / "key"
    for given, status in (("x", 1), ("right\n", 0)):
        key.write_text(given)
        said = ran("--api-key-file", str(key))
        assert said.status == status and ("refuses the key" in said.err) == bool(status)
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert ran().status == 0
    with pytest.raises(SystemExit, match="2"):
        ran("--api-key-file", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("answered", "minutes", "status", "said"),
    [(2 + 2 * 2, "0.1", 0, "ended after 0.1 minutes"), (2, "0.02", 1, "too short for one pair")],
    ids=["after a pair of each length", "before a pair"],
)
def test_time_that_runs_out_leaves_what_there_is(server, ran, answered, minutes, status, said):
    server.hang_after = answered
    done = ran("--minutes", minutes)
    assert done.status == status and said in done.err and ("hits: 100%" in done.verdict) == (status == 0)


def test_a_quick_look_is_a_dozen_requests_of_every_shape_at_a_length_that_fits_the_context(server, ran):
    server.context = 4096
    said = ran("--quick", "--lengths", "2000", "6000", short=False)
    assert "hits: 100%" in said.verdict and len(server.requests) == 12


def test_accepted_drafts_are_those_of_this_run_and_unknown_where_counters_are_hidden(server, ran):
    server.drafts = (10, 17)
    steps = 10 * (REQUESTS - 2)  # those that probe come before
    assert ran().drafts == f"drafts: 1.70 accepted per step, of {steps:,} steps"
    server.workers = (f"http://127.0.0.1:{free_port()}",)
    assert ran().drafts.startswith("drafts: not known")


def test_a_gateways_workers_count_drafts_and_get_no_key_of_its_own(server, url, ran, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    server.drafts = (10, 5)
    gateway = OpenAIServer(workers=(url,) * 2, key="right")  # two ranks behind one address
    with serving(gateway) as gateway_url:
        gateway.requests = server.requests  # what it answers, its worker counts
        (stack,) = json.loads(ran("--json", of=gateway_url).out)["stacks"]
    steps = 10 * (REQUESTS - 2)
    assert stack["drafts"] == {"steps": steps, "tokens": steps // 2, "accepted_per_step": 0.5}
    assert gateway.keys == ["Bearer right"] * 2 and server.keys == [None] * 2


def pair(cold: float, warm: float, cached: int | None = None, tokens: int = 1, last: float = 0.0) -> mine.Round:
    first = MinedReply(1010, cached and 0, cold, "", tokens, cold + 1)
    return first, MinedReply(1010, cached, warm, "", tokens, last)


def measured(pairs: list[mine.Round], name: str = "") -> Stack:
    """A stack that has answered these."""
    stack = Stack("http://a", "tide-7b", None, name)
    stack.bare, stack.rounds[PAIR], stack.reported = 10, {1000: pairs}, pairs[0][1].cached_tokens is not None
    return stack


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([pair(1.0, 0.3)], ["does hit"]),  # without reports time tells
        ([pair(1.0, 0.9)], ["time shows none"]),
        ([pair(0.010, 0.005)], ["time shows none"]),  # both are over before one could tell
        ([pair(1.1, 0.2, 990), pair(1.0, 1.0, 0)], ["99% of it", " 0% in", "0.20 times", "the first request's 1.10"]),
    ],
    ids=["hits", "none", "too soon", "two"],
)
def test_a_verdict_is_read_off_reports_or_times(pairs, said):
    words = verdict([measured([each]) for each in pairs])
    assert all(each in words for each in said)


def test_speeds_leave_the_first_token_out_and_stand_beside_first_tokens_and_in_the_verdict():
    # Held back and sent at once, tokens have no speed.
    assert MinedReply(1010, 990, 2.0, "", 31, 2.001).tokens_per_second is None
    three = [[pair(1.0, 0.5, 990, tokens, last) for last in (1.0, 1.5, 9.0)] for tokens in (41, 21)]
    stacks = [measured(three[0], "this"), measured(three[1], "other")]
    lines = mine.table(stacks).splitlines()
    rows = [line.split()[-2:] for line in lines if line.startswith(("this  ", "other  "))]
    assert [row for row in rows if row[0][0].isdigit()] == [["40.0", "40.0"], ["20.0", "20.0"]]
    assert next(line for line in lines if line.startswith("this / other")).endswith("2.00 x  2.00 x")
    assert verdict(stacks).endswith("Its tokens then come 2.00 times as fast.")
