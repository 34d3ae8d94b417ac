"""What counts as a different answer, and what is arithmetic."""

from __future__ import annotations

import json

import pytest

from proxy.fleet.answer_compare import Continuation, ContinuedToken, Noise, Unanswered, distance, judge, scored
from proxy.fleet.answer_compare import continuation as asked


def continuation(*tops: dict[str, float], cached: int = 0) -> Continuation:
    """A continuation with these logprobs at each step, always the likeliest token."""
    return Continuation(tuple(ContinuedToken(max(top, key=top.get), top) for top in tops), cached)


@pytest.mark.parametrize(
    ("off", "noise", "grain", "result"),
    [
        (0.001, 0.0, 0.0, "same"),
        (0.00101, 0.0, 0.0, "differs"),
        (0.03, 0.01, 0.0, "noise"),
        (0.0625, 0.0, 1 / 64, "noise"),
        (0.0626, 0.0, 1 / 64, "differs"),
    ],
)
def test_noise_is_three_times_what_recomputed_answers_differ_by_or_four_steps_of_their_logits(
    off, noise, grain, result
):
    right = continuation({"a": 0.0, "b": -(grain or 5.1234), "c": -5 * (grain or 1.4321)})
    cached = continuation({**right.steps[0].top, "a": -off})
    verdict = judge([right, cached], [continuation({"x": 0.0, "y": -9.1234}), right], noise)
    assert (verdict.result, verdict.off.error, verdict.cached, verdict.recomputed) == (result, off, cached, right)


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ({"a": -0.1, "b": -2.0}, {"a": -0.1, "c": -5.0}, 3.0),  # b is at most as likely as c over there
        ({"a": -0.1, "b": -7.0}, {"a": -0.1, "c": -5.0}, 2.0),  # of c, for b is the last
        ({"a": -0.1}, {"a": -0.1, "b": -3.0}, 0.0),
        ({"a": -0.5, "b": -0.6}, {"a": -0.6, "b": -0.5}, 0.1),  # another token, with which it ends
    ],
)
def test_a_token_that_the_other_does_not_name_is_off_by_what_it_must_be(one, other, error):
    behind = {"z": -0.1, "y": -3.0}
    apart = distance(continuation(one, behind), continuation(other, behind if error != 0.1 else {"x": -9.0}))
    assert apart == (pytest.approx(error), 0 if error == 0.1 else None)


class OneAnswer:
    def __init__(self, answer: object, status: int = 200) -> None:
        self.answer, self.status = json.dumps(answer).encode(), status

    async def fetch(self, method: str, url: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        return self.status, self.answer


LOGPROBS = {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.0}]}

USAGE = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}


def answer(logprobs: object = LOGPROBS, usage: object = USAGE) -> dict:
    return {"choices": [{"logprobs": logprobs}], "usage": usage}


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (answer(), 400),
        (answer(logprobs=None), 200),
        (answer({"tokens": ["a", "b"], "top_logprobs": [{"a": -0.5}, {}]}), 200),
        (answer(usage=None), 200),
    ],
)
async def test_what_cannot_be_compared_is_no_continuation(given, status):
    with pytest.raises(Unanswered):
        await asked(OneAnswer(given, status), "http://w", b"", 1.0)


def logprob(value: float, cached: int = 0) -> Continuation:
    """One token with this logprob, beside one that is never a multiple of a grain behind it."""
    return continuation({"a": value, "other": value - 5.1234}, cached=cached)


@pytest.mark.parametrize(
    ("answers", "asked", "largest"),
    [
        ([0.0, 0.5, 0.0], [30] * 3, 0.5),
        ([None, 0.5, 0.0, 0.0, 0.0, 0.6], [30] * 3 + [40] * 3, 0.6),
        ([None, 0.5, 0.0, 0.5, None, 0.5], [30] * 3 + [40] * 3, 0.2),
    ],
)
async def test_beginnings_of_a_prompt_are_recomputed_three_times_until_its_noise_is_known(answers, asked, largest):
    """Answers that came from a cache (None) say nothing of it."""
    noise, lengths, left = Noise(), [], list(answers)
    noise.add([logprob(0.0), logprob(0.2)])

    async def recomputed(prompt):
        lengths.append(len(prompt))
        assert list(prompt) == list(range(len(prompt)))
        value = left.pop(0)
        return logprob(value or 0.0, cached=16 if value is None else 0)

    await noise.learn(range(60), recomputed)
    assert lengths == asked and noise.largest == pytest.approx(largest) and not left


def test_an_answers_tokens_have_a_name_and_ids_if_the_worker_gives_those():
    named = Continuation(tuple(ContinuedToken(f"token_id:{each}", {}) for each in (7, 8)), 0)
    assert named.ids == [7, 8]
    assert named.hash == named._replace(cached=9).hash != named._replace(steps=named.steps[:1]).hash
    with pytest.raises(Unanswered, match="no token ids"):
        _ = logprob(0.0).ids


def entry_of(**logprobs: float) -> dict:
    return {name[1:]: {"logprob": value, "rank": 1} for name, value in logprobs.items()}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None, entry_of(_7=-0.5)]}]},
        {"choices": [{"prompt_logprobs": [entry_of(_7=-0.5), entry_of(_8=-0.5)]}]},
        {"choices": [{"prompt_logprobs": [entry_of(_7=-0.5), {"7": {"logprob": "x"}}]}]},
    ],
)
def test_what_names_no_logprobs_of_all_of_these_tokens_is_no_end_of_a_prompt(answer):
    with pytest.raises(Unanswered, match="no logprobs of the prompt"):
        scored(answer, [7, 7])
