"""The hint of a request, and the exact positions that it names.

A hint is a list of at most 16 entries, in any order. Each names one position in the prompt, in tokens from its start:

- `n`, a positive integer: `n` tokens from the start;
- `-n`: `n` tokens before the end;
- `"first:7,8,9"`: behind the first occurrence of these token ids;
- `"last:7,8,9"`: behind their last occurrence;
- `"last-k:7,8,9"`: the same, after skipping the `k` occurrences nearest to the end.

Ids are decimal numbers without spaces, at most 128 of them. Occurrences may overlap. The sender need not count tokens.
A hint is a wish: a wrong entry is dropped and counted, and a right one can only add a cache entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FIELD = "seamark_boundaries"

# From the gateway alone, which takes it out of what clients send. 1: the prompt stays in the cache; 0: no longer.
PIN = "seamark_pin"

# From the gateway, and others that are trusted. "no": other requests find nothing of this one; "private": nor does it
# find what others left; "low": what it leaves goes first.
KEEP = "seamark_keep"
NO, PRIVATE, LOW = "no", "private", "low"
KEEPS = ("", NO, PRIVATE, LOW)

# The same as an action of vLLM's KV hints (tests/upstream/kv_checkpoint.md); a later minor version only adds fields.
ACTION, ACTION_MAJOR = "kv.checkpoint", "1"

# Every position costs a state and a part of a pass, and every pattern a look through the prompt.
MAX_ENTRIES, MAX_PATTERN = 16, 128  # token ids

# Places at which one pattern is compared, and all patterns of a hint. Common tokens must not hold up a scheduler.
MAX_COMPARED, MAX_COMPARED_OF_HINT = 4096, 16_384

IGNORED_REASONS = (
    "malformed",
    "out_of_range",
    "below_unit",
    "not_found",  # the prompt does not hold these token ids
    "too_many",
    "no_states",  # this worker keeps none: `refusals` says why, as it does of the next two
    "speculative",
    "adapter",  # what the workers hold of a LoRA adapter is not certain
    "connector",  # one that puts values into the cache that nobody has computed
    "not_worth_it",  # a hit there would not be felt
    "no_room",  # the cache has no block to spare
    "single_token",  # a step over one token writes no state
)

Ignore = Callable[[str], None]  # is called with one of them

# A request without a hint; None is a hint, a malformed one.
NONE = object()

_COUNT = re.compile(r"-?[0-9]{1,9}")
_PATTERN = re.compile(
    rf"(first|last)(?:(?<=last)-(\d{{1,6}}))?:(\d{{1,9}}(?:,\d{{1,9}}){{0,{MAX_PATTERN - 1}}})", re.ASCII
)

# The end of a prompt is searched in slices, since a list has no search from its end. Most patterns are near the end.
_FIRST_SLICE, _LARGEST_SLICE = 512, 32_768  # tokens


def hint_in(request: Any) -> Any:
    """The hint as it came with a vLLM `Request`, `NONE` without one.

    This is the one place that knows how hints travel: as `kv.checkpoint` actions in vLLM's `KvHintsEnvelope`, which a
    caller in vLLM's own process may attach (its HTTP servers do not take one yet), and else in `vllm_xargs`.
    """
    envelope = getattr(request, "kv_hints", None)
    actions = [action for action in (envelope.actions if envelope is not None else ()) if action.action_type == ACTION]
    ours = [action for action in actions if action.action_version.partition(".")[0] == ACTION_MAJOR]
    if ours:
        return [entry for action in ours for entry in _entries_of(action.payload)]
    return arguments_of(request).get(FIELD, NONE)


def arguments_of(request: Any) -> Mapping[str, Any]:
    """What came with a vLLM `Request` in `vllm_xargs`."""
    return getattr(request.sampling_params, "extra_args", None) or {}


def pin_in(request: Any) -> bool | None:
    """Whether a vLLM `Request` pins its prompt, or releases it; None if it says nothing of the kind."""
    pin = arguments_of(request).get(PIN)
    return bool(pin) if pin in (0, 1) else None


def keep_in(request: Any) -> Any:
    """What a vLLM `Request` says of what it leaves, one of `KEEPS` unless its sender is wrong; "" if nothing."""
    return arguments_of(request).get(KEEP, "")


def entries_in(header: str) -> list[int | str] | None:
    """The entries of a hint that came as a header, `;` between them; None if they are no hint."""
    texts = [text.strip() for text in header.split(";")]
    entries = [int(text) if _COUNT.fullmatch(text) else text for text in texts]
    named = all(isinstance(entry, int) or _PATTERN.fullmatch(entry) for entry in entries)
    return entries if named and len(entries) <= MAX_ENTRIES else None


def _entries_of(payload: Any) -> list[object]:
    """The entries of a hint that a `kv.checkpoint` action's payload stands for; None for one that it does not word."""
    match payload:
        case {"boundaries": list(boundaries)}:
            return [_entry_of(boundary) for boundary in boundaries[: MAX_ENTRIES + 1]]  # one too many is counted
    return [None]


