"""The response cache's entries and executions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.errors import KeyBusy, Overloaded
from proxy.fleet.part import Change
from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.pipeline import response_cache
from proxy.pipeline.dispatch import Lease
from proxy.pipeline.request import Choice, ProxiedRequest, request_of
from proxy.pipeline.response_cache import (
    Execution,
    Hit,
    Reader,
    ResponseCache,
    has_fixed_weights,
)
from proxy.pipeline.sse import HEARTBEATS
from proxy.pipeline.stored_answers import PIECE_BYTES, Entry, Source, weight_of

PIECE = b"x" * 1000


@pytest.fixture
def worker() -> Worker:
    made = Worker("http://a", None)  # type: ignore[arg-type]
    made.up, made.probed = True, Probed(boot="1", models=[{"id": "m", "root": "/m", "created": 1}])
    return made


def cache(most: int = 2**20) -> ResponseCache:
    return ResponseCache(most, Metrics())


def entry(worker: Worker, size: int = 100) -> Entry:
    return Entry([(b"content-type", b"application/json")], (b"x" * size,), Source.of(worker, "m"))


def request(send: asgi.Send | None = None) -> ProxiedRequest:
    scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
    made = request_of(scope, b"", "id", send=send)
    made.body.parsed = {"model": "m"}
    return made


def execution_of(held: ResponseCache, worker: Worker, first: Client | None = None) -> Execution:
    """It has its slot. Its first client is `first`; None: one that has not begun to read."""
    asked = first.request if first is not None else request()
    asked.give(Choice(worker))
    execution = Execution(held, b"k", Lease(SimpleNamespace(released=lambda: None), asked))  # type: ignore[arg-type]
    if first is not None:
        first.reader = execution.own
    return execution


class Client:
    """What one client gets."""

    def __init__(self) -> None:
        self.body, self.ended, self.largest, self.left_key = b"", False, 0, 0
        self.request = request(self._got)
        self.reads = asyncio.Event()
        self.reads.set()
        self.reader: Reader | None = None
        self.watch = asgi.ClientWatch({}, _nothing)

    async def _got(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            self.largest = max(self.largest, len(message.get("body", b"")))
            self.ended = not message.get("more_body")

    def has(self, pieces: int) -> bool:
        """Whether that is all it got."""
        return self.body == PIECE * pieces

    def joins(self, execution: Execution) -> Client:
        self.reader = execution.join(self.request, self._leaves_key)
        return self

    def _leaves_key(self) -> None:
        self.left_key += 1

    async def read(self) -> bool:
        assert self.reader is not None
        return await self.reader.deliver(self.request.reply, self.watch)


async def _nothing() -> Any:
    return {}


async def turns(count: int = 200) -> None:
    """Of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


START: Any = {"type": "http.response.start", "status": 200, "headers": []}


def piece(last: bool = False) -> Any:
    return {"type": "http.response.body", "body": PIECE, "more_body": not last}


def is_hit(held: ResponseCache) -> bool:
    hit = held.hit(b"k", request())
    if hit is not None:
        hit.close()
    return hit is not None


@pytest.mark.parametrize(
    "change",
    [
        {"probed": Probed(boot="2", models=[{"id": "m", "root": "/m"}])},
        {"up": False},
        {"probed": Probed(boot="1")},
        {"probed": Probed(boot="1", models=[{"id": "m", "root": "/another"}])},
        {"renderer_ids": {"m": b"another"}},
    ],
)
def test_an_entry_is_void_with_the_worker_that_computed_it(worker, change):
    held = cache()
    worker.renderer_ids = {"m": b"template"}
    held.answers.add(b"k", entry(worker))
    worker.probed = Probed(
        boot="1", models=[{**worker.probed.models[0], "created": 2}]
    )  # vLLM says now each time it is asked
    assert is_hit(held)
    for name, value in change.items():
        setattr(worker, name, value)
    assert not is_hit(held) and held.answers.size == 0


async def fast_and_slow(
    held: ResponseCache, worker: Worker
) -> tuple[Execution, Client, Client, list[asyncio.Task[bool]]]:
    """An execution that two clients read, the second of which takes nothing for now; and what each of them gets."""
    fast, slow = Client(), Client()
    execution = execution_of(held, worker, fast)
    slow.joins(execution)
    slow.reads.clear()
    reading = [asyncio.create_task(each.read()) for each in (fast, slow)]
    await turns(1)
    return execution, fast, slow, reading


