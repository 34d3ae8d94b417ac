"""How many tokens a worker's answer says the prompt had, how many of them came from its cache, and how many are new."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

MAX_TOKENS = 2**40  # more than any engine takes: what a worker reports beyond it is nonsense


class Usage(NamedTuple):
    """Tokens, as the engine reports them. `cached` is None if the worker does not say."""

    prompt: int
    cached: int | None
    output: int = 0  # generated


_KEY = b'"usage":'  # not within a text, where a backslash stands before each quote
MOST_USAGE_BYTES = 4096


class PassingUsage:
    """Finds the usage in a JSON answer of which only pieces are at hand, one after the other."""

    def __init__(self) -> None:
        self._held = b""

    def see(self, piece: bytes) -> None:
        text = self._held + piece
        at = text.rfind(_KEY)
        self._held = text[at : at + MOST_USAGE_BYTES] if at >= 0 else text[-len(_KEY) :]

    @property
    def usage(self) -> Usage | None:
        """What the last usage among the pieces says, if there is one."""
        if not self._held.startswith(_KEY):
            return None
        text = self._held[len(_KEY) :].decode(errors="replace").lstrip()
        try:
            found, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return None
        return usage_of({"usage": found})


def usage_of(answer: Any) -> Usage | None:
    """Usage of a parsed answer or stream event, in the spelling of any API; None if there is none."""
    for wrapper in ("response", "message"):  # events of a streamed response, or message, carry it inside
        if isinstance(answer, dict) and "usage" not in answer and isinstance(answer.get(wrapper), dict):
            answer = answer[wrapper]
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    if (prompt := _count(usage.get("prompt_tokens"))) is not None:
        return Usage(prompt, _cached(usage.get("prompt_tokens_details")), _count(usage.get("completion_tokens")) or 0)
    if (prompt := _count(usage.get("input_tokens"))) is None:
        return None
    output = _count(usage.get("output_tokens")) or 0
    if isinstance(usage.get("input_tokens_details"), dict):
        return Usage(prompt, _cached(usage["input_tokens_details"]), output)
    # Anthropic's input_tokens are those neither read from the cache nor written to it.
    read, created = (_count(usage.get(name)) for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return Usage(prompt + (read or 0) + (created or 0), read, output)


def _cached(details: Any) -> int | None:
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    """A number of tokens; None for what is none, which a counter would refuse."""
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
