"""Tokens that a worker reports, in the spelling of each API."""

from proxy.chat.usage import Usage, usage_of


def test_tokens_written_to_a_cache_belong_to_the_prompt():
    usage = {"input_tokens": 10, "cache_read_input_tokens": 48, "cache_creation_input_tokens": 6}
    assert usage_of({"usage": usage}) == Usage(64, 48)
    assert usage_of({"usage": {"input_tokens": 10}}) == Usage(10, None)
