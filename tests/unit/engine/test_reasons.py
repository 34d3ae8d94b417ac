"""One reason for each request, the deepest cause."""

from types import SimpleNamespace

from engine_patches.scheduler import reasons
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.reasons import (
    BELOW_UNIT,
    COLD,
    EVICTED,
    HINT_IGNORED,
    HIT,
    MAX_COMPUTED,
    NO_BOUNDARY,
    NOT_WORTH_IT,
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


def test_reasons():
    outcomes = Outcomes(Grid(16, 16))
    assert outcomes.reason_for(request(), state(160), 0) == COLD
    outcomes.computed(request(), 160, EVICTED)
    assert outcomes.reason_for(request(), state(160, 320), 160) == HIT
    assert outcomes.reason_for(request(), state(160, 320), 0) == EVICTED
    outcomes.computed(request(), 320, EVICTED)
    assert outcomes.reason_for(request(), state(160, 320), 160) == EVICTED  # the deepest cause
    outcomes.computed(request(), 16, NOT_WORTH_IT)
    assert outcomes.reason_for(request(), state(16), 0) == NOT_WORTH_IT
    assert outcomes.reason_for(request(name="b"), state(160), 0) == COLD


def test_requests_without_a_usable_hint():
    outcomes = Outcomes(Grid(16, 16))
    assert outcomes.reason_for(request(), Wish(), 0) == NO_BOUNDARY
    assert outcomes.reason_for(request(), Wish(), 160) == HIT
    assert outcomes.reason_for(request(), state(), 0) == HINT_IGNORED
    assert outcomes.reason_for(request(tokens=10), state(), 0) == BELOW_UNIT


def test_memory_is_bounded():
    outcomes = Outcomes(Grid(1, 1))
    for number in range(MAX_COMPUTED + 10):
        outcomes.computed(SimpleNamespace(block_hashes=[str(number)]), 1, EVICTED)
    assert len(outcomes._misses) == MAX_COMPUTED


def test_a_hit_of_just_the_position_and_a_prompt_of_just_the_unit():
    outcomes = Outcomes(Grid(16, 16))
    outcomes.computed(request(), 160, EVICTED)
    assert outcomes.reason_for(request(), state(160), 160) == HIT
    assert outcomes.reason_for(request(), state(160), 144) == EVICTED
    assert outcomes.reason_for(request(tokens=160), state(160), 0) == COLD  # its last token is always computed
    assert outcomes.reason_for(request(tokens=16), state(), 0) == BELOW_UNIT
    assert outcomes.reason_for(request(tokens=17), state(), 0) == HINT_IGNORED


def test_a_prompt_that_is_not_looked_up_is_no_miss():
    unread = request()
    unread.skip_reading_prefix_cache = True
    assert Outcomes(Grid(16, 16)).reason_for(unread, state(160, shared=160), 0) == HINT_IGNORED
    assert Outcomes(Grid(16, 16)).reason_for(unread, Wish(shared=160), 0) == HINT_IGNORED


def test_what_is_shared_decides_whether_a_hit_is_whole():
    outcomes = Outcomes(Grid(16, 16))
    assert outcomes.reason_for(request(), state(160, shared=160), 160) == HIT
    assert outcomes.reason_for(request(), state(160, shared=176), 160) == COLD  # nobody kept a state at 176
    assert outcomes.reason_for(request(), state(160, 320, shared=160), 160) == HIT  # nobody has had what is behind
    assert outcomes.reason_for(request(), state(160, shared=160), 192) == HIT
    assert outcomes.reason_for(request(), Wish(shared=320), 160) == COLD
    assert outcomes.reason_for(request(), Wish(shared=320), 0) == NO_BOUNDARY
    assert outcomes.reason_for(request(), Wish(shared=320, learned=320), 0) == NO_BOUNDARY
    assert outcomes.reason_for(request(tokens=320), Wish(shared=320), 304) == HIT  # the last token is computed


def test_the_deepest_cause_above_the_hit_is_named_wherever_its_state_stood():
    outcomes = Outcomes(Grid(16, 16))
    outcomes.computed(request(), 96, NOT_WORTH_IT)
    outcomes.computed(request(), 256, EVICTED)
    assert outcomes.reason_for(request(), state(160, shared=320), 0) == EVICTED
    assert outcomes.reason_for(request(), state(160, shared=320), 240) == EVICTED
    assert outcomes.reason_for(request(), state(160, shared=320), 256) == COLD
    assert outcomes.reason_for(request(), Wish(shared=240), 0) == NOT_WORTH_IT


def test_what_is_shared_inside_a_kernels_chunk_cannot_be_missed():
    outcomes = Outcomes(Grid(16, 64))
    assert outcomes.reason_for(request(), state(128, shared=176), 128) == HIT
    assert outcomes.reason_for(request(), state(128, shared=192), 128) == COLD


def test_beside_a_draft_head_a_prefix_goes_by_what_it_has_to_share():
    outcomes = Outcomes(Grid(16, 16, 16, 16))
    first = request()
    outcomes.computed(first, 144, EVICTED)
    shares = request()
    shares.block_hashes = first.block_hashes[:10] + request(name="b").block_hashes[10:]
    shares_less = request()
    shares_less.block_hashes = first.block_hashes[:9] + request(name="b").block_hashes[9:]
    assert outcomes.reason_for(shares, state(144, shared=160), 0) == EVICTED
    assert outcomes.reason_for(shares_less, state(144, shared=144), 0) == COLD
    # All that it can have of 160 shared tokens; one unit less is not all.
    assert outcomes.reason_for(shares, state(shared=160), 144) == HIT
    assert Outcomes(Grid(16, 16, 16, 16)).reason_for(shares, state(shared=160), 128) == COLD


def test_the_prefix_that_was_computed_longest_ago_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(reasons, "MAX_COMPUTED", 2)
    outcomes = Outcomes(Grid(16, 16))
    for name in ("a", "b", "a", "c"):
        outcomes.computed(request(name=name), 160, EVICTED)
    assert [outcomes.reason_for(request(name=name), state(160), 0) for name in "abc"] == [EVICTED, COLD, EVICTED]


def test_a_prefix_means_what_became_of_it_last():
    outcomes = Outcomes(Grid(16, 16))
    for miss in (EVICTED, NOT_WORTH_IT):
        outcomes.computed(request(), 160, miss)
    assert outcomes.reason_for(request(), state(160), 0) == NOT_WORTH_IT
