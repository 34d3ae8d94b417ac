"""What an engine says of a request is asked once for all that wait, and never waited for long."""

from __future__ import annotations

import asyncio
import time

from proxy.engine_words import MAX_WORDS, TIMEOUT, EngineWords
from proxy.upstream import Broken
from proxy.workers import Worker


class Feed:
    """A worker's feed, and how often it was asked."""

    def __init__(self, *outcomes: tuple[str, str], status: int = 200, seconds: float = 0.0) -> None:
        self.body = b'{"boot": "b", "cursor": 9, "outcomes": [%b]}' % b",".join(
            b'["%b", "%b", 0]' % (name.encode(), reason.encode()) for name, reason in outcomes
        )
        self.status, self.seconds = status, seconds
        self.asked: list[str] = []

    async def fetch(self, method, url, body=b"", timeout=None):
        self.asked.append(url.partition("?")[2])
        await asyncio.sleep(self.seconds)
        if self.status == 0:
            raise Broken("planned")
        return self.status, self.body


WORKER = Worker("http://w", renderer=None)


async def test_one_question_serves_all_who_wait():
    feed = Feed(*((f"r{number}", "evicted") for number in range(20)), seconds=0.01)
    words = EngineWords(feed)
    found = await asyncio.gather(*(words.word(WORKER, f"r{number}") for number in range(20)))
    assert found == ["evicted"] * 20 and feed.asked == ["boot=&after=0"]
    await words.word(WORKER, "later")
    assert feed.asked[1:] == ["boot=b&after=9"]


async def test_a_feed_that_hangs_holds_nobody_up_for_long_and_is_then_left_alone():
    feed = Feed(seconds=60)
    words = EngineWords(feed)
    began = time.monotonic()
    assert await asyncio.gather(*(words.word(WORKER, f"r{number}") for number in range(20))) == [None] * 20
    assert await words.word(WORKER, "later") is None
    assert time.monotonic() - began < 5 * TIMEOUT and len(feed.asked) == 1


async def test_a_worker_without_a_feed_says_nothing():
    for feed in (Feed(status=404), Feed(status=0)):
        assert await EngineWords(feed).word(WORKER, "r") is None


async def test_words_that_nobody_asks_for_are_bounded():
    words = EngineWords(Feed(*((f"r{number}", "hit") for number in range(MAX_WORDS + 5))))
    assert await words.word(WORKER, "r0") is None
    assert await words.word(WORKER, f"r{MAX_WORDS}") == "hit"
