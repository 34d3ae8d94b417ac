"""A trial opens hints beside drafts that are right, and closes them beside each planted fault, with its reason."""

from __future__ import annotations

import asyncio
import random

import pytest

from proxy.fleet.answer_compare import Noise, Unanswered
from proxy.fleet.draft_prompts import ANSWER, BUILT_IN, LONGEST_EDGE, TrialPrompt, built_in, drawn
from proxy.fleet.draft_reports import DraftFeed
from proxy.fleet.draft_trial import AGREEING, HITTING, MOST, DraftTrial, TrialVerdict
from proxy.fleet.worker import Worker
from tests.harness.drafting_engine import DraftingEngine, DraftingUpstream, drafting_worker


def trial_of(engine: DraftingEngine, worker: Worker | None = None) -> DraftTrial:
    worker, upstream = worker or drafting_worker(engine.ahead), DraftingUpstream(engine)
    feed = DraftFeed(upstream, worker, "own")
    return DraftTrial(upstream, worker, feed, "own", Noise(), 10.0, random.Random(7))


async def verdict_of(engine: DraftingEngine, *, beside: bool = False, clients=()) -> tuple[DraftTrial, TrialVerdict]:
    trial, verdict = trial_of(engine), None
    while verdict is None:
        assert trial.asked <= MOST
        verdict = await trial.step(clients, beside=beside)
    return trial, verdict


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 16])
async def test_an_engine_that_is_right_is_opened_after_eight_prompts_that_hit_where_foretold(ahead, beside):
    engine = DraftingEngine(ahead=ahead)
    trial, verdict = await verdict_of(engine, beside=beside)
    assert (verdict.result, verdict.state) == ("open", "open")
    assert (trial.asked, trial.agreed, trial.hits) == (AGREEING, AGREEING, AGREEING)
    assert f"{AGREEING} of {AGREEING} prompts agree, {AGREEING} of them with a hit" in verdict.figures
    assert verdict.command("engine-1") == {"seamark_trial": 1, "seamark_drafts": "open:engine-1"}


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


async def test_a_fault_at_one_kind_of_prompt_is_looked_at_with_a_new_one_of_that_kind():
    engine = DraftingEngine()
    trial = trial_of(engine)
    assert await trial.step() is None
    engine.hits_off = 0.25
    assert await trial.step() is None
    engine.hits_off = 0.0
    assert await trial.step() is None
    long = [each["prompt"] for each in engine.asked if len(each["prompt"]) == 448 and each["max_tokens"] == ANSWER]
    assert len({tuple(each) for each in long}) == 2
    assert (trial.asked, trial.agreed, trial.differing) == (3, 2, 1)


async def test_prompts_of_a_trial_have_salts_of_their_own_and_nobody_finds_them():
    engine = DraftingEngine()
    await verdict_of(engine)
    assert all(len(each["cache_salt"]) >= 32 for each in engine.asked)
    kept = [each for each in engine.asked if (each.get("vllm_xargs") or {}).get("seamark_boundaries")]
    assert kept and all(each["vllm_xargs"]["seamark_trial"] == 1 for each in kept)


async def test_a_small_vocabulary_is_found_by_what_the_worker_refuses():
    engine = DraftingEngine(vocabulary=300)
    _, verdict = await verdict_of(engine)
    assert verdict.result == "open" and max(map(max, (each["prompt"] for each in engine.asked[2:]))) < 300
    with pytest.raises(Unanswered):
        await trial_of(DraftingEngine(vocabulary=10)).step()


async def test_beside_clients_a_trial_has_one_request_at_a_time():
    class Counting(DraftingUpstream):
        at_once = most = 0

        async def fetch(self, *args, **named):
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                await asyncio.sleep(0)
                return await super().fetch(*args, **named)
            finally:
                self.at_once -= 1

    most = {}
    for beside in (True, False):
        worker, upstream = drafting_worker(), Counting(DraftingEngine())
        trial = DraftTrial(upstream, worker, DraftFeed(upstream, worker, "own"), "own", Noise(), 10.0)
        while await trial.step(beside=beside) is None:
            pass
        most[beside] = upstream.most
    assert most[True] == 1 and most[False] >= 4


async def test_prompts_of_clients_come_behind_the_built_in_ones():
    theirs = [TrialPrompt("client", list(range(2000, 2100)), 80), TrialPrompt("client", list(range(3000, 3200)), 199)]
    engine = DraftingEngine()
    trial, verdict = await verdict_of(engine, clients=theirs)
    assert verdict.result == "open" and trial.asked == AGREEING == len(BUILT_IN) + len(theirs)
    assert sum(list(each["prompt"]) == theirs[0].ids for each in engine.asked) >= 6


async def test_a_verdict_is_believed_only_when_the_feed_shows_it():
    engine = DraftingEngine()
    trial, verdict = await verdict_of(engine)
    assert await trial.send(verdict) and engine.state == "open"
    assert engine.commands == ["open:engine-1"]


async def test_a_verdict_that_the_engine_does_not_take_is_not_believed(monkeypatch):
    monkeypatch.setattr("proxy.fleet.draft_trial.BELIEVED_SECONDS", 0.0)
    engine = DraftingEngine(obeys=False)
    trial, verdict = await verdict_of(engine)
    assert not await trial.send(verdict) and engine.state == "trial"


async def test_an_engine_that_rounds_at_random_is_opened_and_its_faults_are_seen():
    for seed in range(20):
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
    assert built_in("long", (1000, 2000), 384, 100, draw).hint == 99


def test_drawn_prompts_repeat_themselves_and_stay_within_their_range():
    prompt = drawn(448, (1000, 30_000), random.Random(3))
    assert len(prompt) == 448 and min(prompt) >= 1000 and max(prompt) < 30_000 and len(set(prompt)) <= 48


def test_a_hit_is_foretold_at_whole_units_that_leave_a_token_to_compute():
    assert TrialPrompt("short", range(163), 162).foretold(16, 1) == 160
    assert TrialPrompt("short", range(163), 162).foretold(16, 16) == 144
    assert TrialPrompt("long", range(448), 447).foretold(16, 0) == 432
    assert TrialPrompt("turn", range(235), 162).foretold(16, 1) == 160
    assert HITTING < AGREEING <= MOST
