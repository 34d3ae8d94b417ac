"""The hint of a request, and the positions at which its recurrent states are kept.

A hint is a list of token positions, counted from the start of the prompt. It is a wish: a wrong entry is dropped and
counted, and a right one can only add a cache entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

FIELD = "seamark_boundaries"

# Every position costs a state and a part of a pass, so a request gets a bounded number of them.
MAX_POSITIONS = 16

MAX_ENTRIES = 4 * MAX_POSITIONS  # read of one hint

# A hinted position at most this many tokens before the prompt's tail also serves the next turn: it is the end of the
# turn, before the words that ask for an answer.
TURN_REACH = 64

IGNORED_REASONS = (
    "malformed",
    "out_of_range",
    "below_unit",
    "not_ascending",
    "too_many",
    "speculative",
    "not_worth_it",  # a hit there would not be felt
    "no_room",  # the cache has no block to spare
    "single_token",  # a step over one token writes no state
)

# Kinds of targets.
HINTED, TAIL, EDGE, JUNCTION = "hinted", "tail", "edge", "junction"

# A request without a hint; None is a hint, a malformed one.
NONE = object()


class CheckpointTarget(NamedTuple):
    """A position (tokens from the start of the prompt, a multiple of the match unit) whose state is to be kept."""

    position: int
    kind: str


def hint_in(request: Any) -> Any:
    """The hint as it came with a vLLM `Request`, `NONE` without one.

    This is the one place that knows how hints travel: in `vllm_xargs`. The `<|mamba_checkpoint|>` token of vLLM's RFC
    #55697 would be another carrier, whose position in the prompt is the hint.
    """
    return (getattr(request.sampling_params, "extra_args", None) or {}).get(FIELD, NONE)


def usable_positions(
    hint: Any, num_prompt_tokens: int, match_unit: int, ignore: Callable[[str], None]
) -> tuple[int, ...]:
    """Positions (tokens, ascending, multiples of `match_unit`) in a hint from outside.

    `ignore` is called with one of `IGNORED_REASONS` for each entry that is dropped. Two positions in one match unit
    become one, and neither counts as dropped.
    """
    if not isinstance(hint, list):
        ignore("malformed")
        return ()
    positions: list[int] = []
    previous = 0
    if len(hint) > MAX_ENTRIES:
        ignore("too_many")
    for entry in hint[:MAX_ENTRIES]:
        if not isinstance(entry, int) or isinstance(entry, bool):
            ignore("malformed")
        elif not 0 < entry <= num_prompt_tokens:
            ignore("out_of_range")
        elif entry <= previous:
            ignore("not_ascending")
        elif entry < match_unit:
            ignore("below_unit")
        elif len(positions) == MAX_POSITIONS:
            ignore("too_many")
        else:
            previous = entry
            position = entry // match_unit * match_unit
            if not positions or position > positions[-1]:
                positions.append(position)
    return tuple(positions)


def checkpoint_targets(
    request: Any, hinted: tuple[int, ...], match_unit: int, block_size: int
) -> list[CheckpointTarget]:
    """Where the states of a vLLM `Request` are kept, in ascending order.

    A hint's positions, and the prompt's tail if none of them is near it. Without a hint, where vLLM itself stops: the
    last whole block and the last whole unit before the prompt's last token, both only in prompts longer than a block;
    and the junction, the end of a prefix that vLLM has seen shared (Marconi, arXiv 2411.19379).
    """
    last = request.num_prompt_tokens - 1  # the last token is always computed, for its logits
    kinds: dict[int, str] = {}
    tail = last // match_unit * match_unit
    if not hinted:
        kinds[last // block_size * block_size // match_unit * match_unit] = EDGE
    near_tail = any(tail - TURN_REACH <= position <= tail for position in hinted)
    if not near_tail and (hinted or last >= block_size):
        kinds[tail] = TAIL
    if not hinted:  # the sender of a hint knows better than what vLLM infers
        junction = request.shared_prefix_boundary // match_unit * match_unit
        if junction <= last:
            kinds[junction] = JUNCTION
    kinds.update(dict.fromkeys(hinted, HINTED))
    kinds.pop(0, None)
    return [CheckpointTarget(position, kinds[position]) for position in sorted(kinds)]
