"""Which worker has been sent which prefix. What the gateway believes; the engine's reports are the truth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
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
        # Told of what this gateway learns by itself; on a request's path, so they may only take note of it.
        self.on_note: Callable[[Sequence[Boundary], str], None] | None = None
        self.on_forget: Callable[[Sequence[bytes], str], None] | None = None

    def note(self, boundaries: Sequence[Boundary], boot: str) -> None:
        """A request with these boundaries went to the worker that booted as `boot`."""
        for boundary in boundaries:
            self._hold(boundary.key, boundary.tokens, boot)
        if self.on_note is not None:
            self.on_note(boundaries, boot)

    def hear(self, key: bytes, tokens: int, boot: str) -> None:
        """Another gateway sent a prefix to the worker that booted as `boot`; a length that is known here stands."""
        known = self._holders.get(key)
        self._hold(key, tokens if known is None else known[0], boot)

    def _hold(self, key: bytes, tokens: int, boot: str) -> None:
        _, boots = self._holders.pop(key, (0, set()))
        self._holders[key] = (tokens, boots | {boot})
        while len(self._holders) > self._entries:
            self._holders.popitem(last=False)
            if self._evictions is not None:
                self._evictions.inc()

    def forget(self, keys: Sequence[bytes], boot: str, *, heard: bool = False) -> None:
        """The worker that booted as `boot` no longer holds these prefixes; `heard`: another gateway says so."""
        for key in keys:
            if (known := self._holders.get(key)) is not None:
                self._holders[key] = (known[0], known[1] - {boot})
        if self.on_forget is not None and not heard:
            self.on_forget(keys, boot)

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
