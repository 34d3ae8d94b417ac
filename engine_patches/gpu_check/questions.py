"""The questions of `seamark gpu-check`: prompts around every edge of a state or a block, with the hits they must have.

Prompts are random token ids, so two prompts share exactly what they are given to share, and no tokenizer has a say.
Most that resume do so a few tokens before their end: a model this small forgets a wrong state within twenty.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from engine_patches.commands.model import SPECIAL_TOKENS, VOCABULARY

SHARED_LENGTHS = (163, 2000, 8000, 32000)  # tokens that prompts for a user's own model, and timed ones, share

NEW_TOKENS = 32  # greedy tokens of every compared answer

PARALLEL = 8  # questions asked at once

OTHER_STATE, EARLY_STATE = "another prefix's state", "a state one unit early"

DEFECTS = (OTHER_STATE, EARLY_STATE)

# Of a draft head whose window has rows of its own: they change its drafts, and no answer.
NO_ROWS, OTHER_ROWS = "a draft head without its rows", "a draft head with another prefix's rows"

ROW_DEFECTS = (NO_ROWS, OTHER_ROWS)

EXACT, ALIGNED, RESEND = "exact", "aligned", "resend"  # sections; every defect has one more

SCAN_CHUNK = 256  # tokens: a multiple of the chunks (64, 128, 256) that recurrent kernels scan in


class Geometry(NamedTuple):
    """The lengths of an engine's cache and passes, in tokens."""

    block: int
    alignment: int  # states are kept at multiples of it
    budget: int  # of one pass
    ahead: int = 0  # past a state, that a prefix has to share beside drafts
    windows: bool = False  # whether a draft head has a window in cache groups of its own

    @property
    def defects(self) -> Sequence[str]:
        """Those that can be planted."""
        return (*DEFECTS, *ROW_DEFECTS) if self.windows else DEFECTS


class Question(NamedTuple):
    """One prompt, and the hit that its answer must show."""

    case: str
    tokens: Sequence[int]
    hints: Sequence[int]  # positions, tokens
    hit: int | None  # tokens that must come from the cache; None if that depends on the order of requests


QuestionWave = list[Question]  # asked at once; waves follow each other


class TokenRange(NamedTuple):
    """The token ids that prompts are drawn from."""

    first: int = len(SPECIAL_TOKENS)
    end: int = VOCABULARY


TINY_IDS = TokenRange()


class Prompts:
    """Draws prompts: the same seed and ids, the same prompts."""

    def __init__(self, seed: int, ids: TokenRange = TINY_IDS) -> None:
        self._draw, self._ids = random.Random(seed), ids

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(*self._ids) for _ in range(count)]

    def between(self, low: int, high: int) -> int:
        return self._draw.randint(low, high)


def sections(geometry: Geometry, quick: bool, seed: int = 0) -> dict[str, list[QuestionWave]]:
    """All questions, by section; the last wave of a defect's section is the one to be asked with the defect."""
    prompts = Prompts(seed)
    exact = _edges(prompts, geometry, quick)
    exact += _several_boundaries(prompts, geometry)
    for _ in range(1 if quick else 4):
        exact += _burst(prompts, geometry, size=3 if quick else 6)
    asked = {
        EXACT: [wave[start : start + PARALLEL] for wave in exact for start in range(0, len(wave), PARALLEL)],
        ALIGNED: _aligned(prompts, geometry, quick),
        RESEND: _resend(prompts, geometry, (5, 9) if quick else (3, 5, 7, 9)),
    }
    return asked | {defect: _for_defect(prompts, geometry, 2 if quick else 3) for defect in geometry.defects}


def length_section(shared: int) -> str:
    """The section of the questions that share so many tokens."""
    return f"{EXACT}, {shared} shared tokens"


def own_sections(geometry: Geometry, lengths: Sequence[int], ids: TokenRange) -> dict[str, list[QuestionWave]]:
    """Questions for a user's own model, a section for each shared length, shortest first; then the planted defects."""
    prompts = Prompts(0, ids)
    asked = {length_section(shared): _shared(prompts, geometry, shared, 29, 3) for shared in sorted(lengths)}
    return asked | {defect: _for_defect(prompts, geometry, 2) for defect in geometry.defects}


