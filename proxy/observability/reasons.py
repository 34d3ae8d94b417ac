"""Why requests hit or missed the cache: the closed set of reasons, the choice among them, recent requests explained."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from proxy.observability.request_diff import PrefixChange

MAX_REQUESTS = 10_000  # explained, the last ones


class ReasonText(NamedTuple):
    """What people read of one reason."""

    short: str  # for a line in a list
    long: str  # one or two sentences


REASON_TEXT = {
    "hit": ReasonText("hit", "Everything that this prompt is known to share with earlier ones came from the cache."),
    "cold": ReasonText("first sight", "No earlier request began like this one. The next one that does can share it."),
    "prefix_changed": ReasonText(
        "changed in the middle",
        "It is like an earlier request, but something before the shared part's end differs; everything after that is "
        "computed again.",
    ),
    "below_unit": ReasonText(
        "too short to share", "The part it shares is shorter than the match unit, the engine's smallest step of reuse."
    ),
    "not_worth_it": ReasonText(
        "too little to be felt", "The engine kept no state there: computing it again is about as quick as reusing it."
    ),
    "evicted": ReasonText(
        "no longer in the cache",
        "The worker was sent this prefix before and has given its room to others. More memory for the cache helps.",
    ),
    "worker_restarted": ReasonText(
        "lost in a restart", "The worker that held this prefix has restarted since, and holds nothing from before."
    ),
    "other_worker": ReasonText(
        "held by another worker",
        "Another worker holds more of this prompt but had too many requests, or no room (setting load_slack).",
    ),
    "salt": ReasonText(
        "another client's prompt",
        "The same prompt was sent with another cache salt. Prefixes of different keys are kept apart on purpose; keys "
        "with one `share` are not.",
    ),
    "unpatched": ReasonText(
        "worker without Seamark",
        "The worker runs without the plugin, so it keeps a state only where a request happens to stop. "
        "`seamark doctor --worker URL` says what to change.",
    ),
    "no_boundary": ReasonText(
        "no place to share up to",
        "It has no text in which others could differ, or its template refuses to render such a text.",
    ),
    "render_failed": ReasonText(
        "worker did not render it", "The worker did not return the chat's tokens, so no hint could be sent."
    ),
    "hint_ignored": ReasonText(
        "worker took no hint",
        "The engine did not look for it, takes no hints for such a request (prompt logprobs, speculative decoding), or "
        "gets none because answers from its cache were found to differ.",
    ),
}


class Expectation(NamedTuple):
    """What was known when the request was sent; tokens, exact positions."""

    failure: str | None  # why no hint was sent
    shareable: int  # deepest boundary some running worker was sent before
    shareable_ever: int  # the same, workers that have gone included
    held: int  # the most that any running worker is believed to hold
    predicted: int  # what the chosen worker is believed to hold
    deepest: int  # deepest boundary of the prompt
    match_unit: int
    would_share: int = 0  # deepest boundary of this prompt that a request before it could have shared, unchanged

    def floored(self, tokens: int) -> int:
        """The part of `tokens` that the engine can deliver: whole match units."""
        return tokens // self.match_unit * self.match_unit


def reason_for(expected: Expectation, cached: int, change: PrefixChange | None = None) -> str:
    """The deepest cause of what a request got, of the closed set; "hit" if it got all it could.

    `change` is where the request differs in the middle from the nearest recent one. It can then share less than it
    would have, so the change is the cause even if the little that it could share was delivered.
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


# The gateway's reasons that may hide a deeper cause, and the engine's reasons that name one: the gateway cannot know
# why a prefix that was sent before is not there, or why a hint was of no use.
ENGINE_CAUSES = {
    "evicted": frozenset({"evicted", "not_worth_it", "below_unit", "hint_ignored"}),
    "cold": frozenset({"hint_ignored"}),  # cold whatever came of the hint, unless the engine takes none at all
}


def deeper_reason(gateway: str, engine: str | None) -> str:
    """The deeper of two reasons for one request, the gateway's and its engine's (None if it gave none).

    The gateway's comes first if it explains the miss: another worker, a restart, a changed prefix.
    """
    return engine if engine is not None and engine in ENGINE_CAUSES.get(gateway, ()) else gateway


def cache_label(expected: Expectation, cached: int) -> str:
    """`hit`, `partial` or `miss`, as in the first-token histogram."""
    if not cached:
        return "miss"
    return "hit" if cached >= expected.floored(expected.shareable) else "partial"


@dataclass
class Explanation:
    """One request; lengths in tokens. It is filled in as the request goes along."""

    request_id: str
    endpoint: str
    owner: str | None = None  # name of the API key it came with; not shown
    began: float = field(default_factory=time.time)  # seconds since the epoch
    status: int | None = None  # of the answer, 499 if the client left; None while it is under way
    model: str | None = None
    worker: str | None = None
    lookup: str | None = None  # how its boundaries were found
    renders: int = 0  # that a worker was asked for
    boundaries: tuple[tuple[int, str], ...] = ()  # position and kind of all that are known in the prompt
    sent: tuple[int, ...] = ()
    shareable: int | None = None
    predicted: int | None = None
    prompt: int | None = None
    delivered: int | None = None
    reason: str | None = None  # None until the answer is complete, and if the worker reports no cached tokens
    changed: dict[str, Any] | None = None  # where it differs from the nearest recent request
    would_save: dict[str, int] = field(default_factory=dict)  # tokens, by rewrite rule or volatile text
    rewrites: tuple[str, ...] = ()
    lost: dict[str, int] | None = None  # tokens by reason, in shadow mode; None until it is judged

    def as_json(self) -> dict[str, Any]:
        """For `/seamark/requests/{id}`."""
        boundaries = [{"tokens": tokens, "kind": kind} for tokens, kind in self.boundaries]
        shown = {name: value for name, value in self.__dict__.items() if name != "owner"}
        return {**shown, "boundaries": boundaries}


class Explanations:
    """The last requests, explained; the oldest is forgotten first."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._most = most
        self._requests: OrderedDict[str, Explanation] = OrderedDict()

    def add(self, explanation: Explanation) -> None:
        self._requests[explanation.request_id] = explanation
        self._requests.move_to_end(explanation.request_id)
        if len(self._requests) > self._most:
            self._requests.popitem(last=False)

    def newest(self, most: int) -> list[Explanation]:
        """The last ones, at most so many, the newest first."""
        return list(islice(reversed(self._requests.values()), most))

    def get(self, request_id: str) -> Explanation | None:
        return self._requests.get(request_id)
