"""Exact repeats before a gateway: identical bytes, one execution, nobody else's answer, and a bound."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from proxy.fleet.part import Change
from proxy.pipeline import response_cache
from proxy.pipeline.cacheable import EMBEDDINGS
from tests.harness.api_keys import bearer, entry
from tests.harness.computed_answers import Computed
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


BODIES = {
    CHAT: chat(),
    COMPLETIONS: {"model": "m", "prompt": "Tide?", "temperature": 0},
    MESSAGES: {**chat(), "max_tokens": 8},
    RESPONSES: {"model": "m", "input": "Tide?", "temperature": 0},
    EMBEDDINGS: {"model": "m", "input": "Tide?"},
}


async def post(own: InMemoryGateway, body: dict[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    return await own.post(body, path, **ALLOW, **headers)


def asking(own: InMemoryGateway, count: int, **fields: Any) -> list[asyncio.Task[httpx.Response]]:
    """So many clients that ask for the same."""
    return [asyncio.create_task(post(own, chat(**fields))) for _ in range(count)]


async def results(own: InMemoryGateway, *bodies: dict[str, Any], **headers: str) -> list[str]:
    """What the response cache made of each."""
    return [(await post(own, body, **headers)).headers[HEADER] for body in bodies]


def readers(own: InMemoryGateway) -> int:
    cache = own.gateway.response_cache
    assert cache is not None
    return sum(len(execution._readers) for execution in [*cache._executions.values()])


@pytest.mark.parametrize("path", BODIES)
async def test_a_repeat_gets_the_same_bytes_without_the_worker(own, computing, path):
    first, second = await post(own, BODIES[path], path), await post(own, BODIES[path], path)
    assert (first.headers[HEADER], second.headers[HEADER]) == ("miss", "hit")
    assert first.status_code == second.status_code == 200 and len(computing.requests) == 1
    assert first.content == second.content and first.headers["content-type"] == second.headers["content-type"]
    assert second.headers["age"] == "0" and "x-seamark-worker" not in second.headers
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        {**chat(), "temperature": None},
        {**chat(), "temperature": 0.5},
        {**chat(), "temperature": False},
        {**chat(), "temperature": None, "seed": None},
        {**chat(), "temperature": 1, "seed": -1},  # which vLLM takes for none
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]),
    ],
)
async def test_what_may_come_out_otherwise_is_computed_each_time(own, computing, body):
    assert await results(own, body, body) == ["bypass", "bypass"] and len(computing.requests) == 2


async def test_a_seed_makes_a_request_deterministic(own):
    body = {**chat(), "temperature": 0.7, "seed": 0}
    assert await results(own, body, body) == ["miss", "hit"]


async def test_the_client_or_the_operator_has_to_allow_it(in_memory, computing):
    own = await in_memory(computing, response_cache=ROOM)
    silent = [(await own.post(chat())).headers[HEADER] for _ in range(2)]
    assert silent == ["bypass", "bypass"] and len(computing.requests) == 2
    own = await in_memory(computing, response_cache=ROOM, response_cache_models="other, m")
    assert [(await own.post(chat())).headers[HEADER] for _ in range(2)] == ["miss", "hit"]
    own = await in_memory(computing, response_cache=ROOM, response_cache_models="other")
    assert (await own.post(chat())).headers[HEADER] == "bypass"


async def test_cache_control_is_honoured(own, computing):
    body = chat()
    assert await results(own, body, body, cache_control="no-store") == ["bypass", "bypass"]
    assert await results(own, body, body) == ["miss", "hit"]
    assert await results(own, body, cache_control="no-store") == ["bypass"]
    assert await results(own, body, cache_control="max-age=600") == ["hit"]
    before = len(computing.requests)
    computing.computed = Computed(words=9)  # a new answer would be another
    fresh = await post(own, body, cache_control="no-cache")
    assert fresh.headers[HEADER] == "miss" and len(computing.requests) == before + 1
    assert (await post(own, body)).content == fresh.content  # and stands in place of the old one
    assert await results(own, body, cache_control="max-age=x") == ["miss"]


@pytest.mark.parametrize(
    "more", [(b"cache-control", b"no-store"), (b"vary", b"user-agent"), (b"vary", b"*"), (b"set-cookie", b"a=b")]
)
async def test_an_answer_that_must_not_be_shared_is_not_stored(own, computing, more):
    computing.more_headers = [more]
    assert await results(own, chat(), chat()) == ["miss", "miss"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_client_leaves_and_the_others_get_the_whole_answer(own, computing, stream):
    event = computing.pause if stream else computing.hold
    event.set()
    first = own.opened(chat(stream=stream), **ALLOW)
    await until(lambda: readers(own) == 1)
    (other,) = asking(own, 1, stream=stream)
    await until(lambda: readers(own) == 2)
    first.leave()
    await until(lambda: readers(own) == 1)
    event.clear()
    answer = await other
    assert answer.status_code == 200 and answer.headers[HEADER] == "joined" and len(computing.requests) == 1
    assert not computing.gone.is_set()
    assert (await post(own, chat(stream=stream))).content == answer.content and len(computing.requests) == 1
    assert own.gateway.pool.workers[0].inflight == 0


async def test_a_first_client_that_was_cut_off_ends_nothing_when_it_leaves(in_memory, computing, monkeypatch):
    monkeypatch.setattr(response_cache, "PATIENCE_SECONDS", 0.0)
    computing.computed = Computed(words=4000)
    computing.pause_after = 3900
    computing.pause.set()
    own = await in_memory(computing, response_cache=2**18)
    first = own.opened(chat(stream=True), **ALLOW)
    await first.message()  # and nothing more
    other = own.opened(chat(stream=True), **ALLOW)
    await other.message()
    body, pieces = b"", other.body()
    while b" 3890" not in body:
        body += await anext(pieces)
    first.leave()
    await asyncio.sleep(0)
    computing.pause.clear()
    body += b"".join([piece async for piece in pieces])
    assert body.count(b"data: ") == 4000 + 2 and body.endswith(b"[DONE]\n\n") and len(computing.requests) == 1


async def test_an_execution_ends_when_nobody_reads_it_any_more(own, computing):
    computing.hold.set()
    asked = [own.opened(chat(), **ALLOW) for _ in range(3)]
    await until(lambda: readers(own) == 3)
    for each in asked:
        each.leave()
    await until(computing.gone.is_set)
    await until(lambda: own.gateway.pool.workers[0].inflight == 0)
    computing.hold.clear()
    assert own.metric("seamark_response_cache_bytes") == 0
    assert await results(own, chat()) == ["miss"]


async def test_a_stream_that_breaks_off_is_nobodys_whole_answer(own, computing):
    computing.pause.set()
    computing.cut_after = 1
    asked = asking(own, 4, stream=True)
    await until(lambda: readers(own) == 4)
    computing.pause.clear()
    answers = await asyncio.gather(*asked)
    assert len({answer.content for answer in answers}) == 1
    assert b"worker_failed" in answers[0].content
    computing.cut_after = None
    assert await results(own, chat(stream=True)) == ["miss"]


async def test_a_failure_before_the_first_byte_is_everyones(own, computing):
    computing.pause.set()
    computing.cut_after = 1
    asked = asking(own, 3)
    await until(lambda: readers(own) == 3)
    computing.pause.clear()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {502}


def odd(*events: Any) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    "events",
    [
        odd({"finish_reason": "stop"}),
        odd({"choices": [{"finish_reason": "stop"}]}),
        odd({"choices": [{"index": {}, "finish_reason": "stop"}]}),
        odd({"choices": 7, "finish_reason": "stop"}),
        [b'data: {"finish_reason": "stop"\n\n'],
    ],
)
async def test_an_odd_stream_is_passed_on_and_leaves_nothing_behind(own, computing, caplog, events):
    class Odd(Computed):
        def events(self, body: Any) -> list[bytes]:
            return events

    computing.computed = Odd()
    asked = [await post(own, chat(stream=True)), *await asyncio.gather(*asking(own, 3, stream=True))]
    assert {answer.content for answer in asked} == {b"".join(events)}
    assert await results(own, chat(stream=True)) == ["miss"]
    assert own.metric("seamark_response_cache_bytes") == own.metric("seamark_response_cache_entries") == 0
    assert not caplog.records


@pytest.mark.parametrize(
    "answer", [{"choices": [None]}, {"choices": {"0": 1}}, {"choices": [{"finish_reason": []}]}, [7]]
)
async def test_an_odd_whole_answer_is_passed_on_and_leaves_nothing_behind(own, computing, caplog, answer):
    computing._whole = lambda *_: json.dumps(answer).encode()
    asked = [await post(own, chat()), *await asyncio.gather(*asking(own, 3))]
    assert {each.content for each in asked} == {json.dumps(answer).encode()}
    assert await results(own, chat()) == ["miss"]
    assert own.metric("seamark_response_cache_bytes") == own.metric("seamark_response_cache_entries") == 0
    assert not caplog.records


def with_keys(folder: Path, *names: str, **fields: Any) -> dict[str, Path]:
    """Settings with a file of such keys, which all have these fields."""
    path = folder / "keys.toml"
    path.write_text("".join(entry(name, **fields) for name in names))
    return {"api_keys": path}


async def test_those_who_ask_for_the_same_are_bound_by_the_limits_of_their_key(in_memory, computing, tmp_path):
    own = await in_memory(computing, response_cache=ROOM, **with_keys(tmp_path, "ann", max_inflight=1, max_queued=2))
    computing.hold.set()
    asked = [asyncio.create_task(post(own, chat(), **bearer("ann"))) for _ in range(300)]
    await until(lambda: sum(task.done() for task in asked) == 297)
    ann = own.gateway.keys.named("ann")
    assert (ann.under_way, ann.queued, readers(own)) == (1, 2, 1)
    computing.hold.clear()
    answers = await asyncio.gather(*asked)
    assert Counter(each.status_code for each in answers) == {429: 297, 200: 3} and len(computing.requests) == 1
    assert [each.headers.get(HEADER) for each in answers if each.status_code == 200].count("miss") == 1
    assert (ann.under_way, ann.queued) == (0, 0)


async def test_who_leaves_while_it_waits_for_what_others_want_too_takes_nothing_along(in_memory, computing):
    own = await in_memory(computing, response_cache=ROOM, max_inflight=1)
    computing.hold.set()
    busy = own.opened(chat("long"), **ALLOW)
    await until(lambda: own.gateway.pool.workers[0].inflight == 1)
    leaving = own.opened(chat(), **ALLOW)
    await until(lambda: len(own.gateway.queue) == 1)
    asked = asking(own, 5)
    await until(lambda: len(own.gateway.queue) == 6)
    computing.hold.clear()
    busy.leave()
    leaving.leave()
    answers = await asyncio.gather(*asked)
    assert {each.status_code for each in answers} == {200} and len({each.content for each in answers}) == 1
    await until(lambda: own.gateway.pool.workers[0].inflight == 0)
    await until(lambda: own.metric("seamark_response_cache_bytes") > 0 and readers(own) == 0)


async def test_a_restart_voids_what_the_worker_answered(own, computing):
    assert await results(own, chat(), chat()) == ["miss", "hit"]
    computing.boot = "1.8e+09"
    await until(lambda: own.gateway.pool.workers[0].boot.endswith("1.8e+09"))
    assert await results(own, chat(), chat()) == ["miss", "hit"]


async def test_a_doubted_cache_or_an_emptied_one_voids_it(own, computing):
    assert await results(own, chat(), chat()) == ["miss", "hit"]
    own.gateway.shelf.tell(own.gateway.pool.workers[0], Change.DISTRUSTED)
    assert await results(own, chat(), chat()) == ["miss", "hit"]
    computing.engine.clear()  # as who has put other weights into the engine has to

    async def is_void() -> bool:
        return await results(own, chat()) == ["miss"]

    await until(is_void)


@pytest.mark.parametrize("name", ["ada", "nobody lists it yet"])
@pytest.mark.parametrize("models", [(), ("*",)])
async def test_what_may_be_an_adapter_is_computed_each_time(in_memory, name, models):
    """Its weights may be replaced at the worker between any two requests."""
    computing = RecordingWorker(computed=Computed(), adapters={"ada": "/a"})
    own = await in_memory(computing, response_cache=ROOM, response_cache_models=models)
    assert await results(own, chat(model=name), chat(model=name)) == ["bypass", "bypass"]
    assert len(computing.requests) == 2
    assert await results(own, chat(), chat()) == ["miss", "hit"]
    load = {"lora_name": "ada", "lora_path": "/x", "load_inplace": True}
    await own.post(load, "/v1/load_lora_adapter")
    assert await results(own, chat()) == ["hit"]  # its base model is what it was


async def test_shadow_mode_leaves_requests_and_answers_as_they_are(in_memory, computing):
    own = await in_memory(computing, shadow=True, response_cache=ROOM)
    body = b'{ "model": "m",  "messages": [], "temperature": 0, "stream": true }'
    asked = [await own.post(body, **ALLOW) for _ in range(2)]
    assert [answer.headers[HEADER] for answer in asked] == ["miss", "hit"]
    assert [request.body for request in computing.requests] == [body]
    assert asked[0].content == asked[1].content


async def test_the_bound_is_held_whatever_comes(in_memory, computing):
    room = 100_000
    own = await in_memory(computing, response_cache=room)
    seen = []
    for number in range(300):
        await post(own, chat(str(number)))
        assert own.gateway.response_cache is not None
        seen.append(own.gateway.response_cache.answers.size)
    assert max(seen) <= room and max(seen) > room / 2
    assert own.metric("seamark_response_cache_evictions_total") > 100
    assert await results(own, chat("299"), chat("0")) == ["hit", "miss"]  # what was not asked for the longest has gone
