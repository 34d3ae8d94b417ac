"""The stories: what clients do with one long prefix, each played on every engine in the same run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness import exact, planted
from proxy.bench.harness.client import (
    MIN_TOKENS,
    Messages,
    PassCounter,
    TimedAnswer,
    ask,
    ask_all,
    complete,
    prose,
    tokens_of,
    with_shared_tokens,
)
from proxy.bench.harness.servers import Server
from proxy.boundaries.divergence import common_prefix

UNIT = 16  # tokens; the oracle's match unit
SYSTEM_PROMPT = "one system prompt, six questions"  # a title
SIZES = (6000, 1864, 469, 163, 130)  # shared tokens; by the long ones the plugin learns what short ones are worth
COLD_STARTS = 5  # system prompts of a size, and conversations; the median counts
TURNS = 4
SHORT = 2  # tokens of an answer that is only timed
JUDGED = (0, 1)  # requests of a series whose answers are compared: a cold one and a warm one
NO_DEFECT = "none"


class Contender:
    def __init__(self, name: str, engine: Server, url: str = "") -> None:
        """`url`: where clients reach it, if not directly."""
        self.name, self.engine, self.url = name, engine, url or engine.url
        self.passes = PassCounter(engine.log)


@dataclass
class Line:
    """One engine's result in one story. Times in seconds, lengths in tokens; medians over several requests.

    First tokens are listed by request, in the same order for every engine.
    """

    engine: str
    hit_second: int = 0
    hit_after: list[int] = field(default_factory=list)
    passes_cold: float = 0.0
    passes_warm: float = 0.0
    ttfts_cold: list[float] = field(default_factory=list)
    ttfts_warm: list[float] = field(default_factory=list)
    compared: int = 0  # answers
    largest_error: float = 0.0
    first_difference: int | None = None

    @property
    def exact(self) -> bool:
        """As `exact.Difference.exact`, over all answers of the line."""
        return exact.Difference(self.first_difference, self.largest_error).exact


@dataclass
class Story:
    title: str
    shared: int
    oracle: int
    lines: list[Line]
    held: bool
    expectation: str

    def line(self, engine: str) -> Line:
        return next(line for line in self.lines if line.engine == engine)


@dataclass
class StoryStage:
    client: httpx.AsyncClient
    reference: str  # URL of the reference engine
    contenders: Sequence[Contender]  # Seamark first
    seed: int = 0

    def fresh_seed(self) -> int:
        """A seed no story has used: its prompt is cold everywhere."""
        self.seed += 1
        return self.seed

    async def shared_prompts(self, shared: int) -> tuple[Messages, ...]:
        """Prompts nobody has seen that share exactly `shared` tokens."""
        return await with_shared_tokens(self.client, self.reference, shared, self.fresh_seed())


def floored(tokens: int, unit: int = UNIT) -> int:
    """The oracle's hit for `tokens` shared tokens."""
    return tokens // unit * unit


def judge(line: Line, answers: Sequence[TimedAnswer], right: Sequence[TimedAnswer]) -> None:
    found = (exact.compare(answer, wanted) for answer, wanted in zip(answers, right, strict=True))
    worst = max(found, key=lambda difference: (difference.position is not None, difference.largest_error))
    line.compared, line.first_difference, line.largest_error = len(right), worst.position, worst.largest_error


async def _one_after_the_other(
    stage: StoryStage, chats: Sequence[Sequence[Messages]], judged: Sequence[int]
) -> list[Line]:
    """What each engine makes of chats whose first request is cold, and whose others are warm.

    Hits are those of the first chat, and of its answers the `judged` ones are compared; the others are for the medians.
    """
    prompts = [chats[0][index] for index in judged]
    right = await ask_all(stage.client, stage.reference, prompts, MIN_TOKENS, parallel=8)
    lines = [Line(contender.name) for contender in stage.contenders]
    answers: list[list[TimedAnswer]] = [[] for _ in lines]  # to the first chat
    passes: list[tuple[list[int], list[int]]] = [([], []) for _ in lines]  # cold and warm
    for number, chat in enumerate(chats):
        # Another engine begins each time: the machine is not the same for the first and the last.
        for engine in ((number + step) % len(lines) for step in range(len(lines))):
            contender, line = stage.contenders[engine], lines[engine]
            for index, prompt in enumerate(chat):
                tokens = MIN_TOKENS if number == 0 and index in judged else SHORT
                contender.passes.restart()
                answer = await ask(stage.client, contender.url, prompt, tokens)
                passes[engine][index > 0].append(contender.passes.after([answer]).with_prompt)
                (line.ttfts_warm if index else line.ttfts_cold).append(answer.ttft)
                if number == 0:
                    answers[engine].append(answer)
    for line, answered, (cold, warm) in zip(lines, answers, passes, strict=True):
        line.passes_cold, line.passes_warm = statistics.median(cold), statistics.median(warm)
        line.hit_second, *line.hit_after = (answer.cached_tokens or 0 for answer in answered[1:])
        judge(line, [answered[index] for index in judged], right)
    return lines


