"""The store and the executions of the response cache."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest

from proxy.errors import KeyBusy, WorkerFailed
from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.pipeline.request import ProxiedRequest, request_of
from proxy.pipeline.response_cache import Entry, Execution, ResponseCache, Source

PIECE = b"x" * 1000


@pytest.fixture
def worker() -> Worker:
    made = Worker("http://a", None)  # type: ignore[arg-type]
    made.up, made.probed = True, Probed(boot="1", models=[{"id": "m", "root": "/m", "created": 1}])
    return made


def cache(most: int = 2**20) -> ResponseCache:
    return ResponseCache(most, Metrics())


def entry(worker: Worker, size: int = 100) -> Entry:
    return Entry([(b"content-type", b"application/json")], b"x" * size, Source.of(worker, "m"), 0.0)


def request(send: asgi.Send | None = None) -> ProxiedRequest:
    scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
    made = request_of(scope, b"", "id", send=send)
    made.body.parsed = {"model": "m"}
    return made


class Client:
    """What one client gets."""

    def __init__(self) -> None:
        self.body, self.ended = b"", False
        self.request = request(self._got)
        self.reads = asyncio.Event()
        self.reads.set()

    async def _got(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body")

    async def read(self, execution: Execution) -> bool:
        return await execution.deliver(self.request, b"joined", self.request.reply, asgi.ClientWatch({}, _nothing))


async def _nothing() -> Any:
    return {}


START: Any = {"type": "http.response.start", "status": 200, "headers": []}


def piece(last: bool = False) -> Any:
    return {"type": "http.response.body", "body": PIECE, "more_body": not last}


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
    held.store(b"k", entry(worker))
    worker.probed = Probed(
        boot="1", models=[{**worker.probed.models[0], "created": 2}]
    )  # vLLM says now each time it is asked
    assert held.get(b"k", "m", None) is not None
    for name, value in change.items():
        setattr(worker, name, value)
    assert held.get(b"k", "m", None) is None and held.size == 0


def test_a_template_that_was_not_known_yet_voids_nothing(worker):
    held = cache()
    held.store(b"k", entry(worker))
    worker.renderer_ids = {"m": b"template"}
    assert held.get(b"k", "m", None) is not None


def test_voiding_one_boot_leaves_the_others(worker):
    held = cache()
    held.store(b"k", entry(worker))
    held.void("another")
    assert held.get(b"k", "m", None) is not None
    held.void("1")
    assert held.get(b"k", "m", None) is None


def test_what_entries_weigh_is_no_less_than_what_they_take(worker):
    held = cache(2**30)
    made = [(str(number).encode() * 8, b"x" * (number % 700)) for number in range(5000)]
    held.store(b"warm", entry(worker))
    gc.collect()
    tracemalloc.start()
    try:
        for key, body in made:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % (1000 + len(body)))]
            held.store(bytes(bytearray(key)), Entry(headers, bytes(bytearray(body)), Source.of(worker, "m"), 0.5))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.3 * held.size < taken <= held.size


def test_the_least_recently_used_goes_first_and_what_is_too_large_is_not_stored(worker):
    held = cache(40_000)
    for name in (b"a", b"b", b"c"):
        held.store(name, entry(worker, 8000))
    assert held.get(b"a", "m", None) is not None
    assert held.take(16_000)  # for an answer under way
    assert held.get(b"b", "m", None) is None and held.get(b"a", "m", None) is not None
    assert held.size <= 40_000
    held.store(b"large", entry(worker, 10_000))
    assert held.get(b"large", "m", None) is None
    assert not held.take(40_000)


async def test_an_answer_that_outgrows_its_share_waits_for_its_slowest_client_and_is_not_kept():
    held = cache(20_000)
    execution = Execution(held, b"k", request())
    sent = 0

    async def compute() -> None:
        nonlocal sent
        await execution.send(START)
        for number in range(100):
            await execution.send(piece(last=number == 99))
            sent += 1

    fast, slow = Client(), Client()
    slow.reads.clear()
    reading = [asyncio.create_task(client.read(execution)) for client in (fast, slow)]
    await asyncio.sleep(0)
    execution.begin(asyncio.create_task(compute()))
    for _ in range(200):
        await asyncio.sleep(0)
    assert sent < 10 and held.size <= 5000  # a quarter of the bound
    assert held.execution(b"k", "m") is None
    slow.reads.set()
    assert await asyncio.gather(*reading) == [True, True]
    assert fast.body == slow.body == PIECE * 100 and fast.ended and slow.ended
    assert held.size == 0


async def test_bytes_under_way_are_given_back_when_the_last_client_has_them():
    held = cache()
    execution = Execution(held, b"k", request())

    async def compute() -> None:
        await execution.send(START)
        for number in range(10):
            await execution.send(piece(last=number == 9))

    client = Client()
    client.reads.clear()
    reading = asyncio.create_task(client.read(execution))
    await asyncio.sleep(0)
    execution.begin(asyncio.create_task(compute()))
    await execution.ended()
    assert held.size > 10 * len(PIECE)
    client.reads.set()
    await reading
    assert held.size == 0 and client.body == PIECE * 10


async def test_a_failure_of_the_first_clients_key_is_not_the_others():
    execution = Execution(cache(), b"k", request())

    async def compute() -> None:
        await asyncio.sleep(0)
        raise KeyBusy("no")

    execution.begin(asyncio.create_task(compute()))
    assert await Client().read(execution) is False
    first = Client()
    first.request = execution._request
    with pytest.raises(KeyBusy):
        await first.read(execution)


async def test_a_failure_in_the_middle_is_everyones_and_no_end():
    execution = Execution(cache(), b"k", request())

    async def compute() -> None:
        await execution.send(START)
        await execution.send(piece())
        raise WorkerFailed("gone")

    execution.begin(asyncio.create_task(compute()))
    client = Client()
    with pytest.raises(WorkerFailed):
        await client.read(execution)
    assert client.body == PIECE and not client.ended


@pytest.mark.parametrize("failure", [0, 502])
async def test_who_joined_counts_as_the_answer_ended_and_not_as_its_first_client_did(failure):
    first = request()
    execution = Execution(cache(), b"k", first)

    async def compute() -> None:
        await execution.send(START)
        if failure:
            first.reply.failed(failure)  # as for a stream that ends with an error event
        await execution.send(piece(last=True))

    client = Client()
    client.reads.clear()
    reading = asyncio.create_task(client.read(execution))
    await asyncio.sleep(0)
    execution.begin(asyncio.create_task(compute()))
    await execution.ended()
    first.reply.failed(499)  # its client has left meanwhile
    client.reads.set()
    await reading
    assert client.ended and client.request.status == (failure or 200)


async def test_an_execution_that_is_cancelled_before_it_runs_leaves_nobody_waiting():
    execution = Execution(cache(), b"k", request())

    async def compute() -> None:
        raise AssertionError

    task = asyncio.create_task(compute())
    execution.begin(task)
    task.cancel()
    client = Client()
    with pytest.raises(Exception, match="stopping"):
        await client.read(execution)


async def test_a_stopping_server_lets_a_stream_say_so():
    execution = Execution(cache(), b"k", request())

    async def compute() -> None:
        await execution.send(START)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await execution.send({"type": "http.response.body", "body": b"stopping"})
            raise

    execution.begin(asyncio.create_task(compute()))
    clients = [Client(), Client()]
    reading = [asyncio.create_task(client.read(execution)) for client in clients]
    while not all(client.request.reply.started for client in clients):
        await asyncio.sleep(0)
    for each in reading:
        each.cancel()
    await asyncio.wait(reading)
    assert [client.body for client in clients] == [b"stopping"] * 2
    assert all(each.cancelled() for each in reading)