def answering(execution: Execution, pieces: int, piece: bytes = PIECE) -> list[int]:
    """The worker answers with so many; the list grows with each that it could send."""
    sent: list[int] = []

    async def compute() -> None:
        await execution.send(START)
        for number in range(pieces):
            await execution.send({"type": "http.response.body", "body": piece, "more_body": number < pieces - 1})
            sent.append(number)

    execution.begin(asyncio.create_task(compute()))
    return sent


async def test_clients_that_read_nothing_cost_others_none_of_their_hits(worker):
    held = cache(2**20)
    stuck: list[asyncio.Task[Any]] = []
    clients = [Client() for _ in range(40)]
    executions = []
    filled = held.answers.take("others", 600_000)
    held.answers.add(b"k", entry(worker, 1000))
    for number, asked in enumerate(clients):
        asked.reads.clear()
        execution = execution_of(held, worker, asked)
        execution._is_kept = False  # as one that is too large
        stuck.append(asyncio.create_task(asked.read()))
        answering(execution, 1000)
        execution.key = b"%d" % number
        executions.append(execution)
    await turns(500)
    assert filled and sum(each._slack for each in executions) > 2**20 > held.answers.size and is_hit(held)
    assert held.answers.add(b"new", entry(worker, 1000)) and is_hit(held)
    for asked, each in zip(clients, stuck, strict=True):
        asked.watch.gone = True
        each.cancel()
    await asyncio.wait(stuck)
    await turns()
    held.answers.hold("others", -600_000)
    held.void()
    assert held.answers.size == held.answers._fixed == sum(each._slack for each in executions) == 0


async def test_a_reader_far_behind_an_answer_that_is_kept_no_longer_gets_it_all(worker, monkeypatch):
    monkeypatch.setattr(response_cache, "MOST_FORGOTTEN", 3)
    held, client = cache(2**20), Client()
    execution = execution_of(held, worker, client)
    client.reads.clear()
    reading = asyncio.create_task(client.read())
    await turns(1)
    sent = answering(execution, 1000)
    while len(sent) < 250:
        await turns(1)
    client.reads.set()
    assert await reading is True and client.has(1000) and held.answers.size == 0


async def test_an_answer_is_waited_for_only_so_long_in_all(worker, monkeypatch):
    monkeypatch.setattr(response_cache, "PATIENCE_SECONDS", 0.02)
    held = cache(2**16)
    execution, fast, _, reading = await fast_and_slow(held, worker)
    answering(execution, 1000)
    assert await reading[0] is True and fast.ended and execution._patience <= 0
    with pytest.raises(asgi.ClientGone):
        await reading[1]


async def test_a_comment_that_had_to_wait_until_the_end_was_out_is_left_out(worker):
    client = Client()
    execution = execution_of(cache(), worker, client)

    async def compute() -> None:
        await execution.send(START)
        await execution.send(piece(last=True))
        await execution.send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})

    execution.begin(asyncio.create_task(compute()))
    assert await client.read() is True and client.has(1) and client.ended


async def test_that_a_client_is_too_slow_for_the_server_is_not_its_falling_behind(worker):
    client = Client()
    execution = execution_of(cache(), worker, client)

    async def fails(_: Any) -> None:
        raise TimeoutError("the server's own")

    client.request.reply._send = fails
    answering(execution, 1)
    with pytest.raises(TimeoutError, match="the server's own"):
        await client.read()


END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

STREAM_START: Any = {**START, "headers": [(b"content-type", b"text/event-stream")]}


