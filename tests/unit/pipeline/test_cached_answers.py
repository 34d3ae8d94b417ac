"""Exact repeats: which may be answered again, what is stored within which bounds, and what their clients get."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from proxy.chat.reader import EMBEDDINGS
from proxy.fleet.part import Change
from proxy.fleet.probe import Probed
from proxy.http.auth import ApiKey, KeyEntry
from proxy.metrics import Metrics
from proxy.pipeline import cacheable, response_cache
from proxy.pipeline.cacheable import LARGEST_JUDGED, digest
from proxy.pipeline.exchange import Exchange, exchange_of
from proxy.pipeline.response_cache import STALE_SECONDS, TIMES_WHAT_IS_FREE, Entry, ResponseCache, Source, StoredAnswers
from proxy.routing.engine_events import EngineEvents
from proxy.settings import Settings
from tests.harness.api_keys import bearer, entry
from tests.harness.fake_engine import Computed
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.sharing_clients import a_worker
from tests.harness.waiting import until

ROOM = 2**22  # bytes

HEADER = "x-seamark-cache"


@pytest.fixture
def computing() -> RecordingWorker:
    return RecordingWorker(computed=Computed(), adapters={"ada": "/a"})


@pytest.fixture
async def own(in_memory, computing) -> InMemoryGateway:
    return await in_memory(computing, response_cache=ROOM)


def chat(question: str = "Tide?", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": question}], "temperature": 0, **fields}


async def post(own: InMemoryGateway, body: dict[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    return await own.post(body, path, **{HEADER: "allow", **headers})


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
    assert second.headers["age"] == "0" and not {"x-seamark-worker", "x-twice"} & second.headers.keys()
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
async def test_the_client_or_the_operator_has_to_allow_it(in_memory, computing, settings, headers, found, caplog):
    own = await in_memory(computing, response_cache=ROOM, **settings)
    assert await results(own, chat(), chat(), **headers) == found
    assert ("response_cache_models: no worker lists other now" in caplog.messages) == bool(settings)
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
async def test_an_answer_that_is_not_final_or_may_not_be_shared_is_its_own_clients_and_is_not_stored(
    own, computing, state, stream
):
    for name, value in state.items():
        setattr(computing, name, value)
    computing.hold.set()
    (worker,) = own.gateway.pool.workers
    asked = [asyncio.create_task(post(own, chat(stream=stream))) for _ in range(3)]
    await until(lambda: computing.requests and len(own.gateway.response_cache.flights) == worker.inflight == 1)
    computing.hold.clear()
    answers = await asyncio.gather(*asked)
    assert len({answer.status_code for answer in answers}) == 1 and len(computing.requests) == 3
    assert own.metric("seamark_response_cache_bytes") == own.metric("seamark_response_cache_entries") == 0


def with_keys(path: Path, **fields: Any) -> dict[str, Any]:
    (path / "keys").write_text("".join(entry(name, **more) for name, more in fields.items()))
    (path / "secret").write_text("salt secret\n")  # one for several gateways
    return {"api_keys": path / "keys", "salt_secret_file": path / "secret"}


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
    assert {each.status_code for each in answers} == {429} and len(own.gateway.queue.waiting) == 0
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

    (events,) = [part for part in own.gateway.shelf._parts if isinstance(part, EngineEvents)]

    async def is_void() -> bool:
        return await results(own, chat()) == ["miss"]

    for happens in (
        lambda: setattr(computing, "boot", "1.8e+09"),
        lambda: own.gateway.shelf.tell(worker, Change.DISTRUSTED),
        lambda: computing.engine.clear(),  # as who has put other weights into the engine has to
        lambda: (events._feeds[worker.url].reader.cancel(), computing.engine.clear()),  # while a read has failed
    ):
        assert "hit" in await results(own, chat(), chat())
        happens()
        await until(is_void)


@pytest.mark.parametrize("name", ["ada", "nobody lists it yet"])
async def test_what_may_be_an_adapter_is_computed_each_time(in_memory, computing, name):
    """Its weights may be replaced at the worker between any two requests."""
    own = await in_memory(computing, response_cache=ROOM, response_cache_models="*")
    assert await results(own, chat(model=name), chat(model=name)) == ["bypass", "bypass"]
    assert await results(own, chat(), chat()) == ["miss", "hit"]


def asked(body: Any, path: str = CHAT, headers=(), of: ApiKey | None = None, query: bytes = b"") -> Exchange:
    scope = {"method": "POST", "path": path, "query_string": query, "headers": list(headers)}
    request = exchange_of(scope, json.dumps(body).encode(), "id", of)
    request.take(json.loads(request.body.raw), asks_usage=True)
    return request


GREEDY = {"model": "m", "temperature": 0}

SECRET = b"secret"


@pytest.mark.parametrize(
    ("body", "path", "repeatable"),
    [
        (GREEDY, CHAT, True),
        ({**GREEDY, "tools": [{"type": "function"}]}, RESPONSES, True),
        ({**GREEDY, "tools": [{"type": "web_search"}]}, CHAT, True),
        ({"input": "x"}, EMBEDDINGS, True),
        ({**GREEDY, "messages": [{"content": [{"image_url": {"url": "data:image/png;base64,AA"}}]}]}, CHAT, True),
        ({**GREEDY, "messages": [{"content": 'see "url": "http://a"'}]}, CHAT, True),
        ({}, EMBEDDINGS, False),
        ({"temperature": False}, CHAT, False),
        ({"seed": 3.0}, CHAT, False),
        ({"seed": True}, CHAT, False),
        ({"seed": 3}, MESSAGES, False),
        ({"seed": 3, "use_beam_search": "true"}, CHAT, False),
        ({"input": "x", "temperature": 0}, "/v1/audio/speech", False),
        ({**GREEDY, "previous_response_id": "resp_1"}, RESPONSES, False),
        ({**GREEDY, "background": True}, RESPONSES, False),
        ({**GREEDY, "tools": [{"type": "web_search"}]}, RESPONSES, False),
        ({**GREEDY, "input": [{"content": [{"type": "input_image", "image_url": "https://a/b"}]}]}, RESPONSES, False),
        ({**GREEDY, "messages": [{"content": [{"source": {"type": "url", "url": "https://a"}}]}]}, MESSAGES, False),
    ],
)
def test_a_request_is_repeatable_if_it_cannot_come_out_otherwise(body, path, repeatable):
    plain, escaped = asked(body, path), asked(body, path)
    escaped.body.raw = plain.body.raw.replace(b'url"', b'u\\u0072l"')
    assert cacheable.is_repeatable(plain) is cacheable.is_repeatable(escaped) is repeatable


def test_requests_are_told_apart_by_all_that_answers_depend_on():
    salts = {"ann": "a", "bob": "team", "cleo": "team"}
    ann, bob, cleo = (ApiKey(name, KeyEntry(sha256="0" * 64), salt) for name, salt in salts.items())
    stream = {**GREEDY, "stream": True}
    apart = [b"accept", b"authorization", b"origin", b"cookie", b"accept-encoding"]
    requests = [
        asked(GREEDY),
        asked({**GREEDY, "user": "x"}),
        asked(GREEDY, COMPLETIONS),
        asked(GREEDY, query=b"a=b"),
        asked(GREEDY, of=ann),
        asked(GREEDY, of=bob),
        asked(GREEDY, RESPONSES),
        asked(GREEDY, RESPONSES, of=bob),
        asked(GREEDY, RESPONSES, of=cleo),  # only the key that asked can continue a response
        *(asked(GREEDY, headers=[(name, b"ab")]) for name in apart),
        asked(GREEDY, headers=[(b"accept", b"a"), (b"accept", b"b")]),
        asked(GREEDY, headers=[(b"accept", b"acookieb")]),
        asked(GREEDY, headers=[(b"accept", b"a"), (b"cookie", b"b")]),
        asked(stream),  # the gateway asks for usage and takes it out again
        asked({**stream, "stream_options": {"include_usage": True}}),
    ]
    digests = [digest(request, SECRET) for request in requests]
    assert len(set(digests)) == len(requests)
    assert digest(asked(GREEDY, of=bob), SECRET) == digest(asked(GREEDY, of=cleo), SECRET)
    assert digest(asked(GREEDY, headers=[(b"user-agent", b"x")]), SECRET) == digests[0]
    assert digest(asked(GREEDY), b"another") != digests[0]


def test_an_answer_says_whether_it_may_be_shared():
    shared = [(b"content-type", b"a"), (b"vary", b"Origin, Accept-Encoding"), (b"cache-control", b"max-age=0")]
    own = [(b"vary", b"user-agent"), (b"set-cookie", b"a=b")]
    own += [(b"cache-control", b"max-age=9, " + word) for word in (b"private", b"no-cache", b"No-Store")]
    assert cacheable.may_keep(shared) and not any(cacheable.may_keep([*shared, each]) for each in own)


def is_final(path: str, asked: Any, is_stream: bool, body: bytes, at_once: int = 2**30) -> bool:
    ending = cacheable.Ending(path, asked, is_stream)
    for at in range(0, len(body), at_once):
        ending.see(body[at : at + at_once])
    return ending.is_final


def chose(reason: str | None, *more: str) -> dict[str, Any]:
    return {"choices": [{"index": index, "finish_reason": each} for index, each in enumerate([reason, *more])]}


def sse(*data: Any, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in data) + end


@pytest.mark.parametrize(
    ("path", "body", "answer", "final"),
    [
        (CHAT, {}, chose("abort"), False),
        (CHAT, {"n": 2}, chose("stop"), False),
        (CHAT, {"n": 2}, chose("stop", "length"), True),
        (COMPLETIONS, {"prompt": ["a", "b"]}, chose("stop"), False),
        (MESSAGES, {}, {"stop_reason": "tool_use"}, True),
        (MESSAGES, {}, {"stop_reason": None}, False),
        (RESPONSES, {}, {"status": "completed"}, True),
        (RESPONSES, {}, {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, True),
        (RESPONSES, {}, {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, False),
        (EMBEDDINGS, {}, {"data": [{}]}, True),
        (EMBEDDINGS, {}, {"error": {}}, False),
    ],
)
def test_a_whole_answer_is_final_if_each_choice_ended_by_itself(path, body, answer, final):
    raw = json.dumps(answer).encode()
    assert is_final(path, body, False, raw) is is_final(path, body, False, raw, 7) is final


STOP = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}


@pytest.mark.parametrize(
    ("path", "body", "stream", "final"),
    [
        (CHAT, {}, sse(chose(None), chose("stop")), True),
        (CHAT, {}, sse(chose(None), chose("stop"), end=b""), False),
        (CHAT, {}, sse(chose("stop"), {"error": {"message": "no"}}), False),
        (MESSAGES, {}, sse(STOP, {"type": "message_stop"}, end=b""), True),
        (MESSAGES, {}, sse(STOP, end=b""), False),
        (RESPONSES, {}, sse({"type": "response.completed", "response": {"status": "completed"}}, end=b""), True),
        (RESPONSES, {}, sse({"type": "response.created", "response": {"status": "in_progress"}}, end=b""), False),
    ],
)
def test_a_stream_is_final_if_it_came_to_its_end(path, body, stream, final):
    assert is_final(path, body, True, stream) is is_final(path, body, True, stream, 7) is final


# What a worker may send in place of a whole answer or of an event; the last ones of an event alone.
ODD = [
    {"choices": [None], "finish_reason": "stop"},
    {"choices": [{"index": 0, "finish_reason": ["stop"]}]},
    {"choices": {"index": 0, "finish_reason": "stop"}},
    {"type": "message_delta", "delta": {"stop_reason": ["end_turn"]}, "response": []},
    {"stop_reason": {}, "status": [], "data": 0},
    "finish_reason",
    None,
    {"choices": [{"index": [], "finish_reason": "stop"}]},
    {"type": "message_delta", "stop_reason": "end_turn"},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS])
def test_what_an_api_does_not_say_is_no_final_answer(path):
    for data in ODD[:-2]:
        assert not is_final(path, {"n": 1}, False, json.dumps(data).encode()), data
    for data in ODD:
        for end in (b"", b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n', b"data: {\n\n"):
            assert not is_final(path, {"n": 1}, True, sse(data, end=end)), (data, end)


def test_what_is_too_long_to_be_parsed_in_a_moment_is_no_final_answer_unless_it_is_a_stream():
    answer = json.dumps({**chose("stop"), "pad": ""}).encode()
    for size, final in ((LARGEST_JUDGED, True), (LARGEST_JUDGED + 1, False)):
        assert is_final(CHAT, {}, False, answer[:-2] + b"x" * (size - len(answer)) + b'"}', 2**16) is final
    assert not is_final(CHAT, {}, True, sse({**chose("stop"), "pad": "x" * 2 * LARGEST_JUDGED}), 2**16)
    words = sse(*({**chose(None), "pad": "x" * 2**16} for _ in range(40)), chose("stop"))
    assert len(words) > 2 * LARGEST_JUDGED and is_final(CHAT, {}, True, words, 2**16)


MOST = 60_000
KEYS = st.sampled_from([b"%d" % number for number in range(12)])
OWNERS = st.sampled_from(["ann", "ann", "bob", "eve", None])


class Storing(RuleBasedStateMachine):
    """Beside the naive model: each question is answered by looking through all that is there."""

    @initialize()
    def begins(self) -> None:
        self.patch, self.now, self.number = pytest.MonkeyPatch(), 0.0, 0
        self.patch.setattr(response_cache.time, "monotonic", lambda: self.now)
        self.gone: list[bytes] = []  # in the model
        self.evicted = 0
        self.held = StoredAnswers(MOST, lambda: setattr(self, "evicted", self.evicted + 1))
        self.source = Source.of(a_worker(), "m")
        self.there: dict[bytes, Entry] = {}
        self.idle: list[bytes] = []  # the first of which nobody has asked for the longest
        self.lent: list[tuple[bytes, Entry]] = []
        self.under_way: Counter[str | None] = Counter()

    def entries(self, owner: str | None = "all") -> list[Entry]:
        found = {id(entry): entry for entry in [*self.there.values(), *(entry for _, entry in self.lent)]}
        return [entry for entry in found.values() if owner in ("all", entry.owner)]

    def holds(self, owner: str | None) -> int:
        return sum(entry.weight for entry in self.entries(owner)) + self.under_way[owner]

    def fixed(self, owner: str | None) -> int:
        return sum(entry.weight for entry in self.entries(owner) if entry.readers) + self.under_way[owner]

    def size(self) -> int:
        return sum(entry.weight for entry in self.entries()) + self.under_way.total()

    def may_fix(self, owner: str | None, size: int) -> bool:
        free = MOST - sum(entry.weight for entry in self.entries() if entry.readers) - self.under_way.total() - size
        return free >= 0 and (owner is None or self.fixed(owner) + size <= TIMES_WHAT_IS_FREE * free)

    def makes_room(self, owner: str | None, size: int) -> bool:
        while self.size() + size > MOST:
            goes = self.idle[0] if self.idle else None
            if goes is not None and self.now - self.there[goes].asked <= STALE_SECONDS:
                most = max((self.there[key].owner for key in self.idle), key=self.holds)
                of = most if self.holds(most) >= self.holds(owner) + size else owner
                goes = next((key for key in self.idle if self.there[key].owner == of), None)
            if goes is None:
                return False
            self.idle.remove(goes)
            self.gone.append(goes)
            del self.there[goes]
        return True

    def removes(self, key: bytes) -> None:
        if self.there.pop(key, None) is not None and key in self.idle:
            self.idle.remove(key)

    @rule(key=KEYS, owner=OWNERS, size=st.sampled_from([500, 3000, 8000, 13_000, 14_000]))
    def add(self, key: bytes, owner: str | None, size: int) -> None:
        self.number += 1  # no two weigh the same
        entry = Entry([], (b"x" * (size + self.number),), self.source, owner)
        self.removes(key)
        fits = entry.weight <= MOST // 4 and self.makes_room(owner, entry.weight)
        if fits:
            self.there[key] = entry
            self.idle.append(key)
        assert self.held.add(key, entry) is fits

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.there)))
        entry = self.there[key]
        may = bool(entry.readers) or self.may_fix(entry.owner, entry.weight)
        assert self.held.lend(key, entry) is may
        if may:
            self.lent.append((key, entry))
            self.idle = [each for each in self.idle if each != key]

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def returned(self, data: st.DataObject) -> None:
        key, entry = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        self.held.returned(key, entry)
        if not entry.readers and self.there.get(key) is entry:
            self.idle.append(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        self.removes(key)
        self.held.remove(key)

    @rule(owner=OWNERS, size=st.sampled_from([700, 9000]))
    def take(self, owner: str | None, size: int) -> None:
        may = self.may_fix(owner, size) and self.makes_room(owner, size)
        assert self.held.take(owner, size) is may
        self.under_way[owner] += size * may

    @rule(owner=OWNERS)
    def give_back(self, owner: str | None) -> None:
        self.held.hold(owner, -self.under_way.pop(owner, 0))

    @rule(seconds=st.sampled_from([1.0, STALE_SECONDS, STALE_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        if self.number:
            assert {key: entry for number in range(12) if (entry := self.held.get(key := b"%d" % number))} == self.there
            assert self.held.size == self.size() <= MOST and self.evicted == len(self.gone)

    def teardown(self) -> None:
        for owner in ("ann", "bob", "eve", None):
            self.give_back(owner)
        for key, lent in self.lent:
            self.held.returned(key, lent)
        self.held.remove_all(None)
        self.patch.undo()
        assert self.held.size == 0 and len(self.held) == 0


TestStoring = Storing.TestCase
TestStoring.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize(
    ("name", "value", "stands"),
    [
        ("learn", Probed(boot="1", models=[{"id": "m", "created": 2}]), True),  # vLLM says now each time
        ("learn", Probed(boot="2", models=[{"id": "m"}]), False),
        ("learn", Probed(boot="1", models=[{"id": "m", "root": 7}]), False),
        ("renderer_ids", {"m": b"another"}, False),
        ("up", False, False),
    ],
)
@pytest.mark.parametrize(("age", "most"), [(10.0, None), (10.0, 10.0), (10.5, 10.0)])
def test_an_entry_stands_as_long_as_its_worker_and_for_whom_it_is_young_enough(
    monkeypatch, name, value, stands, age, most
):
    cache, worker = ResponseCache(Settings(response_cache=2**20), Metrics(), *[None] * 3), a_worker()
    worker.renderer_ids = {"m": b"template"}
    cache.answers.add(b"k", stored := Entry([], (b"x",), Source.of(worker, "m")))
    monkeypatch.setattr(response_cache.time, "monotonic", lambda: stored.stored + age)
    worker.learn(value) if name == "learn" else setattr(worker, name, value)
    assert (cache.find(b"k", "m", most) is not None) is (stands and age == 10.0)
    assert (cache.answers.size > 0) is stands
