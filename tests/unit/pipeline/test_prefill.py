"""Prefill and decode apart, as workers see it: what the two calls are, for which requests, and what stays inside."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.errors import SettingsError
from proxy.fleet.worker import Slot, Worker
from proxy.fleet.worker_metrics import BEST_LANE, EngineInfo, StepTimes
from proxy.http.client import Broken, Stale, Unreachable
from proxy.metrics import Metrics
from proxy.pipeline import prefill as module
from proxy.pipeline.dispatch import Lease
from proxy.pipeline.prefill import Prefills
from proxy.pipeline.request import Choice, Prompt, ProxiedRequest, request_of
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings
from tests.harness.gateways import CHAT, chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.probed import pool_of, probed
from tests.harness.recording_worker import RecordingWorker
from tests.harness.scripted_upstream import Said, ScriptedUpstream, Sent
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
    apart.prefill.status = 500
    await apart.post(chat(LONG + "2"))
    assert "kv_transfer_params" not in body_at(apart.decode)  # it computes the prompt itself
    assert results(apart.own.gateway.metrics) == {"sent": 1, "failed": 1}
    status = await apart.own.status()
    for kind, worker in (("prefill_workers", apart.prefill), ("workers", apart.decode)):
        assert [each["name"] for each in status[kind]] == [worker.url.removeprefix("http://")]
    with pytest.raises((SettingsError, ValueError), match="each has one part"):
        Settings(worker=("http://a:1",), prefill_worker=("http://a:1/v1",))


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


ENGINE = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384, connector=NIXL, lane=BEST_LANE)

FOUND = Found((Boundary("system", b"s", "first:1", estimate=150),), (b"s",), renderer_id=b"one")


def results(metrics: Metrics) -> dict[str, float]:
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {each.labels["result"]: each.value for each in samples if each.name == "seamark_prefills_total"}


class Scene:
    """First calls by themselves, for a worker that takes the prompt."""

    def __init__(self, *names: str) -> None:
        self.upstream, self.metrics, self.index = ScriptedUpstream(say=self._say), Metrics(), PrefixIndex(10**6)
        self.said: Said | Exception | None = None  # None: a transfer
        self.during = lambda: None
        self.pool, other = (pool_of(self.upstream, *each, engine=ENGINE) for each in (names or ("p",), ("decode",)))
        self.workers, (self.decoder,) = self.pool.workers, other.workers
        self.told: list[tuple[Any, ...]] = []  # to the pool
        for name in ("mark_down", "record_failure", "record_success"):
            setattr(self.pool, name, partial(lambda name, *what: self.told.append((name, *what)), name))
        self.prefills = Prefills(Settings(), self.pool, self.upstream, self.index, self.metrics)

    def _say(self, sent: Sent) -> Said | Exception:
        self.during()
        return Said(200, json.dumps({"kv_transfer_params": TRANSFER}).encode()) if self.said is None else self.said

    def request(self, path: str = CHAT, method: str = "POST", **body: Any) -> ProxiedRequest:
        parsed = {"model": "m", "messages": [{"role": "user", "content": "Tide?"}], **body}
        scope = {"method": method, "path": path, "query_string": b"", "headers": []}
        request = request_of(scope, json.dumps(parsed).encode(), "r")
        request.body.take(parsed, request.client, asks_usage=False)
        request.prompt = Prompt(found=FOUND)
        return request

    async def transfer(self, request: ProxiedRequest | None = None, tokens: int = 5000) -> dict[str, Any] | None:
        request = request or self.request()
        request.give(Choice(self.decoder))
        lease = Lease(None, request)  # type: ignore[arg-type]
        lease._slot = Slot(self.decoder, tokens)
        return await self.prefills.transfer(request, lease, [])

    @property
    def results(self) -> dict[str, float]:
        return results(self.metrics)


ONE = {"max_tokens": 1, "stream": False}
BOTH = {**ONE, "max_completion_tokens": 1}


@pytest.mark.parametrize(
    ("path", "fields", "one"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}, ONE),
        (CHAT, {"n": 1, "max_completion_tokens": 9}, BOTH),
        (CHAT, {"n": None, "echo": False, "best_of": None, "prompt_logprobs": 0}, ONE),
        *((CHAT, {"n": number}, None) for number in (2, "1")),
        *((CHAT, {field: True}, None) for field in ("echo", "previous_response_id", "prompt_logprobs", "best_of")),
        ("/v1/messages", {"max_tokens": 9}, ONE),
        ("/v1/responses", {}, {"max_output_tokens": 1, "store": False}),
        ("/v1/embeddings", {}, None),
        *(("/v1/completions", {"prompt": prompt}, ONE) for prompt in ("Tide?", [1, 2])),
        *(("/v1/completions", {"prompt": prompt}, None) for prompt in (["Tide?"], [[1, 2]], [], None)),
    ],
)
async def test_only_one_prompt_that_is_computed_once_is_computed_elsewhere_for_one_token(path, fields, one):
    scene = Scene()
    params = await scene.transfer(scene.request(path, **fields))
    assert (params == TRANSFER) is (len(scene.upstream.sent) == 1) is (one is not None)
    assert scene.results == ({"sent": 1} if one is not None else {})
    if one is not None:
        (sent,) = scene.upstream.sent
        assert sent.fields | one == sent.fields and not {"stream_options", "logprobs"} & sent.fields.keys()
        assert sent.fields["kv_transfer_params"]["do_remote_decode"] and sent.url.endswith(path)
    assert await scene.transfer(scene.request(path, "GET", **fields)) is None


def at_pace(worker: Worker, pass_seconds: float, token_seconds: float) -> None:
    worker.probed = probed(worker.name, worker.engine, "m", step_times=StepTimes(pass_seconds, token_seconds))


@pytest.fixture
def now(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


async def test_a_call_is_worth_what_it_has_cost_beside_the_computing(now):
    """Two passes at first; then a pass, and the median of what calls took beyond their tokens."""
    scene = Scene()
    (prefill,) = scene.workers
    at_pace(scene.decoder, 0.25, 2**-10)
    assert await scene.transfer(tokens=512) is None and scene.results == {"short": 1}

    async def called(seconds: float, tokens: int, **told: Any) -> bool:
        def passes() -> None:
            now[0] += seconds

        scene.during, scene.said = passes, Said(200, json.dumps({"kv_transfer_params": {**TRANSFER, **told}}).encode())
        return await scene.transfer(tokens=tokens) is not None

    assert await called(9.0, 513)  # of a prefill worker whose pace is not known nothing is learnt
    assert await called(9.0, 513)
    at_pace(prefill, 0.25, 2**-10)
    assert await called(2.0, 513, remote_num_tokens=1024, remote_prefill_cached_tokens=512)  # half a second of it
    assert not await called(0.0, 1792) and await called(2.0, 1793, remote_num_tokens="many")
    assert await called(0.0, 1793, remote_num_tokens=512, remote_prefill_cached_tokens=None)  # never below nothing
    assert not await called(0.0, 1024) and await called(0.0, 1025, remote_num_tokens=0)  # of 1.5 and 0
    assert not await called(0.0, 256) and await called(0.0, 257)  # of 1.5, 0 and 0


@pytest.mark.parametrize("lack", ["up", "room", "models", "match_unit", "version", "connector", "engine"])
async def test_without_a_worker_that_fits_the_prompt_is_computed_where_it_is_answered(lack):
    scene = Scene()
    (prefill,) = scene.workers
    other = {"match_unit": 32, "version": "0.3.1", "connector": ""}
    if lack in ("engine", *other):
        prefill.probed = probed("p", replace(ENGINE, **{lack: other[lack]}) if lack in other else None, "m")
    elif lack == "models":
        prefill.probed = probed("p", ENGINE, "n")
        scene.pool._reconcile()  # with it, the pool knows the name
    elif lack == "room":
        prefill.max_inflight = prefill.inflight = 1
    else:
        prefill.up = False
    assert await scene.transfer() is None
    assert scene.results == {"no_worker": 1} and not scene.upstream.sent


@pytest.mark.parametrize("lack", ["engine", "connector", "hints", "cache"])
async def test_a_worker_that_cannot_take_a_prompt_computes_it(lack):
    scene = Scene()
    decoder = scene.decoder
    if lack in ("engine", "connector"):
        decoder.probed = probed("d", replace(ENGINE, connector="") if lack == "connector" else None, "m")
    elif lack == "hints":
        decoder.cache.hints_allowed = False
    else:
        decoder.cache.quarantine()
        decoder.cache.restore()  # which leaves it a salt
    assert await scene.transfer() is None and not scene.upstream.sent and scene.results == {}


async def test_a_prefill_worker_counts_its_request_while_it_computes_and_is_known_to_hold_it():
    scene = Scene()
    (prefill,) = scene.workers
    counted: list[tuple[int, int]] = []
    scene.during = lambda: counted.append((prefill.inflight, prefill.prefill_tokens))
    await scene.transfer(tokens=700)
    scene.said = Broken("gone")
    await scene.transfer(tokens=700)
    assert counted == [(1, 700)] * 2 and (prefill.inflight, prefill.prefill_tokens) == (0, 0)
    assert scene.index.holds(b"s", prefill.boot)
    sent = scene.upstream.sent[0]
    assert (sent.method, sent.url) == ("POST", f"http://p{CHAT}")
    assert sent.fields["vllm_xargs"] == {"seamark_boundaries": ["first:1"]}


async def test_the_prefill_worker_that_holds_a_prefix_is_chosen():
    scene = Scene("a", "b", "c")
    for worker in scene.workers:
        scene.index.record(FOUND.boundaries, worker.boot, ("first:1",) if worker.name == "b" else ())
    for _ in range(4):
        await scene.transfer()
    assert {sent.worker for sent in scene.upstream.sent} == {"b"}
    nothing = scene.request()
    nothing.prompt = Prompt()
    assert await scene.transfer(nothing) == TRANSFER  # without boundaries, anyone


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (None, "record_success"),
        (Said(200, b'{"kv_transfer_params": ["do_remote_prefill"]}'), "record_success"),
        (Said(200, b"{", Broken("gone")), "record_success"),
        (Said(201, json.dumps({"kv_transfer_params": TRANSFER}).encode()), None),
        (Said(500), "record_failure"),
        (Stale("closed"), None),
        (Unreachable("refused"), "mark_down"),
        (Broken("gone"), "record_failure"),
    ],
)
async def test_whatever_a_prefill_worker_says_it_is_judged_and_the_answer_closed(said, told):
    scene, request = Scene(), Scene().request()
    (prefill,) = scene.workers
    scene.said = said
    assert (await scene.transfer(request) == TRANSFER) is (said is None)
    assert scene.results == {"sent" if said is None else "failed": 1}
    more = {"mark_down": ("refused",), "record_failure": (request.body.raw,)}
    assert scene.told == ([(told, prefill, *more.get(told, ()))] if told else [])
    if isinstance(said, Said):
        assert said.closed == 1 and prefill.answered_at > 0
