"""Tokens that a worker reports, in the spelling of each API."""

from __future__ import annotations

import json

import pytest

from proxy.chat.usage import MAX_TOKENS, MOST_USAGE_BYTES, PassingUsage, Usage, usage_of

NONSENSE = (-1, MAX_TOKENS + 1, True, 1.5, "9", [], None)


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        *((told, None) for told in (None, {}, {"prompt_tokens": "9"})),
        *(
            ({name: tokens}, Usage(tokens, None))
            for name in ("prompt_tokens", "input_tokens")
            for tokens in (0, MAX_TOKENS)
        ),
        *(({name: odd}, None) for name in ("prompt_tokens", "input_tokens") for odd in NONSENSE),
        ({"prompt_tokens": 64, "completion_tokens": 7}, Usage(64, None, 7)),
        ({"prompt_tokens": 64, "completion_tokens": -1}, Usage(64, None, 0)),
        ({"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}, Usage(64, 48)),
        ({"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(64, 0)),
        *(({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": odd}}, Usage(9, None)) for odd in NONSENSE),
        *(({"input_tokens": 9, "cache_read_input_tokens": odd}, Usage(9, None)) for odd in NONSENSE),
        ({"input_tokens": 64, "input_tokens_details": {"cached_tokens": 48}, "output_tokens": 7}, Usage(64, 48, 7)),
        ({"input_tokens": 10, "input_tokens_details": {}, "cache_read_input_tokens": 48}, Usage(10, None)),
        ({"input_tokens": 10, "input_tokens_details": None, "cache_read_input_tokens": 48}, Usage(58, 48)),
        ({"input_tokens": 10, "cache_read_input_tokens": 48, "cache_creation_input_tokens": 6}, Usage(64, 48)),
        ({"input_tokens": 10, "cache_creation_input_tokens": 6}, Usage(16, None)),
        ({"input_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}, Usage(10, 0)),
    ],
)
def test_each_spelling_is_read_and_what_no_counter_takes_is_no_number(told, usage):
    assert usage_of({"usage": told}) == usage
    for event in (
        {"response": {"usage": told}},
        {"message": {"usage": told}},
        {"response": {"message": {"usage": told}}},
    ):
        assert usage_of(event) == usage
    assert usage_of({"other": {"usage": told}}) is usage_of([]) is usage_of(None) is None
    assert usage_of({"usage": {"prompt_tokens": 2}, "response": {"usage": told}}) == Usage(2, None)


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_usage_is_found_in_an_answer_that_is_not_kept_and_the_last_one_counts(size):
    told = [{"prompt_tokens": 1}, {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 160}}]
    answer = b"".join(
        b'data: {"text":"%b","usage": \n%b}\n\n' % (b"x" * 3000, json.dumps(each).encode()) for each in told
    )
    passing = PassingUsage()
    for at in range(0, len(answer), size):
        passing.see(answer[at : at + size])
        assert len(passing._held) <= MOST_USAGE_BYTES
    assert passing.usage == Usage(300, 160)


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        *((odd, None) for odd in (b"", b"{}", b'{"usage":null}', b'{"usage":{"prompt', b'{"usage":' + b"[" * 10_000)),
        (b'{"usage":{"x":"","prompt_tokens":1}}', Usage(1, None)),
        (b'{"usage":{"x":"' + b"x" * MOST_USAGE_BYTES + b'","prompt_tokens":1}}', None),  # longer than any
    ],
)
def test_an_answer_without_usage_has_none(answer, usage):
    passing = PassingUsage()
    passing.see(answer)
    assert passing.usage == usage
