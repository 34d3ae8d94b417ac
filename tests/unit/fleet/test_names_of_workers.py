"""Which workers a request is for by the model that it names, one that nobody lists included."""

from __future__ import annotations

import pytest

from proxy.errors import BadRequest
from proxy.fleet import pool as pool_module
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.http.client import Broken, Unreachable
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker

A, B, C = "http://a:1", "http://b:1", "http://c:1"


@pytest.fixture
async def own(in_memory) -> InMemoryGateway:
    a = RecordingWorker(A, models=("m", "alias"), patched=False)
    b = RecordingWorker(B, models=("m",), adapters={"lora": "/lora"}, patched=False)
    c = RecordingWorker(C, models=("n",), patched=False)
    own = await in_memory(a, b, c, is_started=False, replay_seconds=0.0)
    await own.gateway.pool.check_all()
    return own


@pytest.fixture
def pool(own) -> WorkerPool:
    return own.gateway.pool


def named(workers: list[Worker]) -> str:
    return "".join(worker.url[7] for worker in workers)


def test_an_empty_name_means_the_only_model_and_nothing_before_several_ones(pool):
    assert pool.base_models() == ["alias", "n"] and not pool.serving("")
    with pytest.raises(BadRequest, match=r"several are served here: alias, n\.") as refused:
        pool.for_model("")
    assert refused.value.param == "model"
    (gone,) = [worker for worker in pool.workers if worker.url == C]
    gone.up = False  # it may be back soon
    assert not pool.serving("")


def test_all_names_of_one_model_have_one_key(pool):
    assert {pool.key_of(name) for name in ("m", "alias")} == {"alias"}
    assert (pool.key_of("lora"), pool.key_of("n"), pool.key_of(None), pool.key_of(7)) == ("lora", "n", None, None)
    assert pool.key_of("") == ""  # several models
    keys = {"ab": "alias", "c": "n"}
    for name in (f"unknown-{number}" for number in range(40)):
        assert pool.key_of(name) == keys[named(pool.serving(name))]
    for worker in pool.workers:
        worker.up = False
    assert pool.key_of("unknown") == "unknown"


async def test_a_worker_that_does_not_answer_for_its_models_is_known_as_before(own, pool, monkeypatch):
    for failure in (Unreachable(), Broken()):
        own.upstream.faults[C] = failure
        monkeypatch.setattr(pool_module, "ASK_NAMES_SECONDS", -1.0)
        await pool.look_for("new")
        assert named(pool.serving("n")) == "c"
    own.upstream.workers[C].api_key = "wanted"
    own.upstream.faults.clear()
    await pool.ask_models(pool.workers[2])
    assert named(pool.serving("n")) == "c"
