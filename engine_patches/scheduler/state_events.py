"""Which states of hinted requests can be found, and an event for each that comes or goes: what a gateway may count on.

A state is found if the state of every recurrent cache group is cached, and all attention rows before it. Nothing is
walked: the pool names the keys that it removes, and once per step only the states that need one of those are looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from engine_patches.scheduler.adapters import adapter_name
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.hints import CheckpointTarget
from engine_patches.scheduler.request_state import RequestState

# States watched; an older one is forgotten, with an event as if it were evicted. Real caches hold some hundreds.
MAX_STATES = 65_536

# Events that wait for the next report; with --disable-log-stats vLLM never reports.
MAX_EVENTS = 4096

# The part of vLLM's cache key (36 bytes) that names a state: long enough that two states of a cache never share it.
NAME_BYTES = 8

WATCHERS = "seamark_watchers"  # on a block pool: functions that are given the keys that it removes


class StateStored(NamedTuple):
    """The hinted request `request_id` is planned up to token `end`."""

    request_id: str  # vLLM's
    end: int
    states: tuple[tuple[int, str], ...]  # those since the last event: position, and name, "" if none is found


class StateEvicted(NamedTuple):
    """The state `name` can no longer be found."""

    name: str


class CacheCleared(NamedTuple):
    """No state can be found any more."""


class AdapterReplaced(NamedTuple):
    """What prompts with the LoRA adapter `name` left in the cache can no longer be found; its states went before."""

    name: str


StateEvent = StateStored | StateEvicted | CacheCleared | AdapterReplaced


class StateEvents:
    """The states of one scheduler's cache that its events have named. Lengths in tokens."""

    def __init__(
        self,
        pool: Any,
        match_unit: int,
        recurrent_groups: Iterable[int],
        attention_managers: Sequence[Any],
        drops: Sequence[int] | None = None,
    ) -> None:
        """`drops`: of each attention manager, tokens past a state up to which its keys have to reach; None: 0."""
        self._pool = pool
        self._unit = match_unit
        self._recurrent = tuple(recurrent_groups)
        drops = drops or [0] * len(attention_managers)
        self._attention = tuple(
            (manager.kv_cache_group_id, manager.block_size, drop)
            for manager, drop in zip(attention_managers, drops, strict=True)
        )
        self._drop = max(drops, default=0)
        self._needs: dict[bytes, tuple[bytes, ...]] = {}  # all keys of a state, by the prefix that finds it
        self._needed_by: dict[bytes, set[bytes]] = {}
        self._adapter_of: dict[bytes, str] = {}  # of each state that a LoRA adapter has computed, its name
        self._removed: set[bytes] = set()  # keys that one block has lost; another may carry them
        self._cached = pool.cached_block_hash_to_block
        self._number = 0
        self._pending: deque[tuple[int, StateEvent]] = deque(maxlen=MAX_EVENTS)

    def __len__(self) -> int:
        return len(self._needs)

    @property
    def pending(self) -> bool:
        """Whether an event waits to be taken."""
        return bool(self._pending)

    def take(self) -> list[tuple[int, StateEvent]]:
        """The events since the last call, numbered without gaps: a missing number is an event that was dropped here."""
        events = list(self._pending)
        self._pending.clear()
        return events

    def keys_removed(self, keys: Iterable[bytes]) -> None:
        """The pool has removed these keys of a block; some return at once, or stay under another block."""
        for key in keys:
            if key in self._needed_by:
                self._removed.add(key)

    def emit_evictions(self) -> None:
        """A step is planned: emit an event for each state that can no longer be found."""
        if self._pool.cached_block_hash_to_block is not self._cached:
            self.clear()  # the pool was emptied as a whole
        if self._removed:
            removed, self._removed = self._removed, set()
            for key in removed:
                if self._cached.get_one_block(key) is None:
                    for state in list(self._needed_by.get(key, ())):
                        self._unwatch(state)
                        self._emit(StateEvicted(_name(state)))

    def emit_stored(
        self, request: Any, state: RequestState, targets: Iterable[CheckpointTarget], start: int, end: int
    ) -> None:
        """Tokens [start, end) of a hinted request are in the step that was planned: emit its states up to `end`."""
        reported = state.reported_to
        if start < reported:  # preempted: all of it is computed, or found, again
            reported = 0
        state.reported_to = end
        positions = (target.position for target in targets if reported < target.position + self._drop <= end)
        states = tuple((position, self._watch(request, position)) for position in positions)
        if states or end >= request.num_prompt_tokens:
            self._emit(StateStored(request.request_id, end, states))

    def adapter_replaced(self, name: str) -> None:
        """The LoRA adapter `name` is another from now on: its states cannot be found."""
        for state in [state for state, adapter in self._adapter_of.items() if adapter == name]:
            self._unwatch(state)
            self._emit(StateEvicted(_name(state)))
        self._emit(AdapterReplaced(name))

    def clear(self) -> None:
        """The cache was emptied."""
        self._needs.clear()
        self._needed_by.clear()
        self._adapter_of.clear()
        self._removed.clear()
        self._cached = self._pool.cached_block_hash_to_block
        self._emit(CacheCleared())

    def _watch(self, request: Any, position: int) -> str:
        """Name of the state at `position`, watched from now on; "" if it cannot be found."""
        # Who shares the state alone, and not the tokens that lead to it, does not find it: those name it, too.
        state = key_at(request, position + self._drop, self._unit, self._recurrent[0])
        if state not in self._needs:
            needs = tuple(self.keys_of(request, position))
            if not self._has_all(needs):
                return ""
            self._needs[state] = needs
            for key in needs:
                self._needed_by.setdefault(key, set()).add(state)
            if (adapter := adapter_name(request)) is not None:
                self._adapter_of[state] = adapter
            if len(self._needs) > MAX_STATES:
                oldest = next(iter(self._needs))
                self._unwatch(oldest)
                self._emit(StateEvicted(_name(oldest)))
        return _name(state)

    def is_found(self, request: Any, position: int) -> bool:
        """Whether a lookup finds the request's state at `position`."""
        return self._has_all(self.keys_of(request, position))

    def keys_of(self, request: Any, position: int) -> Iterator[bytes]:
        """The keys that have to be cached for the request's state at `position` to be found."""
        for group in self._recurrent:
            yield key_at(request, position, self._unit, group)
        for group, block_size, drop in self._attention:
            reached = position + drop
            for edge in range(block_size, reached + 1, block_size):
                yield key_at(request, edge, self._unit, group)
            if reached % block_size:
                yield key_at(request, reached, self._unit, group)

    def _has_all(self, keys: Iterable[bytes]) -> bool:
        return all(self._cached.get_one_block(key) is not None for key in keys)

    def _unwatch(self, state: bytes) -> None:
        self._adapter_of.pop(state, None)
        for key in self._needs.pop(state):
            states = self._needed_by[key]
            states.discard(state)
            if not states:
                del self._needed_by[key]

    def _emit(self, event: StateEvent) -> None:
        self._number += 1
        self._pending.append((self._number, event))