@pytest.mark.parametrize("reads", [True, False])
async def test_a_large_answer_is_stored_as_it_came_without_its_comments(worker, reads):
    """To join its pieces would hold up everybody."""
    held, client = cache(2**24), Client()
    execution = execution_of(held, worker, client)
    reading = asyncio.create_task(client.read())
    comment = next(iter(HEARTBEATS))

    async def compute() -> None:
        await execution.send(STREAM_START)
        for number in range(2000):
            part = comment if number in (0, 7, 1999) else b"data: {}\n\n" + b": x\n\n" * 200
            await execution.send({"type": "http.response.body", "body": part, "more_body": True})
        if not reads:
            client.reads.clear()
        await execution.send({"type": "http.response.body", "body": END})

    execution.begin(asyncio.create_task(compute()))
    await execution.ended()
    (kept,) = held.answers._entries.values()
    assert len(kept.pieces) == 1998 and comment not in kept.pieces and kept.pieces[-1] == END
    assert kept.weight == Entry(kept.headers, kept.pieces, kept.source).weight > sum(map(weight_of, kept.pieces))
    client.reads.set()
    assert await reading is True and client.body.replace(comment, b"") == b"".join(kept.pieces)


@pytest.mark.parametrize("error", [KeyBusy("no"), Overloaded("no")])
async def test_that_the_first_client_gets_no_other_slot_is_not_the_others_failure(worker, error):
    first = Client()
    execution = execution_of(cache(), worker, first)
    other = Client().joins(execution)

    async def compute() -> None:
        await asyncio.sleep(0)
        raise error

    execution.begin(asyncio.create_task(compute()))
    assert await other.read() is False
    with pytest.raises(type(error)):
        await first.read()


async def test_who_joined_a_request_that_is_given_up_before_it_was_sent_asks_again(worker):
    held = cache()
    execution = execution_of(held, worker)
    other = Client().joins(execution)
    reading = asyncio.create_task(other.read())
    await turns(1)
    await execution.ended()
    assert await reading is False and held.execution(b"k", "m") is None and other.left_key


async def test_an_execution_that_is_cancelled_before_it_runs_leaves_nobody_waiting(worker):
    client = Client()
    execution = execution_of(cache(), worker, client)

    async def compute() -> None:
        raise AssertionError

    task = asyncio.create_task(compute())
    execution.begin(task)
    task.cancel()
    with pytest.raises(Exception, match="stopping"):
        await client.read()


@pytest.mark.parametrize("most", [2**20, 100])
async def test_a_stopping_server_lets_a_stream_say_so(worker, most):
    clients = [Client(), Client()]
    execution = execution_of(cache(most), worker, clients[0])
    clients[1].joins(execution)

    async def compute() -> None:
        await execution.send(START)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await execution.send({"type": "http.response.body", "body": b"stopping"})
            raise

    execution.begin(asyncio.create_task(compute()))
    reading = [asyncio.create_task(client.read()) for client in clients]
    while not all(client.request.reply.started for client in clients):
        await asyncio.sleep(0)
    for each in reading:
        each.cancel()
    await asyncio.wait(reading)
    assert [client.body for client in clients] == [b"stopping"] * 2
    assert all(each.cancelled() for each in reading)


@pytest.mark.parametrize(
    ("model", "cards", "fixed"),
    [
        ("m", [[{"id": "m"}]], True),
        ("m", [[{"id": "m", "parent": None}], [{"id": "n"}]], True),
        ("m", [[{"id": "m"}], [{"id": "m", "parent": "base"}]], False),
        ("ada", [[{"id": "m"}, {"id": "ada", "parent": "m"}]], False),
        ("nobody's", [[{"id": "m"}]], False),
        ("m", [], False),
        ("", [[{"id": "ada", "parent": "m"}]], True),
        (None, [], True),
    ],
)
def test_an_adapter_may_be_replaced_and_a_base_model_may_not(model, cards, fixed):
    workers = [Worker(f"http://{at}", None, probed=Probed(models=each)) for at, each in enumerate(cards)]  # type: ignore[arg-type]
    assert has_fixed_weights(model, workers) is fixed


@pytest.mark.parametrize(
    ("age", "max_age", "found"), [(10.0, None, True), (10.0, 10.0, True), (10.5, 10.0, False), (0.0, 0.0, True)]
)
def test_a_client_says_how_old_an_answer_may_be(worker, monkeypatch, age, max_age, found):
    held, stored = cache(), entry(worker)
    held.answers.add(b"k", stored)
    monkeypatch.setattr(response_cache, "time", SimpleNamespace(monotonic=lambda: stored.stored + age))
    hit = held.hit(b"k", request(), max_age)
    assert (hit is not None) is found and len(held.answers) == 1  # for others it stands
    assert held.hit(b"another", request(), max_age) is None


