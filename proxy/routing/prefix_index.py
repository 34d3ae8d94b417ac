"""Which worker has been sent which prefix, and how much of it its engine still holds.

A request that goes out is expected to leave its prefixes at its worker; the engine's events then correct that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client import Counter

from proxy.boundaries.boundary import Boundary

# For one prefix with its first worker, and for each further worker; measured, rounded up.
ENTRY_BYTES = 450

HOLDER_BYTES = 100


class Holding(NamedTuple):
    """The longest prefix of a request that a worker holds."""

    tokens: int  # that a request finds; not rounded down to a match unit until the engine has reported them
    key: bytes


class PrefixIndex:
    """By prefix key, its length and the workers (by boot identity) that were sent it; bounded, oldest goes first."""

    def __init__(self, size: int, evictions: Counter | None = None) -> None:
        """`size` in bytes; `evictions` counts the prefixes that had to go for others."""
        self._size = size
        self._evictions = evictions
        self._bytes = 0
        # Tokens of the prefix; by worker that was ever sent it, the tokens of it that are held, 0 for none.
        self._prefixes: OrderedDict[bytes, tuple[int, dict[str, int]]] = OrderedDict()
        # Called with what this gateway learns by itself; on a request's path, so they may do no more than an append.
        self.on_record: Callable[[Sequence[Boundary], str], None] | None = None
        self.on_forget: Callable[[Sequence[bytes], str], None] | None = None

    def record(self, boundaries: Sequence[Boundary], boot: str) -> None:
        """A request with these boundaries goes to the worker that booted as `boot`, which will hold them."""
        for boundary in boundaries:
            self._record(boundary.key, boundary.tokens, boot)
        if self.on_record is not None:
            self.on_record(boundaries, boot)

    def record_remote(self, key: bytes, tokens: int, boot: str) -> None:
        """Another gateway sent a prefix to the worker that booted as `boot`; a length known here stands."""
        known = self._prefixes.get(key)
        self._record(key, tokens if known is None else known[0], boot)

    def _record(self, key: bytes, tokens: int, boot: str) -> None:
        entry = self._prefixes.get(key)
        if entry is None:
            entry = self._prefixes[key] = (tokens, {})
            self._bytes += ENTRY_BYTES - HOLDER_BYTES
        else:
            self._prefixes.move_to_end(key)
        if boot not in entry[1]:
            self._bytes += HOLDER_BYTES
        entry[1][boot] = entry[1].get(boot) or tokens
        while self._bytes > self._size and len(self._prefixes) > 1:
            _, (_, holders) = self._prefixes.popitem(last=False)
            self._bytes -= ENTRY_BYTES + (len(holders) - 1) * HOLDER_BYTES
            if self._evictions is not None:
                self._evictions.inc()

    def set_held(self, key: bytes, boot: str, tokens: int) -> None:
        """The engine of `boot` holds `tokens` of a prefix that was recorded for it."""
        _, holders = self._prefixes.get(key, (0, {}))
        if boot in holders:
            holders[boot] = tokens

    def forget(self, keys: Iterable[bytes], boot: str, *, remote: bool = False) -> None:
        """`boot` holds nothing of these prefixes any more; that they were sent is remembered.

        `remote`: another gateway reports that.
        """
        keys = list(keys)
        for key in keys:
            self.set_held(key, boot, 0)
        if self.on_forget is not None and not remote:
            self.on_forget(keys, boot)

    def forget_all(self, boot: str) -> None:
        """What `boot` holds is unknown from now on. Walks over the whole index: for rare events."""
        self.forget([key for key, (_, holders) in self._prefixes.items() if holders.get(boot)], boot)

    def holds(self, key: bytes, boot: str) -> int:
        """Tokens that `boot` holds of the prefix `key`."""
        entry = self._prefixes.get(key)
        return entry[1].get(boot, 0) if entry is not None else 0

    def longest(self, prefixes: Sequence[bytes], boots: Iterable[str]) -> dict[str, Holding]:
        """For each of `boots`, the deepest of `prefixes` (shortest first) that it holds anything of."""
        wanted = set(boots)
        found: dict[str, Holding] = {}
        for key in reversed(prefixes):
            if not wanted:
                break
            entry = self._prefixes.get(key)
            if entry is None:
                continue
            for boot, tokens in entry[1].items():
                if tokens and boot in wanted:
                    found[boot] = Holding(tokens, key)
                    wanted.discard(boot)
        return found

    def sent(self, prefixes: Sequence[bytes], boots: Iterable[str]) -> int:
        """Tokens of the deepest of `prefixes` that any of `boots` was sent, held or not; 0 if none was."""
        wanted = set(boots)
        for key in reversed(prefixes):
            entry = self._prefixes.get(key)
            if entry is not None and not wanted.isdisjoint(entry[1]):
                return entry[0]
        return 0

    def ever_sent(self, prefixes: Sequence[bytes]) -> int:
        """Tokens of the deepest of `prefixes` that any worker, running or gone, was ever sent; 0 if none was."""
        return next((self._prefixes[key][0] for key in reversed(prefixes) if key in self._prefixes), 0)

    def __len__(self) -> int:
        return len(self._prefixes)
