"""Prefill and decode apart, as workers see it: what the two calls are, for which requests, and what stays inside."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.errors import NoWorker, SettingsError
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import BEST_LANE, EngineInfo, StepTimes
from proxy.http.client import Answer, Broken, Stale, Unreachable
from proxy.metrics import Metrics
from proxy.pipeline import prefill as module
from proxy.pipeline.prefill import Prefills
from proxy.pipeline.request import Prompt, ProxiedRequest, request_of
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings
from tests.harness.gateways import CHAT, chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.probed import probed
from tests.harness.recording_worker import RecordingWorker
from tests.harness.scripted_upstream import ScriptedUpstream
from tests.harness.waiting import until

NIXL = "NixlConnector"

TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1], [2, 3]],
    "remote_engine_id": "the-engine-of-p",
    "remote_request_id": "request-at-p",
    "remote_num_tokens": 496,
    "remote_prefill_cached_tokens": 0,
}

LONG = "Which tide? " * 300  # some 1,000 tokens, as the gateway counts them


class Apart(NamedTuple):
    prefill: RecordingWorker
    decode: RecordingWorker
    own: InMemoryGateway

    async def post(self, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        answer = await self.own.post(body, path)
        assert answer.status_code == 200 and "remote" not in answer.text, answer.text
        return answer

    def results(self) -> dict[str, float]:
        """What became of first calls."""
        metric = "seamark_prefills_total"
        samples = (sample for family in self.own.gateway.metrics.registry.collect() for sample in family.samples)
        return {each.labels["result"]: each.value for each in samples if each.name == metric}


def body_at(worker: RecordingWorker) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(worker.requests[-1].body)
    return body


@pytest.fixture
async def apart(in_memory) -> Apart:
    prefill = RecordingWorker(connector=NIXL, transfer=TRANSFER, cached=0)
    decode = RecordingWorker(connector=NIXL, cached=0)
    started = Apart(prefill, decode, await in_memory(decode, prefill_workers=(prefill,)))
    pools = (started.own.gateway.pool, started.own.gateway.prefill_pool)
    await until(lambda: all(worker.up and worker.renderer_ids for pool in pools for worker in pool.workers))
    return started


async def test_a_stream_is_one_of_the_worker_that_answers(apart: Apart):
    await apart.post(chat(LONG, stream=True, stream_options={"include_usage": True}))
    assert body_at(apart.prefill)["stream"] is False and "stream_options" not in body_at(apart.prefill)
    assert body_at(apart.decode)["stream"] is True and body_at(apart.decode)["kv_transfer_params"] == TRANSFER


@pytest.mark.parametrize(
    ("path", "body", "one"),
    [
        ("/v1/completions", {"prompt": LONG}, {"max_tokens": 1}),
        ("/v1/completions", {"prompt": [7] * 4000, "max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/responses", {"input": LONG}, {"max_output_tokens": 1, "store": False}),
        (CHAT, chat(LONG, max_completion_tokens=9), {"max_tokens": 1, "max_completion_tokens": 1}),
    ],
)
async def test_every_api_has_its_own_word_for_a_single_token(apart: Apart, path: str, body: dict[str, Any], one: Any):
    await apart.post({"model": "m", **body}, path)
    asked = body_at(apart.prefill)
    assert asked | one == asked and apart.prefill.requests[-1].target == path
    assert body_at(apart.decode)["kv_transfer_params"] == TRANSFER


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"prompt_logprobs": 1}, {"previous_response_id": "resp_1"}, {"echo": True}]
)
async def test_a_prompt_that_has_to_be_computed_where_it_is_answered_is(apart: Apart, fields: dict[str, Any]):
    await apart.post(chat(LONG, **fields))
    assert not apart.prefill.requests and "kv_transfer_params" not in body_at(apart.decode)


async def test_a_short_prompt_is_computed_where_it_is_answered(apart: Apart):
    await apart.post({"model": "m", "messages": [{"role": "user", "content": "Tide?"}]})
    assert not apart.prefill.requests and apart.results() == {"short": 1}


async def test_how_short_that_is_follows_from_the_measured_step_times(apart: Apart):
    (worker,) = apart.own.gateway.pool.workers
    apart.decode.more_metrics = (
        "seamark_pass_seconds 0.4\nseamark_token_seconds 0.0001\n"  # 8,000 tokens for two passes
    )
    await until(lambda: worker.step_times.known)
    await apart.post(chat(LONG))
    assert not apart.prefill.requests
    apart.decode.more_metrics = "seamark_pass_seconds 0.0004\nseamark_token_seconds 0.1\n"
    await until(lambda: worker.step_times.pass_seconds < 0.1)
    await apart.post({"model": "m", "messages": [{"role": "user", "content": "Which wind?"}]})
    assert len(apart.prefill.requests) == 1


async def test_whatever_becomes_of_the_prefill_worker_the_other_answers(apart: Apart):
    apart.prefill.transfer = None  # as one without a connector
    await apart.post(chat(LONG + "1"))
    apart.prefill.status = 500
    await apart.post(chat(LONG + "2"))
    assert apart.results() == {"failed": 2} and "kv_transfer_params" not in body_at(apart.decode)
    apart.prefill.connector = ""
    (worker,) = apart.own.gateway.prefill_pool.workers
    await until(lambda: worker.engine is not None and not worker.engine.loads_prefills)
    await apart.post(chat(LONG + "3"))
    assert apart.results() == {"failed": 2, "no_worker": 1} and len(apart.decode.requests) == 3


async def test_a_worker_that_cannot_load_is_sent_nothing_to_load(apart: Apart):
    (worker,) = apart.own.gateway.pool.workers
    apart.decode.connector = ""
    await until(lambda: worker.engine is not None and not worker.engine.loads_prefills)
    await apart.post(chat(LONG))
    assert not apart.prefill.requests


async def test_a_client_that_leaves_while_its_prompt_is_computed_ends_that(apart: Apart):
    apart.prefill.hold.set()
    client = apart.own.opened(chat(LONG, stream=True))
    await until(lambda: apart.prefill.requests)
    client.leave()
    await until(apart.prefill.gone.is_set)
    assert not apart.decode.requests


async def test_a_client_that_leaves_when_its_prompt_is_computed_frees_it(apart: Apart):
    apart.prefill.pause_after = 0  # at its head
    apart.prefill.pause.set()
    client = apart.own.opened(chat(LONG, stream=True))
    await until(lambda: apart.prefill.answers)
    client.leave()
    apart.prefill.pause.clear()
    await until(lambda: apart.decode.requests)
    freeing = body_at(apart.decode)
    assert freeing["kv_transfer_params"] == TRANSFER and freeing["max_tokens"] == 1 and freeing["stream"] is False


async def test_prefill_workers_are_shown_and_answer_nobody(apart: Apart):
    status = await apart.own.status()
    assert [worker["name"] for worker in status["prefill_workers"]] == [apart.prefill.url.removeprefix("http://")]
    assert [worker["name"] for worker in status["workers"]] == [apart.decode.url.removeprefix("http://")]


def test_a_worker_has_one_part():
    with pytest.raises((SettingsError, ValueError), match="each has one part"):
        Settings(worker=("http://a:1",), prefill_worker=("http://a:1/v1",))


ENGINE = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384, connector=NIXL, lane=BEST_LANE)

FOUND = Found((Boundary("system", b"s", "first:1", estimate=150),), (b"s",), renderer_id=b"one")


def worker_of(name: str, engine: EngineInfo | None = ENGINE) -> Worker:
    made = Worker(f"http://{name}", None, probed=probed(name, engine, "m"), up=True)  # type: ignore[arg-type]
    made.renderer_ids["m"] = b"one"
    return made


class Said(ScriptedUpstream):
    """What workers say, and what they were sent."""

    def __init__(self) -> None:
        super().__init__([json.dumps({"kv_transfer_params": TRANSFER}).encode()])
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.during = lambda: None

    async def send(self, method, url, headers=(), body=b"", read_timeout=None, fresh=False) -> Answer:
        self.sent.append((method, url, json.loads(body)))
        self.during()
        return self.answer()


class Scene:
    """First calls by themselves, for a worker that takes the prompt."""

    def __init__(self, *workers: Worker) -> None:
        self.decoder, self.workers = worker_of("decode"), list(workers or (worker_of("p"),))
        self.upstream, self.metrics, self.index = Said(), Metrics(), PrefixIndex(10**6)
        self.lists, self.is_serving, self.has_one = True, True, True
        self.told: list[tuple[Any, ...]] = []

        def for_model(model: Any) -> list[Worker]:
            if not self.has_one:
                raise NoWorker("none")
            return self.workers

        pool = SimpleNamespace(
            serving=lambda model: self.workers if self.is_serving else [],
            lists=lambda model: self.lists,
            for_model=for_model,
            mark_down=lambda worker, why: self.told.append(("down", worker, why)),
            record_failure=lambda worker, raw: self.told.append(("failure", worker, raw)),
            record_success=lambda worker: self.told.append(("success", worker)),
        )
        self.prefills = Prefills(Settings(), pool, self.upstream, self.index, self.metrics)  # type: ignore[arg-type]

    def request(self, path: str = CHAT, method: str = "POST", **body: Any) -> ProxiedRequest:
        parsed = {"model": "m", "messages": [{"role": "user", "content": "Tide?"}], **body}
        scope = {"method": method, "path": path, "query_string": b"", "headers": []}
        request = request_of(scope, json.dumps(parsed).encode(), "r")
        request.body.take(parsed, request.client, asks_usage=False)
        request.prompt = Prompt(found=FOUND)
        return request

    async def transfer(self, request: ProxiedRequest | None = None, tokens: int = 5000) -> dict[str, Any] | None:
        lease = SimpleNamespace(worker=self.decoder, prefill_tokens=tokens)
        return await self.prefills.transfer(request or self.request(), lease, [])  # type: ignore[arg-type]

    @property
    def results(self) -> dict[str, float]:
        samples = (sample for family in self.metrics.registry.collect() for sample in family.samples)
        return {each.labels["result"]: each.value for each in samples if each.name == "seamark_prefills_total"}


@pytest.mark.parametrize(
    ("path", "fields", "is_sent"),
    [
        (CHAT, {}, True),
        (CHAT, {"n": 1}, True),
        (CHAT, {"n": None, "echo": False, "best_of": None, "prompt_logprobs": 0}, True),
        (CHAT, {"n": 2}, False),
        (CHAT, {"n": "1"}, False),
        (CHAT, {"previous_response_id": "resp_1"}, False),
        (CHAT, {"prompt_logprobs": 1}, False),
        (CHAT, {"echo": True}, False),
        (CHAT, {"background": True}, False),
        (CHAT, {"best_of": 2}, False),
        (CHAT, {"use_beam_search": True}, False),
        ("/v1/messages", {}, True),
        ("/v1/responses", {}, True),
        ("/v1/embeddings", {}, False),
        ("/v1/completions", {"prompt": "Tide?"}, True),
        ("/v1/completions", {"prompt": [1, 2]}, True),
        ("/v1/completions", {"prompt": ["Tide?"]}, False),
        ("/v1/completions", {"prompt": [[1, 2]]}, False),
        ("/v1/completions", {"prompt": []}, False),
        ("/v1/completions", {}, False),
    ],
)
async def test_only_one_prompt_that_is_computed_once_is_computed_elsewhere(path, fields, is_sent):
    scene = Scene()
    params = await scene.transfer(scene.request(path, **fields))
    assert (params == TRANSFER) is (len(scene.upstream.sent) == 1) is is_sent
    assert scene.results == ({"sent": 1} if is_sent else {})


async def test_what_is_no_post_or_was_not_read_is_not_sent():
    scene, unread = Scene(), Scene().request()
    unread.body.parsed = {}
    assert await scene.transfer(scene.request(method="GET")) is None and await scene.transfer(unread) is None
    assert scene.results == {} and not scene.upstream.sent


@pytest.mark.parametrize("lack", ["plugin", "connector", "hints", "cache"])
async def test_a_worker_that_cannot_take_a_prompt_computes_it(lack):
    scene, decoder = Scene(), None
    decoder = scene.decoder
    if lack == "plugin":
        decoder.probed = probed("d", None, "m")
    elif lack == "connector":
        decoder.probed = probed("d", replace(ENGINE, connector=""), "m")
    elif lack == "hints":
        decoder.cache.hints_allowed = False
    else:
        decoder.cache.quarantine()
        decoder.cache.restore()  # which leaves it a salt
    assert await scene.transfer() is None and not scene.upstream.sent and scene.results == {}


def at_pace(worker: Worker, pass_seconds: float, token_seconds: float) -> None:
    engine = worker.engine
    worker.probed = probed(worker.boot, engine, "m", step_times=StepTimes(pass_seconds, token_seconds))


async def test_a_call_is_worth_what_it_has_cost_beside_the_computing(monkeypatch):
    """Two passes at first; then a pass, and the median of what calls took beyond their tokens."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    scene = Scene()
    (prefill,) = scene.workers
    at_pace(scene.decoder, 0.25, 2**-10)
    assert await scene.transfer(tokens=512) is None and scene.results == {"short": 1}

    async def called(seconds: float, tokens: int, **told: Any) -> bool:
        def passes() -> None:
            now[0] += seconds

        scene.upstream.during = passes
        scene.upstream.pieces = [json.dumps({"kv_transfer_params": {**TRANSFER, **told}}).encode()]
        return await scene.transfer(tokens=tokens) is not None

    assert await called(9.0, 513)  # of a prefill worker whose pace is not known nothing is learnt
    assert await called(9.0, 513)
    at_pace(prefill, 0.25, 2**-10)
    assert await called(2.0, 513, remote_num_tokens=1024, remote_prefill_cached_tokens=512)  # half a second of it
    assert not await called(0.0, 1792) and await called(2.0, 1793, remote_num_tokens="many")
    assert await called(0.0, 1793, remote_num_tokens=512, remote_prefill_cached_tokens=None)  # never below nothing
    assert not await called(0.0, 1024) and await called(0.0, 1025, remote_num_tokens=0)  # of 1.5 and 0
    assert not await called(0.0, 256) and await called(0.0, 257)  # of 1.5, 0 and 0


