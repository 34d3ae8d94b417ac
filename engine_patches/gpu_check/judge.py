"""How `seamark gpu-check` judges: answers against vLLM alone without its cache, hits and passes against those expected.

In float32 on a CPU an answer is exact or wrong. Elsewhere rounding depends on what else is in a batch, and on where a
prompt is cut, with or without a cache. So within a small fixed bound answers are right; beyond it they are wrong only
if they differ clearly more than vLLM alone differs from itself. What lies between proves nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from engine_patches.answers import Discrepancy, compare
from engine_patches.gpu_check.engine import COLD, WARM, CheckedAnswer, LaneResult
from engine_patches.gpu_check.lanes import DEFECTS, RESEND, SPOILED_STATE

OK, WRONG, NOT_RUN, LEFT_OUT = "ok", "WRONG", "not run", "left out"
EXACTNESS = "exactness, "  # the beginning of checks' names

# Logprobs that may be off: a logit between 8 and 16 has steps of .06 in bfloat16.
EXACT, ROUNDED = 1e-4, 0.25
SAVING = 1.05  # times as fast as vLLM alone: less is noise
BEYOND = 2.0  # times the scatter, which is a sample: more is clearly beyond it
FEW = 3  # answers beyond the bound that prove nothing yet

# Of an engine's facts, those that both engines of a lane must have in common, and those on the screen.
SAME = ("runner", "dtype", "backends", "gdn_prefill")
TOLD: tuple[str, ...] = ("device", "machine", "capability", "driver", "cuda", "torch", "vllm", "compiled", "graphs")
TOLD += ("asynchronous", *SAME, "block", "match_unit", "alignment")


class Check(NamedTuple):
    name: str
    verdict: str
    says: str
    numbers: dict[str, Any] | None = None


class Differences(list[Discrepancy]):
    def __init__(self, answers: Iterable[CheckedAnswer], reference: Iterable[CheckedAnswer]) -> None:
        super().__init__(compare(answer, wanted) for answer, wanted in zip(answers, reference, strict=True))

    @property
    def numbers(self) -> dict[str, float]:
        """How many answers have another token, and how far logprobs are off."""
        parted, error = sum(each.token is not None for each in self), max((each.error for each in self), default=0.0)
        return {"answers": len(self), "other_tokens": parted, "error": error}

    def beyond(self, bound: float) -> int:
        return sum(difference.error > bound for difference in self)

    def __str__(self) -> str:
        said = "{other_tokens} of {answers} answers with another token, logprobs off by {error:.2g}"
        return said.format(**self.numbers)


class Scatter:
    def __init__(self, alone: LaneResult) -> None:
        self.bound = EXACT if alone.facts["exact"] else ROUNDED
        self.own = Differences([], [])
        for name, again in alone.answers_again.items():
            self.own += Differences(again, alone.answers[name])

    def verdict(self, differences: Differences) -> str:
        beyond, far = differences.beyond(self.bound), BEYOND * max(self.bound, self.own.numbers["error"])
        if not beyond:
            return OK
        usual = self.own.beyond(self.bound) / max(len(self.own), 1)
        many = beyond > BEYOND * usual * len(differences) + FEW
        return WRONG if self.bound == EXACT or many or differences.beyond(far) else NOT_RUN

    def __str__(self) -> str:
        itself = f"vLLM alone differs from itself so: {self.own}; " if self.own else ""
        return f"{itself}the bound is {self.bound:g}"


def checks(lane: str, mine: LaneResult, alone: LaneResult, own_model: bool, over: bool) -> Iterator[Check]:
    """All that is known so far of the engine with the patches; `over`: no more will be."""
    scatter, fit = Scatter(alone), environment(lane, mine.facts, alone.facts, own_model)
    yield fit
    if fit.verdict == NOT_RUN:  # nothing can be compared
        return
    for name in (name for name in mine.answers if name not in DEFECTS):
        yield exactness(f"{EXACTNESS}{name}, {lane}", name, mine, alone, scatter, own_model)
    planted = [name for name in DEFECTS if name in alone.answers]
    if planted and mine.answers and (over or mine.answers.keys() >= {*planted}):
        yield sight(lane, mine, alone, scatter)
    if mine.passes:
        yield passes(lane, mine, alone)
    if mine.pace or (over and mine.first_tokens):
        yield speed(lane, mine, alone)


def exactness(
    check: str, name: str, mine: LaneResult, alone: LaneResult, scatter: Scatter, own_model: bool = False
) -> Check:
    """Answers of a section beside the reference's, and their hits.

    A hit that is missing on a user's own model, as where the cache has no room for a state, proves nothing.
    """
    questions, answers = [question for wave in mine.sections[name] for question in wave], mine.answers[name]
    differences = Differences(answers, alone.answers[name])
    # vLLM 0.32 drops a unit for the groups of a head that it looks up: beside a window a hit may be longer.
    is_owed = operator.ge if mine.facts["windows"] else operator.eq
    missed, wrong = [], []
    for question, answer, difference in zip(questions, answers, differences, strict=True):
        hit = question.hit(mine.facts)
        if hit is not None and not is_owed(answer.cached, hit):
            missed.append(f"{question.case}: {answer.cached} tokens from the cache instead of {hit}")
        if difference.error > scatter.bound:
            wrong.append(f"{question.case}: token {difference.token}, logprobs off by {difference.error:.2g}")
    verdict, hits = scatter.verdict(differences), sum(bool(answer.cached) for answer in answers)
    says = f"{hits} from the cache; {differences}"
    if verdict != OK or scatter.bound != EXACT:
        says += f"; {scatter}"
    if verdict == NOT_RUN:
        says = f"not proven, since vLLM alone is no steadier: {says}"
    elif missed and verdict == OK:
        verdict = NOT_RUN if own_model else WRONG
    if faults := [*missed, *wrong]:
        says += f"; {len(missed)} wrong hits, {len(wrong)} answers beyond the bound: {'; '.join(faults[:3])}"
    numbers = {"seamark": differences.numbers, "vllm_alone": scatter.own.numbers, "bound": scatter.bound}
    return Check(check, verdict, says, {**numbers, "from_cache": hits, "wrong_hits": missed, "wrong_answers": wrong})


def sight(lane: str, mine: LaneResult, alone: LaneResult, scatter: Scatter) -> Check:
    """Whether the planted defects would have been called WRONG, and how far they are off behind how many tokens."""
    numbers: dict[str, dict[str, float]] = {}
    unseen = []
    # Only writes inside a pass can spoil what it goes on from.
    wanted = [name for name in DEFECTS if mine.facts["writes_in_forward"] or name != SPOILED_STATE]
    for name in (name for name in wanted if name in mine.answers):
        asked, errors = mine.sections[name][-1], numbers.setdefault(name, {})
        spoiled = Differences(mine.answers[name][-len(asked) :], alone.answers[name][-len(asked) :])
        for question, difference in zip(asked, spoiled, strict=True):
            errors[question.case] = max(difference.error, errors.get(question.case, 0.0))
        unseen += [name] if scatter.verdict(spoiled) != WRONG else []
    off = {name: ", ".join(f"{error:.2g} {case}" for case, error in each.items()) for name, each in numbers.items()}
    told = "; ".join(f"{name} is off by {errors}" for name, errors in off.items())
    verdict, says = OK, f"planted defects noticed: {told}"
    if unseen:
        verdict, says = NOT_RUN, f"the check cannot see: not noticed: {', '.join(unseen)} ({told}); {scatter}"
    elif len(numbers) < len(wanted):
        verdict, says = NOT_RUN, f"no time was left to plant all defects (more with --minutes); {says}"
    return Check(f"the check can see, {lane}", verdict, says, numbers)


def passes(lane: str, mine: LaneResult, alone: LaneResult) -> Check:
    """The patched engine takes no pass more than its tokens need; states that are not written inside one take more."""
    says, numbers = [], {}
    for engine, counted in (("Seamark", mine.passes), ("vLLM alone", alone.passes)):
        pairs = zip(counted[::2], counted[1::2], strict=True)
        told = [f"{cold.passes} / {warm.passes} of {warm.tokens} tokens ({warm.cached} cached)" for cold, warm in pairs]
        says.append(f"{engine} {', '.join(told)}")
        numbers[engine] = [each._asdict() for each in counted]
    needed = [math.ceil((each.tokens - each.cached) / mine.facts["budget"]) for each in mine.passes]
    right = all(each.passes <= least for each, least in zip(mine.passes, needed, strict=True))
    right = right or not mine.facts["writes_in_forward"]
    return Check(f"forward passes, {lane}", OK if right else WRONG, f"cold / warm: {'; '.join(says)}", numbers)


def block_copy(lane: str, mine: LaneResult, alone: LaneResult) -> Check:
    """Whether vLLM's own copy of a partial block loses a part of it here; wrong only if the cure fails too."""
    scatter = Scatter(alone)
    cured = exactness("", RESEND, mine, alone, scatter).verdict
    resumed = [pair for pair in zip(alone.from_cache, alone.answers[RESEND], strict=False) if pair[0].cached]
    bad = sum(compare(*pair).error > scatter.bound for pair in resumed)
    says = f"vLLM alone gives {bad} of {len(resumed)} resent answers wrong; with the patches: {cured}"
    numbers = {"untouched_wrong": bad, "resent": len(resumed), "cured": cured}
    return Check(f"block copy, {lane}", cured if resumed else NOT_RUN, says, numbers)