def _entry_of(boundary: Any) -> object:
    match boundary:
        case {"tokens": int(position)}:
            return position
        case {"behind": str(where), "token_ids": list(ids)} if len(ids) <= MAX_PATTERN:
            skipped = f"-{boundary['skip']}" if boundary.get("skip") else ""
            return f"{where}{skipped}:{','.join(map(str, ids))}"
    return None


def resolve(hint: Any, prompt_token_ids: list[int] | None, num_prompt_tokens: int, ignore: Ignore) -> tuple[int, ...]:
    """Positions (tokens from the prompt's start, exact) that the entries of a hint from outside name, in their order.

    0 stands for an entry without a position. Without ids (prompt embeddings) only counts from the start are resolved.
    """
    if not isinstance(hint, list):
        ignore("malformed")
        return ()
    if len(hint) > MAX_ENTRIES:
        ignore("too_many")
    entries = hint[:MAX_ENTRIES]
    patterns = sum(isinstance(entry, str) for entry in entries)
    most = min(MAX_COMPARED, MAX_COMPARED_OF_HINT // max(patterns, 1))
    return tuple(_position(entry, prompt_token_ids, num_prompt_tokens, most, ignore) for entry in entries)


def turn_end(hint: Any, resolved: Sequence[int]) -> int:
    """The position nearest to the prompt's end that a resolved hint counts from there; 0 if it counts none so."""
    if not isinstance(hint, list):
        return 0
    pairs = zip(hint, resolved, strict=False)
    return max((position for entry, position in pairs if isinstance(entry, int) and entry < 0), default=0)


def _position(entry: Any, ids: list[int] | None, num_prompt_tokens: int, most: int, ignore: Ignore) -> int:
    position, reason = 0, "malformed"
    if isinstance(entry, int) and not isinstance(entry, bool):
        reason = "not_found" if entry < 0 and ids is None else "out_of_range"
        counted = entry if entry > 0 else num_prompt_tokens + entry
        if entry and reason != "not_found" and 0 < counted <= num_prompt_tokens:
            position = counted
    elif isinstance(entry, str) and (match := _PATTERN.fullmatch(entry)) is not None:
        reason = "not_found"
        where, skipped, pattern = match[1], int(match[2] or 0), [int(part) for part in match[3].split(",")]
        if ids is not None:
            position = first_end(ids, pattern, most) if where == "first" else last_end(ids, pattern, skipped, most)
    if not position:
        ignore(reason)
    return position


def first_end(ids: list[int], pattern: list[int], most: int = MAX_COMPARED) -> int:
    """Where (tokens) the first occurrence of `pattern` ends; 0 if the first `most` places compared show none."""
    size, rare, offset = len(pattern), *_rarest(pattern)
    found = offset - 1  # of `rare`
    for _ in range(most):
        try:
            found = ids.index(rare, found + 1)
        except ValueError:
            return 0
        start = found - offset
        if ids[start : start + size] == pattern:
            return start + size
    return 0


def last_end(ids: list[int], pattern: list[int], skipped: int = 0, most: int = MAX_COMPARED) -> int:
    """Where (tokens) the last occurrence of `pattern` ends, behind `skipped` ones; 0 if none is among `most` places."""
    size, rare, offset = len(pattern), *_rarest(pattern)
    compared, length, end = 0, _FIRST_SLICE, len(ids)
    while end > 0:
        piece = ids[max(end - length, 0) : end]
        piece.reverse()
        found = -1  # of `rare`, counted backwards from `end`
        while True:
            try:
                found = piece.index(rare, found + 1)
            except ValueError:
                break
            start = end - 1 - found - offset
            if start >= 0 and ids[start : start + size] == pattern:
                if not skipped:
                    return start + size
                skipped -= 1
            compared += 1
            if compared == most:
                return 0
        end -= len(piece)
        length = min(2 * length, _LARGEST_SLICE)
    return 0


def _rarest(pattern: list[int]) -> tuple[int, int]:
    """The id that is likely the rarest, and where it stands: vocabularies end with rare merges and control tokens."""
    rare = max(pattern)
    return rare, pattern.index(rare)
