"""Positions that an engine has told: by content key, how many tokens that beginning of a prompt has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

# Size of an entry: a key of 16 bytes and a number as Python objects, their place in the table. Measured, rounded up.
ENTRY_BYTES = 250


class PositionCache:
    """Tokens by content key, bounded in bytes, the least recently used forgotten first. No estimate ever gets here."""

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self._entries = max(1, size // ENTRY_BYTES)
        self._positions: OrderedDict[bytes, int] = OrderedDict()
        # Called with each position that this gateway learns itself; on a request's path, so it may only take note.
        self.on_put: Callable[[bytes, int], None] | None = None

    def get(self, key: bytes) -> int:
        """The tokens up to that place, 0 if unknown."""
        tokens = self._positions.get(key, 0)
        if tokens:
            self._positions.move_to_end(key)
        return tokens

    def put(self, key: bytes, tokens: int) -> None:
        """An engine has told a position (more than 0)."""
        if self._positions.get(key) == tokens:
            self._positions.move_to_end(key)
            return
        self._keep(key, tokens)
        if self.on_put is not None:
            self.on_put(key, tokens)

    def put_remote(self, key: bytes, tokens: int) -> None:
        """Another gateway was told a position; one that is known here stands."""
        if key not in self._positions:
            self._keep(key, tokens)

    def _keep(self, key: bytes, tokens: int) -> None:
        self._positions[key] = tokens
        self._positions.move_to_end(key)
        if len(self._positions) > self._entries:
            self._positions.popitem(last=False)

    def __len__(self) -> int:
        return len(self._positions)
