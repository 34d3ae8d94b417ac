"""What requests of low priority leave goes first: it stands in vLLM's free list right behind the blocks without a key.

Their states are written only where they put out nothing, and given up at once (`retention`). What others have left, or
have used since, stays in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from engine_patches.scheduler.retention import put_behind


class LowBlocks:
    """Those of one vLLM `Scheduler` that requests of low priority have filled, and no others have used."""

    def __init__(self, scheduler: Any) -> None:
        self._requests, self._pool = scheduler.requests, scheduler.kv_cache_manager.block_pool
        self.keys: dict[int, bytes] = {}  # by id, while the block has this key
        self._freed: dict[int, Any] = {}  # since the last step, by id
        self._last: Any = None  # of those at the front
        self._pool.free_blocks = partial(self._free, self._pool.free_blocks)
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            manager.pop_blocks_for_free = partial(self._pop, manager, manager.pop_blocks_for_free)

    def _pop(self, manager: Any, pop: Any, request_id: str) -> list[Any]:
        """In place of a manager's `pop_blocks_for_free`, through which all blocks of a request go back."""
        blocks: list[Any] = pop(request_id)
        state = getattr(self._requests.get(request_id), "seamark", None)
        if state is not None and state.wish.is_low:
            first = state.resumed_at // manager.block_size
            for index, block in enumerate(blocks):
                key = block.block_hash
                if key is not None and (index >= first or self._is_low(block)):
                    self.keys[block.block_id] = key
        elif self.keys:
            for block in blocks:
                self.keys.pop(block.block_id, None)
        return blocks

    def _free(self, free: Any, blocks: Iterable[Any]) -> None:
        """In place of the pool's `free_blocks`, which puts last whatever is let go: by a request, a copy, or a pin."""
        if self.keys:
            blocks = [*blocks]
            self._freed.update((block.block_id, block) for block in blocks if self._is_low(block))
        free(blocks)

    def give_way(self) -> None:
        """A step is going to be planned: what is free by now goes first."""
        free = [block for block in self._freed.values() if self._is_low(block) and not block.ref_cnt]
        self._freed.clear()
        if not free:
            return
        queue, last = self._pool.free_block_queue, self._last
        for block in free:
            queue.remove(block)
        is_there = last is not None and last not in free and not last.ref_cnt and self._is_low(last)
        before = last if is_there else queue.fake_free_list_head
        while (block := before.next_free_block) is not queue.fake_free_list_tail:
            if block.block_hash is not None and not self._is_low(block):
                break
            before = block
        put_behind(queue, before, free)
        self._last = free[-1]

    def _is_low(self, block: Any) -> bool:
        return bool(self.keys.get(block.block_id, b"") == block.block_hash)
