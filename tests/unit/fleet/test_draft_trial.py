"""A trial opens hints beside drafts that are right, and closes them beside each planted fault, with its reason."""

from __future__ import annotations

import random

import pytest

from proxy.fleet.answer_compare import Noise, Unanswered
from proxy.fleet.draft_prompts import ANSWER, LONGEST_EDGE, built_in
from proxy.fleet.draft_reports import DraftFeed
from proxy.fleet.draft_trial import MOST, DraftTrial, TrialVerdict
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
    await trial.step()
    engine.counts, told = False, engine.tell

    def fails(after: int = 0):
        raise ValueError("planned")

    engine.tell = fails
    with pytest.raises(ValueError, match="planned"):
        await trial.step()
    engine.tell, engine.counts = told, True
    assert (trial.asked, trial.agreed, len(trial.pairs)) == (1, 1, 1)
    await trial.step()
    assert (trial.asked, trial.agreed, len(trial.pairs)) == (2, 2, 2)


@pytest.mark.parametrize("beside", [True, False])
async def test_what_came_from_a_cache_is_no_recomputed_answer(monkeypatch, beside):
    monkeypatch.setattr("proxy.fleet.draft_trial.fresh_salt", lambda: "one for all")
    engine = DraftingEngine()
    trial = trial_of(engine)
    with pytest.raises(Unanswered, match="came from a cache"):
        await trial.step(beside=beside)
    assert trial.asked == 0


async def test_a_worker_that_fails_is_no_worker_with_a_small_vocabulary():
    class Down(DraftingUpstream):
        async def fetch(self, *args, **named):
            return 503, b"{}"

    worker, upstream = drafting_worker(), Down(DraftingEngine())
    trial = DraftTrial(upstream, worker, DraftFeed(upstream, worker, "own"), "own", Noise(), 10.0)
    with pytest.raises(Unanswered, match="503"):
        await trial.step()
