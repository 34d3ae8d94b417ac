"""Which of a worker's hits are whose, where answers do not say what was cached."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.chat import Chat
from proxy.chat.reader import chat_request
from proxy.fleet.worker import Worker
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.observability.explanations import Explanation, Record
from proxy.observability.request_diff import RequestMemory
from proxy.observability.rolling_sums import Totals
from proxy.observability.shadow import AnsweredRequest, ReadPrompt, Shadow
from proxy.settings import Settings
from tests.harness.probed import probed

CHAT = chat_request({"model": "m", "messages": [{"role": "user", "content": "Tide?"}]})

FOUND = Found((Boundary("system", b"s", "first:1", tokens=320),), (b"s",))


class Scene:
    """A worker without the plugin, whose answers to prompts of 400 tokens with one head do not say what was cached."""

    def __init__(self) -> None:
        self.worker = Worker("http://w", None, probed=replace(probed("w#1", None, "m", hits=0), hits_before=0))
        self.shadow = Shadow(Settings(), self.find, RequestMemory(0), Metrics(), IdleWork(), lambda: ["w#1"])

    async def find(self, chat: Chat, worker: Worker, size: int, memory: int, owner: str | None) -> ReadPrompt:
        return ReadPrompt(FOUND)

    async def judge(self, *hits_then: int) -> list[int]:
        """For each request, what it lost for want of the plugin; the worker has counted so many hits at its probe."""
        lost = []
        for hits in hits_then:
            self.answered(hits)
            lost.append(await self.loss())
        return lost

    def answered(self, hits: int, cached: int | None = None) -> None:
        at = time.perf_counter()
        before = self.worker.probed.hits_before
        self.worker.probed = replace(probed("w#1", None, "m", hits=hits), at=at + 1, hits_before=before)
        answer = AnsweredRequest(CHAT, self.worker, "w#1", "m", 100, 100, 400, cached, None, False, None, None, at)
        self.shadow.add(answer)

    async def loss(self) -> int:
        """What the requests that wait lost together."""
        before = self.shadow.would_save()["tokens"]
        running = asyncio.create_task(self.shadow.run())
        async with asyncio.timeout(30):
            while self.shadow.held:
                await asyncio.sleep(0)
        running.cancel()
        return self.shadow.would_save()["tokens"] - before


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_what_a_request_can_have_hit_of_the_workers_new_hits_is_its_own(scene):
    assert await scene.judge(0, 0, 160, 480) == [0, 320, 160, 0]


async def test_hits_of_nobody_known_are_no_later_requests(scene):
    """Several samples of one prompt hit each, clients leave, and some ask the worker directly."""
    assert await scene.judge(0, 1000) == [0, 0]
    assert await scene.judge(1000, 1160, 1160) == [320, 160, 320]


async def test_hits_of_before_the_gateway_came_are_no_requests(scene):
    scene.worker.probed, scene.worker.inflight = replace(scene.worker.probed, hits_before=5000), 1
    assert await scene.judge(5000, 5000, 5320) == [0, 320, 0]


async def test_hits_may_be_those_of_requests_that_wait(scene):
    await scene.judge(0)
    for _ in range(2):
        scene.answered(640)
    assert await scene.loss() == 0
    scene.answered(640)
    assert await scene.loss() == 320


async def test_hits_may_be_those_of_requests_that_are_at_the_worker(scene):
    await scene.judge(0)
    scene.worker.inflight = 1
    assert await scene.judge(640, 640) == [0, 0]
    scene.worker.inflight = 0
    assert await scene.judge(640) == [320]


async def test_hits_that_an_answer_reports_are_its_own(scene):
    await scene.judge(0)
    scene.answered(320, cached=320)
    assert await scene.loss() == 0
    assert await scene.judge(320) == [320]


async def test_what_was_lost_is_told_beside_what_was_computed_in_seconds_once_the_cost_is_known(scene):
    """Prompts of 400 tokens and more, a millisecond each, with a tenth of a second for whatever they hold."""

    def answer(prompt: int) -> Record:
        record, at = Record(lambda _: Explanation("r", "/v1/chat/completions")), time.perf_counter()
        seconds = 0.1 + 0.001 * prompt
        scene.shadow.add(
            AnsweredRequest(CHAT, scene.worker, "w#1", "m", 1, 1, prompt, 0, seconds, True, None, record, at)
        )
        return record

    records = []
    for prompt in (400, 500):
        records.append(answer(prompt))
        await scene.loss()
    first, second = (record.explanation for record in records)
    told = scene.shadow.would_save()
    assert told == {"tokens": 320, "seconds": 0.0, "computed_tokens": 900, "prefill_seconds": 0.0}
    assert (first.prompt, first.delivered, first.lost) == (400, 0, {})
    assert (second.prompt, second.delivered, second.lost) == (500, 0, {"unpatched": 320})
    assert scene.shadow.sums.since_start() == Totals(2, 900, 320, 0, 0)
    for prompt in range(600, 1200, 100):
        answer(prompt)
    await scene.loss()
    told = scene.shadow.would_save()
    assert (told["tokens"], told["computed_tokens"]) == (7 * 320, 6000)
    assert told["seconds"] == pytest.approx(2.24) and told["prefill_seconds"] == pytest.approx(6.8)


async def test_a_request_that_cannot_be_judged_is_counted_and_the_next_one_is_judged(caplog):
    scene, failing = Scene(), [True]

    async def once(*given):
        if failing and failing.pop():
            raise RuntimeError("planned")
        return ReadPrompt(FOUND)

    scene.shadow = Shadow(Settings(), once, RequestMemory(0), Metrics(), IdleWork(), lambda: ["w#1"])
    await scene.judge(0, 0)
    counted = scene.shadow.status()["requests"]
    assert counted.get("failed") == 1 and sum(counted.values()) == 2
    assert "planned" not in caplog.text
