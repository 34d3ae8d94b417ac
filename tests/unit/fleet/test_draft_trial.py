"""A trial opens hints beside drafts that are right, and closes them beside each planted fault, with its reason."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from proxy.fleet import draft_trial
from proxy.fleet.answer_compare import Noise, Unanswered
from proxy.fleet.draft_acceptance import AcceptedPair
from proxy.fleet.draft_prompts import ANSWER, BUILT_IN, LONGEST_EDGE, TrialPrompt, built_in, drawn, kinds
from proxy.fleet.draft_reports import DraftFeed
from proxy.fleet.draft_trial import AGREEING, HITTING, MOST, DraftTrial, TrialVerdict
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import Accepted
from proxy.http.client import Broken
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


def test_a_drawn_prompt_is_one_phrase_again_and_again_with_few_changes():
    class Draw(random.Random):
        changes = 0.0

        def random(self) -> float:
            return self.changes

        def getrandbits(self, k: int) -> int:
            return super().getrandbits(k)

    draw = Draw(1)
    draw.changes = 1 / 12
    same = drawn(60, (1000, 2000), draw)
    assert same[:24] == same[24:48] and same[:12] == same[48:]
    draw.changes = 0.08
    other = drawn(60, (1000, 2000), draw)
    assert other[:24] != other[24:48]
    assert drawn(24, (5, 6), draw) == [5] * 24 and drawn(25, (5, 6), draw) == [5] * 25 and drawn(0, (5, 6), draw) == []


@pytest.mark.parametrize(
    ("kind", "block", "most", "tokens"),
    [
        ("short", 384, 10_000, 163),
        ("long", 384, 10_000, 448),
        ("together", 384, 10_000, 448),
        ("staggered", 384, 10_000, 163),
        ("turn", 384, 163, 163),
        ("turn", 384, 162, 162),
        ("short", 384, 1, 2),
        ("edge", 384, 10_000, 368),  # half of an answer before the block's end
        ("edge", 179, 10_000, 163),
        ("edge", 178, 10_000, 340),  # the end of the first block is too near
        ("edge", 16, 10_000, 176),
        ("edge", 8208, 10_000, 8192),
        ("edge", 8209, 10_000, 163),  # too long
        ("edge", 384, 368, 368),
        ("edge", 384, 367, 163),  # no room
        ("edge", 16, 100, 100),
    ],
)
def test_how_long_a_prompt_of_each_kind_is(kind, block, most, tokens):
    prompt = built_in(kind, (1000, 2000), block, most, random.Random(1))
    assert (prompt.kind, len(prompt.ids), prompt.hint) == (kind, tokens, tokens - 1)


def test_kinds_come_in_turn_for_ever():
    coming = kinds()
    assert [next(coming) for _ in range(2 * len(BUILT_IN))] == [*BUILT_IN, *BUILT_IN]


def asked_by(engine: DraftingEngine, *, prompt: int) -> list[dict]:
    return [each for each in engine.asked if len(each["prompt"]) == prompt]


async def test_each_prompt_is_recomputed_three_times_seeded_once_and_found_twice():
    """Requests for an answer, by their salts: each in order is (trial, hinted)."""
    engine = DraftingEngine()
    trial = trial_of(engine)
    assert await trial.step(beside=True) is None
    answers = [each for each in asked_by(engine, prompt=163) if each["max_tokens"] == ANSWER]
    told = [(each.get("vllm_xargs") or {}) for each in answers]
    assert [("seamark_trial" in each, each.get("seamark_boundaries")) for each in told] == [
        (True, [162]),
        (True, [162]),
        (False, None),  # as clients ask now
        (True, [162]),
        (True, [162]),
    ]
    salts = [each["cache_salt"] for each in answers]
    assert len(set(salts)) == 4 and salts[3] == salts[4]
    (seed,) = (each for each in asked_by(engine, prompt=163) if each["max_tokens"] == 1)
    assert seed["cache_salt"] == salts[3]
    assert [cached for _, cached, _ in engine.entries if cached] == [160, 160]
    assert (trial.asked, trial.agreed, trial.hits, len(trial.pairs)) == (1, 1, 1, 1)
    cold, hit = trial.pairs[0]
    assert (cold.steps > hit.steps > 0) and cold.tokens > hit.tokens


async def test_two_states_are_written_together_and_an_answer_is_gone_on_with_in_a_turn():
    engine = DraftingEngine(vocabulary=40_000)
    trial = trial_of(engine)
    for kind in BUILT_IN:
        engine.asked.clear()
        await trial.step(beside=True)
        seeds = [each for each in engine.asked if each["max_tokens"] == 1 and "prompt_logprobs" not in each]
        assert len(seeds) == {"together": 2, "turn": 0}.get(kind, 1) + (kind == "short"), kind  # and one for the ids
        lengths = {len(each["prompt"]) for each in engine.asked if each["max_tokens"] == ANSWER}
        assert (163 + ANSWER + 40 in lengths) is (kind == "turn")
    assert trial.hits == len(BUILT_IN)


async def test_while_one_is_answered_from_the_cache_another_one_is_or_several_begin_and_end():
    engine = DraftingEngine()
    trial = trial_of(engine)
    hits = {}
    for kind in BUILT_IN:
        engine.asked.clear()
        before = len(engine.entries)
        await trial.step()
        entries = engine.entries[before:]
        hits[kind] = sum(bool(cached) for _, cached, _ in entries)
    assert hits == {**dict.fromkeys(BUILT_IN, 3), "staggered": 6}
    lengths = sorted(each["max_tokens"] for each in engine.asked if each["max_tokens"] not in (1, ANSWER))
    assert lengths == [8, 12, 20, 40]


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


@pytest.mark.parametrize(
    ("cards", "cache_tokens", "tokens"),
    [
        ([{"id": "m"}], 0, 448),
        ([{"id": "m", "max_model_len": 500}], 0, 500 - 4 * ANSWER - 40),
        ([{"id": "m", "max_model_len": 8192}, {"id": "n", "max_model_len": 500}], 0, 500 - 4 * ANSWER - 40),
        ([{"id": "m", "max_model_len": "odd"}], 0, 448),
        ([{"id": "m"}], 1000, 250),
        ([{"id": "m", "max_model_len": 500}], 1000, 250),
        ([{"id": "m", "max_model_len": 300}], 1000, 132),
    ],
)
async def test_prompts_leave_room_in_the_model_and_take_a_quarter_of_the_cache_at_most(cards, cache_tokens, tokens):
    engine, worker = DraftingEngine(), drafting_worker()
    metrics = worker.probed.metrics._replace(cache_tokens=cache_tokens)
    worker.probed = replace(worker.probed, models=cards, metrics=metrics)
    trial = trial_of(engine, worker)
    await trial.step()
    await trial.step()  # a long one
    lengths = [len(each["prompt"]) for each in engine.asked if each["max_tokens"] == ANSWER]
    assert max(lengths) == tokens


async def test_a_worker_that_fails_is_no_worker_with_a_small_vocabulary():
    class Down(DraftingUpstream):
        async def fetch(self, *args, **named):
            return 503, b"{}"

    worker, upstream = drafting_worker(), Down(DraftingEngine())
    trial = DraftTrial(upstream, worker, DraftFeed(upstream, worker, "own"), "own", Noise(), 10.0)
    with pytest.raises(Unanswered, match="503"):
        await trial.step()


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({"differing": 1, "asked": 5}, None),
        ({"differing": 2, "asked": 5}, "differs"),
        ({"unlike_free": 1, "asked": 5}, None),
        ({"unlike_free": 2, "asked": 5}, "drafts"),
        ({"differing": 2, "unlike_free": 2, "asked": 5}, "differs"),
        ({"agreed": 8, "hits": 6, "asked": 8}, "open"),
        ({"agreed": 7, "hits": 6, "asked": 8}, None),
        ({"agreed": 8, "hits": 5, "asked": 8}, None),
        ({"agreed": 8, "hits": 5, "asked": 23}, None),
        ({"agreed": 8, "hits": 5, "asked": 24}, "no_hits"),
        ({"agreed": 7, "hits": 7, "asked": 24}, "no_hits"),
        ({"agreed": 8, "hits": 6, "asked": 24}, "open"),
    ],
)
def test_what_a_trial_has_come_to_decides(known, verdict):
    trial = trial_of(DraftingEngine())
    trial.pairs = [AcceptedPair(Accepted(100, 100), Accepted(100, 100))] * 8
    trial._feed.counts = True
    for name, value in known.items():
        setattr(trial, name, value)
    found = trial._verdict()
    assert (found.result if found is not None else None) == verdict
    assert found is None or found.figures == trial.figures


@pytest.mark.parametrize(
    ("hit", "asked", "verdict"), [(50, 8, "drafts_worse"), (94, 24, "drafts_worse"), (100, 8, "open")]
)
def test_drafts_that_are_worse_behind_hits_decide_as_soon_as_that_is_clear(hit, asked, verdict):
    trial = trial_of(DraftingEngine())
    trial.pairs = [AcceptedPair(Accepted(100, 100), Accepted(100, hit))] * 8
    trial.asked, trial.agreed, trial.hits, trial._feed.counts = asked, 8, 8, True
    found = trial._verdict()
    assert found is not None and found.result == verdict
    assert (
        "8 of" in trial.figures and f"{hit / 100:.2f} drafts a step accepted behind hits, 1.00 without" in trial.figures
    )
    if verdict == "drafts_worse":
        assert found.why == f"on the same prompts, {hit / 100:.2f} drafts a step are accepted behind hits, 1.00 without"


def test_a_verdict_is_told_to_its_engine_in_few_words():
    closed = TrialVerdict("differs", "w" * 300).command("e")
    assert closed == {"seamark_trial": 1, "seamark_drafts": "closed:e:" + "w" * 200}
    assert TrialVerdict("open", "ignored").command("e")["seamark_drafts"] == "open:e"


@pytest.mark.parametrize(("shows_after", "believed"), [(0, True), (2, True), (None, False)])
async def test_a_verdict_is_looked_for_in_the_feed_until_it_is_there_or_time_is_up(monkeypatch, shows_after, believed):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(draft_trial, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(draft_trial, "PAUSE_SECONDS", 0.0)
    engine = DraftingEngine(obeys=False)
    trial, reads = trial_of(engine), []
    told = engine.tell

    def tell(after: int = 0):
        if engine.commands:
            reads.append(clock.now)
            clock.now += 4.0
            engine.state = "open" if shows_after is not None and len(reads) > shows_after else "trial"
        return told(after)

    engine.tell = tell
    assert await trial.send(TrialVerdict("open")) is believed
    assert len(reads) == (3 if shows_after is None else shows_after + 1), "it is waited for ten seconds"


async def test_a_verdict_for_an_engine_without_a_gate_is_told_to_nobody():
    engine = DraftingEngine()
    trial, told = trial_of(engine), engine.tell
    engine.tell = lambda after=0: {**told(after), "drafts": None}
    assert not await trial.send(TrialVerdict("open")) and not engine.asked


async def test_of_requests_that_are_asked_one_by_one_those_behind_a_failure_are_not_left_unasked_for(recwarn):
    """Python warns of a coroutine that nobody has awaited or closed."""

    class Failing(DraftingUpstream):
        async def fetch(self, method, url, body=b"", timeout=None, headers=()):
            if len(self.engine.asked) >= 2 and method == "POST":
                raise Broken
            return await super().fetch(method, url, body, timeout, headers)

    worker, upstream = drafting_worker(), Failing(DraftingEngine(vocabulary=40_000))
    trial = DraftTrial(upstream, worker, DraftFeed(upstream, worker, "own"), "own", Noise(), 10.0)
    with pytest.raises(Broken):
        await trial.step(beside=True)
    gc.collect()
    assert not [each for each in recwarn.list if "never awaited" in str(each.message)]
