"""How `seamark gpu-check` judges: answers against a reference engine's, hits and passes against the expected ones.

In float32 on a CPU an answer is exact or wrong. Elsewhere rounding depends on what else is in a batch, and in kernels
that scan in chunks also on where a prompt is cut, with or without a cache. The measure there is the reference engine's
own scatter: how its answers differ when it is asked a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engine_patches.gpu_check.engine import Answer
from engine_patches.gpu_check.job import Result
from engine_patches.gpu_check.questions import ALIGNED, DEFECTS, EXACT, RESEND, Question
from engine_patches.gpu_check.speed import WARM, FirstTokens, Passes

OK, WRONG, NOT_RUN, LEFT_OUT = "ok", "WRONG", "not run", "left out"

EXACTNESS, SPEED, BLOCK_COPY = "exactness, ", "speed, ", "block copy, "  # the beginnings of checks' names

SAVING = 1.05  # times as fast as vLLM alone: less is noise

STRICT_BOUND = 1e-4  # of a logprob

TIE = 0.1  # logprob by which the reference may prefer its own token to the one that rounding chose

LOOSE_SHARE = 0.01  # of answers that may take the other side of a tie

# The scatter is a sample, so differences may exceed it by this factor.
SCATTER = 2.0


class Check(NamedTuple):
    """One line of the report."""

    name: str
    verdict: str
    says: str
    numbers: dict[str, Any] | None = None


class Difference(NamedTuple):
    """How an answer differs from the reference's."""

    token: int | None  # index of the first token that differs
    tie: float  # logprob by which the reference prefers its own token there, 0 if no token differs
    error: float  # largest difference of a logprob, up to and including that token


class Rule(NamedTuple):
    """What still counts as the same answer."""

    error: float = STRICT_BOUND
    tie: float = 0.0
    share: float = 0.0  # of the answers that may have another token

    def accepts(self, difference: Difference) -> bool:
        """Whether this one answer may pass."""
        return difference.error <= self.error and (difference.token is None or difference.tie < self.tie)

    def accepts_all(self, differences: Sequence[Difference]) -> bool:
        """Whether these answers may pass together."""
        return all(map(self.accepts, differences)) and _parted(differences) <= self.share * len(differences)


STRICT = Rule()


def compare(answer: Answer, reference: Answer) -> Difference:
    """How `answer` differs from the reference's, which has the same length."""
    error = 0.0
    steps = zip(answer.tokens, answer.top, reference.tokens, reference.top, strict=True)
    for index, (token, top, wanted, wanted_top) in enumerate(steps):
        error = max(error, _error(top, wanted_top))
        if token != wanted:
            return Difference(index, wanted_top[wanted] - wanted_top.get(token, -math.inf), error)
    return Difference(None, 0.0, error)


def _error(top: Mapping[int, float], wanted: Mapping[int, float]) -> float:
    """The largest difference of a logprob; a token that one side does not name is at most as likely as its last."""
    last, wanted_last = min(top.values()), min(wanted.values())
    both = top.keys() & wanted.keys()
    errors = [abs(top[token] - wanted[token]) for token in both]
    errors += [top[token] - wanted_last for token in top.keys() - both]
    errors += [wanted[token] - last for token in wanted.keys() - both]
    return max(errors)


def compare_all(answers: Iterable[Answer], reference: Iterable[Answer]) -> list[Difference]:
    """`compare` for each pair."""
    return [compare(answer, wanted) for answer, wanted in zip(answers, reference, strict=True)]


def rule_from(reference: Result) -> Rule:
    """The rule for kernels that round: the reference, without any cache, against itself asked a second time."""
    sections = reference.answers.items()
    own = [each for name, answers in sections for each in compare_all(reference.answers_again[name], answers)]
    return Rule(
        error=max(TIE, SCATTER * max(difference.error for difference in own)),
        tie=max(TIE, SCATTER * max(difference.tie for difference in own)),
        share=min(1.0, max(LOOSE_SHARE, SCATTER * _parted(own) / len(own))),
    )


def _parted(differences: Sequence[Difference]) -> int:
    return sum(difference.token is not None for difference in differences)


