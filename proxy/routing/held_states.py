"""The prefix index, corrected by the events of one worker's engine about its states.

A state has the engine's name; a prefix has the gateway's key. A request that the engine reports ties the two: it says
at which positions it found the request's boundaries, and at which ones it keeps states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from proxy.boundaries.boundary import Boundary, Entry
from proxy.routing.feed_lines import Admitted, Came, Cleared, Event, Gone
from proxy.routing.prefix_index import PrefixIndex

# Requests that the engine has not fully reported, and prefixes tied to a state; per worker, some 500 bytes each.
MAX_PENDING, MAX_TIED = 8192, 16_384


class _Pending(Struct):
    boot: str
    entries: tuple[Entry, ...]  # its hint
    boundaries: dict[bytes, Entry]  # what the hint says of each, by key
    ahead: int  # tokens past a state, up to which a request has to share
    new: list[bytes]  # keys of those that were not held before
    positions: dict[bytes, int]  # of boundaries not yet tied or given up, by key
    placed: set[bytes]  # keys of all that have or had a position
    states: dict[int, str] = {}  # names of those reported so far, by position


@dataclass
class _HeldState:
    boot: str
    tokens: int  # its position
    keys: set[bytes] = field(default_factory=set)  # of the prefixes for which it is the deepest


# Called with the key and the tokens of each boundary that an engine has resolved, and with the engine's name of a
# request, the tokens of the prompt that it has computed, and whether all boundaries lie before.
Learnt = Callable[[bytes, int], None]
PromptComputed = Callable[[str, int, bool], None]


@dataclass(eq=False)
class HeldStates:
    """The states of one worker, as its engine reports them. What cannot be known counts as not held."""

    _prefix_index: PrefixIndex
    _learnt: Learnt
    _computed: PromptComputed = lambda *_: None
    _pending: OrderedDict[str, _Pending] = field(default_factory=OrderedDict)
    _states: OrderedDict[str, _HeldState] = field(default_factory=OrderedDict)
    _tied: dict[bytes, str] = field(default_factory=dict)  # prefix key to the name of its state

    def sent(
        self, request_id: str, boundaries: Sequence[Boundary], entries: Sequence[Entry], boot: str, ahead: int = 0
    ) -> None:
        """A request goes to the worker with the hint `entries`; its boundaries are about to be recorded in the index.

        `ahead`: tokens past a state, up to which a request has to share to find it.
        """
        if not boundaries or not entries:
            return
        new: list[bytes] = []
        said: dict[bytes, Entry] = {}
        places: dict[bytes, int] = {}
        for boundary in boundaries:
            if not self._prefix_index.holds(boundary.key, boot):
                new.append(boundary.key)
            if entry := boundary.entry if boundary.entry in entries else boundary.tokens:
                said[boundary.key] = entry
                # An engine that takes positions only resolves nothing: what was sent is where it looks.
                if isinstance(entry, int) and entry > 0:
                    places[boundary.key] = entry
        self._pending[request_id] = _Pending(boot, tuple(entries), said, ahead, new, places, set(places))
        self._pending.move_to_end(request_id)
        if len(self._pending) > MAX_PENDING:
            _, oldest = self._pending.popitem(last=False)
            self._not_held(oldest.new, oldest.boot)

    def _resolved(self, request_id: str, positions: Sequence[int]) -> None:
        """The engine has resolved the request's hint to these positions, in its order; 0 for what is not there."""
        if (pending := self._pending.get(request_id)) is None:
            return
        found = dict(zip(pending.entries, positions, strict=False))
        pending.positions = {}
        for key, entry in pending.boundaries.items():
            if tokens := found.get(entry):
                pending.positions[key] = tokens
                self._prefix_index.set_length(key, tokens)
                self._learnt(key, tokens)
            else:
                self._not_held((key,), pending.boot)
        pending.placed = set(pending.positions)

    def refused(self, request_id: str) -> None:
        """The worker has not computed the request: what was new in it is not held."""
        if (pending := self._pending.pop(request_id, None)) is not None:
            self._not_held(pending.new, pending.boot)

    def left(self, request_id: str) -> None:
        """Its client has left: the request counts as not computed until the engine reports it."""
        if (pending := self._pending.get(request_id)) is not None:
            self._not_held(pending.new, pending.boot)

    def apply(self, event: Event, boot: str) -> None:
        """Apply what the engine has told; `boot` is the worker's identity now."""
        match event:
            case Admitted():
                self._resolved(event.request_id, event.positions)
            case Came():
                self._stored(event.request_id, event.end, {place: name for place, name in event.states if name})
            case Gone():
                self._evicted(event.state)
            case Cleared():
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
        later = {}
        for key, tokens in pending.positions.items():
            if tokens > end:
                later[key] = tokens
                continue
            usable = (position for position in pending.states if position + pending.ahead <= tokens)
            if deepest := max(usable, default=0):
                self._tie(key, deepest, pending.states[deepest], pending.boot)
            else:
                self._not_held((key,), pending.boot)
        pending.positions = later
        if not later:
            self._not_held((key for key in pending.boundaries if key not in pending.placed), pending.boot)
            del self._pending[request_id]
        self._computed(request_id, end, not later)

    def _tie(self, key: bytes, tokens: int, name: str, boot: str) -> None:
        tied = self._tied.get(key)
        if tied is not None and tied != name:
            known = self._states[tied]
            if known.tokens >= tokens and known.boot == boot:
                return  # a deeper one that this request did not ask for
            known.keys.discard(key)
            if not known.keys:
                del self._states[tied]
        state = self._states.setdefault(name, _HeldState(boot, tokens))
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
        if (state := self._states.pop(name, None)) is not None:
            for key in state.keys:
                self._tied.pop(key, None)
            self._prefix_index.forget(state.keys, state.boot)
