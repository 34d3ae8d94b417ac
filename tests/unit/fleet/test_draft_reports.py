"""What is read of the feed of an engine that drafts: its gate, its counts, and who else tries it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.fleet import draft_reports
from proxy.fleet.draft_reports import DRAFTED_SECONDS, MAX_KEPT, MOST_BYTES, PAUSE_SECONDS, DraftFeed
from proxy.fleet.worker_metrics import Accepted
from tests.harness.drafting_engine import drafting_worker
from tests.harness.virtual_time import on_virtual_time


class Worker:
    """Answers reads of its feed with what a test tells it to, the last one again and again."""

    def __init__(self, *told: Any, status: int = 200) -> None:
        self.told, self.status = list(told), status
        self.asked: list[str] = []

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        self.asked.append(url)
        told = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        return self.status, told if isinstance(told, bytes) else json.dumps(told).encode()


def events(cursor: int = 0, *outcomes: str, boot: str = "feed", **more: Any) -> dict[str, Any]:
    return {"boot": boot, "cursor": cursor, "outcomes": [[name, "hit", 0] for name in outcomes], **more}


def feed_of(worker: Worker, url: str = "") -> DraftFeed:
    known = drafting_worker()
    if url:
        known.url = url
    return DraftFeed(worker, known, "own")


async def test_one_of_several_engines_is_asked_for_by_its_rank():
    worker = Worker(events())
    await feed_of(worker, "http://w#3").read()
    (url,) = worker.asked
    assert url.startswith("http://w/seamark/outcomes?") and url.endswith("&engine=3")


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (404, events()),
        (200, {**events(), "outcomes": [5]}),
        (200, {**events(), "cursor": -1}),
        (200, events(drafts=[])),
        (200, events(drafted=[["a"]])),
        (200, b" " * (MOST_BYTES + 1)),
        (200, b'{"a":[' + b"1," * 2**15 + b"1]}"),
    ],
)
async def test_what_is_no_feed_is_an_error(status, told):
    worker = Worker(told, status=status)
    with pytest.raises(ValueError):  # noqa: PT011  # whatever the words
        await feed_of(worker).read()


async def test_counts_are_kept_within_bounds_the_oldest_forgotten_first():
    first, second = ([[f"{letter}{number}", 1, 1] for number in range(MAX_KEPT // 2)] for letter in "ab")
    feed = feed_of(Worker(events(1, drafted=first), events(2, drafted=second), events(3, drafted=[["c", 1, 1]])))
    await feed.read()
    await feed.read()
    assert len(feed.drafted) == MAX_KEPT and "a0" in feed.drafted
    await feed.read()
    assert len(feed.drafted) == MAX_KEPT and "a0" not in feed.drafted and {"a1", "b0", "c"} <= feed.drafted.keys()


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
