"""The hint of a request: token positions at which a recurrent state is worth keeping.

A hint is a wish. Whatever is wrong with it is dropped and counted; what is left can only add cache entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

FIELD = "seamark_boundaries"

# Every position costs a state and a piece of a pass, so a request does not get arbitrarily many.
MAX_POSITIONS = 16

MAX_ENTRIES = 4 * MAX_POSITIONS  # read at all

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


NONE = object()


def carried_by(request: Any) -> Any:
    """The hint as it came with a vLLM `Request`, `NONE` without one.

    The one place that knows how hints travel: `vllm_xargs` today. The `<|mamba_checkpoint|>` token that vLLM's RFC
    #55697 proposes would be another carrier, its position in the prompt the hint.
    """
    return (getattr(request.sampling_params, "extra_args", None) or {}).get(FIELD, NONE)


def usable_positions(
    hint: Any, num_prompt_tokens: int, match_unit: int, ignore: Callable[[str], None]
) -> tuple[int, ...]:
    """Positions (tokens, ascending, multiples of `match_unit`) of a hint as it came from outside.

    `ignore` is called with one of `IGNORED_REASONS` for each entry that is dropped. Two positions in the same match
    unit become one without a word.
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


HINTED, TAIL, EDGE, JUNCTION = "hinted", "tail", "edge", "junction"

# A hinted position this close (tokens) before the prompt's tail serves a follow-up as well: it is the end of the turn,
# before the words that ask for an answer.
TURN_REACH = 64


class CheckpointTarget(NamedTuple):
    """A position (tokens from the start of the prompt, a multiple of the match unit) whose state is to be kept."""

    position: int
    kind: str


def wanted_positions(request: Any, hinted: tuple[int, ...], match_unit: int, block_size: int) -> list[CheckpointTarget]:
    """Positions in ascending order.

    Without a hint: where vLLM itself stops, the last whole block and the last whole unit before the prompt's last
    token; nothing for a prompt below a block, of which vLLM alone keeps nothing either. The junction is the end of a
    prefix that vLLM has seen shared after the fact (Marconi, arXiv 2411.19379).
    """
    last = request.num_prompt_tokens - 1  # the last token is always computed, for its logits
    kinds: dict[int, str] = {}
    tail = last // match_unit * match_unit
    if not hinted:
        kinds[last // block_size * block_size // match_unit * match_unit] = EDGE
    reached = any(tail - TURN_REACH <= position <= tail for position in hinted)
    if not reached and (hinted or last >= block_size):
        kinds[tail] = TAIL
    if not hinted:  # who sends a hint knows better than what vLLM infers
        junction = request.shared_prefix_boundary // match_unit * match_unit
        if junction <= last:
            kinds[junction] = JUNCTION
    kinds.update(dict.fromkeys(hinted, HINTED))
    kinds.pop(0, None)
    return [CheckpointTarget(position, kinds[position]) for position in sorted(kinds)]