async def delivered(hit: Hit) -> tuple[list[Any], list[bool]]:
    """What a client gets, and whether all of it has been sent each time."""
    sent, over, watch = [], [], asgi.ClientWatch({}, _nothing)

    async def send(message: Any) -> None:
        sent.append(message)
        over.append(watch.over)

    assert await hit.deliver(send, watch) is True
    return sent, over


async def test_a_stored_answer_is_sent_piece_by_piece_with_its_age_and_given_back(worker, monkeypatch):
    held, headers = cache(2**22), [(b"content-type", b"text/event-stream")]
    pieces = (b"a" * PIECE_BYTES, b"b" * (PIECE_BYTES - 1), b"c", b"d")
    stored = Entry(headers, pieces, Source.of(worker, "m"))
    held.answers.add(b"k", stored)
    monkeypatch.setattr(response_cache, "time", SimpleNamespace(monotonic=lambda: stored.stored + 7.9))
    hit = held.hit(b"k", request())
    assert stored.readers == 1
    (start, *parts), over = await delivered(hit)
    own = [(b"age", b"7"), (b"x-request-id", b"id"), (b"x-seamark-cache", b"hit")]
    assert (start["status"], start["headers"]) == (200, [*headers, *own])
    assert [each["body"] for each in parts] == [pieces[0], pieces[1] + pieces[2], pieces[3]]
    assert [each["more_body"] for each in parts] == [True, True, False] and over == [False, False, False, True]
    assert stored.readers == 0 and stored.headers == headers
    with pytest.raises(RuntimeError):
        await delivered(hit)
    hit.close()
    assert stored.readers == 0 and is_hit(held)


async def test_a_client_that_leaves_gives_a_stored_answer_back(worker):
    held, stored = cache(), entry(worker)
    held.answers.add(b"k", stored)
    hit = held.hit(b"k", request())

    async def fails(_: Any) -> None:
        raise asgi.ClientGone

    with pytest.raises(asgi.ClientGone):
        await hit.deliver(fails, asgi.ClientWatch({}, _nothing))
    assert stored.readers == 0


@pytest.mark.parametrize(
    ("change", "is_void"),
    [(Change.CLEARED, True), (Change.DISTRUSTED, True), (Change.GIVEN, False), (Change.ADAPTER, False)],
)
async def test_what_casts_doubt_on_a_workers_answers_voids_them_and_what_is_under_way(worker, change, is_void):
    held, client = cache(), Client()
    held.answers.add(b"stored", entry(worker))
    execution = execution_of(held, worker, client)
    answering(execution, 1, END)
    other = Worker("http://b", None, up=True, probed=Probed(boot="9", models=worker.probed.models))  # type: ignore[arg-type]
    held.on_worker(worker, change)
    assert (held.execution(b"k", "m") is None) is is_void and (len(held.answers) == 0) is is_void
    await client.read()
    await execution.ended()
    assert held.voided == is_void and not is_hit(held)
    held.on_worker(other, change)
    assert held.voided == 2 * is_void


JSON_START: Any = {**START, "headers": [(b"content-type", b"application/json"), (b"x-seamark-reason", b"hit")]}

ANSWER = b'{"choices":[{"index":0,"finish_reason":"stop"}]}'


