"""`python -m tests.bench.soak`: its traffic, and its complaints when something is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.bench.harness.client import COMPLETION, TimedAnswer
from proxy.fleet.answer_compare import ContinuedToken
from tests.bench import soak
from tests.bench.soak import Driven, Outcome, judge
from tests.bench.traffic import Request, Traffic


def test_the_stream_of_requests_is_the_same_for_the_same_seed_and_has_every_kind():
    one, again, other = Traffic(7), Traffic(7), Traffic(8)
    events = [one.event(number) for number in range(300)]
    assert events == [again.event(number) for number in range(300)]
    assert events[:20] != [other.event(number) for number in range(20)]
    assert {request.kind for event in events for request in event.requests} == set(one.kinds)


def test_how_an_answer_is_delivered_is_no_part_of_the_question():
    request = Request("hinted", COMPLETION, {"prompt": [1], "max_tokens": 3})
    delivered = {**request.body, "stream": True, "cache_salt": "red", "vllm_xargs": {"seamark_boundaries": [1]}}
    assert replace(request, body=delivered).question == request.question
    assert replace(request, body={"prompt": [2], "max_tokens": 3}).question != request.question


TOP = {"token_id:1": -0.5, "token_id:2": -0.9}

RIGHT = TimedAnswer((ContinuedToken("token_id:1", TOP),), 100, 0, 0.0, 0.1, 0.2)

REQUEST = Request("salts", COMPLETION, {"prompt": [1] * 100}, judged=True)


def driven(*outcomes: Outcome, **fields) -> Driven:
    """A made-up run in which all is well but what the arguments say."""
    well = Driven("room", 60.0, (Outcome(REQUEST, RIGHT), *outcomes), {}, {}, ())
    return replace(well, **fields)


WRONG = RIGHT._replace(steps=(ContinuedToken("token_id:2", TOP),))


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (driven(Outcome(REQUEST, failure="500")), "1 requests failed"),
        (driven(Outcome(REQUEST, WRONG)), "1 answers differ"),
        (driven(Outcome(REQUEST, RIGHT._replace(steps=()))), "1 answers differ"),
        (driven(Outcome(replace(REQUEST, must_miss=True), RIGHT._replace(cached_tokens=16))), "1 requests with a salt"),
        (driven(log_lines=["room: ERROR"]), "1 lines of the logs"),
        (driven(leftovers={"vllm:kv_cache_usage_perc": 0.1}), "1 gauges"),
        (driven(leftovers={"vllm:num_requests_running": None}), "1 gauges"),
        (replace(driven(), outcomes=()), "no answer was judged"),
    ],
)
def test_each_thing_that_is_wrong_is_told(run, complaint):
    assert judge(driven(), {REQUEST.question: RIGHT}).complaints == []
    result = judge(run, {REQUEST.question: RIGHT})
    assert len([line for line in result.complaints if complaint in line]) == 1
    assert complaint in soak.render(result)