def speed(lane: str, mine: LaneResult, alone: LaneResult) -> Check:
    """Seamark beside vLLM alone, for the record: speed is never wrong. Ratios above 1 are in its favour."""
    theirs = {(each.case, each.tokens): each for each in alone.first_tokens}
    pairs = [(each, theirs[each.case, each.tokens]) for each in mine.first_tokens if (each.case, each.tokens) in theirs]
    prices: dict[int, dict[str, float]] = {}
    says = ["vLLM alone / with Seamark, until the last first token"]
    numbers: dict[str, Any] = {"state_seconds": prices}
    for each, other in pairs:
        ratio = other.seconds / each.seconds
        if each.case == COLD and not each.hints:
            none, one, *_, most = cold = [c for c in mine.first_tokens if (c.case, c.tokens) == (COLD, each.tokens)]
            first, further = one.seconds - none.seconds, (most.seconds - one.seconds) / max(most.states - one.states, 1)
            prices[each.tokens] = {"first": first, "further": further}
            told = ", ".join(f"{_ms(c.seconds)} with {c.states or 'no'} states" for c in cold)
            cost = f"the first state {_ms(first)}, each further one {_ms(further)}"
            says.append(f"{each.tokens:,} cold tokens: {_ms(other.seconds)} / {told} ({cost})")
        elif each.case != COLD:
            found = f"{other.cached:,} / {each.cached:,} cached, {other.passes} / {each.passes} passes"
            took = f"{_ms(other.seconds)} / {_ms(each.seconds)} ({ratio:.2f}x; {found})"
            says.append(f"{each.case} behind {each.tokens:,} tokens: {took}")
        if each.case == WARM:  # the longest prefix comes last
            saves = bool(each.cached) and ratio >= SAVING
            numbers |= {"hits_save_time": saves, "warm_shared": each.tokens, "warm_ratio": ratio}
    if mine.pace and alone.pace:
        decode = alone.pace["decode"] / mine.pace["decode"]
        says.append(f"decode: {_ms(alone.pace['decode'])} / {_ms(mine.pace['decode'])} a token ({decode:.2f}x)")
        known = f"{_ms(mine.pace['floor'])} a pass and {_ms(mine.pace['token'])} a token"
        says.append(f"pace learnt: {known if mine.pace['token'] else 'not yet known'}")
        numbers |= {"decode_ratio": decode, "pace": mine.pace}
    if "hits_save_time" in numbers:
        says.append(f"hits {'save' if numbers['hits_save_time'] else 'do not save'} time here")
    for name, result in (("alone", alone), ("seamark", mine)):
        numbers[name] = [each._asdict() for each in result.first_tokens]
    return Check(f"speed, {lane}", OK, "; ".join(says), numbers)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def environment(lane: str, facts: dict[str, Any], alone: Mapping[str, Any], own_model: bool) -> Check:
    """What runs here, and whether the patches are live; an own model may be of a family whose states cost passes."""
    told = [f"{name.replace('_', ' ')} {facts[name]}" for name in TOLD if facts.get(name) not in (None, [])]
    verdict, says = OK, "the patches are live, states are written inside the pass"
    others = [f"{name.replace('_', ' ')} {alone[name]}" for name in SAME if alone[name] != facts[name]]
    if not facts["patches_live"]:
        verdict, says = WRONG, 'the patches are not live: run "pip install --no-deps /path/to/seamark" in this '
        says += "environment, and read the lines with seamark in the engine's log"
    elif facts["hints_refused"]:
        verdict, says = NOT_RUN, f"hints are refused: {facts['hints_refused']}"
    elif others:
        verdict, says = NOT_RUN, f"vLLM alone ran another way, so nothing can be compared: {', '.join(others)}"
    elif not facts["writes_in_forward"]:
        verdict = OK if own_model else WRONG
        says = "the patches are live, but states are not written inside the pass: each costs a pass of its own"
    return Check(f"environment, {lane}", verdict, ", ".join([*told, says]), facts)
