"""Which workers a request is for by the model that it names, one that nobody lists included."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from proxy.errors import BadRequest, NoWorker
from proxy.fleet import pool as pool_module
from proxy.fleet.model_names import MOST_NAMES, some_of
from proxy.fleet.pool import ASK_NAMES_SECONDS, WorkerPool, union_of_models
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


@pytest.mark.parametrize(
    ("model", "serving", "for_model"),
    [("m", "ab", "ab"), ("alias", "a", "a"), ("lora", "b", "b"), ("n", "c", "c"), (None, "", "abc"), (7, "", "abc")],
)
def test_a_name_is_for_the_workers_that_list_it_and_what_is_no_name_for_all(pool, model, serving, for_model):
    assert (named(pool.serving(model)), named(pool.for_model(model))) == (serving, for_model)
    assert pool.lists(model) is bool(serving)


def test_a_name_of_workers_that_are_all_down_is_for_none_and_one_of_some_for_the_rest(pool):
    pool.mark_down(pool.workers[0])
    assert named(pool.serving("m")) == named(pool.for_model("m")) == "b"
    assert not pool.serving("alias") and pool.lists("alias")
    with pytest.raises(NoWorker, match=r"Worker a:1: no connection\.$"):
        pool.for_model("alias")
    for worker in pool.workers:
        pool.mark_down(worker, "gone")
    with pytest.raises(NoWorker, match="a:1: gone; b:1: gone; c:1: gone"):
        pool.for_model(None)


def test_a_worker_that_is_warmed_up_gets_requests_only_if_no_other_one_can_take_them(pool):
    first, second, _ = pool.workers
    first.warming = True
    assert named(pool.for_model("m")) == "b"
    second.warming = True
    assert named(pool.for_model("m")) == "ab"
    second.up = False
    assert named(pool.for_model("m")) == "a"


def test_an_empty_name_means_the_only_model_and_nothing_before_several_ones(pool):
    assert pool.base_models() == ["alias", "n"] and not pool.serving("")
    with pytest.raises(BadRequest, match=r"several are served here: alias, n\.") as refused:
        pool.for_model("")
    assert refused.value.param == "model"
    (gone,) = [worker for worker in pool.workers if worker.url == C]
    gone.up = False  # it may be back soon
    assert not pool.serving("")


async def test_an_empty_name_means_the_only_model_of_all_workers_that_are_up(in_memory, a, b):
    pool = (await in_memory(a, b, is_started=False)).gateway.pool
    with pytest.raises(NoWorker):
        pool.for_model("")
    await pool.check_all()
    assert named(pool.serving("")) == named(pool.for_model("")) == "ab"
    pool.workers[0].up = False
    assert named(pool.serving("")) == named(pool.for_model("")) == "b"


async def test_where_the_only_model_is_down_an_empty_name_is_left_to_who_is_up_and_lists_none(in_memory, a, b):
    a.models = ()
    pool = (await in_memory(a, b, is_started=False)).gateway.pool
    await pool.check_all()
    assert named(pool.for_model("")) == named(pool.serving("unknown")) == "b"
    pool.workers[1].up = False
    assert pool.base_models() == ["m"] and named(pool.for_model("")) == "a"


def test_a_name_that_nobody_lists_is_for_one_model_of_those_that_take_any_or_were_not_asked(pool):
    first, second, third = pool.workers
    for names in (["x"], [f"name-{number}" for number in range(40)]):
        chosen = {name: named(pool.serving(name)) for name in names}
        assert set(chosen.values()) <= {"ab", "c"} and chosen == {name: named(pool.serving(name)) for name in names}
    assert set(chosen.values()) == {"ab", "c"}, "of forty names, each model gets some"
    first.takes_any_name = False
    assert {named(pool.serving(name)) for name in names} == {"b", "c"}
    third.takes_any_name = True
    assert {named(pool.serving(name)) for name in names} == {"c"}
    third.up = False
    assert {named(pool.serving(name)) for name in names} == {"b"}
    second.takes_any_name, third.up, third.takes_any_name = False, True, False
    assert {named(pool.serving(name)) for name in names} == {"ab", "c"}, "they word the refusal"


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


async def test_for_a_name_that_nobody_lists_all_that_are_up_are_asked_once_in_a_second(pool, clock, a, b, c):
    pool.workers[1].up = False

    async def asked(model: object, seconds: float = 0.0) -> tuple[int, int, int]:
        clock.now += seconds
        await pool.look_for(model)
        told = a.lists, b.lists, c.lists
        a.lists = b.lists = c.lists = 0
        return told

    for model in ("m", "lora", "", None, 7):
        assert await asked(model) == (0, 0, 0), model
    assert await asked("new") == (1, 0, 1)
    assert await asked("newer", ASK_NAMES_SECONDS - 0.001) == (0, 0, 0)
    assert await asked("newer", 0.001) == (1, 0, 1)
    c.models = ("n", "new")
    assert await asked("new", ASK_NAMES_SECONDS) == (1, 0, 1) and named(pool.serving("new")) == "c"
    assert await asked("new", ASK_NAMES_SECONDS) == (0, 0, 0)
    pool.workers[0].takes_any_name = True
    assert await asked("newer", ASK_NAMES_SECONDS) == (0, 0, 0)


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


async def test_a_worker_is_found_for_a_model_that_it_has_now(pool, clock, a, b, c):
    assert named(await pool.find("m")) == "ab" and (a.lists, b.lists, c.lists) == (0, 0, 0)
    c.models = ("n", "new")
    assert named(await pool.find("new")) == "c" and (a.lists, b.lists, c.lists) == (1, 1, 1)
    for worker in pool.workers:
        worker.up = False
    assert named(await pool.find("lora")) == "b", "all are looked at where none is up"


async def test_workers_are_looked_at_before_they_are_called_not_ready_and_only_then(pool, a, b, c):
    pool.workers[2].up = False
    assert named(await pool.ready()) == "ab" and not c.lists
    pool.workers[0].up = pool.workers[1].up = False
    assert named(await pool.ready()) == "abc" and c.lists == 1


async def test_one_that_took_a_name_which_it_does_not_list_even_then_takes_any(pool, a):
    worker = pool.workers[0]
    for model in ("m", "alias", "", None, 7):
        pool.answered_name(worker, model, taken=True)
        pool.answered_name(worker, model, taken=False)
    assert (worker.takes_any_name, a.lists) == (None, 0)
    pool.answered_name(worker, "new", taken=False)
    assert worker.takes_any_name is False
    for _ in range(3):  # many requests at the same time
        pool.answered_name(worker, "new", taken=True)
    await until(lambda: worker.takes_any_name)
    assert a.lists == 1
    pool.answered_name(worker, "newer", taken=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert worker.takes_any_name and a.lists == 1
    pool.answered_name(worker, "newer", taken=False)
    assert worker.takes_any_name is False
    pool.answered_name(worker, "newer", taken=True)
    await until(lambda: worker.takes_any_name)


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


def test_models_of_all_workers_are_listed_once_as_the_first_one_has_them(pool):
    listed = union_of_models(pool.workers)
    assert [each["id"] for each in listed] == ["m", "alias", "lora", "n"]
    assert listed[0] is pool.workers[0].probed.models[0]


@pytest.mark.parametrize("more", [0, 1, 3])
def test_of_many_names_a_few_are_shown_and_the_rest_is_counted(more):
    names = [f"m{number}" for number in range(MOST_NAMES)]
    shown = some_of([*names, *["z"] * more])
    assert shown == ", ".join(names) + (f" and {more} more" if more else "")
