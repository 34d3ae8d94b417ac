"""The positions that were found: by content key, the token position and the name of the tokens before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

# Size of an entry: two keys of 16 bytes as Python objects, the tuple, its place in the table. Measured, rounded up.
ENTRY_BYTES = 400


class Position(NamedTuple):
    """A place in a prompt."""

    tokens: int  # the prefix is prompt[:tokens]
    key: bytes  # names the tokens of that prefix: equal prefixes have equal keys, however they were written


class PositionCache:
    """Position by content key, bounded in bytes, the least recently used forgotten first."""

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self._entries = max(1, size // ENTRY_BYTES)
        self._positions: OrderedDict[bytes, Position] = OrderedDict()
        # Called with each position that this gateway finds itself; on a request's path, so it may only take note of it.
        self.on_put: Callable[[bytes, Position], None] | None = None

    def get(self, key: bytes) -> Position | None:
        """The position, None if unknown."""
        position = self._positions.get(key)
        if position is not None:
            self._positions.move_to_end(key)
        return position

    def known(self, keys: Iterable[bytes]) -> dict[int, bytes]:
        """Names of the prefixes that are remembered under these keys, by their length in tokens."""
        positions = self._positions
        return {position.tokens: position.key for key in keys if (position := positions.get(key)) is not None}

    def put(self, key: bytes, position: Position) -> None:
        """Remember a position."""
        self._keep(key, position)
        if self.on_put is not None:
            self.on_put(key, position)

    def put_remote(self, key: bytes, position: Position) -> None:
        """Remember a position that another gateway found; one that is known here stands."""
        if key not in self._positions:
            self._keep(key, position)

    def _keep(self, key: bytes, position: Position) -> None:
        self._positions[key] = position
        self._positions.move_to_end(key)
        if len(self._positions) > self._entries:
            self._positions.popitem(last=False)

    def __len__(self) -> int:
        return len(self._positions)
