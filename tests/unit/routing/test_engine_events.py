"""What an engine says of a request is read once for all that wait, and never waited for long; its news are read on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest
from msgspec.structs import astuple

from proxy.boundaries.boundary import Boundary
from proxy.fleet.part import Change, Part, Shelf
from proxy.fleet.worker import Load, Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.client import Broken
from proxy.http.json_body import OverBound
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.routing import engine_events
from proxy.routing.engine_events import EngineEvents
from proxy.routing.feed_lines import MOST_BYTES, MOST_COUNT, MOST_EVENTS, MOST_NAME, MOST_POSITIONS, MOST_VALUES
from proxy.routing.prefix_index import PrefixIndex
from tests.harness.probed import probed
from tests.harness.virtual_time import on_virtual_time
from tests.harness.waiting import until


def admitted(name: str, reason: str, shared: int = 0, *positions: int) -> list[Any]:
    return ["admitted", name, reason, 0, shared, positions]


class Feed:
    """A worker's feed, and how often it was asked. `told`: what it holds."""

    def __init__(self, *hits: str, seconds: float = 0.0) -> None:
        events = [admitted(name, "hit") for name in hits]
        self.told: dict[str, Any] = {"boot": "b", "cursor": 9, "events": events, "reset": False}
        self.index, self.learnt, self.computed = PrefixIndex(10**6), dict[bytes, int](), list[Any]()  # known by it
        self.fails: Exception | None = None
        self.seconds = seconds
        self.evil: list[bytes] = []  # lines, in place of what it is told
        self.asked: list[dict[str, list[str]]] = []
        self.status, self.is_open = 200, False  # of its answer
        self.news = asyncio.Event()

    async def ask(self, method, url, body=b"", timeout=None):
        query = parse_qs(url.partition("?")[2], keep_blank_values=True)
        self.asked.append(query)
        await asyncio.sleep(self.seconds)
        if self.fails is not None:
            raise self.fails
        if query["boot"] != [""]:
            await self.news.wait()
            self.news.clear()
        self.is_open = True
        return self

    async def lines(self, most: int) -> AsyncIterator[bytes]:
        assert most == MOST_BYTES
        for line in self.evil or (json.dumps(self.told).encode(),):
            if len(line) > MOST_BYTES:
                raise OverBound("a line")
            yield line

    def close(self) -> None:
        self.is_open = False

    def tell(self, *events: Any, **more: Any) -> None:
        self.told |= {"cursor": self.told["cursor"] + 1, "events": events, "reset": False, **more}
        self.news.set()


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a feed that answers does so in time, and is read in time."""
    monkeypatch.setattr(engine_events, "PATIENCE", 30.0)
    monkeypatch.setattr(engine_events, "READ_TIMEOUT", 250.0)


WORKER = Worker("http://w", renderer=None, probed=probed("w#1", EngineInfo("0", "0", match_unit=16, block_size=384)))

SYSTEM = Boundary("system", b"s", "first:1", tokens=163)

HINT = ("first:1",)


@asynccontextmanager
async def reading(feed: Feed) -> AsyncIterator[EngineEvents]:
    told = feed.learnt.__setitem__, "", lambda *each: feed.computed.append(each)
    events = EngineEvents(feed, feed.index, IdleWork(), Shelf(Metrics()), *told)
    try:
        yield events
    finally:
        await events.aclose()


async def outcome_of(events: EngineEvents, worker: Worker, name: str) -> tuple[str, int, tuple[int, ...]] | None:
    """What the engine says of a request, once it says so: reason, shared tokens, positions."""
    told = asyncio.get_running_loop().create_future()
    events.ask(worker, name, told.set_result)
    return (said.reason, said.shared, said.positions) if (said := await told) is not None else None


@asynccontextmanager
async def following(feed: Feed, worker: Worker = WORKER) -> AsyncIterator[EngineEvents]:
    """The same while a request is at the worker: the feed was read once, and is asked for news."""
    async with reading(feed) as events:
        feed.index.record([SYSTEM], worker.boot)
        events.sent(worker, "r", [SYSTEM], HINT)
        await until(lambda: len(feed.asked) == 2)
        yield events


@on_virtual_time
async def test_a_feed_that_hangs_holds_nobody_up_for_long_and_is_then_left_alone() -> None:
    feed, clock = Feed(seconds=60), asyncio.get_running_loop().time
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_events, "PATIENCE", 2.0)
        patched.setattr(engine_events, "READ_TIMEOUT", 3.0)
        async with reading(feed) as events:
            began = clock()
            assert await asyncio.gather(*(outcome_of(events, WORKER, f"r{at}") for at in range(20))) == [None] * 20
            assert clock() - began == pytest.approx(2.0)
            assert [await outcome_of(events, WORKER, name) for name in ("later", "last")] == [None] * 2
            assert clock() - began == pytest.approx(3.0) and len(feed.asked) == 1


def told(*events: Any, **more: Any) -> bytes:
    return json.dumps({"boot": "b", "cursor": 10, "events": events, "reset": False, "load": [0, 0], **more}).encode()


async def read_of(events: EngineEvents, feed: Feed, *lines: bytes) -> Any:
    """Have the feed, which is followed, give these lines, and wait until nobody reads it any more."""
    feed.evil = list(lines)
    feed.news.set()
    reader = events._feeds[WORKER.url]
    await until(lambda: reader.reader.done())
    assert not feed.is_open
    return reader


@pytest.mark.parametrize(
    "lines",
    [
        [b"x" * (MOST_BYTES + 1)],
        [told(*[["cleared"]] * (MOST_EVENTS + 1))],
        [told(["came", "r", 1, [7] * (MOST_VALUES + 1)])],
        [told()] * (engine_events.MOST_LINES + 1),
        [b"[" * 200_000],
        [told(beside=[])[:-2] + b"[" * 200_000],
        [told(cursor=10**30)],
        [told(cursor=float("inf"))],
        [told(cursor=-1)],
        [told(cursor="1" * 5000)],
        [told(load=[float("inf"), float("nan")])],
        [told(boot="b" * (MOST_NAME + 1))],
        [told(events={"x": 1})],
        [told(drafts=["s" * (MOST_NAME + 1), ""])],
    ],
)
async def test_a_feed_beyond_all_bounds_is_not_read_and_that_is_said_once(caplog, lines):
    """What it would have said is lost, so nothing is believed of what the worker holds."""
    feed = Feed()
    async with following(feed) as events:
        feed.index.record([SYSTEM], "another")
        for name in ("s", "t"):
            reader = await read_of(events, feed, *lines)
            assert reader.cursor in (9, 10, 11) and not reader.load and WORKER.others == Load()
            assert feed.index.longest((b"s",), [WORKER.boot, "another"]).keys() == {"another"}
            assert caplog.text.count("are not read") == 1
            reader.silent_until, feed.evil = 0.0, []
            events.sent(WORKER, name, [SYSTEM], HINT)
            feed.tell(admitted(name, "hit", 16))
            assert await outcome_of(events, WORKER, name) == ("hit", 16, ())


@pytest.mark.parametrize(
    "nonsense",
    [
        7,
        ["what"],
        ["came", 7],
        ["came"],
        ["came", "r", 200, [[160, "s" * (MOST_NAME + 1)]]],
        ["came", "r", 200, [[160, "s"]] * 2**13],
        ["cleared", ["x"]],
        admitted("q", "R" * 2**16),
        admitted("x" * (MOST_NAME + 1), "hit"),
        ["admitted", "q", "cold"],
        admitted("q", "cold", 0, "x"),
        admitted("q", "cold", 0, MOST_COUNT + 1),
        admitted("q", "cold", 0, *[16] * (MOST_POSITIONS + 1)),
        ["pinned", "x", ["y"]],
    ],
)
async def test_nonsense_about_one_thing_costs_what_was_believed_and_no_word_about_others(caplog, nonsense):
    feed = Feed()
    async with following(feed) as events:
        assert feed.index.longest([SYSTEM.key], [WORKER.boot])  # nothing is wrong so far
        feed.tell(nonsense, admitted("r", "cold"))
        assert await outcome_of(events, WORKER, "r") == ("cold", 0, ())
        await until(lambda: caplog.text.count("events reported by worker w: V") == 1)
        assert not feed.index.longest([SYSTEM.key], [WORKER.boot]) and "q" not in events._feeds[WORKER.url].outcomes
        feed.tell(admitted("q", "evicted", 16, 163))  # the feed is read on
        assert await outcome_of(events, WORKER, "q") == ("evicted", 16, (163,))


async def test_words_that_nobody_asks_for_are_bounded(monkeypatch):
    monkeypatch.setattr(engine_events, "MAX_OUTCOMES", 100)
    async with reading(Feed(*(f"r{number}" for number in range(105)))) as events:
        for name in ("r104", "r103"):
            assert await outcome_of(events, WORKER, name) == ("hit", 0, ())
        (feed,) = events._feeds.values()
        assert len(feed.outcomes) == 99 and "r3" not in feed.outcomes and "r4" in feed.outcomes


CAME = ["came", "r", 200, [[160, "5c"]]]


async def test_news_correct_the_directory_without_anybody_asking():
    async with following(feed := Feed()):
        feed.tell(admitted("r", "cold", 0, 163), CAME)
        await until(lambda: feed.index.longest((b"s",), [WORKER.boot])[WORKER.boot].tokens == 160)
        assert (feed.learnt, feed.computed) == ({b"s": 163}, [("r", 200, True)])
        feed.tell(["gone", "5c"])
        await until(lambda: not feed.index.longest((b"s",), [WORKER.boot]))


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([CAME, ["cleared", "lost"], CAME, ["cleared"]], [(Change.CLEARED, "")]),
        ([CAME, ["adapter", "a"], ["adapter", "a"]], [(Change.ADAPTER, "a")]),
        ([["adapter", "a"], ["cleared"]], [(Change.ADAPTER, "a"), (Change.CLEARED, "")]),
        ([["cleared"]] + [CAME] * engine_events.STEP_EVENTS, [(Change.CLEARED, "")]),
    ],
)
async def test_what_else_becomes_of_a_cache_is_told_on_once_whatever_comes_with_it(states, told):
    feed = Feed()
    async with following(feed) as events:
        changes: list[tuple[Change, str]] = []

        class Told(Part):
            def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
                changes.append((change, model))

        events._shelf.put(Told())
        for news in (states, [["gone", "5d"]]):
            asked = len(feed.asked)
            feed.tell(*news)
            await until(lambda asked=asked: len(feed.asked) > asked)
        assert changes == told


@on_virtual_time
async def test_a_busy_feed_is_not_read_more_often_than_allowed() -> None:
    feed, clock = Feed(), asyncio.get_running_loop().time
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_events, "time", SimpleNamespace(monotonic=clock))
        async with reading(feed) as events:
            events.sent(WORKER, "r", [], ())
            for _ in range(200):
                feed.tell(["gone", "x"])
                asked = len(feed.asked)
                while len(feed.asked) == asked:
                    await asyncio.sleep(0.001)
            assert len(feed.asked) <= engine_events.READS_AT_ONCE + clock() * engine_events.READS_PER_SECOND + 2
            assert clock() > 180 / engine_events.READS_PER_SECOND
            for _ in range(4):  # and one of a worker that gets nothing is read on, since answers of it may be kept
                await asyncio.sleep(200)
                asked = len(feed.asked)
                feed.tell(["gone", "x"])
                await asyncio.sleep(1)
                assert len(feed.asked) > asked


def test_an_outcome_comes_in_the_header_of_a_whole_answer():
    outcome_in = engine_events.outcome_in
    assert astuple(outcome_in("hit,160,163,163:0:410")) == ("", "hit", 160, 163, (163, 0, 410), "")
    assert astuple(outcome_in("hit,160,163,163,pinned")) == ("", "hit", 160, 163, (163,), "pinned")
    assert not any(map(outcome_in, ("", "hit,160,163,163:x", "hit,160,163,163,not one")))


async def test_of_two_requests_with_one_name_the_later_one_is_told_of():
    async with following(feed := Feed()) as events:
        asked = [asyncio.create_task(outcome_of(events, WORKER, "q")) for _ in range(2)]
        await asyncio.sleep(0)
        feed.tell(admitted("q", "hit", 16))
        assert await asyncio.gather(*asked) == [None, ("hit", 16, ())]


async def test_a_request_that_ends_after_its_worker_was_removed_leaves_nothing():
    async with reading(Feed()) as events:
        events.sent(WORKER, "r", (SYSTEM,), HINT)
        events.on_worker(WORKER, Change.REMOVED)
        for end in (events.refused, events.left):
            end(WORKER, "r")
        events.fell_short(WORKER, (b"s",), (), 0)
        assert not events._feeds


async def test_what_other_gateways_have_at_a_worker_is_read_with_its_events():
    feed, worker = Feed(), replace(WORKER)
    async with following(feed, worker):
        assert "load" not in feed.asked[1]
        feed.tell(load=[3, 5000])
        await until(lambda: worker.others == (3, 5000))
        await until(lambda: len(feed.asked) == 3)
        assert feed.asked[2]["load"] == ["3:5000"]
        feed.fails = Broken("planned")
        feed.news.set()
        await until(lambda: worker.others == (0, 0))  # nothing is known any more


async def test_a_pin_is_not_waited_for_where_nobody_reads_or_nothing_comes(monkeypatch):
    monkeypatch.setattr(engine_events, "PIN_PATIENCE", 0.01)
    feed = Feed()
    async with reading(feed) as events:
        with events.pin_asked(WORKER, "p") as fate:
            assert await fate() == "" and not feed.asked
    async with following(feed := Feed()) as events:
        with events.pin_asked(WORKER, "p") as fate:
            assert await fate() == ""
        monkeypatch.setattr(engine_events, "PIN_PATIENCE", 1000.0)
        with events.pin_asked(WORKER, "p") as fate:
            feed.fails = Broken("planned")
            feed.news.set()
            assert await fate() == "", "the feed has ended"
        with events.pin_asked(WORKER, "q") as fate:
            feed.fails = None
            events._feeds[WORKER.url].silent_until = 0.0
            events.sent(WORKER, "q", [], ())
            feed.tell(["pinned", "p", "refused"], ["pinned", "q", "pinned"])
            assert await fate() == "pinned"


async def test_what_ends_a_read_unforeseen_is_said_by_its_kind_and_nobody_waits_for_it(caplog):
    feed = Feed()
    feed.fails = RuntimeError("planned")
    async with reading(feed) as events:
        assert await outcome_of(events, WORKER, "r") is None
        assert await outcome_of(events, WORKER, "q") is None and len(feed.asked) == 1
    assert "events of worker w: RuntimeError" in caplog.text and "planned" not in caplog.text


async def test_each_of_several_engines_is_read_by_its_rank_and_says_who_reads():
    feed, worker = Feed(), replace(WORKER, url="http://w#3")
    async with following(feed, worker) as events:
        events.sent(worker, "r", [], ())
        assert [query["engine"] for query in feed.asked] == [["3"], ["3"]]
    feed = Feed("r")
    events = EngineEvents(feed, PrefixIndex(10**6), IdleWork(), Shelf(Metrics()), _gateway_id="ab12")
    await outcome_of(events, WORKER, "r")
    await events.aclose()
    assert feed.asked[0]["gateway"] == ["ab12"] and "engine" not in feed.asked[0] and "lines" not in feed.asked[0]
