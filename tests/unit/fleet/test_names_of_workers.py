"""Which workers a request is for by the model that it names, one that nobody lists included."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from proxy.errors import BadRequest
from proxy.fleet import pool as pool_module
from proxy.fleet.pool import ASK_NAMES_SECONDS, WorkerPool
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
def a() -> Lists:
    return Lists(A, models=("m", "alias"))


@pytest.fixture
def b() -> Lists:
    return Lists(B, models=("m",), adapters={"lora": "/lora"})


@pytest.fixture
def c() -> Lists:
    return Lists(C, models=("n",))


@pytest.fixture
async def own(in_memory, a, b, c) -> InMemoryGateway:
    own = await in_memory(a, b, c, is_started=False, replay_seconds=0.0)
    await own.gateway.pool.check_all()
    for server in (a, b, c):
        server.lists = 0
    return own


@pytest.fixture
def pool(own) -> WorkerPool:
    return own.gateway.pool


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The pool's, which stands still until a test moves it on."""
    found = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


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


async def test_who_asks_for_such_a_name_meanwhile_waits_for_the_same_answers(pool, clock, c):
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


async def test_a_worker_that_does_not_answer_for_its_models_is_known_as_before(own, pool, clock):
    for failure in (Unreachable(), Broken()):
        own.upstream.faults[C] = failure
        clock.now += ASK_NAMES_SECONDS
        await pool.look_for("new")
        assert named(pool.serving("n")) == "c"
    own.upstream.workers[C].api_key = "wanted"
    own.upstream.faults.clear()
    await pool.ask_models(pool.workers[2])
    assert named(pool.serving("n")) == "c"


async def test_one_that_took_a_name_which_was_added_meanwhile_does_not_take_any(pool, a):
    worker, a.models = pool.workers[0], ("m", "alias", "new")
    pool.answered_name(worker, "new", taken=True)
    await until(lambda: worker.serves("new"))
    assert worker.takes_any_name is None


async def test_nothing_is_learnt_of_one_that_has_restarted_meanwhile(pool, a):
    held, worker = asyncio.Event(), pool.workers[0]
    a.held = held
    pool.answered_name(worker, "new", taken=True)
    await until(lambda: a.lists)
    a.boot = "2.0"
    await pool.check_health(worker)
    held.set()
    await until(lambda: not pool._tasks)
    assert worker.takes_any_name is None
