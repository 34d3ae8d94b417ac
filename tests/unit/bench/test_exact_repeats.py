"""What `tests.bench.exact_repeats` and `second_sight_serve` take for wrong."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.bench import exact_repeats, second_sight_serve
from tests.bench.exact_repeats import ROOM, Seen, complaints
from tests.bench.second_sight_serve import OFF, ON, Row
from tests.harness.state_uses import Uses


def answer(name: str, text: str = "Noon.") -> bytes:
    choice = {"message": {"content": text}, "finish_reason": "length"}
    return json.dumps({"id": name, "choices": [choice]}).encode()


def seen() -> Seen:
    """Two groups asked the same, each got an answer of its own, and then that again."""
    found = Seen(results=Counter(miss=2, hit=1, joined=1, bypass=1))
    found.computed["ann", 7] = {answer("1")}
    found.computed["team", 7] = {answer("2"), answer("3")}
    found.repeated = [("ann", 7, answer("1")), ("team", 7, answer("2"))]
    return found


OWN = {7: ("Noon.", "length")}


def test_bytes_that_an_engine_gave_to_the_same_group_are_right():
    assert complaints(seen(), OWN, 5) == []


@pytest.mark.parametrize(
    ("repeated", "told"),
    [
        (("ann", 7, answer("9")), "1 answers from the cache have bytes that no engine gave"),
        (("ann", 7, answer("2")), "1 answers reached two groups"),
    ],
)
def test_other_bytes_and_those_of_another_group_are_wrong(repeated, told):
    found = seen()
    found.repeated.append(repeated)
    assert any(told in each for each in complaints(found, OWN, 5))


def test_another_text_a_failed_request_too_much_memory_and_a_way_not_taken_are_wrong():
    found = seen()
    found.computed["ann", 7].add(answer("4", "Night."))
    assert "another text" in complaints(found, OWN, 5)[0]
    found = seen()
    found.most_bytes = ROOM + 1
    assert complaints(found, OWN, 5) == [f"the cache held {ROOM + 1} bytes"]
    found = seen()
    found.failed.append("503")
    assert complaints(found, OWN, 6) == ["1 requests failed: 503"]
    found = seen()
    del found.results["joined"]
    assert len(complaints(found, OWN, 5)) == 2  # and one request has no answer


def test_the_text_of_a_stream_is_that_of_the_whole_answer():
    parts = [
        {"delta": {"content": "No"}, "finish_reason": None},
        {"delta": {"content": "on."}, "finish_reason": "length"},
    ]
    lines = [f"data: {json.dumps({'choices': [part]})}\n\n" for part in parts]
    stream = "".join([*lines, 'data: {"choices": []}\n\n', "data: [DONE]\n\n"]).encode()
    assert exact_repeats.text_of(stream) == exact_repeats.text_of(answer("1")) == OWN[7]


def row(engine: str, hits: int, **states: Uses) -> Row:
    return Row("case", engine, 1000, hits, (0.1,), states)


def test_expecting_junctions_may_cost_no_hits_and_has_to_write_states():
    on = row(ON, 500, expected=Uses(3, 1), learned=Uses(2, 0))
    off = row(OFF, 400, learned=Uses(2, 0))
    assert second_sight_serve.complaints([on, off]) == []
    assert on.in_words().split()[-5:] == ["1", "expected", "3/1,", "learned", "2/0"]
    assert "500 tokens hit with" in second_sight_serve.complaints([on, off._replace(hits=501)])[0]
    assert len(second_sight_serve.complaints([off._replace(engine=ON), on._replace(engine=OFF, hits=0)])) == 2
