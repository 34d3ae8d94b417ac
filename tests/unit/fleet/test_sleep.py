"""Whether a worker computes nothing: what its engines say counts, and else what its metrics tell."""

from __future__ import annotations

import json

import pytest

from proxy.fleet.sleep import IS_PAUSED, IS_SLEEPING, EngineAnswers


def answers(is_sleeping: bool | None, is_paused: bool | None) -> EngineAnswers:
    """None: the worker lacks the route."""
    found = EngineAnswers("")
    for path, said in ((IS_SLEEPING, is_sleeping), (IS_PAUSED, is_paused)):
        found.take(path, 404 if said is None else 200, json.dumps({path[1:]: said}).encode())
    return found


@pytest.mark.parametrize(
    ("levels", "is_sleeping", "is_paused", "words"),
    [
        ((None,), False, False, ""),
        ((0,), False, False, ""),  # /resume has ended a sleep of level 0, and the gauge stays
        ((0,), False, None, "asleep (level 0)"),  # it may be paused
        ((None,), True, True, "asleep (paused): POST /resume wakes it"),  # vLLM calls it sleeping, too
        ((1,), True, True, "asleep (level 1): POST /wake_up wakes it"),
        ((None,), True, False, "asleep: POST /wake_up wakes it"),
    ],
)
def test_the_engines_word_counts_and_else_its_gauge(levels, is_sleeping, is_paused, words):
    why = answers(is_sleeping, is_paused).why_asleep(levels)
    assert why.startswith(words) and bool(why) == bool(words)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b'{"is_paused":true}', {IS_SLEEPING: None, IS_PAUSED: True}),
        (404, b'{"is_paused":true}', {IS_SLEEPING: None}),  # it lacks the route: it is not asked there again
        (200, b'{"is_paused":1}', {IS_SLEEPING: None}),
        (200, b"no JSON", {IS_SLEEPING: None}),
        (500, b'{"is_paused":true}', {IS_SLEEPING: None, IS_PAUSED: None}),  # nothing now
    ],
)
def test_what_a_route_answers_is_what_it_says_and_one_without_an_answer_is_lacking(status, body, said):
    found = EngineAnswers("boot")
    found.take(IS_PAUSED, status, body)
    assert found.said == said