def judge_answers(lane: str, patched: Result, reference: Result, rule: Rule, own_model: bool = False) -> list[Check]:
    """Exactness, the chunk-aligned case on its own, and whether the planted defects are noticed.

    Only answers that are not the reference's are wrong on a user's own model. A hit that is missing there, as where
    the cache has no room for a state, and a planted defect that the model does not show, prove nothing either way.
    """
    asked = {name: [q for wave in waves for q in wave] for name, waves in patched.sections.items()}
    both = [name for name in patched.answers if name in reference.answers]
    differences = {name: compare_all(patched.answers[name], reference.answers[name]) for name in both}
    exact = [name for name in both if name.startswith(EXACT) or name == RESEND]

    def exactness(name: str, names: Sequence[str]) -> Check:
        questions = [question for each in names for question in asked[each]]
        answers = [answer for each in names for answer in patched.answers[each]]
        found = [difference for each in names for difference in differences[each]]
        return _exactness(name, questions, answers, found, rule, NOT_RUN if own_model else WRONG)

    checks = [exactness(EXACTNESS + lane, exact)]
    if ALIGNED in both:
        checks.append(exactness(f"chunk-aligned, {lane}", [ALIGNED]))
    warm = {defect: differences[defect][len(asked[defect]) // 2 :] for defect in DEFECTS if defect in both}
    unseen = [defect for defect, found in warm.items() if rule.accepts_all(found)]
    largest = {defect: max(difference.error for difference in found) for defect, found in warm.items()}
    errors = ", ".join(f"{defect} is off by {error:.2g}" for defect, error in largest.items())
    says = f"planted defects noticed: {errors}"
    verdict = OK
    if unseen:
        says = f"planted defects not noticed: {', '.join(unseen)} ({errors})"
        verdict = NOT_RUN if own_model else WRONG
    if len(warm) < len(DEFECTS):
        says, verdict = "no time was left to plant defects (more with --minutes)", NOT_RUN
    checks.append(Check(f"the check can see, {lane}", verdict, says, largest))
    return checks


def _exactness(
    name: str,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    differences: Sequence[Difference],
    rule: Rule,
    missed_verdict: str,
) -> Check:
    missed = [
        f"{question.case}: {answer.cached} tokens from the cache instead of {question.hit}"
        for question, answer in zip(questions, answers, strict=True)
        if question.hit is not None and answer.cached != question.hit
    ]
    wrong = [
        f"{question.case}: {_description(difference)}"
        for question, difference in zip(questions, differences, strict=True)
        if not rule.accepts(difference)
    ]
    parted = _parted(differences)
    error = max(difference.error for difference in differences)
    says = (
        f"{len(answers)} answers of {len(answers[0].tokens)} tokens, {sum(bool(a.cached) for a in answers)} from the "
        f"cache; {parted} with another token, logprobs off by {error:.1e} at most"
    )
    if rule is not STRICT:
        ties = max(difference.tie for difference in differences)
        says += f" ({'bit-equal' if error == 0 else f'ties of {ties:.2g}' if parted else 'same tokens'}; by the "
        says += f"reference's own scatter, {int(rule.share * len(answers))} may have another token at ties below "
        says += f"{rule.tie:.2g}, and logprobs may differ by {rule.error:.2g})"
    faults = missed + wrong
    if faults:
        says += f"; {len(missed)} wrong hits, {len(wrong)} wrong answers: " + "; ".join(faults[:3])
    numbers = {
        "answers": len(answers),
        "from_cache": sum(bool(answer.cached) for answer in answers),
        "other_tokens": parted,
        "largest_logprob_error": error,
        "wrong_hits": missed,
        "wrong_answers": wrong,
        "rule": rule._asdict(),
    }
    verdict = WRONG if not rule.accepts_all(differences) else missed_verdict if missed else OK
    return Check(name, verdict, says, numbers)


def _description(difference: Difference) -> str:
    if difference.token is None:
        return f"logprobs off by {difference.error:.2g}"
    return (
        f"token {difference.token} differs, and the reference prefers its own by {difference.tie:.2g}; "
        f"logprobs off by {difference.error:.2g}"
    )


def judge_passes(lane: str, results: dict[str, Result]) -> Check:
    """The patched engine, the first of `results`, takes no pass more than its tokens need; the others stand beside it.

    Where states are not written inside a pass, each costs one of its own: then the passes are only told.
    """
    says = "cold / warm: " + "; ".join(f"{engine} {_passes(result.passes)}" for engine, result in results.items())
    first = next(iter(results.values()))
    free = first.facts.get("writes_in_forward", True)
    right = bool(first.passes) and all(each.passes <= each.needed for each in first.passes)
    verdict = OK if right or not free else WRONG
    numbers = {engine: [each._asdict() for each in result.passes] for engine, result in results.items()}
    return Check(f"forward passes, {lane}", verdict, says, numbers)


def _passes(passes: Sequence[Passes]) -> str:
    pairs = zip(passes[::2], passes[1::2], strict=True)
    return ", ".join(
        f"{cold.passes} / {warm.passes} for {cold.prompt} tokens ({warm.cached} cached)" for cold, warm in pairs
    )


def judge_block_copy(lane: str, untouched: Result, patched: Result, reference: Result, rule: Rule) -> Check:
    """Whether vLLM's own copy of a partial block loses a part of it here; wrong only if the cure fails too."""
    alone = compare_all(untouched.answers[RESEND], reference.answers[RESEND])
    cured = compare_all(patched.answers[RESEND], reference.answers[RESEND])
    pages = untouched.facts["pages_at_one_address"]
    layout = (
        f"caches with pages of {' and '.join(map(str, pages))} bytes start at one address"
        if pages
        else "no two caches with different pages start at one address"
    )
    bad = sum(not rule.accepts(difference) for difference in alone)
    hits = sum(bool(answer.cached) for answer in untouched.answers[RESEND])
    effect = f"{bad} of {hits} resent answers wrong" if bad else f"all {hits} resent answers right"
    works = rule.accepts_all(cured)
    says = f"vLLM alone gives {effect}; with the patches they are {'right' if works else 'WRONG'}; {layout}"
    numbers = {"untouched_wrong": bad, "resent": hits, "pages_at_one_address": pages, "cured": works}
    return Check(BLOCK_COPY + lane, OK if works and hits else WRONG, says, numbers)


def judge_speed(lane: str, mine: Result, alone: Result, name: str) -> Check:
    """Seamark beside vLLM alone (`name`), for the record: speed is never wrong. Ratios above 1 are in its favour."""
    theirs = {(each.case, each.shared): each for each in alone.first_tokens}
    pairs = [(each, theirs[each.case, each.shared]) for each in mine.first_tokens if (each.case, each.shared) in theirs]
    lengths = sorted({each.shared for each, _ in pairs})
    says = [f"{name} / with Seamark, until the last first token"]
    for shared in lengths:
        cases = [_beside(each, other) for each, other in pairs if each.shared == shared]
        says.append(f"{shared:,} shared tokens: " + ", ".join(cases))
    numbers: dict[str, Any] = {
        "alone": [each._asdict() for each in alone.first_tokens],
        "seamark": [each._asdict() for each in mine.first_tokens],
        "ratios": {f"{each.case}, {each.shared}": other.seconds / each.seconds for each, other in pairs},
    }
    if mine.pace is not None and alone.pace is not None:
        decode = alone.pace.decode / mine.pace.decode
        says.append(f"decode: {_ms(alone.pace.decode)} / {_ms(mine.pace.decode)} a token ({decode:.2f}x)")
        numbers |= {"decode_ratio": decode, "pace_alone": alone.pace._asdict()}
    if mine.pace is not None:
        learnt = "not yet known"
        state = _ms(mine.pace.state) if mine.pace.state > 0 else "too little to measure"
        if mine.pace.token:
            learnt = f"{_ms(mine.pace.floor)} a pass and {_ms(mine.pace.token)} a token"
        says.append(f"pace learnt: {learnt}; a state written inside a pass: {state}")
        numbers["pace"] = mine.pace._asdict()
    warm = next(((each, other) for each, other in reversed(pairs) if each.case == WARM), None)
    if warm is not None:
        each, other = warm
        ratio = other.seconds / each.seconds
        saves = bool(each.cached) and ratio >= SAVING
        verb = "save" if saves else "do not save"
        numbers |= {"hits_save_time": saves, "warm_shared": each.shared, "warm_ratio": ratio}
        says.append(f"hits {verb} time here")
    return Check(SPEED + lane, OK, "; ".join(says), numbers)


def _beside(mine: FirstTokens, alone: FirstTokens) -> str:
    return (
        f"{mine.case} {_ms(alone.seconds)} / {_ms(mine.seconds)} ({alone.seconds / mine.seconds:.2f}x; "
        f"{alone.cached:,} / {mine.cached:,} cached, {alone.passes} / {mine.passes} passes)"
    )


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def judge_environment(lane: str, facts: dict[str, Any], own_model: bool = False) -> Check:
    """What runs here, and whether the patches are live; an own model may be of a family whose states cost passes."""
    parts = [
        facts["device"],
        facts["machine"],
        facts["capability"],
        facts["driver"] and f"driver {facts['driver']}",
        facts["cuda"] and f"CUDA {facts['cuda']}",
        f"torch {facts['torch']}",
        f"vLLM {facts['vllm']}",
        f"model runner {facts['runner']}",
        f"compiled {facts['compiled']}, CUDA graphs {facts['graphs']}" if facts["device"] != "CPU" else None,
        "asynchronous scheduling" if facts["asynchronous"] else "synchronous scheduling",
        f"attention {', '.join(facts['backends'])}",
        facts["gdn_prefill"] and f"GDN prefill {', '.join(facts['gdn_prefill'])}",
        f"cache block {facts['block']}, match unit {facts['match_unit']}, states every {facts['alignment']} tokens",
    ]
    if not facts["recurrent"]:
        verdict = "the model has no recurrent layers, so the patches have nothing to do"
    elif not facts["patches_live"]:
        verdict = (
            'the patches are not live: run "pip install --no-deps /path/to/seamark" in this environment, and read the '
            "lines with seamark in the engine's log"
        )
    elif not facts["writes_in_forward"]:
        verdict = "the patches are live, but states are not written inside the pass: each costs a pass of its own"
    else:
        verdict = "the patches are live, states are written inside the pass"
    fine = facts["patches_live"] and (facts["writes_in_forward"] or own_model)
    fine = fine or not facts["recurrent"]
    return Check(f"environment, {lane}", OK if fine else WRONG, ", ".join([*filter(None, parts), verdict]), facts)
