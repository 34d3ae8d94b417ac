"""Why a request did or did not resume from a state: one reason each, the deepest cause that the engine can know."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.request_state import Wish

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
    """Remembers which prefixes that were to have a state were computed before, and what became of their states."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._misses: OrderedDict[bytes, str] = OrderedDict()  # prefix hash -> what a miss of it means

    def computed(self, request: Any, position: int, miss: str) -> None:
        """A prefix that is to have a state was computed; a later miss of it means `miss`."""
        key = self._grid.hash_of(request, position + self._grid.drop)
        self._misses[key] = miss
        self._misses.move_to_end(key)
        if len(self._misses) > MAX_COMPUTED:
            self._misses.popitem(last=False)

    def reason_for(self, request: Any, wish: Wish, hit_tokens: int) -> str:
        """The reason for a request that starts with `hit_tokens` from the cache.

        All that it shares with an earlier prompt is a hit. If it got less, the deepest cause above the hit counts; if
        none is known, nobody had kept a state there. What the engine has never seen cannot be missed.
        """
        hinted = wish.hinted_positions
        if getattr(request, "skip_reading_prefix_cache", False):  # prompt logprobs need every token computed
            return HINT_IGNORED
        last = self._grid.resumable(request.num_tokens)
        reachable = self._grid.deliverable(wish.shared, request.num_tokens)
        deepest = max((position for position in hinted if position <= last), default=0)
        for position in range(max(deepest, reachable), hit_tokens, -self._grid.unit):
            miss = self._misses.get(self._grid.hash_of(request, position + self._grid.drop))
            if miss is not None:
                return miss
        if hit_tokens:
            return HIT if hit_tokens >= reachable else COLD
        return COLD if hinted else self._without_hint(request, wish)

    def _without_hint(self, request: Any, wish: Wish) -> str:
        """The reason for a request that hit nothing, and whose hint names no usable position."""
        if not wish.hinted:
            return NO_BOUNDARY
        return BELOW_UNIT if request.num_prompt_tokens <= self._grid.unit else HINT_IGNORED
