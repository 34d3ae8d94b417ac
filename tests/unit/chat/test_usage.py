"""Tokens that a worker reports, in the spelling of each API."""

from __future__ import annotations

import pytest

from proxy.chat.usage import MAX_TOKENS, MOST_USAGE_BYTES, PassingUsage, Usage, usage_of


@pytest.mark.parametrize(
    "answer", [None, [], {}, {"usage": None}, {"usage": {}}, {"usage": {"prompt_tokens": "9"}}, {"response": None}]
)
def test_what_says_nothing_of_tokens_is_no_usage(answer):
    assert usage_of(answer) is None


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


def test_a_usage_longer_than_any_is_none():
    for filling, found in ((0, Usage(1, None)), (MOST_USAGE_BYTES, None)):
        passing = PassingUsage()
        passing.see(b'{"usage":{"x":"' + b"x" * filling + b'","prompt_tokens":1}}')
        assert passing.usage == found