def _name(state: bytes) -> str:
    return state[:NAME_BYTES].hex()


def only_generates(output: Any) -> bool:
    """Whether a step has one token of each of its requests, besides drafts: vLLM schedules no fewer of any."""
    drafts = output.scheduled_spec_decode_tokens
    num_drafts = sum(map(len, drafts.values())) if drafts else 0
    return bool(output.total_num_scheduled_tokens - num_drafts == len(output.num_scheduled_tokens))


def emit_events(scheduler: Any, output: Any) -> None:
    """A step is planned to its end: emit the states that came with it, and those that went."""
    checkpoints = scheduler.seamark
    events: StateEvents = checkpoints.state_events
    events.emit_evictions()  # nothing may be reported as stored in a pool that was emptied since
    if only_generates(output) and not output.scheduled_new_reqs:
        return
    for name, num_tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        end = request.num_computed_tokens  # vLLM has advanced it already
        start = end - num_tokens
        if start < request.num_prompt_tokens:
            state = checkpoints.state_of(request)
            if state.positions:
                events.emit_stored(request, state, checkpoints.targets(request), start, end)
    events.emit_evictions()


def watch_removed_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `BlockPool._remove_cached_block_hashes`, through which every key leaves the cache."""

    def _remove_cached_block_hashes(self: Any, block: Any) -> Any:
        removed = original(self, block)
        if removed:
            for keys_removed in getattr(self, WATCHERS, ()):
                keys_removed(removed)
        return removed

    return _remove_cached_block_hashes
