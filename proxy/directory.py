"""Which worker has been sent which prefix. What the gateway believes; the engine's reports are the truth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import Counter

from proxy.boundaries import Boundary

# Of one prefix: its key, its place in the table, the set of workers. Measured, rounded up.
ENTRY_BYTES = 600


class Holding(NamedTuple):
    """The longest prefix of a request that a worker was sent before."""

    tokens: int
    key: bytes


class Directory:
    """Prefix key to its length and the workers (by boot identity) that were sent it; bounded, oldest use goes first."""

    def __init__(self, size: int, evictions: Counter | None = None) -> None:
        """`size` in bytes; `evictions` counts the prefixes that had to go for others."""
        self._evictions = evictions
        self._entries = max(1, size // ENTRY_BYTES)
        self._holders: OrderedDict[bytes, tuple[int, set[str]]] = OrderedDict()

    def note(self, boundaries: Iterable[Boundary], boot: str) -> None:
        """A request with these boundaries went to the worker that booted as `boot`."""
        for boundary in boundaries:
            _, boots = self._holders.pop(boundary.key, (0, set()))
            self._holders[boundary.key] = (boundary.tokens, boots | {boot})
        while len(self._holders) > self._entries:
            self._holders.popitem(last=False)
            if self._evictions is not None:
                self._evictions.inc()

    def longest(self, prefixes: Sequence[bytes], boots: Iterable[str]) -> dict[str, Holding]:
        """The deepest of `prefixes` (shortest first) that each of `boots` was sent."""
        wanted = set(boots)
        found: dict[str, Holding] = {}
        for key in reversed(prefixes):
            if not wanted:
                break
            tokens, holders = self._holders.get(key, (0, set()))
            for boot in wanted & holders:
                found[boot] = Holding(tokens, key)
            wanted -= holders
        return found

    def ever_sent(self, prefixes: Sequence[bytes]) -> int:
        """Tokens of the deepest of `prefixes` that any worker, running or gone, was ever sent; 0 if none was."""
        return next((self._holders[key][0] for key in reversed(prefixes) if key in self._holders), 0)

    def __len__(self) -> int:
        return len(self._holders)
