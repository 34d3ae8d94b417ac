"""What a cache still holds of what others count on: the keys that a state needs, and who asks which are gone.

A state is found if the state of every recurrent cache group is cached, and all attention rows before it. Nothing is
walked: the pool names the keys that it removes, and only what needs one of those is looked at, when its watch is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from engine_patches.footprint import WATCHES
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.grid import Grid


class AttentionGroup(NamedTuple):
    """An attention cache group. Lengths in tokens."""

    group: int
    block_size: int
    drop: int  # past a state, up to which its keys have to reach


class HeldKeys:
    """The cache keys of one vLLM `BlockPool`. Positions in tokens."""

    def __init__(self, pool: Any, grid: Grid, recurrent: Iterable[Any], attention: Iterable[Any]) -> None:
        """`recurrent`, `attention`: vLLM's managers of cache groups."""
        self.pool = pool
        self.grid = grid
        self.recurrent = {manager.kv_cache_group_id: manager.block_size for manager in recurrent}  # by group
        self.attention = tuple(
            AttentionGroup(manager.kv_cache_group_id, manager.block_size, grid.drop_in(manager))
            for manager in attention
        )
        self.drop = max((each.drop for each in self.attention), default=0)  # past a state, up to which it is named
        self.groups = {*self.recurrent, *(each.group for each in self.attention)}
        setattr(pool, WATCHES, [])

    def watch(self) -> Watch:
        """One more who asks what is gone."""
        watch = Watch(self.pool)
        getattr(self.pool, WATCHES).append(watch)
        return watch

    def name_of(self, request: Any, position: int) -> bytes:
        """The name of the request's state at `position`: the key of the tokens that lead to it.

        Who shares the state alone, and not what lies past it, does not find it, and has another name for it.
        """
        return self.state_key(request, position + self.drop)

    def state_key(self, request: Any, position: int) -> bytes:
        """The key of the request's state at `position` that stands for all recurrent groups: the first one's."""
        return key_at(request, position, self.grid.unit, next(iter(self.recurrent)))

    def keys_of(self, request: Any, position: int) -> Iterator[bytes]:
        """The keys that have to be cached for the request's state at `position` to be found."""
        yield from self._state_keys(request, position)
        for group, block_size, drop in self.attention:
            reached = position + drop
            for edge in range(block_size, reached + 1, block_size):
                yield key_at(request, edge, self.grid.unit, group)
            if reached % block_size:
                yield key_at(request, reached, self.grid.unit, group)

    def found(self, request: Any, position: int) -> tuple[bytes, ...]:
        """These keys, if a lookup finds the request's state at `position`; none if it does not."""
        keys = []
        for key in self.keys_of(request, position):
            if not self._has(key):
                return ()
            keys.append(key)
        return tuple(keys)

    def is_cached(self, request: Any, position: int) -> bool:
        """Whether the request's state at `position` is in the cache, in every recurrent group."""
        return all(map(self._has, self._state_keys(request, position)))

    def _has(self, key: bytes) -> bool:
        return self.pool.cached_block_hash_to_block.get_one_block(key) is not None

    def _state_keys(self, request: Any, position: int) -> Iterator[bytes]:
        return (key_at(request, position, self.grid.unit, group) for group in self.recurrent)


class Watch:
    """Things that need keys of a pool, each by a name, the oldest first: whoever has it asks which have lost one."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._cached = pool.cached_block_hash_to_block
        self._needs: dict[bytes, tuple[bytes, ...]] = {}
        self._needed_by: dict[bytes, set[bytes]] = {}
        self._removed: set[bytes] = set()  # needed keys that one block has lost; another may carry them

    def __len__(self) -> int:
        return len(self._needs)

    def __contains__(self, name: bytes) -> bool:
        return name in self._needs

    def add(self, name: bytes, keys: Iterable[bytes]) -> None:
        """From now on `name` needs `keys`, all of which are there."""
        self._needs[name] = keys = tuple(keys)
        for key in keys:
            self._needed_by.setdefault(key, set()).add(name)

    def remove(self, name: bytes) -> None:
        """`name` needs nothing any more."""
        for key in self._needs.pop(name):
            names = self._needed_by[key]
            names.discard(name)
            if not names:
                del self._needed_by[key]
                self._removed.discard(key)

    def remove_oldest(self, most: int) -> bytes | None:
        """The name that was removed, if there were more than `most`."""
        if len(self._needs) <= most:
            return None
        oldest = next(iter(self._needs))
        self.remove(oldest)
        return oldest

    def keys_removed(self, keys: Iterable[bytes]) -> None:
        """The pool has removed these keys of a block; some return at once, or stay under another block."""
        self._removed.update(key for key in keys if key in self._needed_by)

    @property
    def emptied(self) -> bool:
        """Whether the pool was emptied as a whole since this watch was made, cleared or last asked."""
        return self._pool.cached_block_hash_to_block is not self._cached

    def lost(self) -> list[bytes]:
        """Names that need a key which is in no block any more; they are removed."""
        suspects, self._removed = list(self._needed_by) if self.emptied else self._removed, set()
        self._cached = self._pool.cached_block_hash_to_block
        lost = []
        for key in suspects:
            if self._cached.get_one_block(key) is None:
                for name in list(self._needed_by.get(key, ())):
                    self.remove(name)
                    lost.append(name)
        return lost

    def clear(self) -> None:
        """Nothing is needed any more."""
        self._needs.clear()
        self._needed_by.clear()
        self._removed.clear()
        self._cached = self._pool.cached_block_hash_to_block


def watch_removed_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `BlockPool._remove_cached_block_hashes`, through which every key leaves the cache."""

    def _remove_cached_block_hashes(self: Any, block: Any) -> Any:
        removed = original(self, block)
        if removed:
            for watch in getattr(self, WATCHES, ()):
                watch.keys_removed(removed)
        return removed

    return _remove_cached_block_hashes
