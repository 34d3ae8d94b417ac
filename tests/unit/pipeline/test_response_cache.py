"""The response cache as its clients see it: they ask, read, stop reading and leave in any order, whatever workers do.

A slot is there for everyone. What shows at one moment alone has a row below the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from proxy.fleet.worker import Slot
from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.pipeline import response_cache
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.response_cache import PATIENCE_SECONDS, ResponseCache, weight_of
from proxy.pipeline.sse import HEARTBEAT
from proxy.settings import Settings
from tests.harness.sharing_clients import END, Client, Run, a_worker, head, part, turns
from tests.harness.virtual_time import VirtualTimeLoop

ROOM = 2**20  # bytes of the cache
LARGEST = ROOM // response_cache.LARGEST_SHARE


class Sharing(RuleBasedStateMachine):
    """Clients of two prompts before one worker."""

    def __init__(self, loop: Any = None) -> None:
        super().__init__()
        self.loop, self.patch, self.metrics = loop or VirtualTimeLoop(), pytest.MonkeyPatch(), Metrics()
        ticks = itertools.count()  # a clock never stands
        clock = SimpleNamespace(monotonic=lambda: self.loop.time() + next(ticks) * 1e-7)
        self.patch.setattr(response_cache, "time", clock, raising=False)
        self.worker, self.all = a_worker(), list[Client]()
        self.runs: list[Run] = []
        self.stored: dict[str, set[bytes]] = {}  # what may be, by prompt
        self.is_tight = False  # whether so much is under way that not all of it may be kept
        self.filled = self.waiting = 0
        pool = SimpleNamespace(up=[self.worker], workers=[self.worker])
        settings = Settings(response_cache=ROOM, response_cache_models=("*",), heartbeat=0)
        self.cache = ResponseCache(settings, self.metrics, pool, self, self.answers)  # type: ignore[arg-type]

    async def acquire(self, request: Exchange) -> None:
        await asyncio.sleep(0)
        request.give(self.worker)
        request.slot = Slot(self.worker, 0)

    def release(self, request: Exchange) -> None:
        if request.slot is not None:
            request.slot.give_back()
            request.slot = None

    unused = release

    @contextlib.contextmanager
    def counted(self, key: Any) -> Any:
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def answers(self, request: Exchange) -> None:
        owner = next(each for each in self.all if each.request is request)
        owner.run = run = Run(len(self.runs), owner)
        run.is_open = not self.open(owner.key)
        self.runs.append(run)
        try:
            while not run.ends or not run.orders.empty():
                order = await run.orders.get()
                if isinstance(order, Exception):
                    raise order
                await request.send(order)
        finally:
            run.ends, run.is_open = run.ends or "left", False

    def settle(self, seconds: float = 0.0) -> None:
        """Let all happen that can without time passing, after so many seconds."""

        async def until_still() -> None:
            await asyncio.sleep(seconds)
            await turns(60)

        self.loop.run_until_complete(until_still())

        for run in self.runs:
            if run.ends == "whole" and run.is_kept and run.owner.ended:
                self.stored.setdefault(run.owner.key, set()).add(run.to_keep)

    def going(self) -> list[Run]:
        return [run for run in self.runs if not run.ends]

    def open(self, key: str) -> list[Run]:
        return [run for run in self.runs if run.owner.key == key and run.is_open]

    def ask(self, key: str, reads: bool = True) -> Client:
        client = Client(key)
        self.all.append(client)
        if not reads:
            client.stops_reading()

        async def until_it_leaves() -> None:
            with contextlib.suppress(asgi.ClientGone), client.watch:
                await self.cache(client.request)

        client.task = self.loop.create_task(until_it_leaves())
        return client

    @rule(key=st.sampled_from("aaab"), reading=st.sampled_from([[True], [True, True], [True, False], [False, True]]))
    def ask_alike(self, key: str, reading: list[bool]) -> None:
        for reads in reading:
            before, stored, is_under_way = len(self.runs), self.stored.get(key), bool(self.open(key))
            client = self.ask(key, reads)
            self.settle()
            if self.is_tight:
                continue
            assert len(self.runs) - before == (stored is None and not is_under_way)
            if stored is not None:
                client.reads.set()
                self.settle()
                assert client.body in stored and client.ended and client.head[b"age"].isdigit()

    @precondition(lambda self: any(each.is_reading for each in self.all))
    @rule(data=st.data(), what=st.sampled_from(["stops", "goes on", "leaves"]))
    def one_client(self, data: Any, what: str) -> None:
        client = data.draw(st.sampled_from([each for each in self.all if each.is_reading]))
        if what == "stops":
            client.stops_reading()
        elif what == "goes on":
            client.reads.set()
        else:
            client.leaves()
        self.settle(1.0)
        assert what != "leaves" or client.run is None or client.run.ends, "nobody reads: the engine is free"

    @precondition(going)
    @rule(
        data=st.data(),
        sizes=st.lists(st.sampled_from([0, 1000, 60_000]), min_size=1, max_size=5),
        ends=st.sampled_from(["", "", "", "whole", "whole", "cut", "failed", "raises"]),
    )
    def says(self, data: Any, sizes: list[int], ends: str) -> None:
        """Of size 0: a comment, so that nobody takes the stream for dead."""
        run = data.draw(st.sampled_from(self.going()))
        pieces = []
        for size in sizes:
            mark = b": %d of %s\n\n" % (run.number, run.owner.key.encode())
            pieces.append(mark * (size // len(mark)) or HEARTBEAT)
        if ends == "raises":
            error = WorkerFailed("gone") if run.head else Overloaded("no")
            run.ends, run.is_open = ends, False
            run.orders.put_nowait(error)
            self.settle(1.0)
            return
        if not run.head:
            run.head = True
            run.orders.put_nowait(head())
        pieces += [END] if ends in ("whole", "failed") else [b""] if ends else []
        for piece in pieces:
            run.answer += piece
            run.to_keep += piece if piece != HEARTBEAT else b""
            run.weight += weight_of(piece) if piece not in (HEARTBEAT, b"") else 0
            run.orders.put_nowait(part(piece, more=piece is not pieces[-1] or not ends))
        self.is_tight = self.is_tight or sum(each.weight for each in self.runs) > ROOM // 2
        fits = run.weight <= LARGEST and not (self.filled and run.weight)
        run.is_kept = run.is_kept and fits
        if ends == "failed":
            run.owner.request.reply.failed(502)
        run.ends = ends
        was_open = run.is_open
        # An answer that outgrew its share, or whose client does not read, is waited for no longer.
        run.is_open = run.is_open and fits and run.owner.reads.is_set() and not ends
        self.settle(1.0)
        waits = [each for each in self.all if each.key == run.owner.key and each.run is None and each.is_reading]
        if was_open and ends == "whole" and run.is_kept and run.owner.ended:
            assert not any(each.reads.is_set() for each in waits), "who waited has the same"

    @initialize(is_full=st.sampled_from([False, False, False, True]))
    def others_fill_it(self, is_full: bool) -> None:
        if is_full and self.cache.answers.take(None, ROOM):
            self.filled = ROOM

    @precondition(lambda self: len(self.runs) < 9)
    @rule(restarts=st.booleans())
    def the_workers_answers_are_doubted(self, restarts: bool) -> None:
        if restarts:
            self.worker.learn(Probed(boot=self.worker.boot + "1", models=self.worker.probed.models))
        else:
            self.cache.on_worker(self.worker, Change.CLEARED)
        self.stored.clear()
        for run in self.runs:  # who waits for one goes on waiting, unless that is known to be in vain
            run.is_kept, run.is_open = False, run.is_open and restarts
        self.settle()

    @invariant()
    def nobody_gets_anything_else(self) -> None:
        for client in self.all:
            if not client.head:
                continue
            result, own = client.head[b"x-seamark-cache"], client.request.head.request_id.encode()
            assert (result == b"miss") == (client.run is not None)
            assert (b"x-theirs" in client.head) == (result == b"miss")
            assert (client.head.get(b"x-request-id") == own) == (b"x-seamark-reason" not in client.head)
            assert (client.head.get(b"x-request-id") == own) == (result != b"miss")
            if client.run is not None:
                assert client.run.answer.startswith(client.body)
            else:
                of = [run.to_keep for run in self.runs if run.owner.key == client.key and run.ends == "whole"]
                assert any(each.startswith(client.body) for each in of)

    @invariant()
    def nobody_waits_for_nothing_and_all_is_counted(self) -> None:
        going = {run.owner.key for run in self.going()}
        for client in self.all:
            if client.is_reading and client.reads.is_set() and client.run is None:
                assert client.key in going
        assert self.worker.inflight == sum(each.run is not None and not each.task.done() for each in self.all)
        assert 0 <= self.cache.answers.size <= ROOM

    def teardown(self) -> None:
        try:
            for client in self.all:
                client.reads.set()
            while going := self.going():
                for run in going:
                    run.ends = "cut"
                    for order in ([] if run.head else [head()]) + [part(b"", more=False)]:
                        run.orders.put_nowait(order)
                self.settle()
            self.settle(1.0)
            for client in self.all:
                assert client.task.done(), "nobody is left waiting"
                if not client.task.cancelled() and (error := client.task.exception()) is not None:
                    assert isinstance(error, GatewayError)
            assert self.worker.inflight == self.waiting == 0 and not self.cache.flights
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
        ("meanwhile", Change.REFUSED, True),
        ("behind it", Change.DISTRUSTED, False),
    ],
)
async def test_the_second_request_hits_unless_the_answer_was_called_into_doubt(scene, when, what, hits):
    def happens(now: str) -> None:
        if now == when and what == "restarts":
            scene.worker.learn(Probed(boot="2", models=scene.worker.probed.models))
        elif now == when and what == "moves":
            scene.all[0].request.give(a_worker())
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


@pytest.mark.parametrize("reads", [False, True])
async def test_who_waits_for_a_client_that_does_not_read_or_as_a_stream_for_long_asks_for_its_own_answer(scene, reads):
    scene.cache._patience = PATIENCE_SECONDS if reads else None
    first, other = scene.ask("a", reads=reads), scene.ask("a")
    await turns()
    assert len(scene.runs) == 1 and scene.waiting == 1
    scene.runs[0].orders.put_nowait(head())
    await asyncio.sleep(3 * PATIENCE_SECONDS)
    assert [run.owner for run in scene.runs] == [first, other] and not scene.waiting
    for client in (first, other):
        client.leaves()
