"""Prompts that stay in the cache: blocks of their states, and of the attention rows before them, held like a request's.

Only what a lookup would find is held, by its keys, so a pin can cost room and never an answer. All pins together take
at most a share of the cache, and never so much that a request of the greatest length would not fit beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

# What became of a pin.
PINNED, RELEASED = "pinned", "released"
NO_ROOM = "no_room"  # it would take more than the share of pins
NOT_CACHED = "not_cached"  # nothing of it is in the cache: shorter than a match unit, or no block was free for a state


class Pin(NamedTuple):
    """What one pin holds."""

    keys: tuple[bytes, ...]  # of the cache, in the prompt's order
    blocks: list[Any]  # vLLM's KVCacheBlock
    adapter: str | None = None  # name of the LoRA adapter that has computed them


class Pins:
    """The pins of one scheduler. Counted in blocks of its pool."""

    def __init__(self, pool: Any, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._pins: dict[bytes, Pin] = {}  # by the prompt's name
        self._held: Counter[int] = Counter()  # pins by block id

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold."""
        return len(self._held)

    @property
    def keys(self) -> set[bytes]:
        """Keys of all that is pinned."""
        return {key for pin in self._pins.values() for key in pin.keys}

    def pin(self, name: bytes, keys: Iterable[bytes], adapter: str | None = None) -> str:
        """Hold the blocks that are cached under `keys`, in place of what the pin `name` held; what became of it.

        `adapter`: name of the LoRA adapter that has computed them.
        """
        keys = tuple(keys)
        found = map(self._pool.cached_block_hash_to_block.get_one_block, keys)
        blocks = list({block.block_id: block for block in found if block is not None}.values())
        if not blocks:
            return NOT_CACHED
        previous = {block.block_id for block in self._pins[name].blocks} if name in self._pins else set()
        others = sum(count > (block_id in previous) for block_id, count in self._held.items())
        new = sum(self._held[block.block_id] == (block.block_id in previous) for block in blocks)
        if others + new > self._limit:
            return NO_ROOM
        self._pool.touch(blocks)
        self.release(name)
        self._pins[name] = Pin(keys, blocks, adapter)
        self._held.update(block.block_id for block in blocks)
        return PINNED

    def release(self, name: bytes) -> str:
        """Let a pin's blocks be evicted like any other."""
        pin = self._pins.pop(name, None)
        blocks = pin.blocks if pin is not None else []
        self._forget(blocks)
        # As vLLM frees a request's blocks: the end of a prompt is evicted before its beginning.
        self._pool.free_blocks(reversed(blocks))
        return RELEASED

    def release_adapter(self, adapter: str) -> None:
        """Let all go that a LoRA adapter has computed which is another now."""
        for name in [name for name, pin in self._pins.items() if pin.adapter == adapter]:
            self.release(name)

    def let_go(self) -> dict[bytes, Pin]:
        """Release all pins; what they held, for `take_again`."""
        pins = dict(self._pins)
        for name in pins:
            self.release(name)
        return pins

    def take_again(self, pins: dict[bytes, Pin]) -> None:
        """Hold what `let_go` has just released, and nobody has taken since."""
        for name, pin in pins.items():
            self._pool.touch(pin.blocks)
            self._pins[name] = pin
            self._held.update(block.block_id for block in pin.blocks)

    def _forget(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self._held[block.block_id] -= 1
            if not self._held[block.block_id]:
                del self._held[block.block_id]


def limit(scheduler: Any, share: float) -> int:
    """Blocks that pins may hold in a vLLM `Scheduler`'s cache: a `share` of it, or what the longest request leaves."""
    config = scheduler.vllm_config
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups]
    longest: int = sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs)
    usable: int = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one is vLLM's null block
    return max(0, min(int(share * usable), usable - longest))
