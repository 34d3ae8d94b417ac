"""Which states of a request are worth keeping: the hinted ones, and the few that vLLM would keep by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

HINTED, TAIL, EDGE, JUNCTION = "hinted", "tail", "edge", "junction"

# A hinted position this close (tokens) before the prompt's tail serves a follow-up as well: it is the end of the turn,
# before the words that ask for an answer.
TURN_REACH = 64


class Wanted(NamedTuple):
    """A position (tokens from the start of the prompt, a multiple of the match unit) whose state is to be kept."""

    position: int
    kind: str


def wanted_positions(request: Any, hinted: tuple[int, ...], match_unit: int, block_size: int) -> list[Wanted]:
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
    return [Wanted(position, kinds[position]) for position in sorted(kinds)]
