"""One reason for each request, the deepest cause."""

from types import SimpleNamespace

from engine_patches.scheduler import reasons
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.reasons import (
    COLD,
    EVICTED,
    HINT_IGNORED,
    MAX_COMPUTED,
    Outcomes,
)
from engine_patches.scheduler.request_state import Wish


def request(tokens=400, name="a"):
    return SimpleNamespace(
        block_hashes=[f"{name}{number}" for number in range(tokens // 16)], num_tokens=tokens, num_prompt_tokens=tokens
    )


def state(*positions, shared=0):
    """Of a request with a hint."""
    return Wish(hinted_positions=positions, hinted=True, shared=shared)


def test_memory_is_bounded():
    outcomes = Outcomes(Grid(1, 1))
    for number in range(MAX_COMPUTED + 10):
        outcomes.computed(SimpleNamespace(block_hashes=[str(number)]), 1, EVICTED)
    assert len(outcomes._misses) == MAX_COMPUTED


def test_a_prompt_that_is_not_looked_up_is_no_miss():
    unread = request()
    unread.skip_reading_prefix_cache = True
    assert Outcomes(Grid(16, 16)).reason_for(unread, state(160, shared=160), 0) == HINT_IGNORED
    assert Outcomes(Grid(16, 16)).reason_for(unread, Wish(shared=160), 0) == HINT_IGNORED


def test_the_prefix_that_was_computed_longest_ago_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(reasons, "MAX_COMPUTED", 2)
    outcomes = Outcomes(Grid(16, 16))
    for name in ("a", "b", "a", "c"):
        outcomes.computed(request(name=name), 160, EVICTED)
    assert [outcomes.reason_for(request(name=name), state(160), 0) for name in "abc"] == [EVICTED, COLD, EVICTED]
