"""Cache keys: what makes a state findable, and the attention rows before it; and what a cache still holds of them.

A state is found if the state of every recurrent cache group is cached, and all attention rows before it. Nothing is
walked: the pool names the keys that it removes, and only what needs one of those is looked at, when its watch is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from engine_patches.footprint import LOCAL_HIT, WATCHES
from engine_patches.ledger import KV_CACHE_MANAGER, MANAGERS, POOL, Function, Patch, Shape, ours
from engine_patches.scheduler.planner import Grid


def key_at(request: Any, position: int, match_unit: int, group: int) -> bytes:
    """vLLM's cache key of a request's first `position` tokens (a multiple of `match_unit`) in a cache group."""
    key: bytes = _key_maker()(request.block_hashes[position // match_unit - 1], group)
    return key


@cache
def _key_maker() -> Callable[[bytes, int], Any]:
    """vLLM's own, looked up once: an import inside a function costs more than a key, and keys come by the dozen."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    maker: Callable[[bytes, int], Any] = make_block_hash_with_group_id
    return maker


def keep_attention_keys(manager: Any, request: Any, positions: Iterable[int]) -> None:
    """Register the request's attention blocks under the keys of `positions`, all computed by the end of this step.

    vLLM registers a key inside a block only for a prompt's tail, and drops a block's shorter keys when a longer one
    comes; so the longest is first here. Rows are append-only: what a shorter key names still stands in a full block.
    """
    blocks, group, size = manager.req_to_blocks[request.request_id], manager.kv_cache_group_id, manager.block_size
    for position in sorted(positions, reverse=True):
        if position % size and position // size < len(blocks):  # KV events tell of the key, too
            manager.block_pool.cache_partial_block(request, blocks[position // size], position, group, size)


class AttentionGroup(NamedTuple):
    """An attention cache group. Lengths in tokens."""

    group: int
    block_size: int
    drop: int  # past a state, up to which its keys have to reach


class HeldKeys:
    """The cache keys of one vLLM `BlockPool`. Positions in tokens."""

    def __init__(self, pool: Any, grid: Grid, recurrent: Iterable[Any], attention: Iterable[Any]) -> None:
        """`recurrent`, `attention`: vLLM's managers of cache groups."""
        self.pool, self.grid = pool, grid
        self.recurrent = {each.kv_cache_group_id: each.block_size for each in recurrent}  # by group
        sizes = [(each.kv_cache_group_id, each.block_size, grid.drop_in(each)) for each in attention]
        self.attention = tuple(AttentionGroup(*each) for each in sizes)
        self.drop = max((each.drop for each in self.attention), default=0)  # past a state, up to which it is named
        self.groups = {*self.recurrent, *(each.group for each in self.attention)}
        setattr(pool, WATCHES, [])

    def name_of(self, request: Any, position: int) -> bytes:
        """The name of the request's state at `position`: the key of all tokens that a hit there has to share."""
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
            if self.pool.cached_block_hash_to_block.get_one_block(key) is None:
                return ()
            keys.append(key)
        return tuple(keys)

    def is_cached(self, request: Any, position: int) -> bool:
        """Whether the request's state at `position` is in the cache, in every recurrent group."""
        return None not in map(self.pool.cached_block_hash_to_block.get_one_block, self._state_keys(request, position))

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
        getattr(pool, WATCHES).append(self)

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
        self._needs.clear()
        self._needed_by.clear()
        self._removed.clear()
        self._cached = self._pool.cached_block_hash_to_block


@ours(
    "evicted-states",
    f"{POOL}._remove_cached_block_hashes",
    why="a gateway that believes a prefix is held has to learn when it is evicted",
    upstream="KV events, for listeners on a socket of their own that compute vLLM's hashes",
    mentions=("removed_hashes.append(block_hash)", "return removed_hashes"),
    relies_on=(
        Shape(f"{POOL}._maybe_evict_cached_block", mentions=("evicted_hashes = self._remove_cached_block_hashes(",)),
    ),
)
def watch_removed_keys(self: Any, block: Any, *, original: Function) -> Any:
    """Replacement of `BlockPool._remove_cached_block_hashes`, through which every key leaves the cache."""
    removed = original(self, block)
    if removed:
        for watch in getattr(self, WATCHES, ()):
            watch.keys_removed(removed)
    return removed


@Patch(
    "attention-keys",
    f"{MANAGERS}:FullAttentionManager.cache_blocks",
    why="without an attention key at the same position a state cannot be reached",
    until="vLLM keeps keys at every checkpoint position",
    parameters="self, request, num_tokens, retention_interval, replay_boundaries",
    mentions=("self._cache_partial_tail_block(request, num_tokens)",),
    relies_on=(
        Shape(
            f"{MANAGERS}:SingleTypeKVCacheManager._apply_cow",
            mentions=("self._pending_cow_copies.append((source_block, cow_block))",),
        ),
        Shape(f"{POOL}._insert_block_hash", mentions=("self.cached_block_hashes_by_block.setdefault",)),
    ),
)
def keep_hinted_keys(self: Any, request: Any, num_tokens: int, *args: Any, original: Function, **kwargs: Any) -> None:
    """Replacement of `FullAttentionManager.cache_blocks`: keys that lead to a state survive vLLM's own longer ones."""
    checkpoints = getattr(self, "seamark", None)
    full_before = self.num_cached_block.get(request.request_id, 0)
    original(self, request, num_tokens, *args, **kwargs)
    if checkpoints is None or checkpoints.states is None:
        return
    state = checkpoints.state_of(request)
    start = state.chunk_start
    full = self.num_cached_block.get(request.request_id, 0)
    if start >= request.num_prompt_tokens and full == full_before and not self._pending_cow_copies:
        return  # a decode step inside a block: no key came and none went
    copies = {copy.block_id for _, copy in self._pending_cow_copies}
    blocks, in_pass = self.req_to_blocks[request.request_id], checkpoints.states.in_pass
    # This step has yet to compute the rows from `start` on, and all rows of a private copy.
    for block in blocks[start // self.block_size :]:
        checkpoints.states.unwritten[block.block_id] = 0 if block.block_id in copies else start

    def needs_key(position: int) -> bool:
        index = position // self.block_size
        # A block that was full before this call has its keys and keeps them.
        if position > num_tokens or index < full_before or index >= len(blocks):
            return False
        # This step's copies fill a private copy; a request that finds it in this very step would copy it empty.
        return position == num_tokens or blocks[index].block_id not in copies

    drop = checkpoints.grid.drop_in(self)
    positions = (position + drop for position in (state.states if in_pass else state.wish.positions))
    keep_attention_keys(self, request, filter(needs_key, positions))


@Patch(
    "written-rows",
    f"{KV_CACHE_MANAGER}.get_computed_blocks",
    why="a partial hit must not copy a block that another request of the same step is about to fill",
    upstream="unreported; vLLM defers such a request only if state and rows are registered together",
    until="vLLM defers partial hits on any block registered in the same step",
    mentions=("self.empty_kv_cache_blocks, 0, 0", "return blocks, num_new_computed_tokens,"),
    relies_on=(
        Shape(
            "vllm.v1.core.block_pool:BlockHashToBlockMap.insert",
            mentions=("self._cache[key] = {blocks.block_id: blocks, block.block_id: block}",),
        ),
    ),
)
def avoid_unwritten_rows(self: Any, request: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    """A prefix that ends inside a block is resumed on a copy of the block, and copies run before the step computes
    anything. A block that another request of the same step fills, itself perhaps a copy, would be copied empty: its
    keys are out already, and vLLM's own deferral misses it if its state is older than its rows.
    """
    found = original(self, request, *args, **kwargs)
    if not _avoids_unwritten_rows(self, request, *found[:2]):
        found = self.empty_kv_cache_blocks, 0, 0
    setattr(request, LOCAL_HIT, found[1])
    return found


def look_up(manager: Any, request: Any, at_most: int) -> Any:
    """What `KVCacheManager.get_computed_blocks` finds of so many tokens at most."""
    computed, hit, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, at_most)
    found = manager.create_kv_cache_blocks(computed), hit, 0
    return found if _avoids_unwritten_rows(manager, request, *found[:2]) else (manager.empty_kv_cache_blocks, 0, 0)


@Patch(
    "written-rows-connector",
    f"{KV_CACHE_MANAGER}.get_computed_blocks_for_connector",
    why="KV connectors look up in a way of their own, and must not copy such a block either",
    upstream="see written-rows",
    until="as written-rows",
    mentions=("return *self.get_computed_blocks(request", "return blocks, num_local, 0,"),
)
def avoid_unwritten_rows_with_a_connector(
    self: Any, request: Any, *args: Any, original: Function, **kwargs: Any
) -> Any:
    found = original(self, request, *args, **kwargs)
    if _avoids_unwritten_rows(self, request, *found[:2]):
        return found
    return *self.get_computed_blocks(request, *args, **kwargs), False


def _avoids_unwritten_rows(manager: Any, request: Any, blocks: Any, hit: int) -> bool:
    """Whether all attention rows of a hit (tokens) are written, after unwritten blocks were replaced by others."""
    checkpoints = getattr(manager, "seamark", None)
    if not hit or checkpoints is None or checkpoints.states is None:
        return True
    unwritten = checkpoints.states.unwritten
    for group, block_size, drop in checkpoints.states.keys.attention:
        copied = blocks.blocks[group]
        if not copied or hit % block_size == 0 or hit <= unwritten.get(copied[-1].block_id, hit):
            continue
        key = key_at(request, hit + drop, checkpoints.grid.unit, group)
        entry = manager.block_pool.cached_block_hash_to_block._cache.get(key)
        candidates = () if entry is None else entry.values() if isinstance(entry, dict) else (entry,)
        written = next((block for block in candidates if block.block_id not in unwritten), None)
        if written is None:
            return False
        copied[-1] = written
    return True
