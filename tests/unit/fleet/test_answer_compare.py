"""What counts as a different answer, and what is arithmetic."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from proxy.fleet.answer_compare import (
    LEAST,
    RECENT,
    Continuation,
    ContinuedToken,
    Noise,
    Unanswered,
    answer_to,
    bound_of,
    completion_request,
    distance,
    judge,
    scored,
    spread,
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


def logprob(value: float, cached: int = 0) -> Continuation:
    """One token with this logprob, beside one that is never a multiple of a grain behind it."""
    return continuation({"a": value, "other": value - 5.1234}, cached=cached)


@pytest.mark.parametrize(
    ("off", "noise", "grain", "result"),
    [
        (0.001, 0.0, 0.0, "same"),
        (0.00101, 0.0, 0.0, "differs"),
        (0.00101, 0.01, 0.0, "noise"),
        (0.03, 0.01, 0.0, "noise"),
        (0.0301, 0.01, 0.0, "differs"),
        (0.0625, 0.0, 1 / 64, "noise"),
        (0.0626, 0.0, 1 / 64, "differs"),
        (0.0626, 0.03, 1 / 64, "noise"),
        (0.0005, 1.0, 1 / 4, "same"),
    ],
)
def test_noise_is_three_times_what_recomputed_answers_differ_by_or_four_steps_of_their_logits(
    off, noise, grain, result
):
    recomputed = continuation({"a": 0.0, "b": -(grain or 5.1234), "c": -5 * (grain or 1.4321)})
    cached = continuation({**recomputed.steps[0].top, "a": -off})
    verdict = judge([cached], [recomputed], noise)
    assert verdict.result == result and verdict.off.error == off
    assert verdict.bound == pytest.approx(max(LEAST, 3 * noise, 4 * grain))
    assert (verdict.noise, verdict.cached, verdict.recomputed) == (noise, cached, recomputed)


def test_the_coarsest_logits_of_several_answers_bound_what_is_noise():
    fine, coarse = logprob(0.0), continuation({"a": 0.0, "b": -0.25})
    for recomputed in ([fine, coarse], [coarse, fine]):
        assert bound_of(0.0, recomputed) == 1.0
    assert bound_of(0.0, [fine]) == LEAST == 0.001


def test_the_grain_of_an_answer_is_that_of_most_of_its_steps():
    coarse, fine, none = ({"a": 0.0, "b": -each} for each in (0.5, 3 / 256, 0.0012))
    assert (continuation(coarse).grain, continuation(fine).grain, continuation(none).grain) == (1 / 4, 1 / 256, 0.0)
    assert continuation(coarse, fine, fine).grain == 1 / 256
    assert continuation(coarse, coarse, fine).grain == 1 / 4
    assert continuation(coarse, fine).grain == 1 / 256  # the finer half counts
    assert continuation({"a": 0.0, "b": -0.5, "c": -3 / 256}).grain == 1 / 256  # of all its tokens
    assert continuation({"a": 0.0, "b": -0.5 - 1.9e-5}).grain == 1 / 4
    assert continuation({"a": 0.0, "b": -0.5 - 2.1e-5}).grain == 0.0


@pytest.mark.parametrize("order", list(itertools.permutations((0.0, 0.1, 0.4))))
def test_answers_are_as_far_apart_as_any_two_of_them(order):
    assert spread([logprob(each) for each in order]) == pytest.approx(0.4)


def test_a_token_that_the_other_one_ranks_last_is_not_off_for_being_less_likely():
    one, other = continuation({"a": -0.1, "b": -7.0}), continuation({"a": -0.1, "c": -5.0})
    assert distance(one, other).error == distance(other, one).error == pytest.approx(2.0)  # of c, for b is the last
    assert distance(continuation({"a": -0.1}), continuation({"a": -0.1, "b": -3.0})).error == 0.0


def test_how_far_an_engine_rounds_is_remembered_of_its_last_prompts():
    noise = Noise()
    assert (noise.largest, noise.is_known) == (0.0, True)
    noise.add([logprob(0.0), logprob(0.0)])
    assert (noise.largest, noise.is_known) == (0.0, True)
    noise.clear()
    noise.add([logprob(0.0), logprob(0.3)])
    assert noise.largest == pytest.approx(0.3) and not noise.is_known
    noise.add([logprob(0.0), logprob(0.1)])
    assert noise.largest == pytest.approx(0.3) and noise.is_known
    for _ in range(RECENT - 2):
        noise.add([logprob(0.0), logprob(0.1)])
    assert noise.largest == pytest.approx(0.3)
    noise.add([logprob(0.0), logprob(0.1)])
    assert noise.largest == pytest.approx(0.1)
    noise.clear()
    assert (noise.largest, noise.is_known) == (0.0, True)


@pytest.mark.parametrize(
    ("answers", "asked", "largest"),
    [
        ([0.0, 0.5, 0.0], [30] * 3, 0.5),
        ([0.0, 0.1, 0.0], [30] * 3, 0.2),
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


async def test_a_prompt_of_one_token_has_no_shorter_beginning():
    noise, lengths = Noise(), []
    noise.add([logprob(0.0), logprob(0.2)])

    async def recomputed(prompt):
        lengths.append(len(prompt))
        return logprob(0.0)

    await noise.learn([7], recomputed)
    assert lengths == [1, 1, 1]


def test_an_answers_tokens_have_a_name_and_ids_if_the_worker_gives_those():
    named = Continuation(tuple(ContinuedToken(f"token_id:{each}", {}) for each in (7, 8)), 0)
    assert named.ids == [7, 8]
    assert named.hash == named._replace(cached=9).hash != named._replace(steps=named.steps[:1]).hash
    with pytest.raises(Unanswered, match="no token ids"):
        _ = logprob(0.0).ids


def test_what_is_asked_for_beside_a_hint_stands_beside_it_and_fields_outermost():
    body = json.loads(completion_request("m", [1], None, (1,), tokens=1, more={"seamark_trial": 1}, prompt_logprobs=5))
    assert (body["max_tokens"], body["prompt_logprobs"], body["logprobs"]) == (1, 5, 5)
    assert body["vllm_xargs"] == {"seamark_boundaries": [1], "seamark_trial": 1}
    assert json.loads(completion_request("m", [1], None, more={"seamark_trial": 1}))["vllm_xargs"] == {
        "seamark_trial": 1
    }
    assert json.loads(completion_request("m", [1], ""))["cache_salt"] == ""
    assert json.loads(completion_request("m", [1], None))["max_tokens"] == 16


async def test_headers_go_to_the_worker_and_the_status_of_a_refusal_comes_back():
    class Worker:
        async def fetch(self, method, url, body, timeout, **named):
            self.asked = (method, url, body, timeout, named)
            return self.answer

    worker = Worker()
    worker.answer = (200, b'{"a":1}')
    assert await answer_to(worker, "http://w", b"x", 2.0) == {"a": 1}
    assert worker.asked == ("POST", "http://w/v1/completions", b"x", 2.0, {})
    await answer_to(worker, "http://w", b"x", 2.0, [(b"a", b"b")])
    assert worker.asked[-1] == {"headers": [(b"a", b"b")]}
    for status, text, words in ((503, b"{}", "status 503"), (200, b"{", "no JSON")):
        worker.answer = (status, text)
        with pytest.raises(Unanswered, match=words) as refused:
            await answer_to(worker, "http://w", b"x", 2.0)
        assert refused.value.status == status


def entry_of(**logprobs: float) -> dict:
    return {name[1:]: {"logprob": value, "rank": 1} for name, value in logprobs.items()}


def test_the_end_of_a_prompt_is_read_as_if_it_had_been_generated():
    entries = [None, entry_of(_5=-0.1), entry_of(_7=-0.5, _8=-1), entry_of(_9=-0.2, _7=-3.0)]
    read = scored({"choices": [{"prompt_logprobs": entries}]}, [7, 9])
    first = ContinuedToken("token_id:7", {"token_id:7": -0.5, "token_id:8": -1.0})
    assert read == Continuation((first, ContinuedToken("token_id:9", {"token_id:9": -0.2, "token_id:7": -3.0})), 0)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [entry_of(_7=-0.5)]}]},
        {"choices": [{"prompt_logprobs": [None, entry_of(_7=-0.5)]}]},
        {"choices": [{"prompt_logprobs": [entry_of(_7=-0.5), entry_of(_8=-0.5)]}]},
        {"choices": [{"prompt_logprobs": [entry_of(_8=-0.5), entry_of(_7=-0.5)]}]},
        {"choices": [{"prompt_logprobs": [entry_of(_7=-0.5), {"7": {}}]}]},
        {"choices": [{"prompt_logprobs": [entry_of(_7=-0.5), {"7": {"logprob": "x"}}]}]},
    ],
)
def test_what_names_no_logprobs_of_all_of_these_tokens_is_no_end_of_a_prompt(answer):
    with pytest.raises(Unanswered, match="no logprobs of the prompt"):
        scored(answer, [7, 7])
