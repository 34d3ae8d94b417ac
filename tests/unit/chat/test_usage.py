"""Tokens that a worker reports, in the spelling of each API."""

from __future__ import annotations

import json

import pytest

from proxy.chat.usage import MAX_TOKENS, MOST_USAGE_BYTES, PassingUsage, Usage, usage_of


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


def test_what_was_generated_is_told_in_the_spelling_of_any_api():
    assert usage_of({"usage": {"prompt_tokens": 64, "completion_tokens": 7}}) == Usage(64, None, 7)
    assert usage_of({"usage": {"input_tokens": 64, "output_tokens": 7}}) == Usage(64, None, 7)
    details = {"input_tokens_details": {"cached_tokens": 48}}
    assert usage_of({"usage": {"input_tokens": 64, "output_tokens": 7, **details}}) == Usage(64, 48, 7)
    assert usage_of({"usage": {"prompt_tokens": 64, "completion_tokens": -1}}) == Usage(64, None, 0)


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
    assert usage_of({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": nonsense}}}) == Usage(
        9, None
    )
    assert usage_of({"usage": {"input_tokens": 9, "cache_read_input_tokens": nonsense}}) == Usage(9, None)


ANSWER = json.dumps(
    {
        "choices": [{"message": {"content": '"usage":{"prompt_tokens":1}'}, "usage": None}],
        "usage": {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 160}},
        "prompt_logprobs": [{"1": 0.5}] * 1000,
    },
    separators=(",", ":"),
).encode()


@pytest.mark.parametrize("size", [1, 10, 1000, 10**6])
def test_usage_is_found_in_an_answer_that_is_not_kept(size):
    passing = PassingUsage()
    for at in range(0, len(ANSWER), size):
        passing.see(ANSWER[at : at + size])
        assert len(passing._held) <= MOST_USAGE_BYTES
    assert passing.usage == Usage(300, 160)


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"usage":null}', b'{"usage":{"prompt', b'{"usage":' + b"[" * 10_000])
def test_an_answer_without_usage_has_none(answer):
    passing = PassingUsage()
    passing.see(answer)
    assert passing.usage is None


def test_a_number_of_tokens_is_at_least_none_and_at_most_what_an_engine_can_have_taken():
    for tokens in (0, MAX_TOKENS):
        assert usage_of({"usage": {"prompt_tokens": tokens}}) == Usage(tokens, None)
    for tokens in (-1, MAX_TOKENS + 1):
        assert usage_of({"usage": {"prompt_tokens": tokens}}) is None


@pytest.mark.parametrize(
    ("fields", "usage"),
    [
        ({"cache_creation_input_tokens": 6}, Usage(16, None)),
        ({"cache_read_input_tokens": 48}, Usage(58, 48)),
        ({"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}, Usage(10, 0)),
        ({"cache_read_input_tokens": None, "cache_creation_input_tokens": None}, Usage(10, None)),
        ({"input_tokens_details": {}, "cache_read_input_tokens": 48}, Usage(10, None)),
        ({"input_tokens_details": None, "cache_read_input_tokens": 48}, Usage(58, 48)),
    ],
)
def test_each_spelling_has_its_own_fields(fields, usage):
    assert usage_of({"usage": {"input_tokens": 10, **fields}}) == usage


def test_an_answers_own_usage_goes_before_that_of_what_it_wraps():
    inner = {"usage": {"prompt_tokens": 1}}
    assert usage_of({"usage": {"prompt_tokens": 2}, "response": inner}) == Usage(2, None)
    assert usage_of({"usage": None, "message": inner}) is None
    assert usage_of({"response": {"message": inner}}) == Usage(1, None)
    assert usage_of({"other": inner}) is None


def test_the_last_usage_of_an_answer_counts_whatever_space_stands_before_it():
    passing = PassingUsage()
    passing.see(b'{"usage":{"prompt_tokens":1},"x":{"usage": \\n'.replace(b"\\n", b"\n"))
    passing.see(b'{"prompt_tokens":2}, "y":1}')
    assert passing.usage == Usage(2, None)


def test_a_usage_longer_than_any_is_none():
    for filling, found in ((0, Usage(1, None)), (MOST_USAGE_BYTES, None)):
        passing = PassingUsage()
        passing.see(b'{"usage":{"x":"' + b"x" * filling + b'","prompt_tokens":1}}')
        assert passing.usage == found
