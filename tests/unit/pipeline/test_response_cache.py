"""The response cache as its clients see it: they ask, read, stop reading and leave in any order, whatever workers do.

Entry is `CachedAnswers`; a slot is there for everyone. What shows only in a figure, or at one moment, has a row or a
test below the machine.
"""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.errors import GatewayError, Overloaded, WorkerFailed
from proxy.fleet.part import Change
from proxy.fleet.probe import Probed
from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.pipeline import response_cache, stored_answers
from proxy.pipeline.cached_answers import CachedAnswers
from proxy.pipeline.dispatch import Lease
from proxy.pipeline.request import Choice, ProxiedRequest
from proxy.pipeline.response_cache import SLACK_BYTES, ResponseCache
from proxy.pipeline.sse import HEARTBEAT
from proxy.pipeline.stored_answers import PIECE_BYTES, weight_of
from tests.harness.sharing_clients import END, Client, Run, a_worker, head, part, turns
from tests.harness.virtual_time import VirtualTimeLoop

ROOM = 2**20  # bytes of the cache
LARGEST = ROOM // stored_answers.LARGEST_SHARE


class Sharing(RuleBasedStateMachine):
    """Clients of two prompts before one worker."""

    def __init__(self, loop: Any = None) -> None:
        super().__init__()
        self.loop, self.patch, self.metrics = loop or VirtualTimeLoop(), pytest.MonkeyPatch(), Metrics()
        ticks = itertools.count()  # a clock never stands
        clock = SimpleNamespace(monotonic=lambda: self.loop.time() + next(ticks) * 1e-7)
        for module in (response_cache, stored_answers):
            self.patch.setattr(module, "time", clock)
        self.patch.setattr(Lease, "release", lambda _: setattr(self, "leases", self.leases - 1))
        self.worker, self.cache = a_worker(), ResponseCache(ROOM, self.metrics)
        self.all: list[Client] = []
        self.runs: list[Run] = []
        self.stored: dict[str, bytes] = {}
        self.filled = self.leases = 0
        self.slots = asyncio.Event()
        self.slots.set()
        pool = SimpleNamespace(up=[self.worker], workers=[self.worker])
        self.cached = CachedAnswers(self.cache, ("*",), pool, self, self)  # type: ignore[arg-type]

    def lease(self, request: ProxiedRequest) -> Lease:
        return Lease(None, request)  # type: ignore[arg-type]

    async def acquire(self, lease: Lease, sharing: Any) -> Any:
        if (found := sharing.find()) is not None:
            return found
        lease.request.give(Choice(self.worker))
        sharing.taken(lease)
        self.leases += 1
        await self.slots.wait()
        return lease

    def joins(self, request: ProxiedRequest) -> Any:
        client = next(each for each in self.all if each.request is request)
        return lambda: setattr(client, "left_key", client.left_key + 1)

    async def answer(self, lease: Lease, send: Any, watch: asgi.ClientWatch) -> None:
        owner = next(each for each in self.all if each.request is lease.request)
        run = Run(len(self.runs), owner)
        self.runs.append(run)
        try:
            while not run.ends or not run.orders.empty():
                if (order := await run.orders.get()) is None:
                    return
                if isinstance(order, Exception):
                    raise type(order)(*order.args)  # a new one, which this frame does not hold
                await send(order)
                run.accepted += len(order.get("body", b""))
            await send(part(HEARTBEAT))  # which had to wait until the end was out
        except asyncio.CancelledError:
            run.cancelled += 1
            if not watch.gone and run.head:
                await turns(8)
                await send(part(b"stopping", more=False))
            raise

    def settle(self, seconds: float = 0.0) -> None:
        """Let all happen that can without time passing, after so many seconds."""

        async def until_still() -> None:
            await asyncio.sleep(seconds)
            before, still = None, 0
            while still < 40:
                now = sum(run.accepted for run in self.runs), sum(len(each.body) + each.ended for each in self.all)
                still, before = (still + 1, now) if now == before else (0, now)
                await asyncio.sleep(0)

        self.loop.run_until_complete(until_still())

    def going(self) -> list[Run]:
        return [run for run in self.runs if not run.ends]

    def readers(self, run: Run) -> list[Client]:
        return [each for each in self.all if each.run is run and each.is_reading]

    def ask(self, key: str, reads: bool = True, may_leave: bool = True) -> Client:
        client = Client(key)
        self.all.append(client)
        if not reads:
            client.stops_reading()

        answered = self.cached(client.request, client.request.reply, client.watch)

        async def until_it_leaves() -> None:
            async with client.watch:
                await answered

        client.task = self.loop.create_task(until_it_leaves() if may_leave else answered)
        return client

    @rule(key=st.sampled_from("aaab"), reading=st.sampled_from([[True], [True, True], [True, False], [False, True]]))
    def ask_alike(self, key: str, reading: list[bool]) -> None:
        for reads in reading:
            self.asks(key, reads)

    def asks(self, key: str, reads: bool) -> Client:
        before, stored = len(self.runs), self.stored.get(key)
        run = next((run for run in self.runs if run.owner.key == key and run.is_open), None)
        client = self.ask(key, reads)
        client.result = "hit" if stored is not None else "joined" if run is not None else "miss"
        self.settle()
        assert len(self.runs) - before == (client.result == "miss"), client.result
        client.run = self.runs[-1] if client.result == "miss" else run
        if client.result == "hit":
            client.reads.set()
            self.settle()
            assert client.body == stored and client.ended and client.head[b"age"].isdigit()
        return client

    @precondition(lambda self: any(each.is_reading for each in self.all))
    @rule(data=st.data(), what=st.sampled_from(["stops", "goes on", "leaves"]))
    def one_client(self, data: Any, what: str) -> None:
        client = data.draw(st.sampled_from([each for each in self.all if each.is_reading]))
        if what == "stops":
            client.stops_reading()
        elif what == "goes on":
            client.reads.set()
            self.settle()
        else:
            self.leaves(client)

    def leaves(self, client: Client) -> None:
        run, had_all = client.run, client.ended
        client.leaves()
        self.settle()
        if run is not None and not run.ends and not had_all and not self.readers(run):
            run.is_open, run.ends = False, "left"
            assert run.cancelled == 1, "nobody reads: the engine is free"

    @precondition(going)
    @rule(
        data=st.data(),
        sizes=st.lists(st.sampled_from([0, 1000, 70_000, 200_000]), min_size=1, max_size=3),
        seconds=st.sampled_from([0.0, 5.0]),
        meanwhile=st.sampled_from(["", "", "", "", "", "doubted", "restarts", "stops"]),
    )
    def says(self, data: Any, sizes: list[int], seconds: float, meanwhile: str) -> None:
        """Of size 0: a comment, so that nobody takes the stream for dead."""
        run = data.draw(st.sampled_from(self.going()))
        self._begin(run)
        for size in sizes:
            mark = b": %d of %s\n\n" % (run.number, run.owner.key.encode())
            run.to_keep += mark * (size // len(mark))
            self._order(run, mark * (size // len(mark)) or HEARTBEAT)
        self.settle(seconds)
        reading = [each for each in self.readers(run) if each.reads.is_set()]
        if seconds and reading:
            assert all(each.body == run.answer for each in reading), "who reads is held up by nobody"
            assert run.accepted == len(run.answer)
        if meanwhile == "stops":
            self.the_server_stops()
        elif meanwhile and len(self.going()) < 3:
            self.the_workers_answers_are_doubted(meanwhile == "restarts")

    def _begin(self, run: Run) -> None:
        if not run.head:
            run.head = True
            run.orders.put_nowait(head())

    def _order(self, run: Run, body: bytes, more: bool = True) -> None:
        run.answer += body
        run.orders.put_nowait(part(body, more))
        for at in range(0, len(body), PIECE_BYTES):  # what may be stored is counted, and bounded
            run.weight += weight_of(body[at : at + PIECE_BYTES])
            if self.filled or run.weight > LARGEST:
                run.is_kept = run.is_open = False

    @precondition(going)
    @rule(data=st.data(), how=st.sampled_from(["whole", "whole", "whole", "cut", "failed", "raises", "unfinished"]))
    def ends(self, data: Any, how: str) -> None:
        run = data.draw(st.sampled_from(self.going()))
        is_whole = how in ("whole", "cut", "failed")
        readers, before = self.readers(run), len(self.runs)
        others = [each for each in readers if each is not run.owner]
        if how == "failed":
            run.owner.request.reply.failed(502)
        if is_whole:
            self._begin(run)
            run.to_keep += END if how != "cut" else b""
            self._order(run, END if how != "cut" else b"", more=False)
        else:
            error = WorkerFailed("gone") if run.head else Overloaded("no")
            run.orders.put_nowait(error if how == "raises" else None)
        run.ends, may_be_stored = how, run.is_open
        run.is_open = False
        self.settle(5.0)
        if how == "whole":
            run.owner.request.reply.failed(499)  # its client leaves behind the end, which is no one else's failure
        if how == "whole" and may_be_stored:
            self.stored[run.owner.key] = run.to_keep
        if how == "raises" and not run.head and others:  # their first client's limit is not theirs
            assert len(self.runs) == before + 1 and all(each.is_reading for each in others)
            for each in others:
                each.run, each.result = self.runs[-1], "joined"
            self.runs[-1].owner.result = "miss"
            return
        for client in readers:
            if run.accepted == len(run.answer):  # else the worker still waits for a slow one
                assert client.left_key or client.result != "joined", "it counts at its key no longer"
            if is_whole and client.reads.is_set():
                status = 502 if how == "failed" else 499 if how == "whole" and client is run.owner else 0
                assert client.ended and client.request.status == (status or 200)
            elif client.reads.is_set():
                assert client.task.done() and not client.ended
                assert isinstance(client.task.exception(), GatewayError)
        if not any(each.key == run.owner.key for each in self.all if each.is_reading):
            self.leaves(self.asks(run.owner.key, reads=True))  # the second request

    @initialize(is_full=st.sampled_from([False, False, False, True]))
    def others_fill_it(self, is_full: bool) -> None:
        if is_full and self.cache.answers.take(None, ROOM):
            self.filled = ROOM

    def the_workers_answers_are_doubted(self, restarts: bool) -> None:
        if restarts:
            self.worker.probed = Probed(boot=self.worker.boot + "1", models=self.worker.probed.models)
        else:
            self.cache.on_worker(self.worker, Change.CLEARED)
        self.stored.clear()
        for run in self.runs:
            run.is_open = False

    def the_server_stops(self) -> None:
        reading, going = [each for each in self.all if each.is_reading], self.going()
        for each in reading:
            each.task.cancel()
            self.loop.run_until_complete(turns(2))
        self.settle()
        for run in going:
            if run.accepted < len(run.answer):  # what waited for a slow client is lost
                run.answer = max((each.body for each in self.all if each.run is run), key=len)
            else:
                run.answer += b"stopping" if run.head else b""
            run.is_open, run.ends = False, "stopped"
            assert run.cancelled == 1, "a second time would cut off what it says"
        for each in reading:
            if each.reads.is_set() and each.run is not None:
                assert each.task.done() and each.body == each.run.answer, "who reads is told"

    @invariant()
    def nobody_gets_anything_else(self) -> None:
        for client in self.all:
            if client.head:
                assert client.head[b"x-seamark-cache"] == client.result.encode()
                assert (b"x-theirs" in client.head) is (client.result == "miss")  # it may be about one request alone
                has_own = client.head.get(b"x-request-id") == client.request.client.request_id.encode()
                assert has_own == (client.result != "miss") and (b"x-seamark-reason" in client.head) == (not has_own)
            if client.run is not None:
                assert client.run.answer.startswith(client.body)
            if client.always_reads and not client.watch.gone and client.task.done():
                assert client.ended or (client.run and client.run.ends in ("raises", "unfinished", "stopped"))

    @invariant()
    def what_is_held_is_bounded_and_counted(self) -> None:
        counted, kept = self.cache.answers.size - self.filled, 0
        assert 0 <= counted <= ROOM - self.filled
        for run in self.going():
            if readers := self.readers(run):
                kept += run.accepted if run.is_kept else 0
                held = run.accepted - min(len(each.body) for each in readers)
                ahead = run.accepted - max(len(each.body) for each in readers)
                assert run.is_kept or (ahead <= LARGEST + 2 * PIECE_BYTES and held <= counted + SLACK_BYTES)
        assert kept <= counted, "what may be stored is counted"

    def teardown(self) -> None:
        try:
            for run in self.going():
                self._begin(run)
                self._order(run, b"", more=False)
                run.ends = "cut"
            for client in self.all:
                client.reads.set()
            self.settle(5.0)
            for client in self.all:
                assert client.task.done(), "nobody is left waiting"
                assert client.left_key or client.result != "joined", "nor counted"
                if not client.task.cancelled():
                    client.task.exception()
            assert self.leases == 0
            value = self.metrics.registry.get_sample_value
            assert value("seamark_response_cache_bytes") == self.cache.answers.size
            assert value("seamark_response_cache_entries") == len(self.cache.answers) >= len(self.stored)
            self.cache.answers.hold(None, -self.filled)
            self.cache.void()
            assert self.cache.answers.size == 0, "all is given back"
        finally:
            self.patch.undo()
            self.loop.close()


TestSharing = Sharing.TestCase
TestSharing.settings = settings(stateful_step_count=30)


@pytest.fixture
async def scene():
    scene = Sharing(asyncio.get_running_loop())
    yield scene
    scene.patch.undo()


@pytest.mark.parametrize(
    ("when", "what", "hits"),
    [
        ("", "", True),
        *(("its head", what, False) for what in ("201", "no store")),
        *(("meanwhile", what, False) for what in ("restarts", "moves", Change.CLEARED, Change.DISTRUSTED)),
        ("meanwhile", "of another", False),  # what it was may have been of that one
        ("meanwhile", Change.GIVEN, True),
        ("behind it", Change.DISTRUSTED, False),
    ],
)
async def test_the_second_request_hits_unless_the_answer_was_called_into_doubt(scene, when, what, hits):
    def happens(now: str) -> None:
        if now == when and what == "restarts":
            scene.worker.probed = Probed(boot="2", models=scene.worker.probed.models)
        elif now == when and what == "moves":
            scene.all[0].request.give(Choice(a_worker()))
        elif now == when:
            is_other = what == "of another"
            scene.cache.on_worker(a_worker("9") if is_other else scene.worker, Change.CLEARED if is_other else what)

    scene.ask("a")
    await turns()
    (run,) = scene.runs
    for order in (head(what if when == "its head" else "plain"), part(b": x\n\n"), part(HEARTBEAT)):
        run.orders.put_nowait(order)
    await turns()
    happens("meanwhile")
    run.ends = "whole"
    run.orders.put_nowait(part(END, more=False))
    await turns()
    happens("behind it")
    second = scene.ask("a")
    await turns()
    assert (second.head.get(b"x-seamark-cache") == b"hit") is hits
    assert second.body == (b": x\n\n" + END if hits else b"")
    second.leaves()


async def test_who_joined_a_request_that_is_given_up_before_it_was_sent_asks_again(scene):
    scene.slots.clear()
    first, second = scene.ask("a"), scene.ask("a")
    await turns()
    first.leaves()
    await turns()
    scene.slots.set()
    await turns()
    (run,) = scene.runs
    assert run.owner is second and second.left_key and isinstance(first.task.exception(), asgi.ClientGone)
    second.task.cancel()


async def test_a_failure_while_an_answer_is_stored_leaves_nobody_waiting(scene, monkeypatch):
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    monkeypatch.setattr(scene.cache.answers, "add", lambda *_: 1 // 0)
    clients = [scene.ask("a", may_leave=False) for _ in range(2)]
    await turns()
    (run,) = scene.runs
    run.ends = "so"
    for order in (head(), part(END, more=False)):
        run.orders.put_nowait(order)
    await asyncio.wait([each.task for each in clients], timeout=5)
    await turns()
    assert all(each.ended and each.task.done() for each in clients) and not scene.leases and clients[1].left_key
    assert [type(each) for each in told] == [ZeroDivisionError]


async def test_that_a_client_is_too_slow_for_the_server_is_not_its_falling_behind(scene):
    async def fails(_: Any) -> None:
        raise TimeoutError("the server's own")

    client = scene.ask("a")
    client.request.reply._send = fails
    await turns()
    scene.runs[0].orders.put_nowait(head())
    with pytest.raises(TimeoutError, match="the server's own"):
        await client.task
