"""What is read of the feed of an engine that drafts: its gate, its counts, and who else tries it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from proxy.fleet import draft_reports
from proxy.fleet.draft_reports import (
    DRAFTED_SECONDS,
    MAX_KEPT,
    MOST_BYTES,
    MOST_NAME,
    NAMED,
    PAUSE_SECONDS,
    STAND_BACK_SECONDS,
    DraftFeed,
    drafted_in,
    gate_in,
    word,
)
from proxy.fleet.worker_metrics import Accepted
from tests.harness.drafting_engine import drafting_worker
from tests.harness.virtual_time import on_virtual_time


class Worker:
    """Answers reads of its feed with what a test tells it to, the last one again and again."""

    def __init__(self, *told: Any) -> None:
        self.told = list(told)
        self.status = 200
        self.asked: list[str] = []
        self.seconds: list[float | None] = []

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        self.asked.append(url)
        self.seconds.append(timeout)
        told = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        return self.status, told if isinstance(told, bytes) else json.dumps(told).encode()

    def queries(self) -> list[dict[str, str]]:
        found = [{name: each[0] for name, each in parse_qs(urlsplit(url).query, True).items()} for url in self.asked]
        self.asked.clear()
        return found


def events(cursor: int = 0, *outcomes: str, boot: str = "feed", **more: Any) -> dict[str, Any]:
    return {"boot": boot, "cursor": cursor, "outcomes": [[name, "hit", 0] for name in outcomes], **more}


def feed_of(worker: Worker, url: str = "") -> DraftFeed:
    known = drafting_worker()
    if url:
        known.url = url
    return DraftFeed(worker, known, "own")


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    found = SimpleNamespace(now=1000.0)
    times = SimpleNamespace(monotonic=lambda: found.now, perf_counter=lambda: found.now)
    monkeypatch.setattr(draft_reports, "time", times)
    return found


def test_the_gate_is_what_the_feed_names_and_none_where_it_names_none(clock):
    told = {"state": "closed", "id": "e", "why": "drafts\x1b[2J"}
    assert gate_in({"drafts": told}) == ("closed", "e", "drafts\\x1b[2J", 1000.0)
    assert gate_in({"drafts": {"state": "trial"}}) == ("trial", "", "", 1000.0)
    assert gate_in({}) is gate_in({"drafts": None}) is None


@pytest.mark.parametrize("told", [{}, {"state": 5}, {"state": "x" * 1025}, {"state": "open", "why": 1}, [], "open"])
def test_a_gate_that_makes_no_sense_is_an_error(told):
    with pytest.raises((ValueError, KeyError, TypeError)):
        gate_in({"drafts": told})


def test_drafts_of_finished_requests_are_told_by_their_ids_or_not_at_all():
    assert drafted_in({"drafted": [["a", 2, 3], ["b", 0, 0]]}) == {"a": Accepted(2, 3), "b": Accepted()}
    assert drafted_in({"drafted": []}) == {} and drafted_in({}) is None
    for nonsense in ([["a", -1, 0]], [["a", 1.5, 0]], [[1, 1, 0]], [["a", 1]], 5):
        with pytest.raises((ValueError, TypeError)):
            drafted_in({"drafted": nonsense})


def test_a_name_is_a_text_of_bounded_length():
    assert word("x" * MOST_NAME) == "x" * 1024
    for nonsense in ("x" * (MOST_NAME + 1), 5, None, ["x"]):
        with pytest.raises(ValueError, match="no name"):
            word(nonsense)


async def test_a_read_goes_on_where_the_last_one_ended():
    worker = Worker(events(7), events(9), events(2, boot="other"))
    feed = feed_of(worker)
    for _ in range(4):
        await feed.read()
    assert worker.queries() == [
        {"boot": "", "after": "0", "wait": "0"},
        {"boot": "feed", "after": "7", "wait": "0"},
        {"boot": "feed", "after": "9", "wait": "0"},
        {"boot": "other", "after": "2", "wait": "0"},
    ]
    assert worker.seconds[0] == draft_reports.READ_SECONDS


async def test_one_of_several_engines_is_asked_for_by_its_rank():
    worker = Worker(events())
    await feed_of(worker, "http://w#3").read()
    assert worker.asked[0].startswith("http://w/seamark/outcomes?") and worker.queries()[0]["engine"] == "3"


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (404, events()),
        (200, b"{"),
        (200, b"[]"),
        (200, {}),
        (200, {**events(), "outcomes": None}),
        (200, {**events(), "outcomes": [5]}),
        (200, {**events(), "cursor": -1}),
        (200, {**events(), "boot": 5}),
        (200, events(drafts=[])),
        (200, events(drafts={})),
        (200, events(drafted=[["a"]])),
        (200, b" " * (MOST_BYTES + 1)),
        (200, b'{"a":[' + b"1," * 2**15 + b"1]}"),
    ],
)
async def test_what_is_no_feed_is_an_error(status, told):
    worker = Worker(told)
    worker.status = status
    with pytest.raises(ValueError):  # noqa: PT011  # whatever the words
        await feed_of(worker).read()


async def test_a_feed_as_large_as_a_plugin_may_tell_is_read():
    padded = json.dumps(events(5)).encode()
    feed = feed_of(Worker(padded + b" " * (MOST_BYTES - len(padded))))
    await feed.read()
    assert not feed.counts


async def test_what_a_feed_says_last_of_its_gate_and_its_counts_stands():
    feed = feed_of(Worker(events(1, drafts={"state": "open"}, drafted=[["a", 1, 2]]), events(2)))
    assert (feed.gate, feed.counts, feed.drafted) == (None, False, {})
    await feed.read()
    assert feed.gate is not None and (feed.gate.state, feed.counts) == ("open", True)
    await feed.read()
    assert (feed.gate, feed.counts, feed.drafted) == (None, False, {"a": Accepted(1, 2)})


async def test_counts_are_kept_within_bounds_the_oldest_forgotten_first():
    first, second = ([[f"{letter}{number}", 1, 1] for number in range(MAX_KEPT // 2)] for letter in "ab")
    feed = feed_of(Worker(events(1, drafted=first), events(2, drafted=second), events(3, drafted=[["c", 1, 1]])))
    await feed.read()
    await feed.read()
    assert len(feed.drafted) == MAX_KEPT and "a0" in feed.drafted
    await feed.read()
    assert len(feed.drafted) == MAX_KEPT and "a0" not in feed.drafted and {"a1", "b0", "c"} <= feed.drafted.keys()


async def test_who_else_tries_an_engine_is_known_by_its_requests_since_the_first_read_for_a_while(clock):
    worker = Worker(
        events(1, f"{NAMED}before-1"),
        events(2, f"{NAMED}own-1", "own-check-1", "chatcmpl-1", f"{NAMED}owner-1"),
        events(3, f"{NAMED}another-1-2"),
        events(4),
    )
    feed = feed_of(worker)
    await feed.read()
    assert not feed.stands_back("zzz")
    await feed.read()
    assert feed.stands_back("zzz") and not feed.stands_back("own"), "of all of them, one has come from another"
    clock.now += 1
    await feed.read()
    assert feed.stands_back("b") and not feed.stands_back("another") and not feed.stands_back("a")
    clock.now += STAND_BACK_SECONDS - 1
    assert feed.stands_back("b")
    clock.now += 0.5
    assert feed.stands_back("zzz")
    clock.now += 0.5
    assert not feed.stands_back("zzz") and STAND_BACK_SECONDS == 30


@on_virtual_time
async def test_drafts_of_answered_requests_are_awaited_for_a_moment() -> None:
    def loop_time() -> float:
        return asyncio.get_running_loop().time()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(draft_reports, "time", SimpleNamespace(monotonic=loop_time, perf_counter=loop_time))
        nothing, a, b = events(1, drafted=[]), events(2, drafted=[["a", 1, 2]]), events(3, drafted=[["b", 3, 4]])
        for told, names, found, seconds in (
            ([a], ["a"], {"a": Accepted(1, 2)}, 0.0),
            ([a], [], {}, 0.0),
            ([nothing, a, nothing, b], ["b", "a"], {"a": Accepted(1, 2), "b": Accepted(3, 4)}, 3 * PAUSE_SECONDS),
            ([a, nothing], ["a", "none"], {"a": Accepted(1, 2)}, DRAFTED_SECONDS),
            ([events(1)], ["a"], {}, 0.0),  # it counts nothing
        ):
            began = loop_time()
            assert await feed_of(Worker(*told)).accepted(names) == found
            assert loop_time() - began == pytest.approx(seconds, abs=1e-6)
