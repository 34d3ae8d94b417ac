"""A worker that has restarted gets the hottest prefixes back before it gets requests, each sent for itself alone."""

from __future__ import annotations

import copy
import json
from unittest.mock import Mock, call

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.chat import CHAT
from proxy.fleet.hot_prefixes import ENTRY_BYTES, WarmupRequest, WarmupSet
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.client import Broken
from proxy.metrics import Metrics
from proxy.pipeline.replayer import Replayer
from proxy.pipeline.warm_up import WarmUp
from proxy.routing.engine_events import EngineEvents
from proxy.routing.prefix_index import PrefixIndex
from tests.harness.gateways import chat
from tests.harness.probed import pool_of
from tests.harness.recording_worker import RecordingWorker
from tests.harness.scripted_upstream import Said, ScriptedUpstream
from tests.harness.waiting import until


async def test_a_restarted_worker_is_given_the_hot_prefixes_first(in_memory):
    worker = RecordingWorker()
    other = RecordingWorker()
    gateway = await in_memory(worker, other, health_interval=0.2)
    for number in range(4):
        owner = (await gateway.post(chat(f"{number}", max_tokens=50, stream=True))).headers["x-seamark-worker"]
    restarted, stays = (worker, other) if owner in worker.url else (other, worker)
    restarted.hold.set()  # the replay takes a while
    restarted.requests.clear()
    restarted.boot = "1.8e+09"
    await until(lambda: restarted.requests)
    sent = json.loads(restarted.requests[0].body)
    assert (sent["max_tokens"], sent["stream"]) == (1, False)
    assert sent["vllm_xargs"]["seamark_boundaries"]
    during = await gateway.post(chat("during"))
    assert during.headers["x-seamark-worker"] in stays.url
    restarted.hold.clear()
    await until(lambda: gateway.metric("seamark_replays_total") >= 1)
    await gateway.shows(lambda status: not any(each["warming"] for each in status["workers"]))


@pytest.mark.parametrize("seconds", [0.2, 3600])
async def test_without_another_worker_nobody_waits_for_a_replay_which_is_bounded(in_memory, worker, seconds):
    gateway = await in_memory(worker, replay_seconds=seconds)
    for number in range(3):
        await gateway.post(chat(f"{number}"))
    worker.held_text = b'"max_tokens":1'  # replays
    worker.hold.set()
    worker.boot = "1.8e+09"
    await until(lambda: any(b'"max_tokens":1' in request.body for request in worker.requests))
    assert (await gateway.post(chat("at once"))).status_code == 200
    if seconds < 1:
        await gateway.shows(lambda status: not any(each["warming"] for each in status["workers"]))
    else:
        assert any(each["warming"] for each in (await gateway.status())["workers"])


FOUND = Found((Boundary("system", b"s", "first:1", estimate=150),), (b"s",), renderer_id=b"one")

PROMPT = WarmupRequest(CHAT, b'{"model":"m"}', ("model",), {}, FOUND, "m")

ENGINE = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384)

PINNED = (b"x-seamark-outcome", b"cold,0,0,,pinned")


@pytest.mark.parametrize(
    "said", [Said(200, b"{}", headers=[PINNED]), Said(503, b"{}"), Broken("gone"), Said(200, Broken("gone"))]
)
@pytest.mark.parametrize("pin", [None, True])
async def test_a_prefix_counts_as_the_workers_only_if_it_has_computed_it(monkeypatch, said, pin):
    said = copy.deepcopy(said)
    told: list[str] = []
    for name in ("sent", "refused"):
        monkeypatch.setattr(EngineEvents, name, lambda *what, name=name: told.append(name))
    upstream = ScriptedUpstream(said)
    (worker,) = pool_of(upstream, "w", engine=ENGINE).workers
    index = PrefixIndex(10**6)
    replayer = Replayer(upstream, index, EngineEvents(upstream, index, None, None, None, ""), 5.0)  # type: ignore[arg-type]
    is_computed = isinstance(said, Said) and said.pieces[0] == b"{}" and said.status == 200
    if isinstance(said, Said) and said.pieces[0] == b"{}":
        answer = await replayer.send(worker, PROMPT, pin=pin)
        assert (answer.status, answer.body, answer.pin) == (said.status, b"{}", "pinned" if is_computed else "")
    else:
        with pytest.raises(Broken):
            await replayer.send(worker, PROMPT, pin=pin)
    assert not isinstance(said, Said) or said.closed == 1
    (sent,) = upstream.sent
    assert sent.fresh and sent.headers[b"x-request-id"].startswith(b"own-")
    assert sent.headers[b"authorization"] == b"Bearer the workers' key"
    if pin is None:
        assert (index.sent((b"s",), {worker.boot}) is not None) == is_computed and told == []
    else:
        assert told == (["sent"] if is_computed else ["sent", "refused"])


@pytest.mark.parametrize(
    ("said", "result"), [(Said(200, b"usage"), "done"), (Said(503, b"no"), "failed"), (Broken(""), "failed")]
)
async def test_a_replay_is_counted_and_its_cost_if_it_was_computed(said, result):
    kept, metrics, upstream, accounting = WarmupSet(10**6), Metrics(), ScriptedUpstream(said), Mock()
    (worker,) = pool_of(upstream, "w", engine=ENGINE).workers
    part = WarmUp(kept, Replayer(upstream, PrefixIndex(10**6), Mock(), 5.0), accounting, metrics)
    await part.prepare(worker)
    assert upstream.sent == [] and part.held == 0
    for key, model in ((b"s", "m"), (b"t", "another worker's")):
        kept.add(key, 100, (), PROMPT._replace(model=model))
    await part.prepare(worker)
    assert len(upstream.sent) == 1 and part.held == kept.held > 0
    labels = {"worker": "w", "result": result}
    assert metrics.registry.get_sample_value("seamark_replays_total", labels) == 1
    assert accounting.replayed.mock_calls == ([call("m", worker, b"usage")] if result == "done" else [])
    worker.cache.hints_allowed = False
    await part.prepare(worker)
    assert len(upstream.sent) == 1


def replay(name: bytes = b"") -> WarmupRequest:
    return WarmupRequest(CHAT, b'{"model":"m","messages":[]}' + name, ("model",), {}, Found(), "m")


def use(prefixes: WarmupSet, key: bytes, of: WarmupRequest) -> None:
    if not prefixes.used_again(key, 0.0):
        prefixes.add(key, 100, (), of, 0.0)


def test_what_is_kept_is_bounded_and_nothing_where_text_is_not_kept():
    size = len(replay().raw) + ENTRY_BYTES
    prefixes = WarmupSet(3 * size)
    for number in range(10):
        use(prefixes, bytes([number]), replay())
    assert len(prefixes) == 3 and prefixes.held <= 3 * size
    none = WarmupSet(0)
    use(none, b"key", replay())
    assert len(none) == 0


def test_what_is_used_again_stays_and_the_least_recently_used_goes():
    size = len(replay(b"0").raw) + ENTRY_BYTES
    prefixes = WarmupSet(2 * size)
    for name in (b"0", b"1", b"0", b"2"):
        use(prefixes, name, replay(name))
    assert {request.raw[-1:] for request in prefixes.hottest({"m"}, 0.0)} == {b"0", b"2"}
