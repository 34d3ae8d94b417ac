"""How `seamark gpu-check` judges: answers against a reference engine's, hits and passes against the expected ones.

In float32 on a CPU an answer is exact or wrong. Elsewhere rounding depends on what else is in a batch, and in kernels
that scan in chunks also on where a prompt is cut, with or without a cache. The measure there is the reference engine's
own scatter: how its answers differ when it is asked a second time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine_patches.gpu_check.draft_oracle import place_of
from engine_patches.gpu_check.engine import CheckedAnswer
from engine_patches.gpu_check.job import LaneResult
from engine_patches.gpu_check.questions import ALIGNED, DEFECTS, EXACT, NEW_TOKENS, RESEND, ROW_DEFECTS
from engine_patches.gpu_check.speed import WARM, FirstTokens, LanePasses

OK, WRONG, NOT_RUN, LEFT_OUT = "ok", "WRONG", "not run", "left out"

# The beginnings of checks' names.
EXACTNESS, SPEED, BLOCK_COPY, DRAFTS_ALONE = "exactness, ", "speed, ", "block copy, ", "vLLM alone with drafts, "

VLLM_ITSELF = "vLLM itself answers otherwise with drafts here"

SAVING = 1.05  # times as fast as vLLM alone: less is noise

STRICT_BOUND = 1e-4  # of a logprob

TIE = 0.1  # logprob by which the reference may prefer its own token to the one that rounding chose

LOOSE_SHARE = 0.01  # of answers that may take the other side of a tie

SCATTER = 2.0  # the scatter is a sample, so differences may exceed it by this factor

# Of an engine's facts, those on the screen.
TOLD = (
    *("device", "machine", "capability", "driver", "cuda", "torch", "vllm", "runner", "compiled", "graphs"),
    *("asynchronous", "backends", "gdn_prefill", "block", "match_unit", "alignment"),
)

# By which the share of right drafts may be lower: rounding takes some answers elsewhere, and the drafts with them.
ACCEPTANCE_NOISE = 0.05

BEHIND_HITS = 0.95  # of the drafts that are right without a cache, behind hits, where nothing rounds


class Check(NamedTuple):
    """One line of the report."""

    name: str
    verdict: str
    says: str
    numbers: dict[str, Any] | None = None


class Discrepancy(NamedTuple):
    """How an answer differs from the reference's."""

    token: int | None  # index of the first token that differs
    tie: float  # logprob by which the reference prefers its own token there, 0 if no token differs
    error: float  # largest difference of a logprob, up to and including that token

    def __str__(self) -> str:
        logprobs = f"logprobs off by {self.error:.2g}"
        if self.token is None:
            return logprobs
        return f"token {self.token} differs, and the reference prefers its own by {self.tie:.2g}; {logprobs}"


class JudgeRule(NamedTuple):
    """What still counts as the same answer."""

    error: float = STRICT_BOUND
    tie: float = 0.0
    share: float = 0.0  # of the answers that may have another token

    def accepts(self, difference: Discrepancy) -> bool:
        """Whether this one answer may pass."""
        return difference.error <= self.error and (difference.token is None or difference.tie < self.tie)

    def accepts_all(self, differences: Sequence[Discrepancy]) -> bool:
        """Whether these answers may pass together."""
        return all(map(self.accepts, differences)) and _parted(differences) <= self.share * len(differences)


STRICT = JudgeRule()


def compare(answer: CheckedAnswer, reference: CheckedAnswer) -> Discrepancy:
    """How `answer` differs from the reference's, which has the same length."""
    error = 0.0
    steps = zip(answer.tokens, answer.top, reference.tokens, reference.top, strict=True)
    for index, (token, top, wanted, wanted_top) in enumerate(steps):
        error = max(error, _error(top, wanted_top))
        if token != wanted:
            return Discrepancy(index, wanted_top[wanted] - wanted_top.get(token, -math.inf), error)
    return Discrepancy(None, 0.0, error)


def _error(top: Mapping[int, float], wanted: Mapping[int, float]) -> float:
    """The largest difference of a logprob; a token that one side does not name is at most as likely as its last."""
    last, wanted_last = min(top.values()), min(wanted.values())
    both = top.keys() & wanted.keys()
    errors = [abs(top[token] - wanted[token]) for token in both]
    errors += [top[token] - wanted_last for token in top.keys() - both]
    errors += [wanted[token] - last for token in wanted.keys() - both]
    return max(errors)


