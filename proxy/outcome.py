"""What became of a chat request: what it could share, what was expected, what came, and the reason for a miss."""

from __future__ import annotations

from typing import Any, NamedTuple

from proxy.recent import Change


class Usage(NamedTuple):
    """What the engine reports; tokens. `cached` is None where the worker does not say."""

    prompt: int
    cached: int | None


class Expectation(NamedTuple):
    """What was known when the request was sent; tokens, exact positions."""

    failure: str | None  # why no hint was sent
    shareable: int  # deepest boundary some running worker was sent before
    shareable_ever: int  # the same, workers that have gone included
    held: int  # the most that any running worker is believed to hold
    predicted: int  # what the chosen worker is believed to hold
    deepest: int  # deepest boundary sent
    match_unit: int
    would_share: int = 0  # deepest boundary of this prompt that a request before it could have shared, unchanged

    def floored(self, tokens: int) -> int:
        """What the engine can deliver of `tokens`."""
        return tokens // self.match_unit * self.match_unit


def reason(expected: Expectation, cached: int, change: Change | None = None) -> str:
    """The deepest cause of what a request got, of the closed set; "hit" where it got all it could.

    `change` is where the request leaves the nearest recent one in the middle: what it could share is less then than
    what it would have shared, so that is the cause even where the little it could share was delivered.
    """
    if expected.failure is not None:
        return expected.failure
    if change is not None and expected.floored(expected.shareable) < expected.floored(expected.would_share):
        return "salt" if change.salt else "prefix_changed"
    if cached and cached >= expected.floored(expected.shareable):
        return "hit"
    if expected.deepest < expected.match_unit:
        return "below_unit"
    if not expected.shareable:
        return "worker_restarted" if expected.shareable_ever else "cold"
    if not expected.floored(expected.shareable):
        return "below_unit"
    elsewhere = expected.floored(expected.held) > expected.floored(expected.predicted)
    if elsewhere and cached >= expected.floored(expected.predicted):
        return "other_worker"
    return "evicted"


# By what the gateway cannot know better (a prefix sent before is not there, a hint was of no use): the engine's
# words that name a cause which the gateway's own word hides.
ENGINE_CAUSES = {
    "evicted": frozenset({"evicted", "not_worth_it", "below_unit", "hint_ignored"}),
    "cold": frozenset({"hint_ignored"}),  # cold whatever it thought of the hint, unless it takes none at all
}


def deepest(gateway: str, engine: str | None) -> str:
    """The deeper of two reasons for one request, the gateway's and its engine's (None where it said nothing).

    What the gateway saw comes first where it explains the miss: another worker, a restart, a changed prefix.
    """
    return engine if engine is not None and engine in ENGINE_CAUSES.get(gateway, ()) else gateway


def cache_label(expected: Expectation, cached: int) -> str:
    """`hit`, `partial` or `miss`, as in the first-token histogram."""
    if not cached:
        return "miss"
    return "hit" if cached >= expected.floored(expected.shareable) else "partial"


def usage_of(answer: Any) -> Usage | None:
    """Usage of a parsed answer or stream event, in the spelling of chat and completions, responses, or messages."""
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
