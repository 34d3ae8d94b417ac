"""One reason for each request, the deepest cause."""

from types import SimpleNamespace

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


def request(tokens=400, name="a"):
    return SimpleNamespace(
        block_hashes=[f"{name}{number}" for number in range(tokens // 16)], num_tokens=tokens, num_prompt_tokens=tokens
    )


def test_reasons():
    outcomes = Outcomes(16)
    assert outcomes.reason_for(request(), True, (160,), 0) == COLD
    outcomes.computed(request(), 160, EVICTED)
    assert outcomes.reason_for(request(), True, (160, 320), 160) == HIT
    assert outcomes.reason_for(request(), True, (160, 320), 0) == EVICTED
    outcomes.computed(request(), 320, EVICTED)
    assert outcomes.reason_for(request(), True, (160, 320), 160) == EVICTED  # the deepest cause
    outcomes.computed(request(), 16, NOT_WORTH_IT)
    assert outcomes.reason_for(request(), True, (16,), 0) == NOT_WORTH_IT
    assert outcomes.reason_for(request(name="b"), True, (160,), 0) == COLD


def test_requests_without_a_usable_hint():
    outcomes = Outcomes(16)
    assert outcomes.reason_for(request(), False, (), 0) == NO_BOUNDARY
    assert outcomes.reason_for(request(), False, (), 160) == HIT
    assert outcomes.reason_for(request(), True, (), 0) == HINT_IGNORED
    assert outcomes.reason_for(request(tokens=10), True, (), 0) == BELOW_UNIT


def test_memory_is_bounded():
    outcomes = Outcomes(1)
    for number in range(MAX_COMPUTED + 10):
        outcomes.computed(SimpleNamespace(block_hashes=[str(number)]), 1, EVICTED)
    assert len(outcomes._misses) == MAX_COMPUTED


def test_a_hit_of_just_the_position_and_a_prompt_of_just_the_unit():
    outcomes = Outcomes(16)
    outcomes.computed(request(), 160, EVICTED)
    assert outcomes.reason_for(request(), True, (160,), 160) == HIT
    assert outcomes.reason_for(request(), True, (160,), 144) == EVICTED
    assert outcomes.reason_for(request(tokens=160), True, (160,), 0) == COLD  # its last token is always computed
    assert outcomes.reason_for(request(tokens=16), True, (), 0) == BELOW_UNIT
    assert outcomes.reason_for(request(tokens=17), True, (), 0) == HINT_IGNORED


def test_a_prompt_that_is_not_looked_up_is_no_miss():
    unread = request()
    unread.skip_reading_prefix_cache = True
    assert Outcomes(16).reason_for(unread, True, (160,), 0) == HINT_IGNORED