def _compare_all(answers: Iterable[CheckedAnswer], reference: Iterable[CheckedAnswer]) -> list[Discrepancy]:
    return [compare(answer, wanted) for answer, wanted in zip(answers, reference, strict=True)]


def _parted(differences: Sequence[Discrepancy]) -> int:
    return sum(difference.token is not None for difference in differences)


def rule_from(reference: LaneResult) -> JudgeRule:
    """The rule for kernels that round: the reference, without any cache, against itself asked a second time."""
    sections = reference.answers.items()
    own = [each for name, answers in sections for each in _compare_all(reference.answers_again[name], answers)]
    return JudgeRule(
        error=max(TIE, SCATTER * max(difference.error for difference in own)),
        tie=max(TIE, SCATTER * max(difference.tie for difference in own)),
        share=min(1.0, max(LOOSE_SHARE, SCATTER * _parted(own) / len(own))),
    )


class Judged:
    """Answers of some sections beside a reference's: which have another token or logprob, and which lack their hit."""

    def __init__(
        self, names: Sequence[str], result: LaneResult, reference: LaneResult, rule: JudgeRule, owed: bool = True
    ) -> None:
        """`owed`: whether the engine owes the hits that the questions name."""
        questions = [question for name in names for wave in result.sections[name] for question in wave]
        answers = [answer for name in names for answer in result.answers[name]]
        differences = _compare_all(answers, (answer for name in names for answer in reference.answers[name]))
        self.same = rule.accepts_all(differences)
        self.hits = sum(bool(answer.cached) for answer in answers)
        self.wrong = [
            f"{question.case}: {difference}"
            for question, difference in zip(questions, differences, strict=True)
            if not rule.accepts(difference)
        ]
        # vLLM 0.32 drops a unit for the groups of a head that it looks up: beside a window a hit may be longer.
        is_owed = operator.ge if result.facts.get("windows") else operator.eq
        self.missed = [
            f"{question.case}: {answer.cached} tokens from the cache instead of {question.hit}"
            for question, answer in zip(questions, answers, strict=True)
            if owed and question.hit is not None and not is_owed(answer.cached, question.hit)
        ]
        parted, error = _parted(differences), max(difference.error for difference in differences)
        self.numbers: dict[str, Any] = {
            "answers": len(answers),
            "from_cache": self.hits,
            "other_tokens": parted,
            "largest_logprob_error": error,
            "wrong_hits": self.missed,
            "wrong_answers": self.wrong,
            "rule": rule._asdict(),
        }
        self.says = (
            f"{len(answers)} answers of {len(answers[0].tokens)} tokens, {self.hits} from the cache; {parted} with "
            f"another token, logprobs off by {error:.1e} at most"
        )
        if rule is not STRICT:
            ties = max(difference.tie for difference in differences)
            kind = f"ties of {ties:.2g}" if parted else "same tokens" if error else "bit-equal"
            self.says += (
                f" ({kind}; by the reference's own scatter, {int(rule.share * len(answers))} may have another token at "
                f"ties below {rule.tie:.2g}, and logprobs may differ by {rule.error:.2g})"
            )
        if faults := [*self.missed, *self.wrong]:
            self.says += f"; {len(self.missed)} wrong hits, {len(self.wrong)} wrong answers: {'; '.join(faults[:3])}"

    def check(self, name: str, if_missed: str) -> Check:
        """Another answer is WRONG; a hit that is missing has the verdict `if_missed`."""
        return Check(name, WRONG if not self.same else if_missed if self.missed else OK, self.says, self.numbers)


