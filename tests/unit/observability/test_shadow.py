"""What prompts cost a worker, and which of its hits are whose where answers do not say."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.reader import chat_request
from proxy.fleet.worker import Worker
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.observability import shadow as shadow_module
from proxy.observability.explanations import Explanation, Record
from proxy.observability.prefill_cost import RENEWAL, CostLearner
from proxy.observability.request_diff import RequestMemory
from proxy.observability.rolling_sums import Totals
from proxy.observability.shadow import MAX_WAITING, AnsweredRequest, ReadPrompt, Shadow
from proxy.settings import Settings
from tests.harness.probed import probed
from tests.harness.virtual_time import on_virtual_time


class Scene:
    """A worker without the plugin, whose answers to prompts of 400 tokens with one head do not say what was cached."""

    def __init__(self, *finds: Found | Exception) -> None:
        self.worker = Worker("http://w", None, probed=replace(probed("w#1", None, "m", hits=0), hits_before=0))
        self.metrics = Metrics()
        self.finds = list(finds)  # in place of the head
        self.shadow = Shadow(Settings(), self._find, RequestMemory(0), self.metrics, IdleWork(), lambda: ["w#1"])

    async def _find(self, *given: Any) -> ReadPrompt:
        head = Found((Boundary("system", b"s", "first:1", tokens=320),), (b"s",))
        found = self.finds.pop(0) if self.finds else head
        if isinstance(found, Exception):
            raise found
        return ReadPrompt(found)

    def add(self, **fields: Any) -> None:
        """A request of 400 tokens, of which the answer says that none was cached; it has just been answered."""
        chat = chat_request({"model": "m", "messages": [{"role": "user", "content": "Tide?"}]})
        given = dict(
            chat=chat, worker=self.worker, boot="w#1", model="m", size=100, memory=100, prompt=400, cached=0,
            seconds=None, alone=False, owner=None, record=None, at=time.perf_counter(),
        )  # fmt: skip
        self.shadow.add(AnsweredRequest(**{**given, **fields}))

    async def judge(self, *hits_then: int) -> list[int]:
        """For each request, what it lost for want of the plugin; the worker has counted so many hits at its probe."""
        lost = []
        for hits in hits_then:
            before = self.worker.probed.hits_before
            later = time.perf_counter() + 1
            self.worker.probed = replace(probed("w#1", None, "m", hits=hits), at=later, hits_before=before)
            self.add(cached=None)
            lost.append(await self.loss())
        return lost

    async def loss(self) -> int:
        before = self.shadow.would_save()["tokens"]
        running = asyncio.create_task(self.shadow.run())
        async with asyncio.timeout(30):
            while self.shadow.held:
                await asyncio.sleep(0)
        running.cancel()
        return self.shadow.would_save()["tokens"] - before

    @property
    def counted(self) -> dict[str, int]:
        return self.shadow.status()["requests"]


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    ("hits", "lost"),
    [
        ((0, 0, 160, 480), [0, 320, 160, 0]),
        ((0, 1000, 1000, 1160, 1160), [0, 0, 320, 160, 320]),  # of nobody known: they are no later requests'
    ],
)
async def test_what_a_request_can_have_hit_of_the_workers_new_hits_is_its_own(scene, hits, lost):
    assert await scene.judge(*hits) == lost


async def test_what_was_lost_is_told_beside_what_was_computed_in_seconds_once_the_cost_is_known(scene):
    """Prompts of 400 tokens and more, a millisecond each, with a tenth of a second for whatever they hold."""

    def answer(prompt: int) -> Record:
        record = Record(lambda _: Explanation("r", "/v1/chat/completions"))
        scene.add(prompt=prompt, seconds=0.1 + 0.001 * prompt, alone=True, record=record)
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


async def test_a_request_that_cannot_be_judged_is_counted_by_the_reason_and_the_next_one_is_judged(caplog):
    scene = Scene(RuntimeError("planned"), Found((), failure="RenderFailed"), Found((), failure="no_boundary"))
    await scene.judge(0, 0, 0, 0)
    assert scene.counted == {"failed": 1, "RenderFailed": 1, "no_boundary": 1, "judged": 1}
    assert "planned" not in caplog.text and scene.shadow.would_save()["computed_tokens"] == 400


async def test_what_is_no_chat_is_not_judged_and_its_hits_are_its_own(scene):
    await scene.judge(0)
    scene.add(chat=None, cached=320)
    scene.add(chat=None, cached=None)
    assert (scene.shadow.held, scene.counted) == (0, {"judged": 1})
    assert await scene.judge(320) == [320]  # the hits were those of the other one


@pytest.mark.parametrize("missing", ["prompt", "cached", "seconds"])
async def test_an_answer_that_lacks_one_of_its_figures_teaches_nothing_of_the_cost(scene, missing):
    for _ in range(200):
        scene.add(**{"seconds": 1.0, "alone": True, "cached": 0, missing: None})
    await scene.judge(*[0] * 200)
    assert scene.shadow.would_save()["seconds"] == 0.0


async def test_requests_wait_within_bounds_of_memory_and_number_and_those_beyond_are_counted(scene):
    room = Settings().text_bytes // 8
    scene.add(memory=room - 100)
    scene.add(memory=100)
    assert (scene.shadow.held, scene.shadow.status()["waiting"]) == (room, 2)
    scene.add(memory=1)
    assert (scene.shadow.held, scene.counted) == (room, {"no_room": 1})
    await scene.loss()
    assert (scene.shadow.held, scene.shadow.judged) == (0, 2)
    for _ in range(MAX_WAITING + 2):
        scene.add(memory=1)
    assert (scene.shadow.held, scene.shadow.status()["waiting"]) == (MAX_WAITING, MAX_WAITING)
    assert scene.counted["no_room"] == 3


@on_virtual_time
async def test_a_worker_that_does_not_count_its_hits_is_waited_for_three_health_checks_long() -> None:
    scene = Scene()
    patience = 3 * Settings().health_interval
    with pytest.MonkeyPatch.context() as patched:
        loop = asyncio.get_running_loop()
        patched.setattr(shadow_module, "time", SimpleNamespace(perf_counter=loop.time, monotonic=loop.time))
        running = asyncio.create_task(scene.shadow.run())
        for after, result in ((patience - 0.5, "judged"), (None, "no_usage")):
            began = loop.time()
            scene.worker.probed = replace(scene.worker.probed, at=began)  # before it was answered
            scene.add(cached=None, at=began)
            before = scene.counted.get(result, 0)
            await asyncio.sleep(after or patience)
            assert scene.counted.get(result, 0) == before
            if after is not None:
                scene.worker.probed = replace(scene.worker.probed, at=began + 0.1)
            await asyncio.sleep(1.0)
            assert scene.counted[result] == before + 1 and not scene.shadow.held
        running.cancel()


@pytest.mark.parametrize("known", [{"boot": "w#2"}, {"hits": None}])
async def test_hits_of_another_boot_or_of_a_worker_that_counts_none_any_more_are_nobodys(scene, known):
    scene.add(cached=None)
    later = {"boot": "w#1", "hits": 0, **known}
    scene.worker.probed = replace(probed(later["boot"], None, "m", hits=later["hits"]), at=time.perf_counter())
    await scene.loss()
    assert scene.counted == {"no_usage": 1} and scene.shadow.status()["cached_not_told"] == 0


def learnt(*lengths: int, floor: float = 0.5, token: float = 0.001) -> CostLearner:
    """Prompts of so many tokens, which cost a floor and the same for each token."""
    pace = CostLearner()
    for tokens in lengths:
        pace.observe(tokens, 0, floor + token * tokens, alone=True)
    return pace


def test_a_pace_below_nothing_is_none_and_so_is_a_floor():
    assert learnt(*range(100, 1100, 100), floor=5.0, token=-0.001).model is None
    assert learnt(*range(100, 1100, 100), token=0.0).model is None
    model = learnt(*range(1000, 11000, 1000), floor=-0.5).model
    assert model is not None and (model.floor_seconds, model.token_seconds) == (0.0, pytest.approx(0.001))


def test_what_was_cached_in_full_or_took_no_time_tells_nothing():
    pace = learnt(*range(100, 600, 100))
    for _ in range(10):
        pace.observe(100, 100, 1.0, alone=True)
        pace.observe(100, 0, 0.0, alone=True)
    assert pace.model is None
    pace.observe(600, 0, 1.1, alone=True)
    assert pace.model is not None and pace.model.requests == 6


def test_requests_that_were_alone_count_before_those_among_others():
    pace = learnt(*range(100, 600, 100))
    for tokens in range(100, 1100, 100):
        pace.observe(tokens, 0, 3.0 + 0.002 * tokens, alone=False)
    assert pace.model is not None and (pace.model.alone, pace.model.requests) == (False, 15)
    pace.observe(600, 0, 1.1, alone=True)
    for _ in range(RENEWAL):
        pace.observe(1000, 0, 5.0, alone=False)
    model = pace.model
    assert (model.alone, model.requests, model.token_seconds) == (True, 6, pytest.approx(0.001))
