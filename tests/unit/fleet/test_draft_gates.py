"""When a worker's drafts are tried, told and believed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from proxy.fleet import draft_gates
from proxy.fleet.answer_compare import Continuation, ContinuedToken, Unanswered
from proxy.fleet.draft_gates import DraftGates
from proxy.fleet.draft_reports import NAMED
from proxy.fleet.draft_trial import DIFFERS, DRAFTS, NO_HITS, TrialVerdict
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import Accepted
from proxy.http.client import Broken, Unreachable
from proxy.metrics import Metrics
from tests.harness.drafting_engine import DraftingEngine, DraftingUpstream, drafting_worker


async def no_clients():
    return ()


class Scripted:
    """Trials that come to what a test says, each prompt taking no time; and the clock of gates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str = "trial", own: str = "own") -> None:
        self.engine, self.worker = DraftingEngine(state=state), drafting_worker(state=state)
        self.metrics = Metrics()
        self.now = 1000.0
        self.next: TrialVerdict | Exception | None = None  # what the next prompt comes to
        self.prompts: list[int] = []  # of each, the number of its trial
        self.made, self.obeys = 0, True
        self.opened: list[Worker] = []
        scene = self

        class Trial:
            figures, began = "figures", 0.0

            def __init__(self, upstream, worker, feed, own, noise, timeout) -> None:
                scene.made += 1
                self.number, self._feed = scene.made, feed

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
        self.gates = DraftGates(DraftingUpstream(self.engine), self.metrics.self_checks, 10.0, self._note, own)

    async def _note(self, worker: Worker) -> None:
        self.opened.append(worker)

    async def step(self, come: TrialVerdict | Exception | None = None) -> None:
        self.next = come
        await self.gates.step(self.worker, no_clients)

    def counted(self, result: str) -> float | None:
        return self.metrics.registry.get_sample_value("seamark_self_check_total", {"result": result})

    def rests_until(self) -> float:
        """Seconds from now on until something is wanted again."""
        began, seconds = self.now, 0.0
        while not self.gates.wants(self.worker):
            seconds += 0.5
            self.now = began + seconds
            assert seconds < 10_000, "nothing is wanted any more"
        self.now = began
        return seconds


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
    assert scene.gates.is_overdue(scene.worker) and scene.rests_until() == 4 and not scene.opened
    scene.obeys, scene.now = True, scene.now + 4
    await scene.step()
    assert len(scene.prompts) == 1 and scene.opened == [scene.worker] and not scene.gates.wants(scene.worker)
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
    scene.gates.noise(scene.worker).add([_answer(0.0), _answer(0.5)])
    scene.engine.id, scene.obeys = "engine-2", True
    await scene.step()
    assert scene.engine.state == "trial" and scene.prompts == [1, 2]
    assert scene.gates.noise(scene.worker).largest == 0 and scene.counted("differs") == 0


def _answer(logprob: float) -> Continuation:
    return Continuation((ContinuedToken("a", {"a": logprob, "b": -5.0}),), 0)


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
    assert scene.counted("no_hits") == 0 and not scene.opened
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
