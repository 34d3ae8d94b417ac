"""Drafts: when a worker's are tried, told and believed, and what a trial finds."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, call

import pytest

from proxy.fleet import draft_gates, draft_reports
from proxy.fleet.answer_compare import Continuation, ContinuedToken, Noise, Unanswered
from proxy.fleet.draft_acceptance import AcceptedPair, LiveAcceptance, judge_pairs
from proxy.fleet.draft_gates import DraftGates
from proxy.fleet.draft_prompts import ANSWER, LONGEST_EDGE, built_in
from proxy.fleet.draft_reports import DRAFTED_SECONDS, MAX_KEPT, MOST_BYTES, NAMED, PAUSE_SECONDS, DraftFeed
from proxy.fleet.draft_trial import DIFFERS, DRAFTS, MOST, NO_HITS, DraftTrial, TrialVerdict
from proxy.fleet.worker_metrics import Accepted
from proxy.http.client import Broken, Unreachable
from proxy.metrics import Metrics
from tests.harness.drafting_engine import DraftingEngine, DraftingUpstream, drafting_worker
from tests.harness.virtual_time import on_virtual_time


class Scripted:
    """Trials that come to what a test says, each prompt taking no time; and the clock of gates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str = "trial", own: str = "own") -> None:
        self.engine, self.worker = DraftingEngine(state=state), drafting_worker(state=state)
        self.metrics = Metrics()
        self.now = 1000.0
        self.next: TrialVerdict | Exception | None = None  # what the next prompt comes to
        self.prompts: list[int] = []  # of each, the number of its trial
        self.obeys, numbers, scene = True, itertools.count(1), self
        self.opened = AsyncMock()  # what is called once hints are

        class Trial:
            figures, began = "figures", 0.0

            def __init__(self, upstream, worker, feed, own, noise, timeout) -> None:
                self.number, self._feed = next(numbers), feed

            async def step(self, clients, *, beside) -> TrialVerdict | None:
                scene.prompts.append(self.number)
                scene.now += 1.0
                if isinstance(scene.next, Exception):
                    raise scene.next
                return scene.next

            async def send(self, verdict) -> bool:
                if scene.obeys:
                    scene.engine.state = verdict.state
                await self._feed.read()
                return scene.obeys

        monkeypatch.setattr(draft_gates, "DraftTrial", Trial)
        monkeypatch.setattr(draft_gates, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.gates = DraftGates(DraftingUpstream(self.engine), self.metrics.self_checks, 10.0, self.opened, own)

    async def step(self, come: TrialVerdict | Exception | None = None) -> None:
        self.next = come
        await self.gates.step(self.worker, AsyncMock(return_value=()))

    def counted(self, result: str) -> float | None:
        return self.metrics.registry.get_sample_value("seamark_self_check_total", {"result": result})

    def rests_until(self) -> float:
        """Seconds from now on until something is wanted again."""
        began = self.now
        while not self.gates.wants(self.worker):
            self.now += 0.5
            assert self.now < began + 10_000, "nothing is wanted any more"
        began, self.now = self.now, began
        return began - self.now


OPENED = TrialVerdict("open", "", "all agree")


@pytest.fixture
def scene(monkeypatch) -> Scripted:
    return Scripted(monkeypatch)


async def test_a_prompt_that_fails_is_asked_again_later_and_later_until_one_is_judged(scene):
    rests = []
    for _ in range(9):
        await scene.step(Unanswered("odd"))
        rests.append(scene.rests_until())
    assert rests == [4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert scene.prompts == [1] * 9
    await scene.step()
    scene.now += 300
    for failure in (Unreachable(), Broken(), ValueError(), ExceptionGroup("", [Unanswered("odd")])):
        await scene.step()
        await scene.step(failure)
        assert scene.rests_until() == 4
        scene.now += 4
    with pytest.raises(RuntimeError):
        await scene.step(RuntimeError())


async def test_a_feed_that_names_no_gate_is_a_failure(scene):
    scene.engine.tell = lambda after=0: {"cursor": 0, "outcomes": []}
    await scene.step(OPENED)
    assert not scene.prompts and scene.worker.draft_gate is None and scene.rests_until() == 4


async def test_a_verdict_that_is_not_believed_is_told_again_before_anything_is_asked(scene):
    scene.obeys = False
    await scene.step(OPENED)
    assert scene.gates.is_overdue(scene.worker) and scene.rests_until() == 4 and not scene.opened.called
    scene.obeys, scene.now = True, scene.now + 4
    await scene.step()
    assert (
        len(scene.prompts) == 1
        and scene.opened.mock_calls == [call(scene.worker)]
        and not scene.gates.wants(scene.worker)
    )
    assert not scene.gates.is_overdue(scene.worker)


async def test_a_trial_without_hits_is_tried_three_times_with_longer_rests(scene):
    rests = []
    for _ in range(2):
        await scene.step(NO_HITS)
        rests.append(scene.rests_until())
        assert scene.worker.draft_state == "trial" and scene.gates.words(scene.worker) == ""
    assert rests == [60, 120] and scene.counted("no_hits") == 0
    await scene.step(NO_HITS)
    assert scene.worker.draft_state == "closed" and scene.counted("no_hits") == 1
    assert scene.prompts == [1, 2, 3]
    scene.gates.reset(scene.worker)
    await scene.step(NO_HITS)
    assert (scene.counted("no_hits"), scene.rests_until()) == (1, 60), "an operator's wish is a new beginning"


async def test_another_process_of_the_engine_is_told_nothing_of_what_the_one_before_was_tried_for(scene):
    scene.obeys = False
    await scene.step(DIFFERS)
    scene.gates.noise(scene.worker).add(
        [Continuation((ContinuedToken("a", {"a": each, "b": -5.0}),), 0) for each in (0.0, 0.5)]
    )
    scene.engine.id, scene.obeys = "engine-2", True
    await scene.step()
    assert scene.engine.state == "trial" and scene.prompts == [1, 2]
    assert scene.gates.noise(scene.worker).largest == 0 and scene.counted("differs") == 0


@pytest.mark.parametrize(
    ("state", "told", "counted"), [("open", True, 0), ("on", False, 1), ("closed", False, 0), ("trial", False, 0)]
)
async def test_a_finding_closes_hints_that_a_trial_opened_and_is_said_of_those_that_are_on(
    monkeypatch, state, told, counted
):
    scene = Scripted(monkeypatch, state)
    scene.gates.close(scene.worker, DRAFTS)
    scene.gates.close(scene.worker, DIFFERS)
    assert scene.gates.is_overdue(scene.worker) is told
    assert scene.gates.wants(scene.worker) is (told or state == "trial")
    assert (scene.counted("drafts"), scene.counted("differs")) == (counted, counted)
    if told:
        await scene.step()
        assert not scene.prompts and scene.worker.draft_state == "closed"
        assert (scene.counted("drafts"), scene.counted("differs")) == (1, 0), "the first finding is told"


def drafts(scene: Scripted, requests: int, behind_hits: int) -> None:
    """So many requests of clients, of 100 steps each."""
    for _ in range(requests):
        scene.gates.count(scene.worker, Accepted(100, 100), is_hit=False)
        scene.gates.count(scene.worker, Accepted(100, behind_hits), is_hit=True)


@pytest.mark.parametrize(("state", "said"), [("on", 2), ("trial", 0), ("closed", 0)])
async def test_clients_drafts_that_are_worse_behind_hits_are_said_where_hints_are_on(monkeypatch, state, said):
    scene = Scripted(monkeypatch, state)
    drafts(scene, 30, 50)
    drafts(scene, 29, 50)
    assert scene.counted("drafts_worse") == min(1, said)
    drafts(scene, 1, 50)  # counted anew
    assert scene.counted("drafts_worse") == said


@pytest.mark.parametrize(("verdict", "counts"), [(OPENED, None), (NO_HITS, None), (DRAFTS, "drafts")])
async def test_a_doubt_is_settled_by_another_trial(monkeypatch, verdict, counts):
    scene = Scripted(monkeypatch, "open")
    assert not scene.gates.wants(scene.worker)
    scene.now = 5000
    drafts(scene, 30, 50)
    assert scene.gates.wants(scene.worker) and scene.worker.takes_hints
    await scene.step()
    assert scene.worker.takes_hints and scene.gates.wants(scene.worker)
    scene.now += 598
    assert not scene.gates.is_overdue(scene.worker)
    await scene.step(verdict)
    assert not scene.gates.wants(scene.worker) and scene.worker.takes_hints is (counts is None)
    assert scene.counted("no_hits") == 0 and not scene.opened.called
    if counts is not None:
        assert scene.counted(counts) == 1
        return
    drafts(scene, 999, 50)
    assert not scene.gates.wants(scene.worker), "it is looked at again after so many steps alone"
    drafts(scene, 1, 50)
    assert scene.gates.wants(scene.worker)


@pytest.mark.parametrize(("own", "stands_back"), [("worker", True), ("0", False)])
async def test_who_sorts_behind_another_that_tries_stands_back_for_five_seconds(monkeypatch, own, stands_back):
    scene = Scripted(monkeypatch, own=own)
    await scene.step()
    scene.engine.entries.append((f"{NAMED}abc-1", 0, None))
    await scene.step()
    assert len(scene.prompts) == (1 if stands_back else 2) and scene.rests_until() == (5 if stands_back else 0)


class Fed:
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


def feed_of(worker: Fed) -> DraftFeed:
    return DraftFeed(worker, drafting_worker(), "own")


async def test_one_of_several_engines_is_asked_for_by_its_rank():
    worker = Fed(events())
    feed = feed_of(worker)
    feed._worker.url = "http://w#3"
    await feed.read()
    (url,) = worker.asked
    assert url.startswith("http://w/seamark/outcomes?") and url.endswith("&engine=3")


@pytest.mark.parametrize(
    "told",
    [
        {**events(), "outcomes": [5]},
        {**events(), "cursor": -1},
        events(drafts=[]),
        events(drafted=[["a"]]),
        b" " * (MOST_BYTES + 1),
        b'{"a":[' + b"1," * 2**15 + b"1]}",
    ],
)
async def test_what_is_no_feed_is_an_error(told):
    for feed in (Fed(told), Fed(events(), status=404)):
        with pytest.raises(ValueError):  # noqa: PT011  # whatever the words
            await feed_of(feed).read()


async def test_counts_are_kept_within_bounds_the_oldest_forgotten_first():
    first, second = ([[f"{letter}{number}", 1, 1] for number in range(MAX_KEPT // 2)] for letter in "ab")
    feed = feed_of(Fed(events(1, drafted=first), events(2, drafted=second), events(3, drafted=[["c", 1, 1]])))
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
            assert await feed_of(Fed(*told)).accepted(names) == found
            assert loop_time() - began == pytest.approx(seconds, abs=1e-6)


def trial_of(engine: DraftingEngine, seed: int | None = 7) -> DraftTrial:
    worker, upstream = drafting_worker(engine.ahead), DraftingUpstream(engine)
    feed = DraftFeed(upstream, worker, "own")
    return DraftTrial(upstream, worker, feed, "own", Noise(), 10.0, random.Random(seed) if seed is not None else None)


async def verdict_of(engine: DraftingEngine, *, beside: bool = False) -> tuple[DraftTrial, TrialVerdict]:
    trial, verdict = trial_of(engine), None
    while verdict is None:
        assert trial.asked <= MOST
        verdict = await trial.step((), beside=beside)
    return trial, verdict


@pytest.mark.parametrize(
    ("fault", "result", "words"),
    [
        ({"hits_off": 0.25}, "differs", "answers from the cache differ"),
        ({"drafts_off": 0.25}, "drafts", "vLLM itself answers otherwise with drafts here"),
        ({"drafts_off": 0.25, "scores_prompts": False}, "drafts", "vLLM itself answers otherwise with drafts here"),
        ({"accepts_on_hits": 0.2}, "drafts_worse", "are accepted behind hits"),
        ({"finds_hits": False}, "no_hits", "too few trial prompts were found"),
        ({"counts": False}, "no_counts", "does not say how many drafts it accepts"),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
async def test_each_fault_keeps_hints_closed_with_its_reason(fault, result, words, beside):
    trial, verdict = await verdict_of(DraftingEngine(**fault), beside=beside)
    assert (verdict.result, verdict.state) == (result, "closed") and words in verdict.why
    assert trial.asked <= MOST and verdict.figures
    command = verdict.command("engine-1")["seamark_drafts"]
    assert command.startswith("closed:engine-1:") and words in command


async def test_recomputed_answers_far_apart_are_no_noise_that_everything_is_lost_in():
    """As of an engine whose answers depend on which of its drafts were right."""
    engine = DraftingEngine(noise=2.0, draw=random.Random(3))
    trial, verdict = await verdict_of(engine)
    assert (verdict.result, verdict.state) == ("drafts", "closed") and trial.asked <= 4


async def test_without_logprobs_of_prompts_the_engine_without_drafts_is_asked_token_by_token():
    engine = DraftingEngine(scores_prompts=False)
    _, verdict = await verdict_of(engine)
    assert verdict.result == "open"
    scored = [len(each["prompt"]) for each in engine.asked if "prompt_logprobs" in each]
    assert scored and max(scored) <= 1024  # the memory for more of them is not the engine's to spare


async def test_a_small_vocabulary_is_found_by_what_the_worker_refuses():
    engine = DraftingEngine(vocabulary=300)
    _, verdict = await verdict_of(engine)
    assert verdict.result == "open" and max(map(max, (each["prompt"] for each in engine.asked[2:]))) < 300
    with pytest.raises(Unanswered):
        await trial_of(DraftingEngine(vocabulary=10)).step()


async def test_an_engine_that_rounds_at_random_is_opened_and_its_faults_are_seen():
    for seed in range(8):
        _, verdict = await verdict_of(DraftingEngine(noise=0.002, draw=random.Random(seed)))
        assert verdict.result == "open", seed
        _, verdict = await verdict_of(DraftingEngine(noise=0.002, hits_off=0.25, draw=random.Random(seed)))
        assert verdict.result == "differs", seed


def test_the_edge_prompt_stops_before_a_blocks_end_and_its_answer_crosses_it():
    draw = random.Random(1)
    for block in (16, 384, 1648, 4176):
        prompt = built_in("edge", (1000, 2000), block, 10_000, draw)
        edges = [at for at in range(block, 20_000, block) if len(prompt.ids) < at < len(prompt.ids) + ANSWER]
        assert edges and len(prompt.ids) == prompt.hint + 1 >= 160
    assert built_in("edge", (1000, 2000), 10 * LONGEST_EDGE, 10**6, draw).hint == 162
    for kind, most, tokens in (("long", 100, 100), ("long", 10_000, 448), ("turn", 163, 163), ("turn", 162, 162)):
        assert len(built_in(kind, (1000, 2000), 384, most, draw).ids) == tokens


async def test_a_step_that_fails_in_the_middle_leaves_nothing_behind():
    engine = DraftingEngine()
    trial = trial_of(engine)
    for steps in (1, 2):
        engine.tell, told = lambda after=0: 1 // 0, engine.tell
        with pytest.raises(ZeroDivisionError):
            await trial.step()
        engine.tell = told
        await trial.step()
        assert (trial.asked, trial.agreed, len(trial.pairs)) == (steps,) * 3


@pytest.mark.parametrize("beside", [True, False])
async def test_what_came_from_a_cache_is_no_recomputed_answer(monkeypatch, beside):
    monkeypatch.setattr("proxy.fleet.draft_trial.fresh_salt", lambda: "one for all")
    engine = DraftingEngine()
    trial = trial_of(engine)
    with pytest.raises(Unanswered, match="came from a cache"):
        await trial.step(beside=beside)
    assert trial.asked == 0


async def test_a_worker_that_fails_is_no_worker_with_a_small_vocabulary(monkeypatch):
    async def fetch(*_: Any, **named: Any) -> tuple[int, bytes]:
        return 503, b"{}"

    monkeypatch.setattr(DraftingUpstream, "fetch", fetch)
    with pytest.raises(Unanswered, match="503"):
        await trial_of(DraftingEngine(), seed=None).step()


def trial(draw: random.Random, cold: float, hit: float) -> str:
    """The result of one that looks behind each of 24 prompts from the eighth on. A step has two drafts."""

    def drafted(rate: float, steps: int) -> Accepted:
        return Accepted(steps, sum(draw.random() < rate / 2 for _ in range(2 * steps)))

    pairs: list[AcceptedPair] = []
    while True:
        pairs.append(AcceptedPair(drafted(cold, 54), drafted(hit, 36)))
        finding = judge_pairs(pairs, is_last=len(pairs) == 24)
        if finding.result == "worse" or (len(pairs) >= 8 and finding.result != "undecided"):
            return finding.result


def test_a_head_that_loses_what_public_reports_name_is_worse_at_once_and_an_equal_one_hardly_ever():
    draw = random.Random(1)
    assert all(trial(draw, 1.3, lost) == "worse" for lost in (0.9, 0.7, 0.5) for _ in range(50))
    draw = random.Random(2)
    assert [trial(draw, 1.3, 1.3) for _ in range(300)].count("worse") <= 6  # though no two answers are paired
    live = LiveAcceptance()
    assert not live.add(Accepted(), is_hit=True) and not live.hit.requests  # without drafts it counts for nothing
    for tokens, variance in ((10, 0.0), (10, 0.0), (20, 1 / 9)):  # between whole requests
        live.add(Accepted(10, tokens), is_hit=True)
        assert live.hit.variance == pytest.approx(variance)
