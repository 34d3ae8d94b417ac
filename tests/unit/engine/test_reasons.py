"""One reason for each request, the deepest cause."""

from types import SimpleNamespace

from engine_patches.scheduler.reasons import (
    BELOW_UNIT,
    COLD,
    EVICTED,
    HINT_IGNORED,
    HIT,
    MAX_SEEN,
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
    outcomes.saw(request(), 160, EVICTED)
    assert outcomes.reason_for(request(), True, (160, 320), 160) == HIT
    assert outcomes.reason_for(request(), True, (160, 320), 0) == EVICTED
    outcomes.saw(request(), 320, EVICTED)
    assert outcomes.reason_for(request(), True, (160, 320), 160) == EVICTED  # the deepest cause
    outcomes.saw(request(), 16, NOT_WORTH_IT)
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
    for number in range(MAX_SEEN + 10):
        outcomes.saw(SimpleNamespace(block_hashes=[str(number)]), 1, EVICTED)
    assert len(outcomes._seen) == MAX_SEEN