@pytest.mark.parametrize(
    "but",
    [
        None,
        "status",
        "no-store",
        "not final",
        "failed",
        "voided",
        "moved",
        "restarted",
        "too large",
    ],
)
async def test_an_answer_is_stored_if_it_is_whole_and_its_worker_is_what_it_was(worker, but):
    held, client = cache(30_000), Client()
    execution = execution_of(held, worker, client)

    async def compute() -> None:
        start = {**JSON_START, "headers": [*JSON_START["headers"], (b"content-length", b"7"), (b"x-mine", b"1")]}
        if but == "no-store":
            start["headers"].append((b"cache-control", b"no-store"))
        await execution.send({**start, "status": 201 if but == "status" else 200})
        if but == "failed":
            client.request.reply.failed(502)
        if but == "voided":
            held.void("another")
        if but == "moved":
            client.request.give(Choice(Worker("http://b", None, up=True)))  # type: ignore[arg-type]
        if but == "restarted":
            worker.probed = Probed(boot="2", models=worker.probed.models)
        body = ANSWER.replace(b"stop", b"abort") if but == "not final" else ANSWER
        body += b" " * 8000 if but == "too large" else b""
        await execution.send({"type": "http.response.body", "body": body})

    execution.begin(asyncio.create_task(compute()))
    assert await client.read() is True
    await execution.ended()
    hit = held.hit(b"k", request())
    assert (hit is not None) is (but is None) and (held.answers.size > 0) is (but is None)
    if hit is not None:
        (start, body), _ = await delivered(hit)
        assert start["headers"][:3] == [
            (b"content-type", b"application/json"),
            (b"content-length", b"7"),
            (b"x-mine", b"1"),
        ]
        assert body["body"] == ANSWER and b"x-seamark-reason" not in dict(start["headers"])


async def test_who_waits_for_an_execution_and_is_ended_ends_it(worker):
    client = Client()
    execution = execution_of(cache(), worker, client)
    task = asyncio.create_task(asyncio.Event().wait())
    execution.begin(task)
    waiting = asyncio.create_task(execution.ended())
    await turns(1)
    waiting.cancel()
    await asyncio.wait((waiting, task))
    assert waiting.cancelled() and task.cancelled()
    await execution.ended()  # it is over


async def test_one_that_was_given_up_is_closed_for_its_own_client(worker):
    left: list[int] = []
    client = Client()
    execution = execution_of(cache(), worker, client)
    execution.own.leave_key = lambda: left.append(1)
    await execution.ended()
    assert left == [1]
    with pytest.raises(RuntimeError):
        await client.read()
    await execution.ended()
    assert left == [1]


async def test_a_worker_that_waits_for_a_slow_client_goes_on_when_that_leaves(worker, monkeypatch):
    monkeypatch.setattr(response_cache, "PATIENCE_SECONDS", 3600.0)
    held = cache(2**20)
    assert held.answers.take(None, 2**20 - 100)  # by others
    execution, fast, slow, reading = await fast_and_slow(held, worker)
    sent = answering(execution, 1000)
    before = -1
    while before != len(sent):
        before = len(sent)
        await turns()
    assert 0 < before < 1000
    slow.watch.gone = True
    reading[1].cancel()
    assert await reading[0] is True and fast.has(1000)


async def test_a_server_that_stops_cuts_nothing_off_of_an_answer_that_is_all_there(worker):
    client = Client()
    execution = execution_of(cache(), worker, client)
    answering(execution, 3)
    await execution.ended()
    client.reads.clear()
    reading = asyncio.create_task(client.read())
    await turns(1)
    reading.cancel()
    client.reads.set()
    await asyncio.wait((reading,))
    assert reading.cancelled() and client.has(3) and client.ended


async def test_a_server_that_stops_ends_an_execution_once(worker):
    clients, cancelled = [Client(), Client()], 0
    execution = execution_of(cache(), worker, clients[0])
    clients[1].joins(execution)
    may_end = asyncio.Event()

    async def compute() -> None:
        nonlocal cancelled
        await execution.send(START)
        while True:
            try:
                await may_end.wait()
                break
            except asyncio.CancelledError:
                cancelled += 1
        await execution.send({"type": "http.response.body", "body": b"stopping"})

    execution.begin(asyncio.create_task(compute()))
    reading = [asyncio.create_task(client.read()) for client in clients]
    while not all(client.request.reply.started for client in clients):
        await turns(1)
    for each in reading:
        each.cancel()
    await turns()
    assert cancelled == 1
    may_end.set()
    await asyncio.wait(reading)
    assert [client.body for client in clients] == [b"stopping"] * 2


def test_what_is_held_is_told_by_the_metrics(worker):
    metrics = Metrics()
    held = ResponseCache(2**20, metrics)
    held.answers.add(b"k", entry(worker))
    value = metrics.registry.get_sample_value
    assert value("seamark_response_cache_bytes") == held.answers.size > 0
    assert value("seamark_response_cache_entries") == 1
