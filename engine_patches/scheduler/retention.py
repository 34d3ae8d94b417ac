"""Which states the cache keeps when it cannot keep all. Counted in blocks: a state can be 170 MB.

A state is an ordinary cached block, and vLLM evicts the least recently used first. Two things differ. A shared prefix
(a system prompt, a document) counts as used whenever a state behind it is. And all states together hold at most a share
of the cache; when it is full, the turns of single conversations go before what is shared. What goes for the share is
found as long as unused blocks are there, and makes room before anything else is evicted. So does what a conversation
has left behind: all before its last two turns. Only blocks that no request holds are touched, so no request ever waits
for a state. What requests of low priority leave goes before all of them: its states are written only where they put
out nothing, and given up at once.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

# All states are looked through for what vLLM has evicted once one part in so many of them has been added: so the look
# costs each state that is added the same, however many there are.
PRUNE_SHARE = 8

# The part of the cache's blocks that the latest rungs hold. For these they may take the oldest blocks in which no state
# lies that was asked for: a cache that has filled once has none that hold nothing, and vLLM alone would use such a one.
RUNG_SHARE, OLDEST = 1 / 16, 64


@dataclass
class KeptState:
    """A recurrent state in the cache: one block for each recurrent cache group."""

    blocks: Sequence[Any]  # vLLM's KVCacheBlock
    keys: Sequence[bytes]  # under which they were registered
    turn: bool  # the end of a conversation's turn, rather than of something shared
    rung: bool = False  # of a ladder, and used once at most: whoever used it keeps a state where it leaves the prompt
    low: bool = False  # requests of low priority alone have written and used it
    uses: int = 0  # requests that resumed from it
    before: bytes | None = None  # key of the turn that its conversation went on from

    @property
    def free(self) -> bool:
        """No request and no running step holds it."""
        return all(block.ref_cnt == 0 for block in self.blocks)

    @property
    def cached(self) -> bool:
        return all(block.block_hash == key for block, key in zip(self.blocks, self.keys, strict=True))


class Retention:
    """All states that one scheduler has written and the cache still holds, least recently used first."""

    def __init__(self, pool: Any, share: float) -> None:
        self._pool, self._limit = pool, int(share * pool.num_gpu_blocks)  # blocks
        # By the key of the first recurrent group: the turns that go first, all others, and those of ladders.
        self._turns: OrderedDict[bytes, KeptState] = OrderedDict()
        self._kept: OrderedDict[bytes, KeptState] = OrderedDict()
        self._rungs: OrderedDict[bytes, KeptState] = OrderedDict()
        self._rung_limit = int(RUNG_SHARE * pool.num_gpu_blocks)  # blocks
        self._num_blocks = {True: 0, False: 0}  # by whether rungs lie in them
        self._added = 0  # states, since the last pruning
        self._released: dict[bytes, KeptState] = {}  # given up for the share, and perhaps still cached
        self._in_block: dict[int, KeptState] = {}  # all of these states, by the ids of their blocks
        self._released_last: dict[bool, bytes] = {}  # by whether it is a rung: these go before all others
        self.low: dict[int, bytes] = {}  # blocks that requests of low priority left, by id: their keys
        self._windows: dict[bytes, list[tuple[Any, bytes]]] = {}  # of a draft head, by state: blocks with their keys

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def __contains__(self, key: bytes) -> bool:
        return self._get(key) is not None

    @property
    def _all(self) -> tuple[OrderedDict[bytes, KeptState], ...]:
        return self._turns, self._kept, self._rungs

    def _get(self, key: bytes) -> KeptState | None:
        return self._turns.get(key) or self._kept.get(key) or self._rungs.get(key)

    def _state(self, key: bytes) -> KeptState | None:
        """The state under `key`, given up or not."""
        return self._get(key) or self._released.get(key)

    def is_rung(self, key: bytes) -> bool:
        state = self._state(key)
        return state is not None and state.rung

    def add(self, key: bytes, blocks: Sequence[Any], turn: bool, rung: bool = False, low: bool = False) -> None:
        self._forget(key)
        for before in [self._in_block.get(block.block_id) for block in blocks]:
            if before is not None and self._state(before.keys[0]) is before:  # it lay there
                self._forget(before.keys[0])
                self._windows.pop(before.keys[0], None)
        self._keep(key, KeptState(blocks, [block.block_hash for block in blocks], turn, rung, low))
        self._added += 1

    def claim(self, key: bytes) -> None:
        """A prompt wants the state under `key` for others: it is no rung any more."""
        if self.is_rung(key) and (state := self._find(key)) is not None:
            self._forget(key)
            state.rung, state.uses = not self.make_room(len(state.blocks)), max(state.uses, 1)
            self._keep(key, state)

    def resumed(self, key: bytes, shared: bool, low: bool) -> bool:
        """A request, of `low` priority or not, resumes from the state under `key`; whether that still goes first.

        `shared`: it is none of its own conversation.
        """
        state = self._find(key)
        if state is None:
            return False
        self._forget(key)
        state.low = state.low and low
        state.uses += 1
        state.rung = state.rung and (state.uses == 1 or not self.make_room(len(state.blocks)))
        state.turn = state.turn and not shared
        self._keep(key, state)
        return state.rung or state.low

    def continued(self, key: bytes, before: bytes, named: Container[bytes]) -> None:
        """The turn under `key` went on from that under `before`: the one before both goes, unless `named` or used."""
        state, earlier = self._turns.get(key), self._turns.get(before)
        if state is None or earlier is None:
            return
        state.before = before
        left = earlier.before
        if left is not None and left in self._turns and left not in named and self._turns[left].free:
            self._release(left)

    def refresh(self, keys: Iterable[bytes], low: bool) -> None:
        """A request, of `low` priority or not, has used a deeper state: these shorter prefixes of it count as used."""
        cached = self._pool.cached_block_hash_to_block
        for key in keys:
            state = self._state(key)
            goes_first = low and state is not None and state.low  # as before
            if not goes_first and (state := self._find(key)) is not None:
                state.low = False
                next(states for states in self._all if key in states).move_to_end(key)
                rows = [block for block, name in self._windows.get(key, ()) if cached.contain(name, block.block_id)]
                for block in (*state.blocks, *rows):
                    if block.ref_cnt == 0 and not block.is_null:
                        self.low.pop(block.block_id, None)
                        self._pool.free_block_queue.remove(block)
                        self._pool.free_block_queue.append(block)

    def add_window(self, key: bytes, blocks: Sequence[tuple[Any, bytes]]) -> None:
        """A draft head has rows in `blocks`, each with its key, before the state under `key`: they are used with it."""
        if key in self:
            self._windows[key] = list(blocks)

    def pinned(self, keys: Iterable[bytes]) -> None:
        """What was given up of the states under these keys is of use to somebody, and goes first no more."""
        for key in self._released.keys() & keys:
            self._forget(key)

    def make_room(self, num_blocks: int) -> bool:
        """Release states until `num_blocks` more fit into the share. False if even that does not help."""
        if num_blocks > self._limit:
            return False
        if self._num_blocks[False] + num_blocks > self._limit and self._added * PRUNE_SHARE >= len(self):
            self.prune()
        while self._num_blocks[False] + num_blocks > self._limit:
            states = itertools.chain(self._turns.items(), self._kept.items())
            victim = next((key for key, state in states if state.free), None)
            if victim is not None:
                self._release(victim)
            elif self._added:
                self.prune()
            else:
                return False
        return True

    def has_idle(self, num_blocks: int, rung: bool = False) -> bool:
        """Whether the next so many blocks that are taken hold at most states that were given up, and fit the share.

        For a `rung`, whether they hold at most rungs, none of which counts for the share.
        """
        if not rung and self._num_blocks[False] + num_blocks > self._limit:
            return False
        return all(self._is_idle(block, rung) for block in self._next(num_blocks))

    def _next(self, num_blocks: int) -> Iterator[Any]:
        """The blocks that are taken next; at least so many are free."""
        block = self._pool.free_block_queue.fake_free_list_head
        for _ in range(num_blocks):
            block = block.next_free_block
            yield block

    def make_room_for_rung(self, num_blocks: int, low: bool) -> bool:
        """Whether the blocks that are taken next may hold a rung.

        They hold at most older ones, or no state that was asked for, if their share has room and priority is not `low`.
        """
        if self.has_idle(num_blocks, rung=True):
            return True
        if low or not self.trim_rungs(num_blocks):
            return False
        queue, oldest = self._pool.free_block_queue, self._next(min(OLDEST, self._pool.get_num_free_blocks()))
        found = list(itertools.islice(itertools.filterfalse(self._is_asked_for, oldest), num_blocks))
        if len(found) < num_blocks:
            return False
        put_first(queue, found)
        return True

    def trim_rungs(self, num_blocks: int = 0) -> bool:
        """Give the oldest rungs up until `num_blocks` more fit into their share, if that helps.

        They go before all other states then.
        """
        room = self._rung_limit - num_blocks
        for key in list(self._rungs) if self._num_blocks[True] > room else ():
            if self._num_blocks[True] > room and self._rungs[key].free:
                self._release(key)
        return self._num_blocks[True] <= room

    def give_up(self, key: bytes) -> bool:
        """A state goes before all others from now on, unless somebody has used it. False while its blocks are held."""
        state = self._get(key)
        if state is None or (not state.low and (state.rung or state.uses)):
            return True
        if state.free:
            self._release(key)
        return state.free

    def prune(self) -> None:
        self._added = 0
        for states in self._all:
            for key in [key for key, state in states.items() if not state.cached]:
                self._forget(key)
        self._released = {key: state for key, state in self._released.items() if state.cached}
        self._in_block = {number: state for number, state in self._in_block.items() if state.cached}
        self._windows = {key: blocks for key, blocks in self._windows.items() if key in self or key in self._released}

    def clear(self) -> None:
        for states in self._all:
            states.clear()
        self._released.clear()
        self._in_block.clear()
        self._windows.clear()
        self._num_blocks = {True: 0, False: 0}

    def _release(self, key: bytes) -> None:
        """Give a state's blocks up, behind those at the front of the free list that hold nothing or were given up.

        A rung's go behind those that hold nothing, or a rung.
        """
        state = self._get(key)
        self._forget(key)
        if state is None or not state.cached:
            return  # vLLM has evicted it since the last pruning
        last = self._released.get(self._released_last.get(state.rung, b""))
        # All that stands before it holds nothing or was given up, too.
        behind = last.blocks[-1] if last is not None and last.cached and last.free else None
        put_first(self._pool.free_block_queue, state.blocks, behind, partial(self._is_idle, rung=state.rung))
        self._released[key] = state
        self._released_last[state.rung] = key
        self._in_block.update((block.block_id, state) for block in state.blocks)

    def _is_idle(self, block: Any, rung: bool) -> bool:
        """Whether a free block holds nothing, or what was given up; for a `rung`, nothing or a rung."""
        if block.block_hash in (None, self.low.get(block.block_id)):
            return True
        state, is_given_up = self._state_in(block)
        return state is not None and is_given_up and (state.rung or not rung)

    def _state_in(self, block: Any) -> tuple[KeptState | None, bool]:
        """The state that lies in a block, and whether it was given up; None if there is none, or not any more."""
        state = self._in_block.get(block.block_id)
        if state is None or not state.cached:
            return None, False
        return state, state.keys[0] in self._released

    def _is_asked_for(self, block: Any) -> bool:
        """Whether a state lies in a block that is neither a rung nor was given up."""
        state, is_given_up = self._state_in(block)
        return state is not None and not state.rung and not is_given_up

    def _find(self, key: bytes) -> KeptState | None:
        """The state under `key`, taken back if it was given up; None if there is none or it is no longer cached."""
        state = self._state(key)
        if state is None or not state.cached:
            return None
        if key in self._released:
            self._forget(key)
            self._keep(key, state)
            self.make_room(0)  # within the share
        return state

    def _keep(self, key: bytes, state: KeptState) -> None:
        turn_first = state.turn and state.uses <= 1
        (self._rungs if state.rung else self._turns if turn_first else self._kept)[key] = state
        self._in_block.update((block.block_id, state) for block in state.blocks)
        self._num_blocks[state.rung] += len(state.blocks)

    def _forget(self, key: bytes) -> None:
        state = self._released.pop(key, None)
        if state is None and (state := self._get(key)) is not None:
            for states in self._all:
                states.pop(key, None)
            self._num_blocks[state.rung] -= len(state.blocks)
        for block in state.blocks if state is not None else ():
            if self._in_block.get(block.block_id) is state:
                del self._in_block[block.block_id]


class LowBlocks:
    """The blocks of one vLLM `Scheduler` that requests of low priority have filled, and no others have used.

    They go first, right behind the blocks without a key. What others have left, or have used since, stays in its place.
    """

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
        if free:
            last = self._last
            is_there = last is not None and last not in free and not last.ref_cnt and self._is_low(last)
            put_first(self._pool.free_block_queue, free, last if is_there else None, self._goes_first)
            self._last = free[-1]

    def _goes_first(self, block: Any) -> bool:
        return block.block_hash is None or self._is_low(block)

    def _is_low(self, block: Any) -> bool:
        return bool(self.keys.get(block.block_id, b"") == block.block_hash)


def put_first(
    queue: Any, blocks: Sequence[Any], behind: Any = None, goes_before: Callable[[Any], bool] = lambda _: False
) -> None:
    """Move free blocks to the front of vLLM's list of them, `behind` one of it if given, and behind those that follow
    as long as each `goes_before` them."""
    for block in blocks:
        queue.remove(block)
    before = behind or queue.fake_free_list_head
    while (block := before.next_free_block) is not queue.fake_free_list_tail and goes_before(block):
        before = block
    for block in blocks:
        block.prev_free_block, block.next_free_block = before, before.next_free_block
        before.next_free_block.prev_free_block = block
        before.next_free_block = before = block
        queue.num_free_blocks += 1
