"""Calls beside a request's own: prefill and decode apart, and adapters that are changed at all workers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.errors import AdapterNotEverywhere, BadRequest, GatewayError, NoWorker, SettingsError
from proxy.fleet.probe import Probed
from proxy.fleet.worker import Slot, Worker
from proxy.fleet.worker_metrics import BEST_LANE, EngineInfo, StepTimes
from proxy.http.client import Broken, Stale, Unreachable
from proxy.metrics import Metrics
from proxy.pipeline import prefill as module
from proxy.pipeline.adapter_changes import AdapterChanges
from proxy.pipeline.exchange import Exchange, Prompt, exchange_of
from proxy.pipeline.prefill import Prefills
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings
from tests.harness.gateways import CHAT, chat
from tests.harness.in_memory_gateway import InMemoryGateway, learnt
from tests.harness.probed import pool_of, probed
from tests.harness.recording_worker import RecordingWorker
from tests.harness.scripted_upstream import Said, ScriptedUpstream, Sent
from tests.harness.waiting import until

NIXL = "NixlConnector"

TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "the-engine-of-p",
    "remote_num_tokens": 496,
    "remote_prefill_cached_tokens": 0,
}

LONG = "Which tide? " * 300  # some 1,000 tokens, as the gateway counts them


class Apart(NamedTuple):
    prefill: RecordingWorker
    decode: RecordingWorker
    own: InMemoryGateway


@pytest.fixture
async def apart(in_memory) -> Apart:
    prefill = RecordingWorker(connector=NIXL, transfer=TRANSFER, cached=0)
    decode = RecordingWorker(connector=NIXL, cached=0)
    started = Apart(prefill, decode, await in_memory(decode, prefill_workers=(prefill,)))
    pools = (started.own.gateway.pool, started.own.gateway.prefill_pool)
    await until(lambda: all(worker.up and worker.renderer_ids for pool in pools for worker in pool.workers))
    return started


async def test_a_stream_is_one_of_the_worker_that_answers(apart: Apart):
    answer = await apart.own.post(chat(LONG, stream=True, stream_options={"include_usage": True}))
    assert answer.status_code == 200 and "remote" not in answer.text, answer.text
    first, second = (worker.requests[-1].fields for worker in (apart.prefill, apart.decode))
    assert first["stream"] is False and "stream_options" not in first
    assert second["stream"] is True and second["kv_transfer_params"] == TRANSFER
    apart.prefill.status = 500
    assert (await apart.own.post(chat(LONG + "2"))).status_code == 200
    assert "kv_transfer_params" not in apart.decode.requests[-1].fields  # it computes the prompt itself
    assert results(apart.own.gateway.metrics) == {"sent": 1, "failed": 1}
    (shown,) = (await apart.own.status())["prefill_workers"]
    assert shown["name"] == apart.prefill.url.removeprefix("http://")
    with pytest.raises((SettingsError, ValueError), match="each has one part"):
        Settings(worker=("http://a:1",), prefill_worker=("http://a:1/v1",))


@pytest.mark.parametrize("is_computed", [False, True])
async def test_a_client_that_leaves_ends_the_computing_of_its_prompt_or_has_it_freed(apart: Apart, is_computed):
    prefill, decode, own = apart
    prefill.pause_after = 0  # at the head of its answer
    (prefill.pause if is_computed else prefill.hold).set()
    client = own.opened(chat(LONG, stream=True))
    await until(lambda: prefill.answers if is_computed else prefill.requests)
    client.leave()
    if not is_computed:
        await until(prefill.gone.is_set)
        assert not decode.requests
        return
    prefill.pause.clear()
    await until(lambda: decode.requests)
    freeing = decode.requests[-1].fields
    assert freeing["kv_transfer_params"] == TRANSFER and freeing["max_tokens"] == 1 and freeing["stream"] is False


ENGINE = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384, connector=NIXL, lane=BEST_LANE)

FOUND = Found((Boundary("system", b"s", "first:1", estimate=150),), (b"s",), renderer_id=b"one")


def results(metrics: Metrics) -> dict[str, float]:
    (family,) = metrics.prefills.collect()
    return {each.labels["result"]: each.value for each in family.samples if each.name == "seamark_prefills_total"}


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
        self.prefills = Prefills(Settings(), self.pool, self.upstream, self.index, self.metrics.prefills)

    def _say(self, sent: Sent) -> Said | Exception:
        self.during()
        return Said(200, json.dumps({"kv_transfer_params": TRANSFER}).encode()) if self.said is None else self.said

    def request(self, path: str = CHAT, method: str = "POST", **body: Any) -> Exchange:
        parsed = {"model": "m", "messages": [{"role": "user", "content": "Tide?"}], **body}
        scope = {"method": method, "path": path, "query_string": b"", "headers": []}
        request = exchange_of(scope, json.dumps(parsed).encode(), "r")
        request.take(parsed, asks_usage=False)
        request.prompt = Prompt(found=FOUND)
        return request

    async def transfer(self, request: Exchange | None = None, tokens: int = 5000) -> dict[str, Any] | None:
        request = request or self.request()
        request.give(self.decoder)
        request.slot = Slot(self.decoder, tokens)
        return await self.prefills.transfer(request, [])

    @property
    def results(self) -> dict[str, float]:
        return results(self.metrics)


ONE, LEFT_OUT = {"max_tokens": 1, "stream": False}, {"stream_options", "logprobs", "max_completion_tokens"}


@pytest.mark.parametrize(
    ("path", "fields", "one"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}, ONE),
        (CHAT, {"n": 1, "max_completion_tokens": 9}, ONE),
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
        assert sent.fields | one == sent.fields and not LEFT_OUT & sent.fields.keys()
        assert sent.fields["kv_transfer_params"]["do_remote_decode"] and sent.url.endswith(path)
    assert await scene.transfer(scene.request(path, "GET", **fields)) is None


async def test_a_call_is_worth_what_it_has_cost_beside_the_computing(monkeypatch):
    """Two passes at first; then a pass, and the median of what calls took beyond their tokens."""
    scene, now = Scene(), [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    (prefill,) = scene.workers

    def learn_pace(worker: Worker) -> None:
        worker.learn(probed(worker.name, worker.engine, "m", step_times=StepTimes(0.25, 2**-10)))

    learn_pace(scene.decoder)
    assert await scene.transfer(tokens=512) is None and scene.results == {"short": 1}

    async def called(seconds: float, tokens: int, **told: Any) -> bool:
        def passes() -> None:
            now[0] += seconds

        scene.during, scene.said = passes, Said(200, json.dumps({"kv_transfer_params": {**TRANSFER, **told}}).encode())
        return await scene.transfer(tokens=tokens) is not None

    assert await called(9.0, 513)  # of a prefill worker whose pace is not known nothing is learnt
    assert await called(9.0, 513)
    learn_pace(prefill)
    assert await called(2.0, 513, remote_num_tokens=1024, remote_prefill_cached_tokens=512)  # half a second of it
    assert not await called(0.0, 1792) and await called(2.0, 1793, remote_num_tokens="many")
    assert await called(0.0, 1793, remote_num_tokens=512, remote_prefill_cached_tokens=None)  # never below nothing
    assert not await called(0.0, 1024) and await called(0.0, 1025, remote_num_tokens=0)  # of 1.5 and 0
    assert not await called(0.0, 256) and await called(0.0, 257)  # of 1.5, 0 and 0


@pytest.mark.parametrize(
    "known",
    [
        {"up": False},
        {"max_inflight": 1, "inflight": 1},
        {"probed": probed("p", ENGINE, "n")},
        {"probed": probed("p", None, "m")},
        {"probed": probed("p", replace(ENGINE, match_unit=32), "m")},
        {"probed": probed("p", replace(ENGINE, version="0.3.1"), "m")},
        {"probed": probed("p", replace(ENGINE, connector=""), "m")},
    ],
)
async def test_without_a_worker_that_fits_the_prompt_is_computed_where_it_is_answered(known):
    scene = Scene()
    (prefill,) = scene.workers
    for name, value in known.items():
        setattr(prefill, name, value)
    if "probed" in known:
        prefill.learn(known["probed"])
        scene.pool._reconcile()  # with it, the pool knows its names
    assert await scene.transfer() is None
    assert scene.results == {"no_worker": 1} and not scene.upstream.sent


@pytest.mark.parametrize(
    "lacks",
    [
        lambda worker: worker.learn(probed("d", None, "m")),
        lambda worker: worker.learn(probed("d", replace(ENGINE, connector=""), "m")),
        lambda worker: worker.quarantine(),
        lambda worker: (worker.quarantine(), worker.restore()),  # which leaves it a salt
    ],
)
async def test_a_worker_that_cannot_take_a_prompt_computes_it(lacks):
    scene = Scene()
    lacks(scene.decoder)
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


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADAPTER = {"lora_name": "tide-lora", "lora_path": "/x"}


async def test_an_adapter_is_loaded_and_unloaded_at_all_workers_and_known_at_once(in_memory):
    workers = [RecordingWorker(checks_names=True, adapters={}) for _ in range(2)]
    own = await in_memory(*workers, health_interval=3600)
    await learnt(own)
    workers[1].status = 500
    assert (await own.post(ADAPTER, LOAD)).status_code == 502 and workers[0].adapters == {"tide-lora": "/x"}
    assert (await own.post(chat("x", model="tide-lora"))).status_code == 200
    workers[1].status = 200
    answer = await own.post(ADAPTER, LOAD)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'tide-lora' added successfully.")
    assert [worker.adapters for worker in workers] == [{"tide-lora": "/x"}] * 2
    for number in range(4):
        asked = await own.post(chat(f"{number}", model="tide-lora"))
        assert asked.status_code == 200 and asked.headers["x-seamark-boundary"]
        assert asked.headers["x-seamark-reason"] != "unpatched"
    assert (await own.get("/v1/models/tide-lora")).json()["parent"] == "m"
    workers[0].adapters["late"] = "/y"  # past the gateway
    assert (await own.post({"model": "late", "input": "x"}, "/v1/embeddings")).headers["x-seamark-worker"] == "worker-0"
    del workers[0].adapters["late"]
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 200
    assert [worker.adapters for worker in workers] == [{}, {}]
    assert (await own.post(chat("x", model="tide-lora"))).status_code == 404


class AdapterScene:
    """Workers that say what they are told to, by their names; all serve the model `m`."""

    def __init__(self, **said: Any) -> None:
        self.said, self.upstream = said, ScriptedUpstream(say=self._say)
        pool = pool_of(self.upstream, *said)
        self.workers = pool.workers
        for worker in self.workers:
            cards = [{"id": "m"}, {"id": "tide-lora", "parent": "m", "root": "/x"}]
            worker.learn(Probed(boot=worker.name, models=cards))
        pool.ask_models = AsyncMock()  # type: ignore[method-assign]
        self.changes = AdapterChanges([pool], self.upstream, 7.0)

    def _say(self, sent: Sent) -> Said | Exception:
        said = self.said[sent.worker]
        return said if isinstance(said, Exception) else Said(*said, headers=[(b"content-type", b"text/plain")])

    async def serve(self, path: str = LOAD, **body: Any) -> tuple[int, str]:
        got: list[Any] = []

        async def send(message: Any) -> None:
            got.append(message)

        parsed = {**ADAPTER, **body}
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
        request = exchange_of(scope, json.dumps(parsed).encode(), "r", None, send)
        request.take(parsed, asks_usage=False)
        await self.changes.serve(request)
        start, answer = got
        return start["status"], answer["body"].decode()

    @property
    def asked(self) -> list[str]:
        return [sent.worker for sent in self.upstream.sent]


OK, LOADED = (200, b"Success."), (400, b"It has already been loaded.")

NO_ADAPTER, NO_ROUTE_THERE = (404, b"The LoRA adapter cannot be found."), (404, b'{"detail":"Not Found"}')

BAD = (400, b'{"error":{"message":"No such path."}}')


@pytest.mark.parametrize(
    ("path", "said", "status", "text"),
    [
        (LOAD, {"a": OK, "b": OK}, 200, "Success."),
        (LOAD, {"a": LOADED, "b": OK}, 200, "Success."),  # of the same path
        (LOAD, {"a": LOADED, "b": LOADED}, 400, "It has already been loaded."),
        (LOAD, {"a": NO_ROUTE_THERE, "b": NO_ROUTE_THERE}, 404, NO_ROUTE_THERE[1].decode()),
        (UNLOAD, {"a": OK, "b": NO_ADAPTER}, 200, "Success."),
        (UNLOAD, {"a": NO_ADAPTER, "b": NO_ADAPTER}, 404, NO_ADAPTER[1].decode()),
    ],
)
async def test_what_is_as_asked_for_everywhere_or_refused_alike_is_answered_as_one_worker_does(
    path, said, status, text
):
    scene = AdapterScene(**said)
    assert await scene.serve(path) == (status, text)
    assert sorted(scene.asked) == sorted(said)


@pytest.mark.parametrize(
    ("path", "said", "done", "cause"),
    [
        (LOAD, {"a": OK, "b": BAD}, "a", "b (No such path.)"),
        (LOAD, {"a": BAD, "b": (500, b"")}, "no worker", "a (No such path.); b (it gives no reason)"),
        (LOAD, {"a": OK, "b": (500, b"x" * 300)}, "a", f"b ({'x' * 200})"),
        (LOAD, {"a": OK, "b": Broken("")}, "a", "b (it broke off)"),
        (LOAD, {"a": OK, "b": Unreachable("connection refused")}, "a", "b (connection refused)"),
        (UNLOAD, {"a": OK, "b": (500, b"no")}, "a", "b (no)"),
    ],
)
async def test_where_it_was_not_done_is_told_with_the_reason(path, said, done, cause):
    scene, verb = AdapterScene(**said), "loaded" if path == LOAD else "unloaded"
    with pytest.raises(AdapterNotEverywhere) as error:
        await scene.serve(path)
    assert f"'tide-lora' is {verb} at {done}, and not at {cause}. " in str(error.value)
    for another in ({"lora_path": "/y"}, {"lora_name": "ebb-lora"}):  # is not the one that was loaded already
        with pytest.raises(AdapterNotEverywhere):
            await AdapterScene(a=LOADED, b=OK).serve(**another)


async def test_a_worker_that_is_down_is_not_asked_and_told():
    scene = AdapterScene(a=OK, b=OK)
    scene.workers[1].up, scene.workers[1].words = False, "connection refused"
    with pytest.raises(AdapterNotEverywhere, match=r"loaded at a, and not at b \(connection refused\)"):
        await scene.serve()
    assert scene.asked == ["a"]
    scene.workers[1].words = ""
    with pytest.raises(AdapterNotEverywhere, match=r"b \(down\)"):
        await scene.serve()
    scene.workers[0].up = False
    with pytest.raises(NoWorker):
        await scene.serve()
    assert scene.asked == ["a", "a"]


async def test_the_base_model_that_a_request_names_decides():
    scene = AdapterScene(a=OK, b=OK)
    scene.workers[1].learn(Probed(boot="b", models=[{"id": "n"}]))
    assert await scene.serve(base_model_name="n") == (200, "Success.") and scene.asked == ["b"]
    with pytest.raises(BadRequest, match="nobody's") as error:
        await scene.serve(base_model_name="nobody's" + "x" * 300)
    assert error.value.param == "base_model_name" and len(str(error.value)) < 260
    assert isinstance(error.value, GatewayError) and scene.asked == ["b"]


async def test_among_several_models_those_that_have_the_route_decide():
    scene = AdapterScene(a=(400, b"1 validation error"), b=NO_ROUTE_THERE)
    scene.workers[1].learn(Probed(boot="b", models=[{"id": "n"}]))
    assert (await scene.serve())[0] == 400
    assert [(sent.worker, sent.body) for sent in scene.upstream.sent][:2] == [("a", b"{}"), ("b", b"{}")]
    assert scene.asked == ["a", "b", "a"]
    scene.said["b"] = (400, b"1 validation error")
    with pytest.raises(BadRequest, match="m, n") as error:
        await scene.serve()
    assert error.value.param == "base_model_name"
    scene.said |= {"a": NO_ROUTE_THERE, "b": NO_ROUTE_THERE}
    assert (await scene.serve())[0] == 404  # nobody has it: all are asked
