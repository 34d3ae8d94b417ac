"""Tokens that a worker reports, in the spelling of each API."""

import pytest

from proxy.chat.usage import Usage, usage_of


def test_tokens_written_to_a_cache_belong_to_the_prompt():
    usage = {"input_tokens": 10, "cache_read_input_tokens": 48, "cache_creation_input_tokens": 6}
    assert usage_of({"usage": usage}) == Usage(64, 48)
    assert usage_of({"usage": {"input_tokens": 10}}) == Usage(10, None)


@pytest.mark.parametrize(
    ("prompt", "details"), [("prompt_tokens", "prompt_tokens_details"), ("input_tokens", "input_tokens_details")]
)
def test_cached_tokens_are_a_part_of_the_prompt(prompt, details):
    assert usage_of({"usage": {prompt: 64, details: {"cached_tokens": 48}}}) == Usage(64, 48)
    assert usage_of({"usage": {prompt: 64, details: {"cached_tokens": 0}}}) == Usage(64, 0)
    for untold in ({}, {"cached_tokens": None}, {"cached_tokens": "48"}):
        assert usage_of({"usage": {prompt: 64, details: untold}}) == Usage(64, None)
    assert usage_of({"usage": {prompt: 64, details: None}}) == Usage(64, None)


@pytest.mark.parametrize("wrapper", ["response", "message"])
def test_events_of_streams_carry_usage_inside(wrapper):
    assert usage_of({wrapper: {"usage": {"input_tokens": 10}}}) == Usage(10, None)


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"usage": None}, {"usage": {}}, {"usage": {"prompt_tokens": "9"}}, {"response": None}]
)
def test_what_says_nothing_of_tokens_is_no_usage(answer):
    assert usage_of(answer) is None


@pytest.mark.parametrize("nonsense", [-1, 10**40, True, 1.5, "9", []])
def test_what_no_counter_takes_is_no_number_of_tokens(nonsense):
    assert usage_of({"usage": {"prompt_tokens": nonsense}}) is None
    assert usage_of({"usage": {"input_tokens": nonsense}}) is None
    assert usage_of({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": nonsense}}}) == (9, None)
    assert usage_of({"usage": {"input_tokens": 9, "cache_read_input_tokens": nonsense}}) == (9, None)
