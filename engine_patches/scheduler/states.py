"""The states of one scheduler's cache: their blocks, pinned prompts, and events for gateways, which may count on them.

All of it lives in the scheduler's process, on its one thread. Positions in tokens.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine_patches.scheduler.adapters import adapter_name
from engine_patches.scheduler.cache_keys import HeldKeys, Watch
from engine_patches.scheduler.draft_windows import DraftWindows
from engine_patches.scheduler.planner import CheckpointTarget, RequestState
from engine_patches.scheduler.retention import Retention
from engine_patches.settings import DEFAULT_SHARE
from engine_patches.structs import Struct

# States whose bytes and hits are counted, and those in events; an older one is forgotten, with an event as if it were
# evicted. Real caches hold some hundreds.
MAX_WRITTEN = MAX_STATES = 65_536

# Events that wait for the next report, which may never come: nobody collects, or takes what is sent.
MAX_EVENTS = 4096

# The part of vLLM's cache key (36 bytes) that names a state: long enough that two states of a cache never share it.
NAME_BYTES = 8

# What became of a pin.
PINNED, RELEASED = "pinned", "released"
NO_ROOM = "no_room"  # it would take more than the share of pins
NOT_CACHED = "not_cached"  # nothing of it is in the cache: shorter than a match unit, or no block was free for a state


class Pin(NamedTuple):
    keys: tuple[bytes, ...]  # of the cache, in the prompt's order
    blocks: list[Any]  # vLLM's KVCacheBlock
    adapter: str | None = None  # name of the LoRA adapter that has computed them


class Pins:
    """Prompts that stay in the cache: what a lookup finds of them is held like a request's, up to `limit` blocks."""

    def __init__(self, pool: Any, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._pins: dict[bytes, Pin] = {}  # by the prompt's name
        self.num_blocks = 0  # that pins hold

    @property
    def keys(self) -> set[bytes]:
        return {key for pin in self._pins.values() for key in pin.keys}

    def pin(self, name: bytes, keys: Iterable[bytes], adapter: str | None = None) -> str:
        """Hold the blocks that are cached under `keys`, in place of what the pin `name` held; what became of it."""
        keys = tuple(keys)
        found = map(self._pool.cached_block_hash_to_block.get_one_block, keys)
        blocks = {block.block_id: block for block in found if block is not None}
        if not blocks:
            return NOT_CACHED
        if len(blocks.keys() | self._held(but=name)) > self._limit:
            return NO_ROOM
        pin = Pin(keys, list(blocks.values()), adapter)
        self._pool.touch(pin.blocks)
        self.release(name)
        self._hold(name, pin)
        return PINNED

    def release(self, name: bytes) -> str:
        """Let a pin's blocks be evicted like any other."""
        if (pin := self._pins.pop(name, None)) is not None:
            self.num_blocks = len(self._held())
            # As vLLM frees a request's blocks: the end of a prompt is evicted before its beginning.
            self._pool.free_blocks(reversed(pin.blocks))
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
            self._hold(name, pin)

    def _hold(self, name: bytes, pin: Pin) -> None:
        self._pins[name] = pin
        self.num_blocks = len(self._held())

    def _held(self, but: bytes = b"") -> set[int]:
        """Ids of the blocks that pins hold, all but one of them."""
        return {block.block_id for name, pin in self._pins.items() if name != but for block in pin.blocks}


class StateStored(Struct, array_like=True, frozen=True, tag="came"):
    """The hinted request `request_id` is planned up to token `end`."""

    request_id: str  # vLLM's
    end: int
    states: tuple[tuple[int, str], ...]  # those since the last event: position, and name, "" if none is found


class StateEvicted(Struct, array_like=True, frozen=True, tag="gone"):
    """The state `name` can no longer be found."""

    name: str


class CacheCleared(Struct, array_like=True, frozen=True, tag="cleared"):
    """No state can be found any more."""

    why: str = ""  # "lost": it is not known which


class AdapterReplaced(Struct, array_like=True, frozen=True, tag="adapter"):
    """What prompts with the LoRA adapter `name` left in the cache can no longer be found; its states went before."""

    name: str


StateEvent = StateStored | StateEvicted | CacheCleared | AdapterReplaced


class StateEvents:
    """The states of one scheduler's cache that its events have named. Lengths in tokens."""

    def __init__(self, keys: HeldKeys) -> None:
        self._keys = keys
        self._states = Watch(keys.pool)
        self._adapter_of: dict[bytes, str] = {}  # of each state that a LoRA adapter has computed, its name
        self._number = 0
        self._pending: deque[tuple[int, StateEvent]] = deque(maxlen=MAX_EVENTS)

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def take(self) -> list[tuple[int, StateEvent]]:
        """The events since the last call, numbered without gaps: a missing number is an event that was dropped here."""
        events = list(self._pending)
        self._pending.clear()
        return events

    def emit_evictions(self) -> None:
        """A step is planned: emit an event for each state that can no longer be found."""
        if self._states.emptied:
            self.clear()
        for state in self._states.lost():
            self._evicted(state)

    def emit_stored(
        self, request: Any, state: RequestState, targets: Iterable[CheckpointTarget], start: int, end: int
    ) -> None:
        """Tokens [start, end) of a hinted request are in the step that was planned: emit its states up to `end`."""
        reported = 0 if start < state.reported_to else state.reported_to  # 0: preempted, and all of it comes again
        state.reported_to = end
        positions = (target.position for target in targets if reported < target.position + self._keys.drop <= end)
        states = tuple((position, self._watch(request, position)) for position in positions)
        if states or end >= request.num_prompt_tokens:
            self._emit(StateStored(request.request_id, end, states))

    def adapter_replaced(self, name: str) -> None:
        """The LoRA adapter `name` is another from now on: its states cannot be found."""
        for state in [state for state, adapter in self._adapter_of.items() if adapter == name]:
            self._states.remove(state)
            self._evicted(state)
        self._emit(AdapterReplaced(name))

    def clear(self) -> None:
        self._states.clear()
        self._adapter_of.clear()
        self._emit(CacheCleared())

    def _watch(self, request: Any, position: int) -> str:
        """Name of the state at `position`, watched from now on; "" if it cannot be found."""
        state = self._keys.name_of(request, position)
        if state not in self._states:
            if not (needs := self._keys.found(request, position)):
                return ""
            self._states.add(state, needs)
            if (adapter := adapter_name(request)) is not None:
                self._adapter_of[state] = adapter
            if (oldest := self._states.remove_oldest(MAX_STATES)) is not None:
                self._evicted(oldest)
        return state[:NAME_BYTES].hex()

    def _evicted(self, state: bytes) -> None:
        self._adapter_of.pop(state, None)
        self._emit(StateEvicted(state[:NAME_BYTES].hex()))

    def _emit(self, event: StateEvent) -> None:
        self._number += 1
        self._pending.append((self._number, event))


class StateStore(Protocol):
    def offer(self, request: Any, position: int, used: bool = True) -> None:
        """The request's state at `position` is cached; `used`: a request resumed from it, or it is pinned."""

    def close(self, why: str) -> None:
        """Hold no block that is not being copied, and find nothing any more. `why`: half a sentence for the log."""


@dataclass
class States:
    """Where each state lies, and who is told of it."""

    keys: HeldKeys
    most_pinned: int  # blocks that pins may hold
    in_pass: bool = False  # states are written inside a pass; if not, chunks are cut for them, and vLLM keeps them
    share: float = DEFAULT_SHARE  # of the cache's blocks, that states written inside a pass may hold
    num_bytes: int = 0  # of one state, all recurrent layers
    give_back: Callable[[list[Any]], None] | None = None  # frees blocks of states; None: the pool does, at once
    store: StateStore | None = None  # None without a directory for checkpoints
    windows: DraftWindows | None = None  # None without a draft head that has any
    unwritten: dict[int, int] = field(default_factory=dict)  # attention block -> token from which the step fills it

    def __post_init__(self) -> None:
        self.pins = Pins(self.keys.pool, self.most_pinned)
        self.retention = Retention(self.keys.pool, self.share)
        self.events = StateEvents(self.keys)
        self.written = Watch(self.keys.pool)  # those that were counted as written
        self._held: list[Any] = []  # blocks written in the running step
        self._spare: list[bytes] = []  # keys of those that nobody asked for

    def begin_step(self) -> None:
        self.release()
        self.unwritten.clear()

    def release(self) -> None:
        """Make the blocks of the last step's states cache like any other.

        That step may still run. Workers run steps in order, so the next owner of such a block writes after it; only
        what a KV connector loads comes in no such order, and `give_back` waits for the step if there may be one.
        """
        if self._held:
            held, self._held = self._held, []
            (self.give_back or self.keys.pool.free_blocks)(held)
        self._spare = [key for key in self._spare if not self.retention.give_up(key)]
        self.retention.trim_rungs()

    def has_idle(self, states: int = 1, *, rungs: bool = False) -> bool:
        """Whether so many states would put out nothing that is of use; of `rungs`: nothing but earlier ones."""
        blocks = states * len(self.keys.recurrent)
        return self.keys.pool.get_num_free_blocks() >= blocks and self.retention.has_idle(blocks, rungs)

    def reserve(
        self, request: Any, position: int, turn: bool, *, spare: bool = False, rung: bool = False, low: bool = False
    ) -> list[Any] | None:
        """Blocks for a state that this step writes, one per recurrent group, registered under the position's keys.

        `turn`: of one conversation; `spare`: it puts out nothing of use, and goes first; a `rung` puts out no other
        state, and goes before all others once later ones need the room. `low`: its request is of low priority.
        None: the cache has no room.
        """
        pool, groups = self.keys.pool, self.keys.recurrent
        is_full = pool.get_num_free_blocks() < len(groups)
        if rung:
            is_full = is_full or not self.retention.make_room_for_rung(len(groups), low)
        else:
            is_full = is_full or (spare and not self.has_idle()) or not self.retention.make_room(len(groups))
        if is_full:
            return None
        blocks: list[Any] = pool.get_new_blocks(len(groups))
        self._held += blocks
        for (group, block_size), block in zip(groups.items(), blocks, strict=True):
            # It has none; vLLM 0.31 requires the argument at a block's edge.
            pool.cache_partial_block(request, block, position, group, block_size, replace_existing_hashes=True)
        self.retention.add(blocks[0].block_hash, blocks, turn, rung, low)
        if spare:
            self._spare.append(blocks[0].block_hash)
        return blocks

    def continued(self, request: Any, position: int, before: int, named: Iterable[int]) -> None:
        """A request's turn that ends at `position` follows the one that ended at `before`; its hint's are `named`."""
        key, earlier, *others = (self.keys.state_key(request, each) for each in (position, before, *named))
        self.retention.continued(key, earlier, others)

    def add_written(self, key: bytes) -> None:
        self.written.add(key, (key,))
        self.written.remove_oldest(MAX_WRITTEN)

    @property
    def bytes_held(self) -> int:
        """Bytes of those that were counted as written and are still cached."""
        self.written.lost()
        return len(self.written) * self.num_bytes

    def offer(self, request: Any, positions: Iterable[int], used: bool = True) -> None:
        """The request's states at `positions` are cached, as `StateStore.offer` is told."""
        if self.store is not None:
            for position in positions:
                self.store.offer(request, position, used)

    def resumed(
        self, request: Any, position: int, passed: Sequence[int], *, shared: bool, stored: bool, low: bool = False
    ) -> None:
        """A request resumes at `position`, behind those `passed`; `shared`: with others; `stored`: as it pays."""
        key = self.keys.state_key(request, position)
        if self.retention.resumed(key, shared, low):
            self._spare.append(key)
        elif stored:
            self.offer(request, [position])
        self.retention.refresh((self.keys.state_key(request, each) for each in passed), low)

    def keep_windows(self, request: Any, state: RequestState, positions: Sequence[int]) -> None:
        """The step that is planned computes a request up to `positions`: a draft head's rows are found there."""
        if self.windows is not None:
            for position, blocks in self.windows.keep(request, state, positions).items():
                self.retention.add_window(self.keys.state_key(request, position), blocks)

    def pin(self, request: Any, positions: Sequence[int]) -> str:
        """Pin a prompt's states at those of `positions` where they are found; what became of it."""
        if request.num_prompt_tokens < self.keys.grid.unit:
            return NOT_CACHED
        found = {position: keys for position in positions if (keys := self.keys.found(request, position))}
        windows = [self.windows.keys_at(request, position) for position in found] if self.windows is not None else []
        prompt = self.keys.grid.hash_of(request, request.num_prompt_tokens)
        fate = self.pins.pin(prompt, itertools.chain(*found.values(), *windows), adapter_name(request))
        if fate == PINNED:
            self.retention.pinned(itertools.chain(*found.values()))
            self.offer(request, found)
        return fate

    def unpin(self, request: Any) -> str:
        if request.num_prompt_tokens < self.keys.grid.unit:
            return NOT_CACHED
        return self.pins.release(self.keys.grid.hash_of(request, request.num_prompt_tokens))

    def adapter_replaced(self, name: str) -> None:
        """The LoRA adapter `name` has other contents from now on: nothing that it left in the cache can be found."""
        self.pins.release_adapter(name)
        self.events.adapter_replaced(name)
