"""Which worker has been sent which prefix, and how much of it its engine still holds.

A request that goes out is expected to leave its prefixes at its worker; the engine's events then correct that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from prometheus_client import Counter

from proxy.boundaries.boundary import Boundary, Entry

# For one prefix with its first worker, and for each further worker; measured, rounded up.
ENTRY_BYTES, HOLDER_BYTES = 500, 100


class Holding(Struct, order=True):
    tokens: int  # that a request finds, in whole match units once the engine has reported them
    key: bytes
    is_told: bool  # the engine has told the prefix's length; if not, `tokens` is a guess


@dataclass(slots=True, eq=False)
class Prefix:
    """A prefix that workers were sent. Requests keep a reference, and see its length once an engine tells it."""

    tokens: int  # 0 until an engine has told it
    estimate: int
    held: dict[str, int] = field(default_factory=dict)  # tokens held, by worker that was ever sent it; 0 for none

    @property
    def size(self) -> int:
        """Its tokens, as well as that is known; at least 1."""
        return self.tokens or self.estimate or 1

    def tell(self, tokens: int) -> None:
        """An engine has told its length. Until then, what workers hold of it was a guess as well."""
        if not self.tokens:
            self.held = {boot: tokens if held else 0 for boot, held in self.held.items()}
        self.tokens = tokens


class PrefixIndex:
    """By prefix key, its length and the workers (by boot identity) that were sent it; bounded, oldest goes first."""

    def __init__(self, size: int, evictions: Counter | None = None) -> None:
        """`size` in bytes; `evictions` counts the prefixes that had to go for others."""
        self._size, self._evictions, self._bytes = size, evictions, 0
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        # Called with what this gateway learns by itself; on a request's path, so they may do no more than an append.
        self.on_held: Callable[[bytes, int, str], None] | None = None
        self.on_forget: Callable[[Sequence[bytes], str], None] | None = None

    def record(self, boundaries: Sequence[Boundary], boot: str, hint: Sequence[Entry] | None = None) -> None:
        """A request with these boundaries goes to the worker that booted as `boot`, which will hold them.

        Of those that have an entry, only what the `hint` says; None: all.
        """
        for boundary in boundaries:
            key, entry, tokens = boundary.key, boundary.entry, boundary.tokens
            prefix = self._prefixes.get(key)
            if prefix is None:
                prefix = self._prefixes[key] = Prefix(tokens, boundary.estimate)
                self._bytes += ENTRY_BYTES - HOLDER_BYTES
            else:
                self._prefixes.move_to_end(key)
                if tokens and not prefix.tokens:
                    prefix.tell(tokens)
            if boot not in prefix.held:
                self._bytes += HOLDER_BYTES
            if not prefix.held.get(boot):
                is_kept = hint is None or entry is None or entry in hint or tokens in hint
                prefix.held[boot] = (prefix.tokens or prefix.estimate or 1) if is_kept else 0
            while self._bytes > self._size and len(self._prefixes) > 1:
                _, gone = self._prefixes.popitem(last=False)
                self._bytes -= ENTRY_BYTES + (len(gone.held) - 1) * HOLDER_BYTES
                if self._evictions is not None:
                    self._evictions.inc()

    def record_remote(self, key: bytes, tokens: int, boot: str) -> None:
        """Another gateway's prefix is held by the worker that booted as `boot`; a length known here stands."""
        self.record([Boundary("learned", key, None, tokens, tokens)], boot)

    def set_length(self, key: bytes, tokens: int) -> None:
        if (prefix := self._prefixes.get(key)) is not None and tokens > 0 and tokens != prefix.tokens:
            prefix.tell(tokens)

    def set_held(self, key: bytes, boot: str, tokens: int) -> None:
        """The engine of `boot` holds `tokens` of a prefix that was recorded for it."""
        prefix = self._prefixes.get(key)
        if prefix is not None and boot in prefix.held:
            prefix.held[boot] = tokens
            if tokens and self.on_held is not None:
                self.on_held(key, tokens, boot)

    def forget(self, keys: Iterable[bytes], boot: str, *, remote: bool = False) -> None:
        """`boot` holds nothing of these prefixes any more, as its engine or another gateway (`remote`) says."""
        keys = [key for key in keys if self.holds(key, boot)]
        for key in keys:
            self.set_held(key, boot, 0)
        if keys and self.on_forget is not None and not remote:
            self.on_forget(keys, boot)

    def forget_all(self, boot: str) -> None:
        """What `boot` holds is unknown from now on. Walks over the whole index: for rare events."""
        self.forget([key for key, prefix in self._prefixes.items() if prefix.held.get(boot)], boot)

    def holds(self, key: bytes, boot: str) -> int:
        prefix = self._prefixes.get(key)
        return prefix.held.get(boot, 0) if prefix is not None else 0

    def longest(self, prefixes: Sequence[bytes], boots: Collection[str]) -> dict[str, Holding]:
        """For each of `boots` (a set, if they are many), the deepest of `prefixes`, shortest first, that it holds."""
        return self.look_up(prefixes, boots, ())[0]

    def sent(self, prefixes: Sequence[bytes], boots: Collection[str]) -> Prefix | None:
        """The deepest of `prefixes` that any of `boots` was sent, held or not; None if none was."""
        return self.look_up(prefixes, (), boots)[1]

    def look_up(
        self, prefixes: Sequence[bytes], boots: Collection[str], sent_to: Collection[str]
    ) -> tuple[dict[str, Holding], Prefix | None, Prefix | None]:
        """In one walk: `longest`, what any of `sent_to` was `sent`, and what any worker was, running or gone."""
        found: dict[str, Holding] = {}
        sent = ever_sent = None
        for key in reversed(prefixes):
            if (prefix := self._prefixes.get(key)) is None:
                continue
            if ever_sent is None:
                ever_sent = prefix
            for boot, tokens in prefix.held.items():
                if sent is None and boot in sent_to:
                    sent = prefix
                if tokens and boot not in found and boot in boots:
                    found[boot] = Holding(tokens, key, bool(prefix.tokens))
            if len(found) == len(boots) and (sent is not None or not sent_to):
                break
        return found, sent, ever_sent

    def __len__(self) -> int:
        return len(self._prefixes)