def answers(
    lane: str, patched: LaneResult, reference: LaneResult, rule: JudgeRule, own_model: bool = False
) -> Iterator[Check]:
    """Exactness, the chunk-aligned case on its own, and whether the planted defects are noticed.

    Only answers that are not the reference's are wrong on a user's own model. A hit that is missing there, as where
    the cache has no room for a state, and a planted defect that the model does not show, prove nothing either way.
    """
    missing = NOT_RUN if own_model else WRONG
    both = [name for name in patched.answers if name in reference.answers]
    exact = [name for name in both if name.startswith(EXACT) or name in (RESEND, *ROW_DEFECTS)]
    yield Judged(exact, patched, reference, rule).check(EXACTNESS + lane, missing)
    if ALIGNED in both:
        yield Judged([ALIGNED], patched, reference, rule).check(f"chunk-aligned, {lane}", missing)
    spoiled = {name: _compare_all(patched.answers[name], reference.answers[name]) for name in DEFECTS if name in both}
    warm = {name: differences[len(differences) // 2 :] for name, differences in spoiled.items()}
    unseen = [name for name, differences in warm.items() if rule.accepts_all(differences)]
    largest = {name: max(difference.error for difference in differences) for name, differences in warm.items()}
    errors = ", ".join(f"{name} is off by {error:.2g}" for name, error in largest.items())
    verdict, says = OK, f"planted defects noticed: {errors}"
    if len(spoiled) < len(DEFECTS):
        verdict, says = NOT_RUN, "no time was left to plant defects (more with --minutes)"
    elif unseen:
        verdict, says = missing, f"planted defects not noticed: {', '.join(unseen)} ({errors})"
    yield Check(f"the check can see, {lane}", verdict, says, largest)


def drafts_alone(name: str, drafting: LaneResult, without: LaneResult, rule: JudgeRule) -> Check:
    """vLLM alone with drafts beside vLLM alone without drafts and cache: not ours, but no ground for hints."""
    judged = Judged([each for each in drafting.answers if each not in DEFECTS], drafting, without, rule, owed=False)
    says = f"{judged.says}; {_drafts_words(drafting.verified)}"
    if judged.same:
        return Check(name, OK, says, judged.numbers)
    return Check(name, NOT_RUN, f"{VLLM_ITSELF}: {says}", judged.numbers)


def not_ours(check: Check) -> Check:
    """The check, where vLLM alone is not right either: then an answer that differs says nothing about Seamark."""
    if check.verdict != WRONG:
        return check
    return check._replace(verdict=NOT_RUN, says=f"nothing is proven, since {VLLM_ITSELF}: {check.says}")


def acceptance(
    lane: str, mine: LaneResult, uncached: LaneResult, cached: LaneResult, rule: JudgeRule, own_model: bool
) -> Check:
    """Drafts must be right as often as those of vLLM alone without a cache: a hit may not make the head worse.

    In all, and in the answers that hit with Seamark, beside the same ones of the others. Where none is right or none is
    wrong, rows never went on from different states, and the lane is blind.
    """
    engines = {"vLLM alone without its cache": uncached, "vLLM alone": cached, "Seamark": mine}
    shares = {name: _share(each.verified) for name, each in engines.items()}
    says = "; ".join(f"{name} {_drafts_words(each.verified)}" for name, each in engines.items())
    behind = {name: _verified_where(mine, each) for name, each in engines.items()}
    on_hits = {name: _share(verified) for name, verified in behind.items()}
    says += "; behind hits "
    says += "; ".join(f"{name} {_drafts_words(rows)}, {_pace_words(rows)}" for name, rows in behind.items())
    equal, compared = _own_drafts(mine, uncached)
    says += f"; the head itself proposes the same as without a cache in {equal:,} of {compared:,} places"
    cold = on_hits["vLLM alone without its cache"]
    least = BEHIND_HITS * cold if rule is STRICT else cold - ACCEPTANCE_NOISE
    most = max((drafts for drafts, _ in mine.verified), default=0)
    missing = set(range(most + 1)) - {right for _, right in mine.verified}
    verdict, says = OK, f"accepted / drafted: {says}"
    if not most:
        verdict, says = NOT_RUN, "no row verified any draft"
    elif shares["Seamark"] < shares["vLLM alone without its cache"] - ACCEPTANCE_NOISE:
        verdict, says = NOT_RUN if own_model else WRONG, f"drafts are right less often with hits: {says}"
    elif on_hits["Seamark"] < least:
        verdict, says = NOT_RUN if own_model else WRONG, f"drafts are right less often behind hits: {says}"
    elif missing:
        unseen = " or ".join(map(str, sorted(missing)))
        verdict, says = NOT_RUN, f"no row had {unseen} right drafts, so it shows nothing of them: {says}"
    numbers: dict[str, Any] = {name: round(value, 4) for name, value in shares.items()}
    numbers["behind hits"] = {name: round(value, 4) for name, value in on_hits.items()}
    numbers["own drafts"] = {"equal": equal, "compared": compared}
    return Check(f"acceptance, {lane}", verdict, says, numbers)


def _verified_where(hit: LaneResult, result: LaneResult) -> dict[tuple[int, int], int]:
    """Rows that `result` verified in answers to questions that found something in the cache of `hit`."""
    rows: dict[tuple[int, int], int] = {}
    for name in (hit.answers.keys() & result.answers.keys()).difference(DEFECTS, ROW_DEFECTS):
        for mine, answer in zip(hit.answers[name], result.answers[name], strict=True):
            for row, times in answer.verified.items() if mine.cached else ():
                rows[row] = rows.get(row, 0) + times
    return rows


def _own_drafts(mine: LaneResult, uncached: LaneResult, defect: str | None = None) -> tuple[int, int]:
    """In how many places a head proposes the same as without a cache, and of how many; `defect`: where it was planted.

    Without one, in all sections in which nothing was.
    """
    if defect is None:
        wanted = mine.proposed.keys() - {*DEFECTS, *ROW_DEFECTS}
        places = {(name, place) for name in wanted for place in mine.proposed[name]}
    else:
        spoiled, told = mine.sections[defect][-1], range(1, NEW_TOKENS + 1)
        places = {(defect, place_of(question.tokens, count)) for question in spoiled for count in told}
    own, cold = (
        {(name, place): drafts for name, of_section in each.proposed.items() for place, drafts in of_section.items()}
        for each in (mine, uncached)
    )
    compared = places & own.keys() & cold.keys()
    return sum(own[place] == cold[place] for place in compared), len(compared)


def rows_of_heads(lane: str, mine: LaneResult, uncached: LaneResult, own_model: bool) -> Iterator[Check]:
    """Where a head has a window: whether its drafts show that it lacks rows, or has another prefix's."""
    found = {defect: _own_drafts(mine, uncached, defect) for defect in ROW_DEFECTS if defect in mine.proposed}
    if not found:
        return
    unseen = [defect for defect, (equal, compared) in found.items() if equal >= BEHIND_HITS * compared]
    told = ", ".join(
        f"{defect} drafts as cold in {equal} of {compared} places" for defect, (equal, compared) in found.items()
    )
    verdict, says = OK, f"planted defects noticed: {told}"
    if unseen:
        verdict, says = NOT_RUN if own_model else WRONG, f"planted defects not noticed: {', '.join(unseen)} ({told})"
    numbers = {defect: {"equal": equal, "compared": compared} for defect, (equal, compared) in found.items()}
    yield Check(f"the check can see rows of the draft head, {lane}", verdict, says, numbers)


def _pace_words(verified: Mapping[tuple[int, int], int]) -> str:
    return f"{1 + _right(verified) / max(sum(verified.values()), 1):.2f} tokens a step"


def _share(verified: Mapping[tuple[int, int], int]) -> float:
    """The share of drafts that were right; 0 if there were none."""
    return _right(verified) / max(_drafted(verified), 1)


def _drafts_words(verified: Mapping[tuple[int, int], int]) -> str:
    return f"{_right(verified):,} of {_drafted(verified):,} drafts right ({_share(verified):.1%})"


def _right(verified: Mapping[tuple[int, int], int]) -> int:
    return sum(right * times for (_, right), times in verified.items())


def _drafted(verified: Mapping[tuple[int, int], int]) -> int:
    return sum(drafts * times for (drafts, _), times in verified.items())


def passes(lane: str, results: dict[str, LaneResult]) -> Check:
    """The patched engine, the first of `results`, takes no pass more than its tokens need; the others stand beside it.

    Where states are not written inside a pass, each costs one of its own: then the passes are only told.
    """
    says = "cold / warm: " + "; ".join(f"{engine} {_passes_words(result.passes)}" for engine, result in results.items())
    first = next(iter(results.values()))
    free = first.facts.get("writes_in_forward", True)
    right = bool(first.passes) and all(each.passes <= each.needed for each in first.passes)
    numbers = {engine: [each._asdict() for each in result.passes] for engine, result in results.items()}
    return Check(f"forward passes, {lane}", OK if right or not free else WRONG, says, numbers)


def _passes_words(counted: Sequence[LanePasses]) -> str:
    pairs = zip(counted[::2], counted[1::2], strict=True)
    return ", ".join(
        f"{cold.passes} / {warm.passes} for {cold.prompt} tokens ({warm.cached} cached)" for cold, warm in pairs
    )


def block_copy(name: str, untouched: LaneResult, patched: LaneResult, reference: LaneResult, rule: JudgeRule) -> Check:
    """Whether vLLM's own copy of a partial block loses a part of it here; wrong only if the cure fails too."""
    alone, cured = (Judged([RESEND], result, reference, rule) for result in (untouched, patched))
    pages = untouched.facts["pages_at_one_address"]
    layout = (
        f"caches with pages of {' and '.join(map(str, pages))} bytes start at one address"
        if pages
        else "no two caches with different pages start at one address"
    )
    bad = len(alone.wrong)
    effect = f"{bad} of {alone.hits} resent answers wrong" if bad else f"all {alone.hits} resent answers right"
    says = f"vLLM alone gives {effect}; with the patches they are {'right' if cured.same else 'WRONG'}; {layout}"
    numbers = {"untouched_wrong": bad, "resent": alone.hits, "pages_at_one_address": pages, "cured": cured.same}
    return Check(name, OK if cured.same and alone.hits else WRONG, says, numbers)


def speed(lane: str, mine: LaneResult, alone: LaneResult, name: str) -> Check:
    """Seamark beside vLLM alone (`name`), for the record: speed is never wrong. Ratios above 1 are in its favour."""
    theirs = {(each.case, each.shared): each for each in alone.first_tokens}
    pairs = [(each, theirs[each.case, each.shared]) for each in mine.first_tokens if (each.case, each.shared) in theirs]
    says = [f"{name} / with Seamark, until the last first token"]
    for shared in sorted({each.shared for each, _ in pairs}):
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
        state = _ms(mine.pace.state) if mine.pace.state > 0 else "too little to measure"
        known = f"{_ms(mine.pace.floor)} a pass and {_ms(mine.pace.token)} a token"
        learnt = known if mine.pace.token else "not yet known"
        says.append(f"pace learnt: {learnt}; a state written inside a pass: {state}")
        numbers["pace"] = mine.pace._asdict()
    warm = next(((each, other) for each, other in reversed(pairs) if each.case == WARM), None)
    if warm is not None:
        each, other = warm
        ratio = other.seconds / each.seconds
        saves = bool(each.cached) and ratio >= SAVING
        numbers |= {"hits_save_time": saves, "warm_shared": each.shared, "warm_ratio": ratio}
        says.append(f"hits {'save' if saves else 'do not save'} time here")
    return Check(SPEED + lane, OK, "; ".join(says), numbers)


def _beside(mine: FirstTokens, alone: FirstTokens) -> str:
    return (
        f"{mine.case} {_ms(alone.seconds)} / {_ms(mine.seconds)} ({alone.seconds / mine.seconds:.2f}x; "
        f"{alone.cached:,} / {mine.cached:,} cached, {alone.passes} / {mine.passes} passes)"
    )


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def environment(lane: str, facts: dict[str, Any], own_model: bool = False) -> Check:
    """What runs here, and whether the patches are live; an own model may be of a family whose states cost passes."""
    told = [f"{name.replace('_', ' ')} {facts[name]}" for name in TOLD if facts[name] not in (None, [])]
    verdict, says = OK, "the patches are live, states are written inside the pass"
    if not facts["recurrent"]:
        says = "the model has no recurrent layers, so the patches have nothing to do"
    elif not facts["patches_live"]:
        verdict, says = WRONG, 'the patches are not live: run "pip install --no-deps /path/to/seamark" in this '
        says += "environment, and read the lines with seamark in the engine's log"
    elif not facts["writes_in_forward"]:
        verdict = OK if own_model else WRONG
        says = "the patches are live, but states are not written inside the pass: each costs a pass of its own"
    return Check(f"environment, {lane}", verdict, ", ".join([*told, says]), facts)
