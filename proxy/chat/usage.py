"""How many tokens a worker's answer says the prompt had, and how many of them came from its cache."""

from __future__ import annotations

from typing import Any, NamedTuple


class Usage(NamedTuple):
    """Tokens, as the engine reports them. `cached` is None if the worker does not say."""

    prompt: int
    cached: int | None


def usage_of(answer: Any) -> Usage | None:
    """Usage of a parsed answer or stream event, in the spelling of any API; None if there is none."""
    for wrapper in ("response", "message"):  # events of a streamed response, or message, carry it inside
        if isinstance(answer, dict) and "usage" not in answer and isinstance(answer.get(wrapper), dict):
            answer = answer[wrapper]
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    if isinstance(usage.get("prompt_tokens"), int):
        return Usage(usage["prompt_tokens"], _cached(usage.get("prompt_tokens_details")))
    if not isinstance(usage.get("input_tokens"), int):
        return None
    if isinstance(usage.get("input_tokens_details"), dict):
        return Usage(usage["input_tokens"], _cached(usage["input_tokens_details"]))
    # Anthropic's input_tokens are those neither read from the cache nor written to it.
    read, created = (usage.get(name) for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return Usage(usage["input_tokens"] + (read or 0) + (created or 0), read if isinstance(read, int) else None)


def _cached(details: Any) -> int | None:
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None