async def test_costs_of_the_last_32_calls_are_remembered(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    scene = Scene()
    (prefill,) = scene.workers
    at_pace(prefill, 0.25, 2**-10)

    def passes() -> None:
        now[0] += 1000.0

    scene.upstream.during = passes
    for _ in range(20):
        await scene.transfer()
    scene.upstream.during = lambda: None
    for _ in range(16):
        await scene.transfer()
    at_pace(scene.decoder, 0.25, 2**-10)
    assert await scene.transfer(tokens=5000) is None  # 16 of each
    scene.decoder.probed = probed("decode", ENGINE, "m")
    await scene.transfer()
    at_pace(scene.decoder, 0.25, 2**-10)
    assert await scene.transfer(tokens=5000) is not None  # of 32, 17 cost nothing


@pytest.mark.parametrize("lack", ["serving", "listed", "ready", "room", "unit", "version", "connector", "plugin"])
async def test_without_a_worker_that_fits_the_prompt_is_computed_where_it_is_answered(lack):
    scene = Scene()
    (prefill,) = scene.workers
    engines = {
        "unit": replace(ENGINE, match_unit=32),
        "version": replace(ENGINE, version="0.3.1"),
        "connector": replace(ENGINE, connector=""),
        "plugin": None,
    }
    if lack in engines:
        prefill.probed = probed("p", engines[lack], "m")
    scene.is_serving, scene.lists, scene.has_one = lack != "serving", lack != "listed", lack != "ready"
    if lack == "room":
        prefill.max_inflight = prefill.inflight = 1
    assert await scene.transfer() is None
    assert scene.results == {"no_worker": 1} and not scene.upstream.sent


async def test_a_prefill_worker_counts_its_request_while_it_computes_and_is_known_to_hold_it():
    scene = Scene()
    (prefill,) = scene.workers
    counted: list[tuple[int, int]] = []
    scene.upstream.during = lambda: counted.append((prefill.inflight, prefill.prefill_tokens))
    await scene.transfer(tokens=700)
    scene.upstream.failure = Broken("gone")
    await scene.transfer(tokens=700)
    assert counted == [(1, 700)] * 2 and (prefill.inflight, prefill.prefill_tokens) == (0, 0)
    assert scene.index.holds(b"s", prefill.boot)
    (method, url, body), _ = scene.upstream.sent
    assert (method, url) == ("POST", f"http://p{CHAT}") and body["vllm_xargs"] == {"seamark_boundaries": ["first:1"]}


async def test_the_prefill_worker_that_holds_a_prefix_is_chosen():
    scene = Scene(worker_of("a"), worker_of("b"), worker_of("c"))
    for worker in scene.workers:
        scene.index.record(FOUND.boundaries, worker.boot, ("first:1",) if worker.url == "http://b" else ())
    for _ in range(4):
        await scene.transfer()
    assert {url for _, url, _ in scene.upstream.sent} == {f"http://b{CHAT}"}
    nothing = scene.request()
    nothing.prompt = Prompt()
    assert await scene.transfer(nothing) == TRANSFER  # without boundaries, anyone


@pytest.mark.parametrize(
    ("status", "pieces", "failure", "told", "result"),
    [
        (200, None, None, "success", "sent"),
        (200, [b"{}"], None, "success", "failed"),
        (200, [b'{"kv_transfer_params": {"do_remote_prefill": false}}'], None, "success", "failed"),
        (200, [b'{"kv_transfer_params": ["do_remote_prefill"]}'], None, "success", "failed"),
        (200, [b'{"kv_transfer_params": null}'], None, "success", "failed"),
        (200, [b"[1]"], None, "success", "failed"),
        (200, [b"{"], None, "success", "failed"),
        (200, [b"[" * 10**5], None, "success", "failed"),
        (200, [b"{", Broken("gone")], None, "success", "failed"),
        (201, None, None, None, "failed"),
        (400, None, None, None, "failed"),
        (499, None, None, None, "failed"),
        (500, None, None, "failure", "failed"),
        (200, None, Stale("closed"), None, "failed"),
        (200, None, Unreachable("refused"), "down", "failed"),
        (200, None, Broken("gone"), "failure", "failed"),
    ],
)
async def test_whatever_a_prefill_worker_says_it_is_judged_and_the_answer_closed(status, pieces, failure, told, result):
    scene, request = Scene(), Scene().request()
    (prefill,) = scene.workers
    scene.upstream.status, scene.upstream.failure = status, failure
    scene.upstream.pieces = pieces or scene.upstream.pieces
    assert (await scene.transfer(request) == TRANSFER) is (result == "sent")
    assert scene.results == {result: 1} and scene.upstream.closed == (failure is None)
    assert [each[:2] for each in scene.told] == ([(told, prefill)] if told else [])
    if told in ("down", "failure"):
        assert scene.told[0][2] == ("refused" if told == "down" else request.body.raw)
    assert (prefill.answered_at > 0) is (failure is None)


@pytest.mark.parametrize("failure", [None, Broken("gone"), Unreachable("refused"), Stale("closed")])
async def test_a_prompt_that_nobody_waits_for_is_taken_by_the_worker_that_would_have_answered(failure):
    scene = Scene()
    scene.upstream.failure = failure
    request = scene.request(stream=True, logprobs=True)
    await scene.prefills.release(request, scene.decoder, TRANSFER, [])
    ((method, url, body),) = scene.upstream.sent
    assert (method, url) == ("POST", f"http://decode{CHAT}")
    assert body["kv_transfer_params"] == TRANSFER and (body["stream"], body["max_tokens"]) == (False, 1)
    assert "logprobs" not in body and "vllm_xargs" not in body
