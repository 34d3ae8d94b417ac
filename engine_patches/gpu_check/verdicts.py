"""How `seamark gpu-check` judges: answers against a reference engine's, hits and passes against the expected ones.

In float32 on a CPU an answer is exact or wrong. Elsewhere rounding depends on what else is in a batch, and in kernels
that scan in chunks also on where a prompt is cut, with or without a cache. The measure there is the reference engine's
own scatter: how its answers differ when it is asked a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engine_patches.gpu_check.engine import Answer, Passes, Result, Timing
from engine_patches.gpu_check.questions import ALIGNED, DEFECTS, EXACT, RESEND, Question

OK, WRONG, NOT_RUN = "ok", "WRONG", "not run"

EXACTNESS = "exactness, "  # the beginning of a check's name

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


def judge_answers(lane: str, patched: Result, reference: Result, rule: Rule) -> list[Check]:
    """Exactness, the chunk-aligned case on its own, and whether the planted defects are noticed."""
    asked = {name: [q for wave in waves for q in wave] for name, waves in patched.sections.items()}
    differences = {name: compare_all(patched.answers[name], reference.answers[name]) for name in patched.answers}
    questions = asked[EXACT] + asked[RESEND]
    answers = patched.answers[EXACT] + patched.answers[RESEND]
    checks = [_exactness(EXACTNESS + lane, questions, answers, differences[EXACT] + differences[RESEND], rule)]
    aligned = _exactness(f"chunk-aligned, {lane}", asked[ALIGNED], patched.answers[ALIGNED], differences[ALIGNED], rule)
    checks.append(aligned)
    warm = {defect: differences[defect][len(asked[defect]) // 2 :] for defect in DEFECTS if defect in differences}
    unseen = [defect for defect, found in warm.items() if rule.accepts_all(found)]
    largest = {defect: max(difference.error for difference in found) for defect, found in warm.items()}
    errors = ", ".join(f"{defect} is off by {error:.2g}" for defect, error in largest.items())
    says = f"planted defects noticed: {errors}"
    if unseen:
        says = f"planted defects not noticed: {', '.join(unseen)} ({errors})"
    checks.append(Check(f"the check can see, {lane}", WRONG if unseen else OK, says, largest))
    return checks


def _exactness(
    name: str, questions: Sequence[Question], answers: Sequence[Answer], differences: Sequence[Difference], rule: Rule
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
    return Check(name, OK if not missed and rule.accepts_all(differences) else WRONG, says, numbers)


def _description(difference: Difference) -> str:
    if difference.token is None:
        return f"logprobs off by {difference.error:.2g}"
    return (
        f"token {difference.token} differs, and the reference prefers its own by {difference.tie:.2g}; "
        f"logprobs off by {difference.error:.2g}"
    )


def judge_passes(lane: str, results: dict[str, Result]) -> Check:
    """The patched engine, the first of `results`, takes one pass for every prompt; the others stand beside it."""
    says = "cold / warm: " + "; ".join(f"{engine} {_passes(result.passes)}" for engine, result in results.items())
    patched = next(iter(results.values())).passes
    verdict = OK if patched and all(each.passes == 1 for each in patched) else WRONG
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
    return Check(f"block copy, {lane}", OK if works and hits else WRONG, says, numbers)


def timing_check(lane: str, timing: Timing) -> Check:
    """Numbers for the record; they cannot fail."""
    says = (
        f"a pass takes {_ms(timing.decode_pass)}, a further prompt token {_ms(timing.prompt_token)}; first token of "
        f"{timing.prompt} tokens {_ms(timing.first_token_cold)} cold, {_ms(timing.first_token_warm)} warm; "
        f"a state written inside the pass {_ms(timing.state)}"
    )
    return Check(f"timing, {lane}", OK, says, timing._asdict())


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def judge_environment(lane: str, facts: dict[str, Any]) -> Check:
    """What runs here, and whether the patches are live."""
    parts = [
        facts["device"],
        facts["machine"],
        facts["capability"],
        facts["driver"] and f"driver {facts['driver']}",
        facts["cuda"] and f"CUDA {facts['cuda']}",
        f"torch {facts['torch']}",
        f"vLLM {facts['vllm']}",
        f"model runner {facts['runner']}",
        f"attention {', '.join(facts['backends'])}",
        facts["gdn_prefill"] and f"GDN prefill {', '.join(facts['gdn_prefill'])}",
        f"cache block {facts['block']}, match unit {facts['match_unit']}, states every {facts['alignment']} tokens",
    ]
    if not facts["patches_live"]:
        verdict = (
            'the patches are not live: run "pip install --no-deps vllm-seamark" in this environment, and read the '
            "lines with seamark in the engine's log"
        )
    elif not facts["writes_in_forward"]:
        verdict = "the patches are live, but states are not written inside the pass: each costs a pass of its own"
    else:
        verdict = "the patches are live, states are written inside the pass"
    fine = facts["patches_live"] and facts["writes_in_forward"]
    return Check(f"environment, {lane}", OK if fine else WRONG, ", ".join([*filter(None, parts), verdict]), facts)
