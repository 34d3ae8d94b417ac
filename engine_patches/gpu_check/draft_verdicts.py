"""How `seamark gpu-check` judges engines that draft: vLLM's own answers with drafts, and how often drafts are right."""

from __future__ import annotations

from collections.abc import Mapping

from engine_patches.gpu_check.job import Result
from engine_patches.gpu_check.questions import DEFECTS
from engine_patches.gpu_check.verdicts import NOT_RUN, OK, WRONG, Check, Rule, compare_all

DRAFTS_CHECK = "vLLM alone with drafts, "  # the beginning of a check's name

VLLM_ITSELF = "vLLM itself answers otherwise with drafts here"

# By which the share of right drafts may be lower: rounding takes some answers elsewhere, and the drafts with them.
ACCEPTANCE_NOISE = 0.05


def judge_alone(lane: str, which: str, drafting: Result, without: Result, rule: Rule) -> Check:
    """vLLM alone with drafts beside vLLM alone without drafts and cache: not ours, but no ground for hints."""
    names = [name for name in drafting.answers if name not in DEFECTS]
    questions = [q for name in names for wave in drafting.sections[name] for q in wave]
    answers = [answer for name in names for answer in drafting.answers[name]]
    differences = compare_all(answers, [answer for name in names for answer in without.answers[name]])
    wrong = [q.case for q, each in zip(questions, differences, strict=True) if not rule.accepts(each)]
    fine = rule.accepts_all(differences)
    error = max(difference.error for difference in differences)
    other = sum(difference.token is not None for difference in differences)
    hits = sum(bool(answer.cached) for answer in answers)
    says = (
        f"{len(answers)} answers, {hits} from the cache; {other} with another token than without drafts, logprobs off "
        f"by {error:.1e} at most; {_share_words(drafting.verified)}"
    )
    if not fine:
        says = f"{VLLM_ITSELF}: {'; '.join(wrong[:3]) or 'in more answers than its scatter explains'}; {says}"
    numbers = {"answers": len(answers), "from_cache": hits, "other_tokens": other, "largest_logprob_error": error}
    return Check(f"{DRAFTS_CHECK}{which}, {lane}", OK if fine else NOT_RUN, says, numbers)


def not_ours(check: Check) -> Check:
    """The check, where vLLM alone is not right either: then an answer that differs says nothing about Seamark."""
    if check.verdict != WRONG:
        return check
    return check._replace(verdict=NOT_RUN, says=f"nothing is proven, since {VLLM_ITSELF}: {check.says}")


def judge_acceptance(lane: str, mine: Result, uncached: Result, cached: Result, own_model: bool) -> Check:
    """Drafts must be right as often as those of vLLM alone without a cache: a hit may not make the head worse.

    Where none is right or none is wrong, rows never went on from different states, and the lane is blind.
    """
    shares = {
        "vLLM alone without its cache": share(uncached.verified),
        "vLLM alone": share(cached.verified),
        "Seamark": share(mine.verified),
    }
    says = "accepted / drafted: " + "; ".join(
        f"{name} {_share_words(each.verified)}" for name, each in zip(shares, (uncached, cached, mine), strict=True)
    )
    numbers = {name: round(value, 4) for name, value in shares.items()}
    most = max((drafts for drafts, _ in mine.verified), default=0)
    missing = set(range(most + 1)) - {right for _, right in mine.verified}
    verdict = OK
    if not most:
        verdict, says = NOT_RUN, "no row verified any draft"
    elif shares["Seamark"] < shares["vLLM alone without its cache"] - ACCEPTANCE_NOISE:
        verdict, says = NOT_RUN if own_model else WRONG, f"drafts are right less often behind hits: {says}"
    elif missing:
        verdict = NOT_RUN
        says = f"no row had {' or '.join(map(str, sorted(missing)))} right drafts, so it shows nothing of them: {says}"
    return Check(f"acceptance, {lane}", verdict, says, numbers)


def share(verified: Mapping[tuple[int, int], int]) -> float:
    """The share of drafts that were right; 0 if there were none."""
    drafted = sum(drafts * times for (drafts, _), times in verified.items())
    return sum(right * times for (_, right), times in verified.items()) / drafted if drafted else 0.0


def _share_words(verified: Mapping[tuple[int, int], int]) -> str:
    drafted = sum(drafts * times for (drafts, _), times in verified.items())
    right = sum(right * times for (_, right), times in verified.items())
    return f"{right:,} of {drafted:,} drafts right ({share(verified):.1%})"
