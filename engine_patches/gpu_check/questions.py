"""The questions of `seamark gpu-check`: prompts around all edges of states and blocks, and how far each may be cached.

Prompts are random token ids, so two prompts share exactly what they are given to share, and no tokenizer has a say.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine_patches.commands.model import SPECIAL_TOKENS, VOCABULARY

SHARED_LENGTHS = (163, 2000, 8000, 32000)  # tokens that prompts for a user's own model, and timed ones, share
NEW_TOKENS = 32  # greedy tokens of every compared answer
NEAR, FAR = 2, 150  # tokens between a state and the answer
OTHER_STATE, EARLY_STATE = "another prefix's state", "a state one unit early"
SPOILED_STATE = "a cold request's own state spoiled by its writes"
DEFECTS = (OTHER_STATE, EARLY_STATE, SPOILED_STATE)

# Sections; every defect has one more. A few questions prove most, so they come first.
FIRST, MORE, RESEND = "first questions", "more questions", "resent prompts"

Geometry = Mapping[str, Any]  # of an engine's cache and passes, in tokens, as in its facts: `LaneEngine.lengths`


class Question(NamedTuple):
    """One prompt, and how far an engine that keeps all states has seen it before."""

    case: str
    tokens: Sequence[int]
    hints: Sequence[int]  # positions, tokens
    known: int | None  # tokens up to which a state was asked for; None if that depends on the order of requests

    def hit(self, facts: Geometry) -> int | None:
        """Tokens that must come from the cache of an engine with these facts."""
        if self.known is None:
            return None
        ahead, alignment = facts["ahead"], facts["alignment"]
        reach = min(self.known - ahead, len(self.tokens) - max(ahead, 1))  # the last token is always computed
        return int(max(reach, 0) // alignment * alignment)


QuestionWave = list[Question]  # asked at once; waves follow each other
Sections = dict[str, list[QuestionWave]]

TINY_IDS = range(len(SPECIAL_TOKENS), VOCABULARY)  # the token ids that prompts are drawn from


class Prompts:
    """Draws prompts: the same seed and ids, the same prompts."""

    def __init__(self, seed: int, ids: range = TINY_IDS) -> None:
        self._draw, self._ids = random.Random(seed), ids
        self.between = self._draw.randint

    def tokens(self, count: int) -> list[int]:
        return self._draw.choices(self._ids, k=count)


def sections(lengths: Geometry, few: bool) -> Sections:
    """All questions, the most valuable first; the last wave of a defect's section is the one to be asked with it."""
    prompts, unit, block = Prompts(0), lengths["alignment"], lengths["block"]
    edges = _edges(prompts, (block - 1, block, block + 1), (block,))
    asked = {FIRST: [*edges, *_several_boundaries(prompts, lengths), *_burst(prompts, lengths, 3)]}
    asked |= _with_defects(prompts, lengths) | {RESEND: _resend(prompts, lengths)}
    if few:
        return asked
    shared = [unit - 1, unit, unit + 1, 5 * unit + 3, block + 5 * unit + 7]
    shared += [2 * block - 1, 2 * block, 2 * block + 1, lengths["budget"] + unit + 3]
    bursts = [wave for _ in range(2) for wave in _burst(prompts, lengths, 6)]
    return asked | {MORE: [*_edges(prompts, shared, (block - 1, block + 1)), *bursts]}


def length_section(shared: int) -> str:
    return f"{shared:,} shared tokens"


def own_sections(lengths: Geometry, shared_lengths: Sequence[int], ids: range, defects: bool = True) -> Sections:
    """Questions for a user's own model: the shortest shared length, the planted defects, the other lengths."""
    prompts = Prompts(0, ids)
    first, *others = ({length_section(shared): _shared(prompts, shared, 29, 3)} for shared in sorted(shared_lengths))
    for each in ([_with_defects(prompts, lengths)] if defects else []) + others:
        first |= each
    return first


