"""What engines of `draft_engines` are held to: another engine's answers and the hits that they owe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.harness.draft_engines import LENGTHS

LOGPROB_BOUND = 1e-4  # as of all exactness checks in float32

# Tokens that each prompt of a traffic shares with an earlier one, which has left a state there.
SHARED: Mapping[str, Sequence[int]] = {
    "pairs": [length * shares for length, shares in itertools.product(LENGTHS, (0, 1, 1, 1, 1))],
    "heads": [0, 163, 0, 430, 163, 163, 430, 0, 100],
}


def differences(found: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Which answers are not as they should be."""
    if "error" in found:
        return [found["error"]]
    answers = {tuple(answer["prompt"]): answer for answer in right["answers"]}
    wrong = []
    for answer in found["answers"]:
        known = answers.get(tuple(answer["prompt"]))
        if known is None or known["tokens"] != answer["tokens"]:
            wrong.append(f"a prompt of {len(answer['prompt'])} tokens, {answer['cached']} of them cached")
        elif answer["logprobs"] != pytest.approx(known["logprobs"], abs=LOGPROB_BOUND):
            wrong.append(f"the log probabilities of a prompt of {len(answer['prompt'])} tokens")
    return wrong


def hits(found: Mapping[str, Any]) -> list[int]:
    """Tokens that each prompt found in the cache."""
    return [answer["cached"] for answer in found["answers"]]


def owed(traffic: str, ahead: int, alignment: int = 16) -> list[int]:
    """The same, as they have to be; `ahead`: tokens past a state that a prefix has to share."""
    return [max(shared - ahead, 0) // alignment * alignment for shared in SHARED[traffic]]
