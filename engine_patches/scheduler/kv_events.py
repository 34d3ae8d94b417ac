"""KV events of a hybrid (`--kv-events-config`): the attention blocks that lead to a held state, and no others.

vLLM announces every attention block that it caches. But a hybrid's prompt is resumed only where a recurrent state is
held, so an index built from those events promises hits that do not come. Here a block is announced as long as some held
state lies at its end or behind it. What recurrent groups announce is left out: vLLM gives their blocks the same hashes,
and indexes that know no groups take them for attention. All of it happens where vLLM hands its events out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_patches import settings
from engine_patches.ledger import KV_CACHE_MANAGER, POOL, SCHEDULER, Function, Patch, Shape
from engine_patches.scheduler.cache_keys import HeldKeys, Watch
from engine_patches.settings import logger


@dataclass(slots=True)
class _Block:
    parent: bytes | None  # hash of the block before it
    uses: int = 0  # announced blocks right behind it, and states in it or at its end


class ResumableBlocks:
    """The attention blocks of one scheduler's cache that are announced. Lengths in tokens."""

    def __init__(self, keys: HeldKeys, sizes: Mapping[int, int], hidden: Collection[int] = ()) -> None:
        """`sizes`: of announced blocks, by attention group, in whole units; `hidden`: groups that decide no hit."""
        from vllm.distributed.kv_events import BlockRemoved
        from vllm.v1.core import kv_cache_utils

        self._keys = keys
        self._pool = pool = keys.pool
        self._unit = keys.grid.unit
        self._sizes = sizes
        # How far a key of a cache group lies past the state that it makes findable.
        self._past = dict.fromkeys(keys.recurrent, 0) | {each.group: each.drop for each in keys.attention}
        self._left_out = {*self._past, *hidden}  # of what the pool announces
        self._announced: dict[int, dict[bytes, _Block]] = {group: {} for group in sizes}
        self._states = Watch(keys.pool)  # those that can be resumed
        self._last: dict[bytes, dict[int, bytes | None]] = {}  # of each, by group, the hash of its last announced block
        self._touched: dict[Any, set[int]] = {}  # by request: where it may have made a state findable
        self._reports: list[tuple[Any, int, int]] = []  # requests that want what they found of a group announced
        self._block_removed, self._external = BlockRemoved, kv_cache_utils.maybe_convert_block_hash
        # vLLM 0.33 has methods for blocks whose hashes cover the tokens behind them.
        self._extra_keys = getattr(pool, "_generate_event_extra_keys", kv_cache_utils.generate_block_hash_extra_keys)
        self._ahead_of = getattr(pool, "_lookahead_token_ids", None)

    def take_over(self) -> None:
        """Stand between the pool and whoever takes its events. A pool without events keeps its own methods."""
        pool = self._pool
        self._cache_full_blocks, pool.cache_full_blocks = pool.cache_full_blocks, self.cache_full_blocks
        self._cache_partial_block, pool.cache_partial_block = pool.cache_partial_block, self.cache_partial_block
        self._emit_cached, pool.emit_cached_block_events = pool.emit_cached_block_events, self.emit_cached_block_events
        self._take, pool.take_events = pool.take_events, self.take_events

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Any = None,
    ) -> None:
        """In place of the pool's: remember at which positions a state may have become findable."""
        self._cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        for number in range(num_cached_blocks, num_full_blocks):
            if not blocks[number].is_null and (block_mask is None or block_mask[number - num_cached_blocks]):
                self._touch(request, (number + 1) * block_size, kv_cache_group_id)

    def cache_partial_block(
        self, request: Any, block: Any, num_tokens: int, kv_cache_group_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of the pool's: the same for a key inside a block."""
        key = self._cache_partial_block(request, block, num_tokens, kv_cache_group_id, *args, **kwargs)
        if key is not None:
            self._touch(request, num_tokens, kv_cache_group_id)
        return key

    def emit_cached_block_events(
        self, request: Any, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        """In place of the pool's: a request whose `kv_cache_report_mode` is "full" has found these blocks."""
        if kv_cache_group_id in self._sizes:
            self._reports.append((request, kv_cache_group_id, num_cached_blocks * block_size))
        if kv_cache_group_id not in self._left_out:
            self._emit_cached(request, num_cached_blocks, block_size, kv_cache_group_id)

    def take_events(self) -> list[Any]:
        """In place of the pool's: events since the last call, those of other cache groups first."""
        events = [event for event in self._take() if getattr(event, "group_idx", None) not in self._left_out]
        if self._states.emptied:
            events = [*self._clear(), *events]  # an index may pass over AllBlocksCleared
        # A state that comes may keep announced what another one leaves, so those that go come last.
        for request, positions in self._touched.items():
            for position in sorted(positions):
                events += self._announce(request, position)
        for request, group, num_tokens in self._reports:
            events += self._report(request, group, num_tokens)
        for state in self._states.lost():
            events += self._withdraw(state)
        self._touched.clear()
        self._reports.clear()
        return events

    def _touch(self, request: Any, num_tokens: int, group: int) -> None:
        past = self._past.get(group)
        if past is not None:
            self._touched.setdefault(request, set()).add(num_tokens - past)

    def _announce(self, request: Any, position: int) -> list[Any]:
        """The events of a state at `position` that can be resumed; none if it cannot, or is announced already."""
        if position <= 0 or position + self._keys.drop > len(request.block_hashes) * self._unit:
            return []
        state = self._keys.name_of(request, position)
        keys = () if state in self._states else self._keys.found(request, position)
        if not keys:
            return []
        events: list[Any] = []
        self._last[state] = {group: self._store(request, group, position, events) for group in self._sizes}
        self._states.add(state, keys)
        return events

    def _store(self, request: Any, group: int, position: int, events: list[Any]) -> bytes | None:
        """Announce the blocks up to `position` that are not yet; the hash of the last, None if there is none."""
        announced, hashes = self._announced[group], self._hashes(request, group, position)
        first = len(hashes)
        while first and hashes[first - 1] not in announced:
            first -= 1
        parent = hashes[first - 1] if first else None
        for block_hash in hashes[first:]:
            if parent is not None:
                announced[parent].uses += 1
            announced[block_hash] = _Block(parent)
            parent = block_hash
        if parent is not None:
            announced[parent].uses += 1
        if first < len(hashes):
            events.append(self._stored(request, group, hashes, first))
        return parent

    def _report(self, request: Any, group: int, num_tokens: int) -> list[Any]:
        """Announce once more what is announced of the first tokens of a request."""
        hashes = self._hashes(request, group, min(num_tokens, len(request.block_hashes) * self._unit))
        announced = self._announced[group]
        known = next((index for index, each in enumerate(hashes) if each not in announced), len(hashes))
        return [self._stored(request, group, hashes[:known], 0)] if known else []

    def _hashes(self, request: Any, group: int, num_tokens: int) -> list[bytes]:
        """Hashes of the blocks in the first tokens of a request, as long as those announced."""
        size, unit, hashes = self._sizes[group], self._unit, request.block_hashes
        return [hashes[end // unit - 1] for end in range(size, num_tokens + 1, size)]  # of a long prompt thousands

    def _stored(self, request: Any, group: int, hashes: Sequence[bytes], first: int) -> Any:
        """vLLM's event for all but the `first` blocks of `hashes`."""
        size, extra_keys, feature = self._sizes[group], [], 0
        for number in range(first, len(hashes)):
            keys, feature = self._extra_keys(request, number * size, (number + 1) * size, feature)
            extra_keys.append(keys)
        options = {}
        if self._ahead_of is not None:
            ends = range((first + 1) * size, (len(hashes) + 1) * size, size)
            ahead = self._pool.num_hash_lookahead_tokens
            options["lookahead_token_ids"] = [self._ahead_of(request, end) for end in ends] if ahead else None
        return self._pool._build_block_stored_event(
            request,
            block_hashes=list(map(self._external, hashes[first:])),
            parent_block_hash=self._external(hashes[first - 1]) if first else None,
            start_token_idx=first * size,
            end_token_idx=len(hashes) * size,
            block_size=size,
            kv_cache_group_id=group,
            extra_keys_list=extra_keys,
            **options,
        )

    def _withdraw(self, state: bytes) -> list[Any]:
        """The events of a state that can no longer be resumed."""
        events = []
        for group, last in self._last.pop(state).items():
            announced, gone, block_hash = self._announced[group], [], last
            while block_hash is not None:
                block = announced[block_hash]
                block.uses -= 1
                if block.uses:
                    break
                del announced[block_hash]
                gone.append(block_hash)
                block_hash = block.parent
            events += self._gone(group, gone)
        return events

    def _clear(self) -> list[Any]:
        """Withdraw everything: the cache was emptied."""
        events = []
        for group, announced in self._announced.items():
            events += self._gone(group, list(reversed(announced)))
            announced.clear()
        self._last.clear()
        self._states.clear()
        self._reports.clear()
        return events

    def _gone(self, group: int, hashes: Sequence[bytes]) -> list[Any]:
        """vLLM's event for withdrawn blocks, none before one that follows it."""
        names = list(map(self._external, hashes))
        return [self._block_removed(block_hashes=names, medium=self._pool.medium, group_idx=group)] if names else []


@Patch(
    "kv-events",
    f"{SCHEDULER}.__init__",
    why="KV events name attention blocks that no state makes usable; nothing is replaced where they are off",
    upstream="vllm#44451, #43258; ai-dynamo/dynamo#12169",
    until="vLLM announces of a hybrid what can be resumed, and indexes go by it",
    mentions=("self.enable_kv_cache_events = (",),
    relies_on=(
        Shape(
            f"{POOL}.cache_full_blocks",
            "self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask",
            mentions=("if blk.is_null or (block_mask is not None and not block_mask[i])",),
        ),
        Shape(f"{POOL}.emit_cached_block_events", "self, request, num_cached_blocks, block_size, kv_cache_group_id"),
        Shape(f"{POOL}.take_events", "self", mentions=("self.kv_event_queue = []",)),
        Shape(
            f"{POOL}._build_block_stored_event",
            mentions=("request.all_token_ids[start_token_idx:end_token_idx]", "extra_keys_list", "self.medium"),
        ),
        Shape(f"{POOL}.reset_prefix_cache", mentions=("self.cached_block_hash_to_block = BlockHashToBlockMap()",)),
        Shape(f"{KV_CACHE_MANAGER}.take_events", "self", mentions=("self.block_pool.take_events()",)),
    ),
)
def announce_resumable_blocks(self: Any, *args: Any, original: Function, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    states, blocks = self.seamark.states, settings.kv_events()
    if states is None or not self.enable_kv_cache_events or blocks == settings.OFF or not states.keys.attention:
        return
    unit = states.keys.grid.unit if blocks == settings.UNITS else 0
    sizes = {each.group: unit or each.block_size for each in states.keys.attention}
    ResumableBlocks(states.keys, sizes, states.windows.groups if states.windows is not None else ()).take_over()
    logger.info(
        "seamark: KV events announce attention blocks up to held states, in blocks of %s tokens",
        ", ".join(map(str, sizes.values())),
    )
