"""Why requests hit or missed the cache: the closed set of reasons, and the choice among them."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from proxy.observability.request_diff import PrefixChange
from proxy.routing.prefix_index import Prefix


class ReasonText(NamedTuple):
    short: str  # for a line in a list
    long: str  # one or two sentences
    action: str  # what to do about it; empty if there is nothing


REASON_TEXT = {
    "hit": ReasonText("hit", "All that was kept of what this prompt shares with earlier ones came from the cache.", ""),
    "cold": ReasonText(
        "first sight",
        "No earlier request began like this one. The next one that does can share it.",
        "Nothing, unless requests like it keep coming: then something near their start changes, such as a date.",
    ),
    "between_states": ReasonText(
        "shares more than was kept",
        "It is the first to leave an earlier prompt where it does. It got all up to the last state before that place; "
        "the tokens between, `shareable` less `delivered`, were computed again. A state is kept there now.",
        "",
    ),
    "prefix_changed": ReasonText(
        "changed in the middle",
        "It is like an earlier request, but something before the shared part's end differs; everything after that is "
        "computed again.",
        "Move what changes (a date, an id, a list of files) behind the shared part; the explanation names it.",
    ),
    "below_unit": ReasonText(
        "too short to share",
        "The part it shares is shorter than the match unit, the smallest step in which the engine reuses a prompt.",
        "Nothing: prompts as short as this are quick to compute.",
    ),
    "not_worth_it": ReasonText(
        "too little to be felt",
        "The engine kept no state there: computing it again is about as quick as reusing it.",
        "",
    ),
    "evicted": ReasonText(
        "no longer in the cache",
        "The worker was sent this prefix before and has given its room to others.",
        "Give vLLM more memory (--gpu-memory-utilization), or start fewer conversations at once.",
    ),
    "worker_restarted": ReasonText(
        "lost in a restart",
        "The worker that held this prefix has restarted since, and holds nothing from before.",
        "Nothing now. If it happens often, look into the worker's log for why it restarts.",
    ),
    "other_worker": ReasonText(
        "held by another worker",
        "Another worker holds more of this prompt but refused it, had too many requests, or no room (setting "
        "load_slack).",
        "If it happens often, raise load_slack, so that requests wait for the worker that holds their prompt.",
    ),
    "salt": ReasonText(
        "another client's prompt",
        "The same prompt was sent with another cache salt. Prefixes of different keys are kept apart on purpose; keys "
        "with one `share` are not.",
        "If these clients may share, give their keys one `share` in the keys file.",
    ),
    "unpatched": ReasonText(
        "worker without Seamark",
        "The worker runs without the plugin, so it keeps a state only where a request happens to stop.",
        "Run `seamark doctor --worker URL`: it says what to install or change.",
    ),
    "no_boundary": ReasonText(
        "no place to share up to",
        "It has no text in which others could differ (a prompt of token ids), or its template refuses to render such a "
        "text.",
        "Nothing for a single request. If all of a client end so, run `seamark boundary` on one of them.",
    ),
    "no_facts": ReasonText(
        "template not learnt yet",
        "The gateway has not learnt this chat template yet, or the worker renders no chat for it, so vLLM was "
        "not told where the shared part ends.",
        "Wait for a minute after a worker's start. If it stays so, `seamark doctor --worker URL` says what is missing.",
    ),
    "not_kept": ReasonText(
        "nothing may be kept",
        "It, or its API key, asks that nothing of it be kept. It found nothing, and leaves nothing to be found.",
        "Nothing: without `x-seamark-keep`, or `keep` in the keys file, it would share as others do.",
    ),
    "hint_ignored": ReasonText(
        "worker kept nothing here",
        "The engine did not look for it (prompt logprobs, `echo` with `logprobs`), had no room for a state, keeps none "
        "at any place that it is told, or is told none because answers from its cache were found to differ.",
        "Leave prompt logprobs out of the request; run `seamark doctor --worker URL` for the rest.",
    ),
}


class Expectation(Struct):
    """What was known when the request was sent; lengths in tokens."""

    failure: str | None  # why no hint was sent
    sent: Prefix | None  # the deepest beginning that some running worker was sent before
    sent_here: bool  # the chosen worker was sent it
    ever_sent: Prefix | None  # the same, workers that have gone included
    held: int  # the most that any running worker is known to hold
    predicted: int  # what the chosen worker is known to hold
    match_unit: int
    ahead: int = 0  # past a state, up to which a request has to share

    def deliverable(self, shared: int) -> int:
        """What the engine can deliver of `shared` tokens: whole match units, and those it has to share beyond."""
        return max(shared - self.ahead, 0) // self.match_unit * self.match_unit

    def found(self, held: int) -> int:
        """What a request finds of `held` tokens: an engine has told a state's position, or else a prefix's length."""
        return self.deliverable(held) if held % self.match_unit else held

    def shareable(self, prompt: int, told: int | None = None) -> int:
        """Of the prompt, what lies before the point where it leaves every earlier one; its last token is computed.

        `told`: what the worker's engine says that it shares with earlier ones, None if it does not say. An engine does
        not know what others were sent; what it does know stands.
        """
        known = self.sent.tokens if self.sent is not None else 0
        if told is not None:
            known = told if self.sent_here or told > known else known
        return self.deliverable(min(known, prompt - (not self.ahead)))


# Two states are not kept so near each other (match units): what lies between them is no loss. A match unit may be a
# whole cache block, of thousands of tokens, and those would be felt.
NEAR_UNITS, NEAR_TOKENS = 2, 128

# A loss of less than one in so many of the tokens that could have come is no miss where all that was kept has come.
LOST_PARTS = 4


def reason_for(
    expected: Expectation,
    prompt: int,
    cached: int,
    shareable: int,
    deepest: int,
    engine: str = "",
    change: PrefixChange | None = None,
) -> str:
    """The cause that cost a request the most tokens, of the closed set; "hit" if it got all it could.

    Of the `prompt`, `cached` tokens came, `shareable` could have, and `deepest` end with its own deepest boundary.
    `engine`: the engine's reason. `change` is where the request differs in the middle from the nearest recent one: it
    could have shared more.
    """
    if expected.failure == "not_kept":
        return "hit" if cached else "not_kept"
    near = min(NEAR_UNITS * expected.match_unit, NEAR_TOKENS)
    is_full = cached and cached > shareable - near and expected.failure in (None, "no_facts", "no_boundary")
    if not is_full and expected.failure not in (None, "no_facts"):
        return str(expected.failure)
    cause = "hit" if is_full else _beside_change(expected, prompt, cached, shareable, deepest, engine)
    is_first = cause in ("cold", "between_states")
    if change is not None:
        unchanged = expected.deliverable(change.token + change.lost)
        beyond = min(unchanged - max(shareable, cached), change.lost)
        if is_first:  # nobody had kept a state here before: the change is why this request needed one
            is_change = _is_felt(unchanged - cached, unchanged)
        else:
            is_change = _is_felt(beyond, unchanged) if cause == "hit" else beyond > 0 and beyond >= shareable - cached
        if is_change:
            return "salt" if change.is_salt else "prefix_changed"
    if is_first and cached:  # the first that goes on like an earlier one, not the first that begins so
        return "between_states" if _is_felt(shareable - cached, shareable) else "hit"
    return cause


def _is_felt(lost: int, tokens: int) -> bool:
    return lost > 0 and lost * LOST_PARTS >= tokens


def _beside_change(expected: Expectation, prompt: int, cached: int, shareable: int, deepest: int, engine: str) -> str:
    """Why a request got less than it could have shared, as it is."""
    if not expected.deliverable(deepest):
        return "below_unit"
    here = expected.found(expected.predicted)
    if expected.found(expected.held) > here and cached >= here:
        return "other_worker"
    if not shareable:
        ever = expected.ever_sent.size if expected.ever_sent is not None else 0
        if expected.sent is None and ever:
            return "worker_restarted" if expected.deliverable(ever) else "below_unit"
        if expected.sent is not None and expected.sent.tokens:
            is_long = expected.deliverable(min(expected.sent.tokens, prompt - (not expected.ahead)))
            # Its engine knows nothing of it any more.
            return _of_engine(engine, expected.failure or "evicted") if is_long else "below_unit"
        return expected.failure or _of_engine(engine, "cold")
    if expected.sent is None and engine == "hit":
        return "hit"  # nobody had asked for a state further on
    return _of_engine(engine, expected.failure or "evicted")


# Reasons of an engine that name a cause: the gateway cannot know why a prefix that was sent before is not there, or why
# a hint was of no use. A prefix that nobody had asked for by a boundary is first sight for its engine.
ENGINE_CAUSES = frozenset(
    {"cold", "between_states", "evicted", "not_worth_it", "below_unit", "no_boundary", "hint_ignored"}
)


def _of_engine(engine: str, otherwise: str) -> str:
    if engine not in ENGINE_CAUSES or (otherwise == "cold" and engine != "hint_ignored"):
        return otherwise
    # To the engine, of a template that is not known, nobody asked for a state.
    return otherwise if otherwise == "no_facts" and engine in ("cold", "between_states", "no_boundary") else engine
