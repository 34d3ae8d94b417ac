"""The closed set of reasons in words: what happened, and what follows from it for whoever runs the gateway."""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """Of one reason."""

    short: str  # for a line in a list
    long: str  # one or two sentences


WORDS = {
    "hit": Words("hit", "Everything that this prompt is known to share with earlier ones came from the cache."),
    "cold": Words("first sight", "No earlier request began like this one. The next one that does can share it."),
    "prefix_changed": Words(
        "changed in the middle",
        "It is like an earlier request, but something before the shared part's end differs; all behind that is "
        "computed anew.",
    ),
    "below_unit": Words(
        "too short to share", "What it shares is shorter than the match unit, the engine's smallest step of reuse."
    ),
    "not_worth_it": Words(
        "too little to be felt", "The engine kept no state there: computing it again is about as quick as reusing it."
    ),
    "evicted": Words(
        "no longer in the cache",
        "The worker was sent this prefix before and has given its place to others. More memory for the cache helps.",
    ),
    "worker_restarted": Words(
        "lost in a restart", "The worker that held this prefix has restarted since, and holds nothing from before."
    ),
    "other_worker": Words(
        "held by another worker",
        "Another worker holds more of this prompt but had too many requests, or no room (setting load_slack).",
    ),
    "salt": Words(
        "another client's prompt",
        "The same prompt was sent with another cache salt. Prefixes of different keys are kept apart on purpose; keys "
        "with one `share` are not.",
    ),
    "unpatched": Words(
        "worker without Seamark",
        "The worker runs without the plugin, so it keeps a state only where a request happens to stop. "
        "`seamark doctor --worker URL` says what to change.",
    ),
    "no_boundary": Words(
        "no place to share up to", "No text in it that others could differ in, or its template refuses the question."
    ),
    "render_failed": Words(
        "worker did not render it", "The worker did not say what the chat's tokens are, so no hint could be sent."
    ),
    "hint_ignored": Words(
        "worker took no hint",
        "The engine did not look, takes no hints for such a request (prompt logprobs, speculative decoding), or gets "
        "none since answers from its cache were found to differ.",
    ),
}
