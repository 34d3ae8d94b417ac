"""Which of a worker's hits are whose, where answers do not say what was cached."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.chat import Chat
from proxy.chat.reader import chat_request
from proxy.fleet.part import Change
from proxy.fleet.worker import Worker
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.observability import shadow as shadow_module
from proxy.observability.explanations import Explanation, Record
from proxy.observability.request_diff import RequestMemory
from proxy.observability.rolling_sums import Totals
from proxy.observability.shadow import MAX_WAITING, AnsweredRequest, FindBoundaries, ReadPrompt, Shadow
from proxy.settings import Settings
from tests.harness.probed import probed
from tests.harness.virtual_time import on_virtual_time

CHAT = chat_request({"model": "m", "messages": [{"role": "user", "content": "Tide?"}]})

FOUND = Found((Boundary("system", b"s", "first:1", tokens=320),), (b"s",))


class Scene:
    """A worker without the plugin, whose answers to prompts of 400 tokens with one head do not say what was cached."""

    def __init__(self) -> None:
        self.worker = Worker("http://w", None, probed=replace(probed("w#1", None, "m", hits=0), hits_before=0))
        self.metrics = Metrics()
        self.boots = ["w#1"]
        self.answers = 0
        self.clock = 1000.0  # of `time`
        self.time = SimpleNamespace(perf_counter=lambda: self.clock, monotonic=lambda: self.clock)
        self.shadow = self.made(self.find)

    def made(self, find: FindBoundaries) -> Shadow:
        return Shadow(Settings(), find, RequestMemory(0), self.metrics, IdleWork(), lambda: self.boots)

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

    scene.shadow = scene.made(once)
    await scene.judge(0, 0)
    counted = scene.shadow.status()["requests"]
    assert counted.get("failed") == 1 and sum(counted.values()) == 2
    assert "planned" not in caplog.text


def asked(scene: Scene, **fields: Any) -> AnsweredRequest:
    """A request of 400 tokens, of which the answer says that none was cached; it has just been answered."""
    given = dict(
        chat=CHAT, worker=scene.worker, boot="w#1", model="m", size=100, memory=100, prompt=400, cached=0,
        seconds=None, alone=False, owner=None, record=None, at=time.perf_counter(),
    )  # fmt: skip
    return AnsweredRequest(**{**given, **fields})


def metric(scene: Scene, name: str, **labels: str) -> float | None:
    return scene.metrics.registry.get_sample_value(f"seamark_shadow_{name}", labels)


async def test_what_is_no_chat_is_not_judged_and_its_hits_are_its_own(scene):
    await scene.judge(0)
    scene.shadow.add(asked(scene, chat=None, cached=320))
    scene.shadow.add(asked(scene, chat=None, cached=None))
    assert (scene.shadow.held, scene.shadow.status()["requests"]) == (0, {"judged": 1})
    assert await scene.judge(320) == [320]  # the hits were those of the other one


@pytest.mark.parametrize("missing", ["prompt", "cached", "seconds"])
async def test_an_answer_that_lacks_one_of_its_figures_teaches_nothing_of_the_cost(scene, missing):
    for _ in range(200):
        scene.shadow.add(asked(scene, **{"seconds": 1.0, "alone": True, "cached": 0, missing: None}))
    await scene.judge(*[0] * 200)
    assert scene.shadow.would_save()["seconds"] == 0.0


async def test_where_nobody_says_what_was_cached_a_request_goes_unjudged(scene):
    scene.worker.probed = probed("w#1", None, "m")
    scene.shadow.add(asked(scene, cached=None))
    assert (scene.shadow.status()["requests"], scene.shadow.held) == ({"no_usage": 1}, 0)
    assert metric(scene, "requests_total", result="no_usage") == 1
    scene.shadow.add(asked(scene, cached=0))
    assert scene.shadow.held == 100


async def test_requests_wait_within_bounds_of_memory_and_number_and_those_beyond_are_counted(scene):
    room = Settings().text_bytes // 8
    scene.shadow.add(asked(scene, memory=room - 100))
    scene.shadow.add(asked(scene, memory=100))
    assert (scene.shadow.held, scene.shadow.status()["waiting"]) == (room, 2)
    scene.shadow.add(asked(scene, memory=1))
    assert (scene.shadow.held, scene.shadow.status()["requests"]) == (room, {"no_room": 1})
    await scene.loss()
    assert (scene.shadow.held, scene.shadow.judged) == (0, 2)
    for _ in range(MAX_WAITING + 2):
        scene.shadow.add(asked(scene, memory=1))
    assert (scene.shadow.held, scene.shadow.status()["waiting"]) == (MAX_WAITING, MAX_WAITING)
    assert scene.shadow.status()["requests"]["no_room"] == 3


@pytest.mark.parametrize("failure", ["RenderFailed", "no_boundary"])
async def test_a_prompt_whose_boundaries_are_not_found_is_counted_by_the_reason(failure):
    scene = Scene()

    async def fails(*given: Any) -> ReadPrompt:
        return ReadPrompt(Found((), failure=failure))

    scene.shadow = scene.made(fails)
    scene.shadow.add(asked(scene))
    await scene.loss()
    assert scene.shadow.status()["requests"] == {failure: 1} and scene.shadow.would_save()["computed_tokens"] == 0


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
            scene.shadow.add(asked(scene, cached=None, at=began))
            before = scene.shadow.status()["requests"].get(result, 0)
            await asyncio.sleep(after or patience)
            assert scene.shadow.status()["requests"].get(result, 0) == before
            if after is not None:
                scene.worker.probed = replace(scene.worker.probed, at=began + 0.1)
            await asyncio.sleep(1.0)
            assert scene.shadow.status()["requests"][result] == before + 1 and not scene.shadow.held
        running.cancel()


@pytest.mark.parametrize("known", [{"boot": "w#2"}, {"hits": None}])
async def test_hits_of_another_boot_or_of_a_worker_that_counts_none_any_more_are_nobodys(scene, known):
    scene.shadow.add(asked(scene, cached=None))
    later = {"boot": "w#1", "hits": 0, **known}
    scene.worker.probed = replace(probed(later["boot"], None, "m", hits=later["hits"]), at=time.perf_counter())
    await scene.loss()
    assert scene.shadow.status()["requests"] == {"no_usage": 1} and scene.shadow.status()["cached_not_told"] == 0


def with_text(*texts: str) -> Found:
    """Boundaries of prompts that begin with the same texts, 160 tokens each, and end in a turn of their own."""
    keys = tuple("".join(texts[: number + 1]).encode() for number in range(len(texts)))
    boundaries = tuple(
        Boundary("explicit", key, 160 * (number + 1), 160 * (number + 1)) for number, key in enumerate(keys)
    )
    return Found(boundaries, keys)


async def losses(scene: Scene, *requests: tuple[Found, dict[str, Any]]) -> list[dict[str, int]]:
    """What each lost, by reason."""
    told: list[dict[str, int]] = []
    for found, fields in requests:
        record = Record(lambda _: Explanation("r", "/v1/chat/completions"))

        async def find(*given: Any, found: Found = found) -> ReadPrompt:
            return ReadPrompt(found)

        scene.shadow._find_boundaries = find
        scene.shadow.add(asked(scene, record=record, **fields))
        await scene.loss()
        assert record.explanation.lost is not None
        told.append(record.explanation.lost)
    return told


async def test_what_a_worker_lost_before_its_cost_was_known_goes_with_it():
    scene = Scene()
    await losses(scene, (with_text("a"), {}), (with_text("a"), {}))
    other = Worker("http://v", None, probed=probed("v#1", None, "m"))
    await losses(
        scene, (with_text("b"), {"worker": other, "boot": "v#1"}), (with_text("b"), {"worker": other, "boot": "v#1"})
    )
    assert scene.shadow.status()["tokens_without_seconds"] == 320
    for change in (Change.CLEARED, Change.GIVEN):
        scene.shadow.on_worker(scene.worker, change)
    assert scene.shadow.status()["tokens_without_seconds"] == 320
    scene.shadow.on_worker(scene.worker, Change.REMOVED)
    assert scene.shadow.status()["tokens_without_seconds"] == 160
    scene.shadow.on_worker(other, Change.REMOVED)
    assert scene.shadow.status()["tokens_without_seconds"] == 0
    for number in range(6):
        prompt = 400 + 100 * number
        scene.shadow.add(asked(scene, prompt=prompt, seconds=0.1 + 0.001 * prompt, alone=True))
    await scene.loss()
    told = scene.shadow.status()["plugin_would_save"]
    computed = sum(0.1 + 0.001 * (400 + 100 * number) for number in range(6))
    assert told["prefill_seconds"] == pytest.approx(computed), "of requests since it is there again alone"
    assert list(scene.shadow.status()["learnt"]) == ["w"]
