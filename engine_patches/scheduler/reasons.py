"""Why a request did or did not resume from a state: one reason each, the deepest cause that the engine can know."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

# The reasons an engine can tell, out of the closed set that the whole product uses.
HIT, COLD, BELOW_UNIT, NOT_WORTH_IT, EVICTED, NO_BOUNDARY, HINT_IGNORED = (
    "hit",
    "cold",
    "below_unit",
    "not_worth_it",
    "evicted",
    "no_boundary",
    "hint_ignored",
)

# Prefixes remembered; a hash is 32 bytes.
MAX_COMPUTED = 65_536


class Outcomes:
    """Remembers which hinted prefixes were computed before, and what became of their states."""

    def __init__(self, match_unit: int) -> None:
        self._unit = match_unit
        self._misses: OrderedDict[bytes, str] = OrderedDict()  # prefix hash -> what a miss of it means

    def computed(self, request: Any, position: int, miss: str) -> None:
        """A hinted prefix was computed; a later miss of it means `miss`."""
        key = request.block_hashes[position // self._unit - 1]
        self._misses[key] = miss
        self._misses.move_to_end(key)
        if len(self._misses) > MAX_COMPUTED:
            self._misses.popitem(last=False)

    def reason_for(self, request: Any, hinted: bool, positions: tuple[int, ...], hit_tokens: int) -> str:
        """The reason for a request that starts with `hit_tokens` from the cache.

        `hinted` says whether it came with a hint at all; `positions` are the usable ones of it.
        """
        if positions and getattr(request, "skip_reading_prefix_cache", False):
            return HINT_IGNORED  # prompt logprobs need every token computed: nothing was looked up
        for position in reversed(positions):
            if position <= hit_tokens:
                return HIT
            if position < request.num_tokens:
                miss = self._misses.get(request.block_hashes[position // self._unit - 1])
                if miss is not None:
                    return miss
        if hit_tokens:
            return HIT
        if positions:
            return COLD
        if not hinted:
            return NO_BOUNDARY
        return BELOW_UNIT if request.num_prompt_tokens <= self._unit else HINT_IGNORED
