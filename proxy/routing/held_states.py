"""The prefix index, corrected by the events of one worker's engine about its states.

A state has the engine's name; a prefix has the gateway's key. A request that the engine reports ties the two: the
gateway knows its boundaries, the engine knows the positions of its states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.boundaries.boundary import Boundary
from proxy.routing.prefix_index import PrefixIndex

# Requests that the engine has not fully reported, and prefixes tied to a state; per worker, some 500 bytes each.
MAX_PENDING = 8192

MAX_TIED = 16_384


@dataclass
class _Pending:
    """A request on its way."""

    boot: str
    boundaries: tuple[Boundary, ...]
    new: list[bytes] = field(default_factory=list)  # keys of those that were not held before
    states: dict[int, str] = field(default_factory=dict)  # names of those reported so far, by position


@dataclass
class _State:
    """A state that the engine holds."""

    boot: str
    tokens: int  # its position
    keys: set[bytes] = field(default_factory=set)  # of the prefixes for which it is the deepest


class HeldStates:
    """The states of one worker, as its engine reports them. What cannot be known counts as not held."""

    def __init__(self, prefix_index: PrefixIndex) -> None:
        self._prefix_index = prefix_index
        self._pending: OrderedDict[str, _Pending] = OrderedDict()
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._tied: dict[bytes, str] = {}  # prefix key to the name of its state

    def sent(self, request_id: str, boundaries: Sequence[Boundary], boot: str) -> None:
        """A request goes to the worker; its boundaries are about to be recorded in the prefix index."""
        if not boundaries:
            return
        new = [boundary.key for boundary in boundaries if not self._prefix_index.holds(boundary.key, boot)]
        self._pending[request_id] = _Pending(boot, tuple(boundaries), new)
        self._pending.move_to_end(request_id)
        if len(self._pending) > MAX_PENDING:
            _, oldest = self._pending.popitem(last=False)
            self._not_held(oldest.new, oldest.boot)

    def refused(self, request_id: str) -> None:
        """The worker has not computed the request: what was new in it is not held."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            self._not_held(pending.new, pending.boot)

    def left(self, request_id: str) -> None:
        """Its client has left: the request counts as not computed until the engine reports it."""
        pending = self._pending.get(request_id)
        if pending is not None:
            self._not_held(pending.new, pending.boot)

    def apply(self, states: Iterable[Sequence[Any]], boot: str) -> None:
        """Apply the engine's events, in their order; `boot` is the worker's identity now.

        Raises `ValueError`, `TypeError`, `KeyError` or `IndexError` on nonsense.
        """
        for kind, *event in states:
            if kind == "came":
                request_id, end, positions = event
                self._stored(request_id, int(end), {int(position): str(name) for position, name in positions if name})
            elif kind == "gone":
                self._evicted(*event)
            elif kind == "cleared":
                self.forget_all(boot)

    def forget_all(self, boot: str) -> None:
        """Nothing is known of what the worker holds; `boot` is its identity now."""
        for boot_of_state in {boot, *(state.boot for state in self._states.values())}:
            self._prefix_index.forget_all(boot_of_state)
        self._states.clear()
        self._tied.clear()

    def fell_short(self, prefixes: Sequence[bytes], left: Container[bytes], tokens: int, unit: int, boot: str) -> None:
        """A request that starts with `prefixes` found only `tokens` at an engine that matches in `unit`s.

        More is not held, except for what the request itself has `left` behind and the states that the engine reported.
        """
        for key in prefixes:
            if self._prefix_index.holds(key, boot) // unit * unit > tokens and key not in left:
                self._not_held((key,), boot)

    def _stored(self, request_id: str, end: int, states: dict[int, str]) -> None:
        pending = self._pending.get(request_id)
        if pending is None:  # another gateway's
            return
        pending.states.update(states)
        later = []
        for boundary in pending.boundaries:
            if boundary.tokens > end:
                later.append(boundary)
                continue
            deepest = max((position for position in pending.states if position <= boundary.tokens), default=0)
            if deepest:
                self._tie(boundary.key, deepest, pending.states[deepest], pending.boot)
            else:
                self._not_held((boundary.key,), pending.boot)
        pending.boundaries = tuple(later)
        if not later:
            del self._pending[request_id]

    def _tie(self, key: bytes, tokens: int, name: str, boot: str) -> None:
        tied = self._tied.get(key)
        if tied is not None and tied != name:
            known = self._states[tied]
            if known.tokens >= tokens and known.boot == boot:
                return  # a deeper one that this request did not ask for
            known.keys.discard(key)
            if not known.keys:
                del self._states[tied]
        state = self._states.setdefault(name, _State(boot, tokens))
        state.boot = boot
        state.keys.add(key)
        self._states.move_to_end(name)
        self._tied[key] = name
        self._prefix_index.set_held(key, boot, tokens)
        while len(self._tied) > MAX_TIED:
            self._evicted(next(iter(self._states)))  # its eviction could no longer be applied

    def _not_held(self, keys: Iterable[bytes], boot: str) -> None:
        self._prefix_index.forget((key for key in keys if key not in self._tied), boot)

    def _evicted(self, name: str) -> None:
        state = self._states.pop(name, None)
        if state is not None:
            for key in state.keys:
                self._tied.pop(key, None)
            self._prefix_index.forget(state.keys, state.boot)
