"""What counts as a different answer, and what is arithmetic."""

from __future__ import annotations

import json
import random

import pytest

from proxy.fleet.answer_compare import (
    LEAST,
    Continuation,
    ContinuedToken,
    Unanswered,
    completion_request,
    distance,
    judge,
)
from proxy.fleet.answer_compare import continuation as asked


def continuation(*tops: dict[str, float], cached: int = 0) -> Continuation:
    """A continuation with these logprobs at each step, always the likeliest token."""
    return Continuation(tuple(ContinuedToken(max(top, key=top.get), top) for top in tops), cached)


def rounded(draw: random.Random, grain: float, steps: int = 16) -> list[dict[str, float]]:
    """Logprobs of logits in multiples of `grain`; 0 for exact ones."""
    logits = [[draw.uniform(3, 8) for _ in range(5)] for _ in range(steps)]
    if grain:
        logits = [[round(value / grain) * grain for value in step] for step in logits]
    return [{f"token_id:{index}": value - 9.1234 for index, value in enumerate(step)} for step in logits]


def nudged(tops: list[dict[str, float]], draw: random.Random, most: float, grain: float = 0.0) -> Continuation:
    """The same, each logprob off by up to `most`, by whole grains where there is one."""
    off = (lambda: draw.uniform(-most, most)) if not grain else (lambda: grain * draw.randint(-1, 1))
    return continuation(*({token: value + off() for token, value in top.items()} for top in tops), cached=64)


def test_float32_arithmetic_is_the_same_and_a_wrong_state_differs():
    draw = random.Random(1)
    tops = rounded(draw, 0.0)
    recomputed = [continuation(*tops)] * 3
    assert judge([nudged(tops, draw, 5e-6)], recomputed, 0.0).result == "same"
    assert judge([nudged(tops, draw, 0.05)], recomputed, 0.0).result == "differs"


def test_one_rounding_of_bfloat16_logits_is_noise_even_where_recomputed_answers_agree():
    draw = random.Random(2)
    tops = rounded(draw, 1 / 32)
    recomputed = [continuation(*tops)] * 3
    assert recomputed[0].grain == 1 / 32
    assert judge([nudged(tops, draw, 0.0, grain=1 / 32)], recomputed, 0.0).result == "noise"
    assert judge([nudged(tops, draw, 2.0)], recomputed, 0.0).result == "differs"


def test_what_recomputed_answers_differ_by_is_noise_from_the_cache_too():
    draw = random.Random(3)
    tops = rounded(draw, 0.0)
    assert judge([nudged(tops, draw, 0.02)], [continuation(*tops)] * 3, 0.01).result == "noise"
    assert judge([nudged(tops, draw, 0.5)], [continuation(*tops)] * 3, 0.01).result == "differs"


def test_the_worst_of_the_cached_answers_counts_and_the_nearest_of_the_others():
    draw = random.Random(4)
    tops, others = rounded(draw, 0.0), rounded(draw, 0.0)
    right, wrong = nudged(tops, draw, 0.0), nudged(others, draw, 0.0)
    assert judge([right], [continuation(*others), continuation(*tops)], 0.0).result == "same"
    verdict = judge([right, wrong], [continuation(*tops)] * 3, 0.0)
    assert (verdict.result, verdict.cached) == ("differs", wrong)


def test_a_distance_ends_with_the_first_other_token():
    one = continuation({"a": -0.1, "b": -2.5}, {"a": -0.5, "b": -0.6}, {"c": -0.1, "d": -3.0})
    other = continuation({"a": -0.1, "b": -2.5}, {"a": -0.6, "b": -0.5}, {"x": -0.1, "y": -3.0})
    apart = distance(one, other)
    assert apart.position == 1 and apart.error == pytest.approx(0.1)


def test_a_token_that_the_other_does_not_name_is_off_by_what_it_must_be():
    one, other = continuation({"a": -0.1, "b": -2.0}), continuation({"a": -0.1, "c": -5.0})
    assert distance(one, other).error == pytest.approx(3.0)  # b is at most as likely as c over there
    assert distance(one, one).error < LEAST


def test_a_chosen_token_that_is_none_of_the_likeliest_is_no_rank():
    one = continuation({"a": -0.1, "b": -2.0})
    other = Continuation((ContinuedToken("z", {"a": -0.1, "c": -5.0, "z": -30.0}),), 0)
    assert distance(one, other).error == pytest.approx(3.0)  # b is at most as likely as c over there
    assert distance(continuation({"a": -0.1}), continuation({"z": -0.5})).error == pytest.approx(0.4)  # no other rank


class OneAnswer:
    """Workers that all give this answer."""

    def __init__(self, answer: object, status: int = 200) -> None:
        self.answer, self.status = json.dumps(answer).encode(), status

    async def fetch(self, method: str, url: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        return self.status, self.answer


LOGPROBS = {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.0}]}

USAGE = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}


def answer(logprobs: object = LOGPROBS, usage: object = USAGE) -> dict:
    return {"choices": [{"logprobs": logprobs}], "usage": usage}


async def test_a_continuation_is_read_with_what_the_engine_had_cached():
    read = await asked(OneAnswer(answer()), "http://w", b"", 1.0)
    assert read == ((("token_id:7", {"token_id:7": -0.5, "token_id:8": -1.0}),), 48)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (answer(), 400),
        ([], 200),
        ({"choices": []}, 200),
        (answer(logprobs=None), 200),
        (answer({"tokens": [], "top_logprobs": []}), 200),
        (answer({"tokens": ["a"], "top_logprobs": [{}]}), 200),
        (answer({"tokens": ["a", "b"], "top_logprobs": [{"a": -0.5}, {}]}), 200),
        (answer(usage=None), 200),
        (answer(usage={"prompt_tokens": 64}), 200),
    ],
)
async def test_what_cannot_be_compared_is_no_continuation(given, status):
    with pytest.raises(Unanswered):
        await asked(OneAnswer(given, status), "http://w", b"", 1.0)


def test_a_continuation_is_asked_for_greedily_under_its_salt_with_its_hint():
    plain = json.loads(completion_request("m", [1, 2], None))
    assert (plain["prompt"], plain["temperature"], plain["ignore_eos"]) == ([1, 2], 0, True)
    assert "cache_salt" not in plain and "vllm_xargs" not in plain
    assert plain["return_tokens_as_token_ids"] is True  # two tokens may have one text
    salted = json.loads(completion_request("m", [1, 2], "s", (1,)))
    assert (salted["cache_salt"], salted["vllm_xargs"]) == ("s", {"seamark_boundaries": [1]})


def test_a_continuation_that_ends_sooner_is_compared_up_to_its_end():
    tops = rounded(random.Random(5), 0.0)
    assert distance(continuation(*tops), continuation(*tops[:3])) == (0.0, None)
