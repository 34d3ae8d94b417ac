"""`seamark bench mine` and `replay` before a server that says what a test wants: hits, errors, an end in time."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from proxy.bench import mine, replay
from proxy.bench.harness.servers import free_port
from proxy.bench.mine import AskedRequest, MinedReply, Stack
from proxy.bench.shapes import SHAPES, text_of
from proxy.boundaries.divergence import common_prefix
from tests.harness.recording_worker import serving

TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "Tide."}}]}\n\n'

SMALL, REQUESTS = ("--tokens", "200", "--burst", "3"), 2 + 7 * 3 + 7 + 3 + 4 + 5


@dataclass(eq=False)
class OpenAIServer:
    """One token for each word, and as many from the cache as an earlier prompt began with, in whole units."""

    unit: int = 1  # tokens
    caches: bool = True
    details: bool = True
    constant: bool = False  # the same prompt_tokens for every prompt
    explains: bool = False  # as a Seamark gateway does
    broken_after: int | None = None  # requests
    refuses: str = ""  # the role or the kind of content of which no chat may have any
    interrupts_after: int | None = None  # requests
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
        elif request.url.path.startswith("/seamark/requests/"):
            answer = JSONResponse({"reason": request.url.path.rpartition("/")[2]})
        elif request.url.path == "/seamark/status" and self.workers:
            answer = JSONResponse({"workers": [{"url": url} for url in self.workers]})
        elif not request.url.path.startswith("/v1/"):
            answer = JSONResponse({}, 404)
        else:
            self.requests.append(await request.json())
            if self.hang_after is not None and len(self.requests) > self.hang_after:
                await receive()  # until the client goes
            if len(self.requests) == self.interrupts_after:
                os.kill(os.getpid(), signal.SIGINT)
            answer = self._answer(self.requests[-1])
        await answer(scope, receive, send)

    def _answer(self, request: Mapping[str, Any]) -> Response:
        if request["model"] != "tide-7b":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if self.refuses and f'"{self.refuses}"' in json.dumps(request["messages"]):
            return JSONResponse({"error": {"message": f"no {self.refuses} here"}}, 400)
        words = text_of(request["messages"]).split()
        cached = max((common_prefix(words, old) for old in self.prompts), default=0)
        cached = cached // self.unit * self.unit if self.caches else 0
        self.prompts.append(words)
        self.order.append(self)
        usage: dict[str, Any] = {"prompt_tokens": 7 if self.constant else len(words), "completion_tokens": 1}
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        more = {"x-seamark-overhead-ms": "1", "x-request-id": "below_unit"} if self.explains else {}
        stream = TOKEN + b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
        if self.broken_after is not None and len(self.requests) > self.broken_after:
            stream = b"data: [DONE]\n\n"
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


NAMES = [shape.name for shape in SHAPES]


def losses(said: Ran) -> list[tuple[str, str]]:
    """What is said of each shape, by its name."""
    return re.findall(r"^(?:this |other)? *([a-z]+) +[\d,]+  (.+)$", said.out.partition("lost:")[2], re.M)


def test_all_that_is_shared_is_found_in_a_cache_that_keeps_all_and_every_document_is_new(server, ran):
    said = ran("--bound", "60")
    assert "model tide-7b" in said.out and said.drafts == "no drafts" and len(server.requests) == REQUESTS
    assert said.verdict.startswith("A later request finds 100% of what it shares with earlier ones (")
    assert [name for name, _ in losses(said)] == NAMES and "tokens that" not in said.out
    assert f"100% of {REQUESTS - 2} first tokens came within 60 s" in said.out
    shown = re.findall(r"^([a-z]+): [\d,]+ tokens, ([\d,]+) found, first token after [\d.]+ s$", said.err, re.M)
    assert [*Counter(name for name, _ in shown)] == NAMES and len(shown) == REQUESTS - 2
    new = Counter(name for name, found in shown if int(found) < 10)
    assert new == {**dict.fromkeys(NAMES, 1), "busy": 4}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"caches": False}, {"user": "shares: nothing is kept of it", "cold": "does not wait for the one"}),
        (
            {"unit": 80},
            {"system": "hits end at multiples of 80 tokens", "grows": "tokens that request 2 shares: hits end"},
        ),
        ({"caches": False, "explains": True}, {"repeat": "nothing is kept of it (below_unit)"}),
        ({"details": False}, {"user": "not reported; first tokens come"}),
        ({"refuses": "text"}, {"part": "not asked to its end: URL answers 400: no text here", "fork": "nothing"}),
        ({"loading": 3}, dict.fromkeys(NAMES, "")),
    ],
    ids=str,
)
def test_what_is_lost_is_said_with_its_cause(server, url, ran, monkeypatch, change, told):
    monkeypatch.setattr(mine, "ASK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(mine, "REACH", 60.0)  # how fast this machine is does not matter
    vars(server).update(change)
    done = ran()
    assert done.status == ("refuses" in change) and server.loading == 0
    said = {name: said.replace(url, "URL") for name, said in losses(done)}
    assert {name: said[name] for name in told if told[name] not in said[name]} == {}
    assert ("has no model yet; waiting" in done.err) == ("loading" in change)
    unknown = change == {"details": False}
    assert ("--enable-prompt-tokens-details" in done.out and "hits are not reported." in done.verdict) == unknown


def test_lengths_are_met_by_the_servers_own_count_and_turns_hold_the_servers_answers(ran):
    (stack,) = json.loads(ran("--json", "--tokens", "100", "200").out)["stacks"]
    asked = {(each["shape"], each["length"], each["number"]): each for each in stack["requests"]}
    shared = {length: asked["system", length, 2]["shared"] for length in (100, 200)}
    assert shared == {100: pytest.approx(100, abs=3), 200: pytest.approx(200, abs=3)} and not stack["failed"]
    replies = [asked["turns", 200, number]["reply"] for number in (1, 2, 3)]
    assert all(later["cached_tokens"] == before["prompt_tokens"] for before, later in pairwise(replies))
    forks = [asked["fork", 200, number]["reply"]["cached_tokens"] for number in (4, 5)]
    assert min(forks) >= asked["fork", 200, 2]["reply"]["prompt_tokens"]


def test_two_stacks_are_asked_in_turns_and_side_by_side(server, ran):
    other = OpenAIServer(caches=False)
    server.order = other.order = order = []
    with serving(other) as other_url:
        said = ran("--against", other_url)
    this, that = said.out.strip().splitlines()[-2:]
    assert this.startswith("this  A later request finds 100% of") and that.startswith(
        "other A later request finds 0% of"
    )
    assert [name for name, _ in losses(said)] == [name for name in NAMES for _ in range(2)]
    assert order[4:13] == [server] * 3 + [other] * 6  # each goes first every other time
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
    ("change", "minutes", "status", "said"),
    [
        ({"hang_after": 2 + 4}, "0.1", 0, "ended after 0.1 minutes"),
        ({"hang_after": 2}, "0.02", 1, "ended after 0.02 minutes"),
        ({"interrupts_after": 2 + 5}, "10", 130, "interrupted before all was asked"),
        ({"broken_after": 2 + 4}, "10", 1, "streams no token"),
    ],
    ids=str,
)
def test_an_early_end_leaves_what_there_is(server, ran, change, minutes, status, said):
    vars(server).update(change)
    done = ran("--minutes", minutes)
    assert done.status == status and said in done.err
    assert ("A later request finds 100%" in done.out) == (change != {"hang_after": 2})


def test_a_quick_look_is_a_dozen_requests_of_three_shapes_at_lengths_that_fit_the_context(server, ran):
    server.context = 4096
    said = ran("--quick", "--tokens", "2000", "6000", short=False)
    assert [name for name, _ in losses(said)] == NAMES[:3] and len(server.requests) == 2 + 9


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


def asked(number: int, shared: int, found: int | None, first: float, wave: int, **more: Any) -> AskedRequest:
    reply = MinedReply(2000, found, first, "", 31, first + 1.0)
    return AskedRequest(
        **{"shape": "user", "length": 2000, "round": 0, "sent": 0.0, **more},
        number=number,
        wave=wave,
        shared=shared,
        reply=reply,
    )


COLD = asked(1, 0, 0, 2.0, 0)


@pytest.mark.parametrize(
    ("later", "told"),
    [
        ([asked(2, 1900, 1890, 0.5, 1)], "nothing"),
        ([asked(2, 1900, 1890, 5.0, 1)], "time: a first token takes 5.000 s"),
        ([asked(2, 1900, 0, 2.0, 1), asked(3, 1900, 1890, 0.5, 2)], "is kept only once the second has shown it"),
        (
            [asked(2, 1900, 500, 2.0, 1), asked(3, 1900, 500, 2.0, 2)],
            "1,400 of the 1,900 tokens that request 2 shares: nothing is kept nearer",
        ),
        ([asked(2, 1900, 0, 2.0, 0)], "it does not wait for the one beside it"),
        ([asked(2, 1900, 1890, 0.5, 1), asked(3, 0, 0, 9.0, 1)], "nothing; a new request beside it waits 9.000 s"),
        ([asked(2, 1900, None, 0.5, 1)], "not reported; first tokens come sooner later"),
        ([asked(2, 1900, None, 1.9, 1)], "not reported; first tokens come no sooner later"),
        ([], "nothing was asked that could be found"),
    ],
)
def test_a_loss_is_told_by_what_was_found_and_when_first_tokens_came(later, told):
    stack = Stack("http://a", "tide-7b", None)
    stack.asked, stack.reported = [COLD, *later], not any(each.reply.cached_tokens is None for each in later)
    (row,) = stack.rows().values()
    assert told in row.told(stack)
    assert row.within(2.0) == sum(each.reply.first_token <= 2.0 for each in stack.asked) / len(stack.asked)


@pytest.mark.parametrize(
    ("waits", "speed"),
    [((0.0, 0.0), 60.0), ((0.0, 1.0), 30.0), ((0.0, 3.0), 15.0)],
    ids=["together", "in turn", "apart"],
)
def test_the_speed_of_what_runs_together_is_that_of_all_of_it(waits, speed):
    stack = Stack("http://a", "tide-7b", None)
    stack.asked = [asked(number, 0, 0, 2.0 + wait, 0) for number, wait in enumerate(waits, 1)]
    (row,) = stack.rows().values()
    assert row.speed == speed
    held_back = AskedRequest("user", 2000, 1, 0, 1, 0, 0.0, MinedReply(2000, 0, 2.0, "", 31, 2.001))
    stack.asked = [held_back]
    assert stack.rows()["user", 2000].speed is None


def recorded(session: int | None, timestamp: float, tokens: int, *ids: int) -> str:
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": 3, "hash_ids": ids, "session": session}
    return json.dumps({name: value for name, value in row.items() if value is not None})


# Blocks of 64 tokens: two agents that begin alike and each one's next turn; as one session, one after the other.
PROMPTS = (300, 1, 2, 3, 4, 5), (320, 1, 2, 6, 7, 8), (400, 1, 2, 3, 4, 9, 10, 11), (512, 1, 2, 6, 7, 8, 12, 13, 14)
TRACE, TWO_SESSIONS = (
    tuple(recorded(session, 10 * at, *prompt) for at, prompt in enumerate(PROMPTS)) for session in (7, None)
)


@pytest.mark.parametrize(
    ("change", "trace", "status", "told"),
    [
        ({}, TRACE, 0, r"theoretical 46\.0%   achieved 4\d\.\d%: 9\d\.\d% of [\d,]+ tokens that could be found"),
        ({}, TRACE, 0, r", 1 answered to their end"),
        (
            {},
            TWO_SESSIONS,
            0,
            r", 2 answered to their end\ngoodput       ([\d.]+) of \1 requests/s: 100% of first tokens",
        ),
        ({"caches": False}, TRACE, 0, r"theoretical 46\.0%   achieved 0\.0%: 0\.0% of "),
        ({"details": False}, TRACE, 0, "theoretical 46.0%   achieved not reported"),
        ({"broken_after": 4}, TRACE, 1, "(?s)2 of 4 requests answered.*\nbroken off    1 x URL streams no token"),
        ({"interrupts_after": 5}, TRACE, 130, r"(?s)\d of 4 requests answered.*interrupted before all was answered"),
        ({}, (*TRACE, "", "{}"), 1, "trace.jsonl, line 5: Object missing required field `timestamp`"),
        ({}, (), 1, "trace.jsonl is empty: give a file with a JSON object on each line"),
    ],
    ids=str,
)
def test_a_trace_is_sent_with_texts_that_share_what_it_says(server, url, tmp_path, capsys, change, trace, status, told):
    vars(server).update(change)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(trace))
    assert replay.main([str(path), "--base-url", url, "--speed", "10", "--bound", "60"]) == status
    out, err = capsys.readouterr()
    assert re.search(told, (out + err).replace(url, "URL"))
    if status == 0:
        chats = sorted((request["messages"] for request in server.requests[2:]), key=lambda each: len(text_of(each)))
        first, other, *_ = chats
        assert [request["max_tokens"] for request in server.requests[2:]] == [3] * 4
        assert all(
            [each["role"] for each in chat][-2:] in (["system", "user"], ["assistant", "user"]) for chat in chats
        )
        assert first[0] == other[0] and first[1] != other[1]
        lengths = [len(text_of(chat).split()) for chat in chats]
        assert all(abs(length - tokens) < 30 for length, tokens in zip(lengths, (300, 320, 400, 512), strict=True))


def test_who_goes_on_from_an_earlier_prompt_waits_for_it_and_nobody_else(tmp_path):
    path = tmp_path / "trace.jsonl"
    turns = (200, 0, 1, 2, 3), (130, 0, 7, 8), (220, 0, 1, 2, 4), (300, 0, 1, 2, 5, 6), (210, 0, 7, 8, 9)
    fork = (310, 0, 1, 2, 6, 8)
    alone = *((120, 0, number) for number in range(10, 18)), (120, 0, 17), (999,)
    path.write_text("\n".join(recorded(None, at, *prompt) for at, prompt in enumerate((*turns, fork, *alone))))
    found = replay.Replay(Stack("http://a", "tide-7b", None), replay.read(path))
    assert [len(session) for session in found._sessions.values()] == [3, 2, 1] + [1] * 10 and found._block == 64