def _floor(position: int, geometry: Geometry) -> int:
    return max(0, (position - geometry.ahead) // geometry.alignment * geometry.alignment)


def _shared(prompts: Prompts, geometry: Geometry, shared: int, *ends: int) -> list[QuestionWave]:
    """A cold prompt, warm ones that share a prefix with it and go on for `ends` tokens, and the first of them again."""
    prefix = prompts.tokens(shared)
    warm = [[*prefix, *prompts.tokens(end)] for end in ends]
    again, hit = warm[0], _floor(shared, geometry)
    return [
        [Question(f"cold, {shared} shared", [*prefix, *prompts.tokens(37)], [shared], 0)],
        [Question(f"warm, {shared} shared", whole, [shared, len(whole) - 1], hit) for whole in warm],
        [Question(f"resent, {len(again)} tokens", again, [shared], _floor(len(again) - 1, geometry))],
    ]


def _edges(prompts: Prompts, geometry: Geometry, quick: bool) -> list[QuestionWave]:
    """Cold, warm and resent prompts around the edges of units, blocks and passes."""
    unit, block, budget = geometry.alignment, geometry.block, geometry.budget
    lengths = {block - 1, block, block + 1}
    if not quick:
        lengths |= {unit - 1, unit, unit + 1, 5 * unit + 3, block + 5 * unit + 7}
        lengths |= {2 * block - 1, 2 * block, 2 * block + 1, budget + unit + 3}
    waves = [_shared(prompts, geometry, shared, prompts.between(1, 4)) for shared in sorted(lengths)]
    for length in (block,) if quick else (block - 1, block, block + 1):
        whole = prompts.tokens(length)
        # The last token is always computed. Beside drafts it may be the one behind a state that has to be shared.
        last = length - 1 + min(1, geometry.ahead)
        resent = Question(f"resent, ends after {length}", whole, [length - 1, length], _floor(last, geometry))
        longer = Question(f"goes on after {length}", [*whole, *prompts.tokens(2)], [length], _floor(length, geometry))
        waves.append([[resent._replace(case=f"cold, ends after {length}", hit=0)], [], [resent, longer]])
    return [[question for wave in together for question in wave] for together in zip(*waves, strict=True)]


def _several_boundaries(prompts: Prompts, geometry: Geometry) -> list[QuestionWave]:
    """One request leaves four states; four others, sharing more and more, find one each."""
    unit, block = geometry.alignment, geometry.block
    whole = prompts.tokens(2 * block + unit + 7)
    hints = [2 * unit + 3, block - unit, block + unit + 5, 2 * block]
    kept = [_floor(hint, geometry) for hint in hints]
    found = []
    for shared in (2 * unit + 9, block + 3, block + 2 * unit + 1, 2 * block + 5):
        hit = max(position for position in kept if position + geometry.ahead <= shared)
        found.append(Question(f"one of four, {shared} shared", [*whole[:shared], *prompts.tokens(2)], [], hit))
    return [[Question("four boundaries", whole, hints, 0)], found]


def _burst(prompts: Prompts, geometry: Geometry, size: int) -> list[QuestionWave]:
    """Prompts of all lengths at once, three times: cold, resent, and others with the same beginning."""
    shared = prompts.between(geometry.alignment, 2 * geometry.block)
    prefix = prompts.tokens(shared)

    def siblings(longest: int) -> list[list[int]]:
        return [[*prefix, *prompts.tokens(prompts.between(1, longest))] for _ in range(size)]

    first, second = siblings(geometry.block), siblings(8)
    return [
        [Question(f"burst, cold, {shared} shared", whole, [shared, len(whole) - 1], None) for whole in first],
        [
            Question(f"burst, resent, {len(whole)} tokens", whole, [shared], _floor(len(whole) - 1, geometry))
            for whole in first
        ],
        [Question(f"burst, warm, {shared} shared", whole, [shared], _floor(shared, geometry)) for whole in second],
    ]


def _aligned(prompts: Prompts, geometry: Geometry, quick: bool) -> list[QuestionWave]:
    """Prompts cut only at chunk ends of every kernel, and asked alone: nothing differs but the state's origin."""
    waves = []
    for shared in (SCAN_CHUNK,) if quick else (SCAN_CHUNK, 3 * SCAN_CHUNK):
        prefix = prompts.tokens(shared)
        for case, hit in (("cold", 0), ("warm", _floor(shared, geometry))):
            whole = [*prefix, *prompts.tokens(2)]  # so near the end no further state is kept
            waves.append([Question(f"{case}, {shared} shared, alone", whole, [shared], hit)])
    return waves


def _resend(prompts: Prompts, geometry: Geometry, tenths: Sequence[int]) -> list[QuestionWave]:
    """Identical prompts that end inside their first block: vLLM alone, blind to hints, resumes there too."""
    drawn = [prompts.tokens(geometry.block * share // 10 + 5) for share in tenths]
    again = [Question(f"resent, {len(p)} tokens", p, [len(p) - 1], _floor(len(p) - 1, geometry)) for p in drawn]
    return [[Question(f"cold, {len(p)} tokens", p, [len(p) - 1], 0) for p in drawn], again]


def _for_defect(prompts: Prompts, geometry: Geometry, count: int) -> list[QuestionWave]:
    """Requests that resume from a state with a neighbour one unit earlier."""
    unit = geometry.alignment
    shared = max(8 * unit, 160) // unit * unit
    cold, warm = [], []
    for _ in range(count):
        prefix = prompts.tokens(shared)
        cold.append(Question("cold", [*prefix, *prompts.tokens(2)], [shared - unit, shared], 0))
        warm.append(Question("warm", [*prefix, *prompts.tokens(2)], [shared], _floor(shared, geometry)))
    return [cold, warm]
