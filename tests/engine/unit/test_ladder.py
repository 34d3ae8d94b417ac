"""On vLLM's own scheduler: what is found by prompts that share all but their ends, which no hint names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_patches.scheduler.earlier_prompts import (
    BETWEEN_STATES,
    HIT,
    LADDER_SHARE,
    PROBE,
    PROMPTS_TO_JUDGE,
    LadderUse,
)
from engine_patches.scheduler.planner import RUNGS
from engine_patches.scheduler.step_time import StepTime
from tests.harness.audit import patched_vllm
from tests.harness.audited_core import Core
from tests.harness.fan_out_audit import Unjudged

HEAD, TAIL = 60, 4  # tokens of a system prompt, and of the template's words behind a question


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    with patched_vllm():
        yield


class Documents:
    """Prompts of one engine, asked one after the other."""

    def __init__(self, model: Path, unit: int, block: int, blocks: int = 1200, hinted: bool = True) -> None:
        self.core = Core(str(model), blocks, 8192, Unjudged(), block=block, unit=unit, longest=32_768)
        self.draw, self.unit, self.hinted = random.Random(unit + block), unit, hinted
        self.head, self.tail = self.text(HEAD), self.text(TAIL)

    def text(self, length: int) -> list[int]:
        return [self.draw.randrange(1000) for _ in range(length)]

    def ask(self, tokens: list[int], salt: str | None = None) -> tuple[int, str, int]:
        """Tokens that a prompt finds, why, and how many passes it takes."""
        name, passes = f"r{len(self.core.ever)}", 0
        hint = [HEAD, -TAIL] if self.hinted else None
        self.core.request(name, self.head + tokens + self.tail, hint, salt=salt)
        while self.core.scheduler.has_unfinished_requests():
            self.core.step()
            passes += 1
        (admitted,) = self.core.scheduler.seamark.counters.take().requests
        return self.core.hits[name], admitted.reason, passes

    def shared(self, document: list[int]) -> int:
        return (HEAD + len(document)) // self.unit * self.unit


@pytest.mark.parametrize("hinted", [True, False], ids=["hinted", "without a hint"])
@pytest.mark.parametrize("unit", [16, 64], ids=["Mamba2", "gated delta net"])
@pytest.mark.parametrize("block", [1600, 6400])
def test_of_a_document_all_but_twice_the_question_is_found_at_once_and_all_of_it_from_then_on(
    model, block, unit, hinted
):
    asked = Documents(model, unit, block, hinted=hinted)
    for length, most in ((300, 500), (670, 60), (2000, 500), (6800, 120), (20_000, 8)):
        document, question = asked.text(length), asked.draw.randint(8, most)
        found, reason, passes = asked.ask(document + asked.text(question))
        assert passes == -(-(HEAD + length + question + TAIL - found) // 8192), "a ladder costs no pass"
        second, reason, passes = asked.ask(document + asked.text(question))
        shared = asked.shared(document)
        assert shared >= second >= shared - 2 * question - 64 and passes == 1
        assert reason == (HIT if second == shared else BETWEEN_STATES)
        assert asked.ask(document + asked.text(question))[:2] == (shared, HIT)
        assert asked.ask(document + asked.text(question), salt="another")[0] <= HEAD


@pytest.mark.parametrize("length", [670, 6800])
@pytest.mark.parametrize("unit", [16, 64], ids=["Mamba2", "gated delta net"])
def test_of_questions_at_once_on_a_cold_document_all_but_one_wait_for_its_exact_end(model, unit, length):
    asked = Documents(model, unit, 1600)
    for tokens in (1, 1001) * 8:  # as a Spark takes
        asked.core.scheduler.seamark.step_time.step_took(tokens, 0.4 + 0.0005 * tokens)
    document, hits = asked.text(length), asked.core.hits
    for wave, cold in (("cold", 1), ("warm", 0)):
        names = [f"{wave} {number}" for number in range(6)]
        for name in names:
            prompt = asked.head + document + asked.text(48) + asked.tail
            asked.core.request(name, prompt, [HEAD, -TAIL])
        asked.core.run()
        assert sorted(hits[name] for name in names) == [0] * cold + [asked.shared(document)] * (6 - cold)


@pytest.mark.parametrize("unit", [16, 64], ids=["Mamba2", "gated delta net"])
def test_in_a_cache_that_is_full_rungs_take_the_oldest_blocks_and_are_stored_nowhere(model, unit):
    asked, stored = Documents(model, unit, 1600, blocks=90), list[bool]()
    states = asked.core.scheduler.seamark.states
    states.offer = lambda request, positions, used=True: stored.extend(
        kept.is_rung(states.keys.state_key(request, each)) for each in positions
    )
    kept, make_room, full = states.retention, states.retention.make_room_for_rung, list[bool]()

    def puts_out_no_other_state(num_blocks: int, low: bool) -> bool:
        full.append(not kept.has_idle(num_blocks, rung=True))
        has_room = make_room(num_blocks, low)
        others = [state for state in (*kept._turns.values(), *kept._kept.values()) if state.cached]
        held = {block.block_id for state in others for block in state.blocks}
        assert not has_room or held.isdisjoint(block.block_id for block in kept._next(num_blocks))
        return has_room

    kept.make_room_for_rung = puts_out_no_other_state
    for _ in range(30):
        asked.ask(asked.text(6000))
        document, question = asked.text(asked.draw.randint(300, 2000)), asked.draw.randint(8, 100)
        asked.ask(document + asked.text(question))
        assert asked.ask(document + asked.text(question))[0] >= asked.shared(document) - 128 - unit
    assert sum(full) > 60 and stored and not any(stored)


def test_rungs_are_left_while_they_cost_little_and_somebody_takes_one():
    known, use = StepTime(), LadderUse()
    for tokens in (1, 1001) * 8:
        known.step_took(tokens, 0.1 + 0.001 * tokens)
    known._pace = known.pace._replace(state=0.01)
    assert [use.rungs(tokens, known) for tokens in (100, 2000, 90_000)] == [0, 2, len(RUNGS)]
    assert use.rungs(2000, known) * 0.01 <= LADDER_SHARE * known.seconds(2000, 1)

    def left(prompts: int, **how: Any) -> int:
        counts = []
        for _ in range(prompts):
            use.admitted(1000, how.get("lacking", 0), is_used=how.get("is_used", False))
            counts.append(use.rungs(1000, StepTime()))
        return sum(map(bool, counts))

    assert left(PROMPTS_TO_JUDGE - 1) == PROMPTS_TO_JUDGE - 1 and left(4 * PROBE) == 4
    for seen in ({"is_used": True}, {"lacking": 64}):
        assert left(1, **seen) == 1 and left(PROMPTS_TO_JUDGE + 8 * PROBE) < PROMPTS_TO_JUDGE + 2 * PROBE
