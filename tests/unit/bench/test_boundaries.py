"""`python -m tests.bench.boundaries`: what it measures finds all that a chat has."""

import json

from tests.bench.boundaries import LIMITS, main, measure


def test_each_request_that_is_timed_gets_a_whole_hint():
    cost = measure(2_000, 4, rounds=3)
    assert cost.entries == 4  # system prompt, the question before, history, turn
    assert min(cost.new, cost.known, cost.by_texts) > 0


def test_it_fails_if_a_limit_is_missed(monkeypatch, capsys):
    monkeypatch.setitem(LIMITS, 2_000, 1.0)
    monkeypatch.setitem(LIMITS, 400_000, 1.0)
    assert main(["--rounds", "1", "--json"]) == 0
    monkeypatch.setitem(LIMITS, 2_000, 0.0)
    assert main(["--rounds", "1"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[0])["held"]
