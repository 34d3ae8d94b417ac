"""Memory for request bodies: one bound for all of them, and a share of it per API key."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Hashable

from proxy.errors import KeyBusy, Overloaded

# A key may hold so many times what is free: two thirds of all if no other holds anything, and less as others come. So
# there is always room for one more key (dynamic thresholds: Choudhury and Hahne, 1998).
TIMES_WHAT_IS_FREE = 2

# A body of so many bytes may take what is left. A larger one leaves a sixteenth of all, so that no number of large ones
# keeps a chat out.
SMALL_BYTES = 2**16
LEFT_BY_LARGE = 1 / 16

# glibc gives back to the system only the end of its heap, and large bodies lie between small objects. Once so much has
# been freed, everything is given back; that takes some milliseconds.
TRIM_AFTER_BYTES = 32 * 2**20

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: another libc


class BodyMemory:
    """What all bodies take together, in bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self._freed = 0  # since the heap was given back
        self._of_owners: Counter[Hashable] = Counter()

    def of(self, owner: Hashable = None) -> BodyHold:
        """An empty hold for one request; `owner` is its API key, None without keys."""
        return BodyHold(self, owner)

    def grow(self, owner: Hashable, size: int, of_body: int) -> None:
        """Raises `Overloaded` or `KeyBusy` if there is no room for so many bytes more of a body of `of_body`."""
        held = self.held + size
        if held > self._most * (1 if of_body <= SMALL_BYTES else 1 - LEFT_BY_LARGE):
            raise Overloaded("The gateway holds as many request bodies as it may (setting max_bodies_bytes).")
        if owner is not None:
            of_owner = self._of_owners[owner] + size
            if of_owner > TIMES_WHAT_IS_FREE * (self._most - held):
                raise KeyBusy("The request bodies of this API key take as much as one may (setting max_bodies_bytes).")
            self._of_owners[owner] = of_owner
        self.held = held

    def shrink(self, owner: Hashable, size: int) -> None:
        self.held -= size
        if owner is not None:
            self._of_owners[owner] -= size
            if not self._of_owners[owner]:
                del self._of_owners[owner]
        self._freed += size
        if self._freed >= TRIM_AFTER_BYTES and _trim is not None:
            self._freed = 0
            _trim(0)


class BodyHold:
    """What one request's body takes, until its context is left."""

    __slots__ = ("_memory", "_owner", "size")

    def __init__(self, memory: BodyMemory, owner: Hashable) -> None:
        self._memory, self._owner = memory, owner
        self.size = 0

    def __enter__(self) -> BodyHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def take(self, size: int) -> None:
        """So many bytes more. Raises `Overloaded` or `KeyBusy`."""
        self._memory.grow(self._owner, size, self.size + size)
        self.size += size

    def give_back(self, size: int | None = None) -> None:
        """So many bytes less; all of them if no number is given."""
        size = self.size if size is None else size
        self._memory.shrink(self._owner, size)
        self.size -= size
