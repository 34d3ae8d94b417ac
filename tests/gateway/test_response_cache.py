"""Exact repeats before a gateway: identical bytes, one execution, nobody else's answer, and a bound."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from proxy.fleet.part import Change
from proxy.pipeline.cacheable import EMBEDDINGS
from proxy.pipeline.handler import RequestHandler
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


@pytest.mark.parametrize("asks", [False, True])
async def test_a_stream_is_replayed_as_a_stream(own, computing, asks):
    options = {"stream_options": {"include_usage": True}} if asks else {}
    body = chat(stream=True, **options)
    first, second = await post(own, body), await post(own, body)
    assert second.headers[HEADER] == "hit" and second.headers["content-type"].startswith("text/event-stream")
    assert first.content == second.content and first.content.endswith(b"data: [DONE]\n\n")
    assert (await post(own, chat())).headers[HEADER] == "miss"  # a whole answer is another request
    assert len(computing.requests) == 2


@pytest.mark.parametrize(
    "other",
    [
        chat("Ebb?"),
        chat(seed=1),
        chat(max_tokens=3),
        {**chat(), "stream": False},
    ],
)
async def test_another_body_is_another_request(own, other):
    assert await results(own, chat(), other) == ["miss", "miss"]


@pytest.mark.parametrize("name", ["accept", "authorization", "origin", "cookie", "accept-encoding"])
async def test_a_header_that_answers_may_depend_on_tells_requests_apart(own, name):
    assert [(await post(own, chat(), **{name: value})).headers[HEADER] for value in ("a", "b", "a")] == [
        "miss",
        "miss",
        "hit",
    ]


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
@pytest.mark.parametrize(
    "state",
    [*({"computed": Computed(ending=each)} for each in ("abort", None, "error")), {"status": 500}, {"cut_after": 1}],
)
async def test_an_answer_that_is_not_final_is_not_stored(own, computing, state, stream):
    for name, value in state.items():
        setattr(computing, name, value)
    body = chat(stream=stream)
    for _ in range(2):
        with contextlib.suppress(httpx.RemoteProtocolError):
            assert (
                (await post(own, body)).headers[HEADER] != "hit" if state != {"cut_after": 1} else await post(own, body)
            )
    assert len(computing.requests) >= 2
    assert own.metric("seamark_response_cache_entries") == 0


async def test_requests_in_flight_share_one_execution(own, computing):
    computing.pause.set()
    first = own.opened(chat(stream=True), **ALLOW)
    start = await first.message()
    begun = first.body()
    head = await anext(begun)  # the first one streams already
    others = asking(own, 9, stream=True)
    await until(lambda: readers(own) == 10)
    computing.pause.clear()
    whole = head + b"".join([part async for part in begun])
    answers = await asyncio.gather(*others)
    assert len(computing.requests) == 1 and (HEADER.encode(), b"miss") in start["headers"]
    assert {answer.headers[HEADER] for answer in answers} == {"joined"}
    assert {answer.content for answer in answers} == {whole} and whole.endswith(b"data: [DONE]\n\n")
    assert own.metric("seamark_response_cache_total", result="joined") == 9
    assert await results(own, chat(stream=True)) == ["hit"]


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


async def test_a_workers_error_is_everyones_and_is_not_stored(own, computing):
    computing.hold.set()
    computing.status = 500
    asked = asking(own, 4)
    await until(lambda: readers(own) == 4)
    computing.hold.clear()
    answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {500}
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4
    computing.status = 200
    assert await results(own, chat(), chat()) == ["miss", "hit"]


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


async def test_an_answer_too_large_to_keep_is_passed_on_whole(in_memory, computing):
    computing.computed = Computed(words=4000)
    own = await in_memory(computing, response_cache=2**18)
    answer = await post(own, chat(stream=True))
    assert answer.content.count(b"data: ") == 4000 + 2 and answer.content.endswith(b"[DONE]\n\n")
    assert (await post(own, chat(stream=True))).headers[HEADER] == "miss"
    assert own.metric("seamark_response_cache_bytes") == 0


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


async def test_without_the_setting_nothing_of_it_is_there(in_memory, computing):
    own = await in_memory(computing)
    assert type(own.gateway.handler) is RequestHandler and own.gateway.response_cache is None
    answers = [await post(own, chat()) for _ in range(2)]
    assert len(computing.requests) == 2 and not any(HEADER in answer.headers for answer in answers)


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


@pytest.mark.parametrize("count", [360, pytest.param(2500, marks=pytest.mark.thorough)])
async def test_mixed_requests_get_the_bytes_of_a_gateway_without_a_cache(in_memory, computing, tmp_path: Path, count):
    """Coalesced and repeated, by three keys of two groups, whole and streamed."""
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text(entry("ann") + entry("bob", share="team") + entry("cleo", share="team"))
    secret.write_text("salt secret\n")
    files = {"api_keys": keys, "salt_secret_file": secret}
    draw = random.Random(7)
    bodies = [chat(f"Question {number}?", stream=number % 3 == 0) for number in range(count // 60)]
    groups = {"ann": "ann", "bob": "team", "cleo": "team"}
    asked = [(draw.choice(tuple(groups)), draw.randrange(len(bodies))) for _ in range(count)]
    plain: dict[tuple[str, int], bytes] = {}
    own = await in_memory(computing, **files)
    for name, group in groups.items():
        for number, body in enumerate(bodies):
            answer = await post(own, body, **bearer(name))
            assert plain.setdefault((group, number), answer.content) == answer.content
    assert len(set(plain.values())) == 2 * len(bodies)  # each group's answers name its salt
    computing.requests.clear()
    told: Counter[str] = Counter()
    own = await in_memory(computing, response_cache=2**24, **files)
    turns = asyncio.Semaphore(48)

    async def ask(name: str, number: int) -> None:
        async with turns:
            answer = await post(own, bodies[number], **bearer(name))
        told[answer.headers[HEADER]] += 1
        assert answer.content == plain[groups[name], number], (name, number)

    await asyncio.gather(*(ask(name, number) for name, number in asked))
    distinct = len({(groups[name], number) for name, number in asked})
    assert len(computing.requests) == distinct == told["miss"]
    assert told["hit"] and told["joined"] and told.total() == len(asked)
    keys.write_text(entry("ann", share="team") + entry("bob", share="team") + entry("cleo", share="team"))
    own.gateway.read_files()
    moved = await post(own, bodies[asked[0][1]], **bearer("ann"))
    assert moved.content == plain["team", asked[0][1]]  # its old answers are out of reach, the group's are not
