"""Which states of hinted requests can be found: an event for each that comes or goes, which a gateway may count on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from engine_patches.scheduler.adapters import adapter_name
from engine_patches.scheduler.cache_keys import HeldKeys
from engine_patches.scheduler.counters import only_generates
from engine_patches.scheduler.planner import CheckpointTarget, RequestState

# States watched; an older one is forgotten, with an event as if it were evicted. Real caches hold some hundreds.
MAX_STATES = 65_536

# Events that wait for the next report, which may never come: nobody collects, or takes what is sent.
MAX_EVENTS = 4096

# The part of vLLM's cache key (36 bytes) that names a state: long enough that two states of a cache never share it.
NAME_BYTES = 8


class StateStored(msgspec.Struct, array_like=True, frozen=True, tag="came"):
    """The hinted request `request_id` is planned up to token `end`."""

    request_id: str  # vLLM's
    end: int
    states: tuple[tuple[int, str], ...]  # those since the last event: position, and name, "" if none is found


class StateEvicted(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    """The state `name` can no longer be found."""

    name: str


class CacheCleared(msgspec.Struct, array_like=True, frozen=True, tag="cleared"):
    """No state can be found any more."""

    why: str = ""  # "lost": it is not known which


class AdapterReplaced(msgspec.Struct, array_like=True, frozen=True, tag="adapter"):
    """What prompts with the LoRA adapter `name` left in the cache can no longer be found; its states went before."""

    name: str


StateEvent = StateStored | StateEvicted | CacheCleared | AdapterReplaced


class StateEvents:
    """The states of one scheduler's cache that its events have named. Lengths in tokens."""

    def __init__(self, keys: HeldKeys) -> None:
        self._keys = keys
        self._states = keys.watch()
        self._adapter_of: dict[bytes, str] = {}  # of each state that a LoRA adapter has computed, its name
        self._number = 0
        self._pending: deque[tuple[int, StateEvent]] = deque(maxlen=MAX_EVENTS)

    def __len__(self) -> int:
        return len(self._states)

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
        reported = state.reported_to
        if start < reported:  # preempted: all of it is computed, or found, again
            reported = 0
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
            needs = self._keys.found(request, position)
            if not needs:
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


def emit_events(scheduler: Any, output: Any) -> None:
    """A step is planned to its end: emit the states that came with it, and those that went."""
    checkpoints = scheduler.seamark
    events: StateEvents = checkpoints.states.events
    events.emit_evictions()  # nothing may be reported as stored in a pool that was emptied since
    if only_generates(output) and not output.scheduled_new_reqs:
        return
    for name, num_tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        end = request.num_computed_tokens  # vLLM has advanced it already
        start = end - num_tokens
        if start < request.num_prompt_tokens:
            state = checkpoints.state_of(request)
            if state.wish.positions:
                events.emit_stored(request, state, checkpoints.targets(request), start, end)
    events.emit_evictions()