def _shared(prompts: Prompts, shared: int, *ends: int) -> list[QuestionWave]:
    """A cold prompt, warm ones that share a prefix with it and go on for `ends` tokens, and the first of them again."""
    prefix = prompts.tokens(shared)
    warm = [[*prefix, *prompts.tokens(end)] for end in ends]
    return [
        [Question(f"cold, {shared} shared", [*prefix, *prompts.tokens(37)], [shared], 0)],
        [Question(f"warm, {shared} shared", whole, [shared, len(whole) - 1], shared) for whole in warm],
        [Question(f"resent, {len(warm[0])} tokens", warm[0], [shared], len(warm[0]) - 1)],
    ]


def _edges(prompts: Prompts, shared_lengths: Sequence[int], ends: Sequence[int]) -> list[QuestionWave]:
    """Cold, warm and resent prompts around the edges of units, blocks and passes."""
    waves = [_shared(prompts, shared, prompts.between(1, 4), FAR) for shared in shared_lengths]
    for length in ends:
        whole = prompts.tokens(length)
        resent = Question(f"resent, ends after {length}", whole, [length - 1, length], length)
        longer = Question(f"goes on after {length}", [*whole, *prompts.tokens(2)], [length], length)
        waves.append([[resent._replace(case=f"cold, ends after {length}", known=0)], [], [resent, longer]])
    return [[question for wave in together for question in wave] for together in zip(*waves, strict=True)]


def _several_boundaries(prompts: Prompts, lengths: Geometry) -> list[QuestionWave]:
    """One request leaves four states; four others, sharing more and more, find one each."""
    unit, block = lengths["alignment"], lengths["block"]
    whole = prompts.tokens(2 * block + unit + 7)
    hints = [2 * unit + 3, block - unit, block + unit + 5, 2 * block]
    found = []
    for shared in (2 * unit + 9, block + 3, block + 2 * unit + 1, 2 * block + 5):
        last = max(hint for hint in hints if hint <= shared)
        found.append(Question(f"one of four, {shared} shared", [*whole[:shared], *prompts.tokens(2)], [], last))
    return [[Question("four boundaries", whole, hints, 0)], found]


def _burst(prompts: Prompts, lengths: Geometry, size: int) -> list[QuestionWave]:
    """Prompts of all lengths at once, three times: cold, resent, and others with the same beginning."""
    shared = prompts.between(lengths["alignment"], 2 * lengths["block"])
    prefix = prompts.tokens(shared)
    first, second = (
        [[*prefix, *prompts.tokens(prompts.between(1, longest))] for _ in range(size)]
        for longest in (lengths["block"], 8)
    )
    return [
        [Question(f"burst, cold, {shared} shared", whole, [shared, len(whole) - 1], None) for whole in first],
        [Question(f"burst, resent, {len(whole)} tokens", whole, [shared], len(whole) - 1) for whole in first],
        [Question(f"burst, warm, {shared} shared", whole, [shared], shared) for whole in second],
    ]


def _resend(prompts: Prompts, lengths: Geometry) -> list[QuestionWave]:
    """Identical prompts that end inside their first block: vLLM alone, blind to hints, resumes there too."""
    drawn = [prompts.tokens(lengths["block"] * tenths // 10 + 5) for tenths in (3, 5, 7, 9)]
    cold = [Question(f"{len(p)} tokens", p, [len(p) - 1], 0) for p in drawn]
    return [cold, [question._replace(known=len(question.tokens) - 1) for question in cold]]


def _with_defects(prompts: Prompts, lengths: Geometry) -> Sections:
    """Requests that resume from a state with a neighbour one unit earlier, and cold ones that write states."""
    shared = max(8 * lengths["alignment"], 160) // lengths["alignment"] * lengths["alignment"]
    asked: Sections = {}
    for defect in DEFECTS:
        prefixes, hints = [prompts.tokens(shared) for _ in range(2)], [shared - lengths["alignment"], shared]
        far = [Question(f"{FAR} tokens on", [*each, *prompts.tokens(FAR)], [shared], shared) for each in prefixes]
        if defect == SPOILED_STATE:
            asked[defect] = [[question._replace(known=0) for question in far]]
            continue
        near = [Question(f"{NEAR} tokens on", [*each, *prompts.tokens(NEAR)], [shared], shared) for each in prefixes]
        asked[defect] = [[Question("cold", [*each, *prompts.tokens(NEAR)], hints, 0) for each in prefixes], near + far]
    return asked
