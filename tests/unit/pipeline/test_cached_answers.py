"""Exact repeats before a gateway: identical bytes, one execution, nobody else's answer, and a bound."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from proxy.fleet.part import Change
from proxy.pipeline.cacheable import EMBEDDINGS
from tests.harness.api_keys import bearer, entry
from tests.harness.fake_engine import Computed
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

ROOM = 2**22  # bytes

ALLOW = {"x-seamark-cache": "allow"}

HEADER = "x-seamark-cache"


@pytest.fixture
def computing() -> RecordingWorker:
    return RecordingWorker(computed=Computed())


@pytest.fixture
async def own(in_memory, computing) -> InMemoryGateway:
    return await in_memory(computing, response_cache=ROOM)


def chat(question: str = "Tide?", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": question}], "temperature": 0, **fields}


async def post(own: InMemoryGateway, body: dict[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    return await own.post(body, path, **{**ALLOW, **headers})


async def results(own: InMemoryGateway, *bodies: dict[str, Any], **headers: str) -> list[str]:
    return [(await post(own, body, **headers)).headers[HEADER] for body in bodies]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stream=True)),
        (COMPLETIONS, {"model": "m", "prompt": "Tide?", "temperature": 0}),
        (MESSAGES, {**chat(), "max_tokens": 8}),
        (RESPONSES, {"model": "m", "input": "Tide?", "temperature": 0}),
        (EMBEDDINGS, {"model": "m", "input": "Tide?"}),
    ],
)
async def test_a_repeat_gets_the_same_bytes_without_the_worker(own, computing, path, body):
    first, second = await post(own, body, path), await post(own, body, path)
    assert (first.headers[HEADER], second.headers[HEADER]) == ("miss", "hit")
    assert first.status_code == second.status_code == 200 and len(computing.requests) == 1
    assert first.content == second.content and first.headers["content-type"] == second.headers["content-type"]
    assert second.headers["age"] == "0" and "x-seamark-worker" not in second.headers
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize(
    ("settings", "headers", "found"),
    [
        ({}, {HEADER: "no"}, ["bypass", "bypass"]),
        ({"response_cache_models": "other, m"}, {HEADER: "no"}, ["miss", "hit"]),
        ({}, {}, ["miss", "hit"]),
        ({}, {"cache-control": "no-store"}, ["bypass", "bypass"]),
        ({}, {"cache-control": "no-cache"}, ["miss", "miss"]),
        ({}, {"cache-control": "max-age=600"}, ["miss", "hit"]),
    ],
)
async def test_the_client_or_the_operator_has_to_allow_it(in_memory, computing, settings, headers, found):
    own = await in_memory(computing, response_cache=ROOM, **settings)
    assert await results(own, chat(), chat(), **headers) == found
    assert own.metric("seamark_response_cache_total", result=found[-1]) >= 1


async def test_a_new_answer_stands_in_place_of_the_old_one(own, computing):
    old = await post(own, chat())
    computing.computed = Computed(words=9)
    fresh = await post(own, chat(), cache_control="no-cache")
    assert (await post(own, chat())).content == fresh.content != old.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "state",
    [
        {"more_headers": [(b"cache-control", b"no-store")]},
        {"computed": Computed(ending="abort")},
        {"status": 500},
        {"cut_after": 1},
    ],
)
async def test_an_answer_that_is_not_final_or_may_not_be_shared_goes_to_those_who_wait_and_is_not_stored(
    own, computing, state, stream
):
    for name, value in state.items():
        setattr(computing, name, value)
    computing.hold.set()
    asked = [asyncio.create_task(post(own, chat(stream=stream))) for _ in range(3)]
    executions = own.gateway.response_cache._executions
    await until(lambda: sum(len(each._readers) for each in [*executions.values()]) == 3 and computing.requests)
    computing.hold.clear()
    answers = await asyncio.gather(*asked)
    assert len({(answer.status_code, answer.content) for answer in answers}) == len(computing.requests) == 1
    assert own.metric("seamark_response_cache_bytes") == own.metric("seamark_response_cache_entries") == 0
    await post(own, chat(stream=stream))
    assert len(computing.requests) == 2


def with_keys(path: Path, **fields: Any) -> dict[str, Any]:
    keys, secret = path / "keys.toml", path / "secret"
    keys.write_text("".join(entry(name, **more) for name, more in fields.items()))
    secret.write_text("salt secret\n")
    return {"api_keys": keys, "salt_secret_file": secret}


async def test_those_who_ask_for_the_same_are_bound_by_the_limits_of_their_key(in_memory, computing, tmp_path):
    files = with_keys(tmp_path, ann={"max_inflight": 1, "max_queued": 2})
    own = await in_memory(computing, response_cache=ROOM, **files)
    computing.hold.set()
    asked = [asyncio.create_task(post(own, chat(), **bearer("ann"))) for _ in range(300)]
    await until(lambda: sum(task.done() for task in asked) == 297)
    ann = own.gateway.keys.named("ann")
    assert (ann.under_way, ann.queued) == (1, 2)
    computing.hold.clear()
    answers = await asyncio.gather(*asked)
    assert Counter(each.status_code for each in answers) == {429: 297, 200: 3} and len(computing.requests) == 1
    assert [each.headers.get(HEADER) for each in answers if each.status_code == 200].count("miss") == 1
    assert (ann.under_way, ann.queued) == (0, 0)


async def test_who_waits_for_the_same_waits_for_no_longer_than_one_request_may(in_memory, computing, tmp_path):
    """One after the other, twelve would wait twelve times as long."""
    files = with_keys(tmp_path, ann={"max_inflight": 1})
    own = await in_memory(computing, response_cache=ROOM, queue_timeout=0.5, **files)
    computing.hold.set()
    busy = asyncio.create_task(post(own, chat("long"), **bearer("ann")))
    await until(lambda: own.gateway.pool.workers[0].inflight == 1)
    answers = await asyncio.gather(*(post(own, chat(), **bearer("ann")) for _ in range(12)))
    assert {each.status_code for each in answers} == {429} and len(own.gateway.queue) == 0
    computing.hold.clear()
    assert (await busy).status_code == 200 and len(computing.requests) == 1


async def test_mixed_requests_get_the_bytes_of_a_gateway_without_a_cache(in_memory, computing, tmp_path: Path):
    """Coalesced and repeated, by three keys of two groups, whole and streamed."""
    files = with_keys(tmp_path, ann={}, bob={"share": "team"}, cleo={"share": "team"})
    draw, groups = random.Random(7), {"ann": "ann", "bob": "team", "cleo": "team"}
    bodies = [chat(f"Question {number}?", stream=number % 3 == 0) for number in range(6)]
    asked = [(draw.choice(tuple(groups)), draw.randrange(len(bodies))) for _ in range(240)]
    plain: dict[tuple[str, int], bytes] = {}
    own = await in_memory(computing, **files)
    for name, group in groups.items():
        for number, body in enumerate(bodies):
            answer = await post(own, body, **bearer(name))
            assert plain.setdefault((group, number), answer.content) == answer.content
    assert len(set(plain.values())) == 2 * len(bodies)  # each group's answers name its salt
    computing.requests.clear()
    own = await in_memory(computing, response_cache=2**24, **files)
    turns, told = asyncio.Semaphore(48), Counter[str]()

    async def ask(name: str, number: int) -> None:
        async with turns:
            answer = await post(own, bodies[number], **bearer(name))
        told[answer.headers[HEADER]] += 1
        assert answer.content == plain[groups[name], number], (name, number)

    await asyncio.gather(*(ask(name, number) for name, number in asked))
    distinct = len({(groups[name], number) for name, number in asked})
    assert len(computing.requests) == distinct == told["miss"]
    assert told["hit"] and told["joined"] and told.total() == len(asked)


async def test_what_the_worker_answered_is_void_with_its_boot_its_cache_or_its_being_trusted(own, computing):
    (worker,) = own.gateway.pool.workers
    assert await results(own, chat(), chat()) == ["miss", "hit"]
    computing.boot = "1.8e+09"
    await until(lambda: worker.boot.endswith("1.8e+09"))
    assert await results(own, chat(), chat()) == ["miss", "hit"]
    own.gateway.shelf.tell(worker, Change.DISTRUSTED)
    assert await results(own, chat(), chat()) == ["miss", "hit"]
    computing.engine.clear()  # as who has put other weights into the engine has to

    async def is_void() -> bool:
        return await results(own, chat()) == ["miss"]

    await until(is_void)


@pytest.mark.parametrize("name", ["ada", "nobody lists it yet"])
async def test_what_may_be_an_adapter_is_computed_each_time(in_memory, name):
    """Its weights may be replaced at the worker between any two requests."""
    computing = RecordingWorker(computed=Computed(), adapters={"ada": "/a"})
    own = await in_memory(computing, response_cache=ROOM, response_cache_models="*")
    assert await results(own, chat(model=name), chat(model=name)) == ["bypass", "bypass"]
    assert await results(own, chat(), chat()) == ["miss", "hit"]
