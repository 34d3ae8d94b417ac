"""Which workers a request is for by the model that it names, one that nobody lists included."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from proxy.errors import BadRequest
from proxy.fleet import pool as pool_module
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.http.client import Broken, Unreachable
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

A, B, C = "http://a:1", "http://b:1", "http://c:1"


@dataclass
class Lists(RecordingWorker):
    """Counts how often it is asked for its models; the next answer waits for `held`."""

    patched: bool = False
    lists: int = 0
    held: asyncio.Event | None = None

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/v1/models":
            self.lists += 1
            held, self.held = self.held, None
            if held is not None:
                await held.wait()
        await super().__call__(scope, receive, send)


@pytest.fixture
def servers() -> dict[str, Lists]:
    a, b = Lists(A, models=("m", "alias")), Lists(B, models=("m",), adapters={"lora": "/lora"})
    return {"a": a, "b": b, "c": Lists(C, models=("n",))}


@pytest.fixture
async def own(in_memory, servers) -> InMemoryGateway:
    own = await in_memory(*servers.values(), is_started=False, replay_seconds=0.0)
    await own.gateway.pool.check_all()
    for server in servers.values():
        server.lists = 0
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


async def test_who_asks_for_such_a_name_meanwhile_waits_for_the_same_answers(pool, servers):
    c = servers["c"]
    held = c.held = asyncio.Event()
    first = asyncio.create_task(pool.look_for("new"))
    await until(lambda: c.lists)
    second = asyncio.create_task(pool.look_for("new"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not first.done() and not second.done() and c.lists == 1
    c.models = ("n", "new")
    held.set()
    await asyncio.gather(first, second)
    assert c.lists == 1 and pool.lists("new")


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