async def one_system_prompt(stage: StoryStage, shared: int) -> Story:
    """Six questions, one after the other, on one system prompt; a question or two on others for the medians."""
    full, *others = [await stage.shared_prompts(shared) for _ in range(COLD_STARTS)]
    lines = await _one_after_the_other(stage, [full, *(prompts[:2] for prompts in others)], JUDGED)
    oracle, ours = floored(shared), lines[0]
    held = ours.exact and {ours.hit_second, *ours.hit_after} == {oracle}
    return Story(SYSTEM_PROMPT, shared, oracle, lines, held, f"every request after the first hits {oracle}")


def _turns(seed: int) -> list[Messages]:
    """The requests of a conversation, whose assistant's side is given."""
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": prose(90, seed)}]
    turns: list[Messages] = []
    for turn in range(TURNS):
        question = f"{turn + 1}. {prose(30, seed + 1000 * (turn + 1))} What follows?"
        messages.append({"role": "user", "content": question})
        turns.append(list(messages))
        messages.append({"role": "assistant", "content": prose(40, seed + 10_000 * (turn + 1))})
    return turns


async def conversation(stage: StoryStage) -> Story:
    """Four turns, the same on every engine; some more conversations for the medians."""
    chats = [_turns(stage.fresh_seed()) for _ in range(COLD_STARTS)]
    prompts = [await tokens_of(stage.client, stage.reference, turn) for turn in chats[0]]
    shared = [common_prefix(*pair) for pair in itertools.pairwise(prompts)]
    lines = await _one_after_the_other(stage, chats, range(TURNS))
    oracles, ours = [floored(tokens) for tokens in shared], lines[0]
    hits = zip([ours.hit_second, *ours.hit_after], oracles, strict=True)
    # A turn ends before the generation prompt, which some templates repeat in history and some do not.
    held = ours.exact and all(hit >= oracle - UNIT for hit, oracle in hits)
    title = f"a conversation of four turns (shared {', '.join(map(str, shared))})"
    expectation = f"each turn hits the one before, {', '.join(map(str, oracles))} at best, up to {UNIT} tokens less"
    return Story(title, shared[0], oracles[0], lines, held, expectation)


async def same_request_twice(stage: StoryStage) -> Story:
    """The identical request again: everything but the last token could be shared."""
    prompts = [(await stage.shared_prompts(163))[0] for _ in range(COLD_STARTS)]
    tokens = len(await tokens_of(stage.client, stage.reference, prompts[0]))
    lines = await _one_after_the_other(stage, [[prompt, prompt] for prompt in prompts], JUDGED)
    oracle = floored(tokens - 1)
    # What is left over after the turn's end is shorter than a generation prompt and a unit.
    held = lines[0].exact and lines[0].hit_second >= oracle - UNIT
    expectation = f"the second hits {oracle}, at most {UNIT} tokens less"
    return Story("the same request twice", tokens, oracle, lines, held, expectation)


class Planted(NamedTuple):
    """Whether the exactness check noticed a defect."""

    defect: str
    caught: bool
    largest_error: float
    first_difference: int | None

    @property
    def as_it_should(self) -> bool:
        """Whether it noticed this defect; without one, whether it noticed nothing."""
        return self.caught == (self.defect != NO_DEFECT)


async def planted_defects(stage: StoryStage, url: str, folder: Path, unit: int = UNIT) -> list[Planted]:
    """Plant each defect in the engine at `url`, and compare its answer; the first line is without a defect."""
    found = []
    for defect in (NO_DEFECT, *planted.DEFECTS):
        prompt = await tokens_of(stage.client, stage.reference, (await stage.shared_prompts(163))[0])
        hit = floored(len(prompt) - 1, unit)
        right = await complete(stage.client, stage.reference, prompt)
        # Leaves a state one unit before the hit, and one there. vLLM alone does so without the hints.
        for begins, boundary in ((prompt[: hit - unit + 1], hit - unit), (prompt, hit)):
            await complete(stage.client, url, begins, vllm_xargs={"seamark_boundaries": [boundary]})
        with planted.planted(folder, defect):
            answer = await complete(stage.client, url, prompt)
        if answer.cached_tokens != hit:
            raise RuntimeError(f"planting {defect}: the engine hit {answer.cached_tokens} tokens, not {hit}")
        difference = exact.compare(answer, right)
        found.append(Planted(defect, not difference.exact, difference.largest_error, difference.position))
    return found
