"""Which states of hinted requests can be found, and word of each that comes and goes: what a gateway may believe.

Found means all of it: the state of every recurrent cache group, and the attention rows before it. Nothing is walked:
the pool says which keys it took back, and only states that need one of those are looked at, once per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.hints import CheckpointTarget

# States watched; an older one is forgotten as if it had gone. Real caches hold some hundreds.
MAX_STATES = 65_536

# Events that wait for the next report; where vLLM reports nothing (--disable-log-stats) none ever comes.
MAX_NEWS = 4096

# Of vLLM's cache key, 36 bytes: enough that two states of one cache never share a name.
NAME_BYTES = 8


class StateStored(NamedTuple):
    """The hinted request `request_id` is planned up to token `end`."""

    request_id: str  # vLLM's
    end: int
    states: tuple[tuple[int, str], ...]  # position and the state's name, "" where none is found; since the last word


class StateEvicted(NamedTuple):
    """The state `name` is found no more."""

    name: str


class CacheCleared(NamedTuple):
    """No state is found any more."""


StateEvent = StateStored | StateEvicted | CacheCleared


class Findable:
    """The states of one scheduler's cache that its news has named. Lengths in tokens."""

    def __init__(
        self, pool: Any, match_unit: int, recurrent_groups: Iterable[int], attention_managers: Sequence[Any]
    ) -> None:
        self._pool = pool
        self._unit = match_unit
        self._recurrent = tuple(recurrent_groups)
        self._attention = tuple((manager.kv_cache_group_id, manager.block_size) for manager in attention_managers)
        self._needs: dict[bytes, tuple[bytes, ...]] = {}  # by the key of the first recurrent group: all its keys
        self._needed_by: dict[bytes, set[bytes]] = {}
        self._doubtful: set[bytes] = set()  # keys that were taken back, though another block may carry them
        self._cached = pool.cached_block_hash_to_block
        self._number = 0
        self._news: deque[tuple[int, StateEvent]] = deque(maxlen=MAX_NEWS)

    def __len__(self) -> int:
        return len(self._needs)

    @property
    def has_news(self) -> bool:
        """Whether something has to be told."""
        return bool(self._news)

    def take_news(self) -> list[tuple[int, StateEvent]]:
        """What is new, numbered without gaps: a number that is missing was lost here."""
        news = list(self._news)
        self._news.clear()
        return news

    def taken_back(self, keys: Iterable[bytes]) -> None:
        """The pool has removed these keys of a block; some come back at once, or stay under another block."""
        for key in keys:
            if key in self._needed_by:
                self._doubtful.add(key)

    def settle(self) -> None:
        """A step is planned: tell of states that are found no more."""
        if self._pool.cached_block_hash_to_block is not self._cached:
            self.clear()  # the pool was emptied as a whole, whoever did it
        if self._doubtful:
            doubtful, self._doubtful = self._doubtful, set()
            for key in doubtful:
                if self._cached.get_one_block(key) is None:
                    for state in list(self._needed_by.get(key, ())):
                        self._forget(state)
                        self._say(StateEvicted(_name(state)))

    def planned(self, request: Any, wanted: Iterable[CheckpointTarget], start: int, end: int) -> None:
        """Tokens [start, end) of a hinted request are in the step that was planned: tell of its states up to `end`."""
        told = getattr(request, "seamark_told", 0)
        if start < told:  # preempted: all of it is computed, or found, anew
            told = 0
        request.seamark_told = end
        states = tuple((p, self._look_at(request, p)) for p in (each.position for each in wanted) if told < p <= end)
        if states or end >= request.num_prompt_tokens:
            self._say(StateStored(request.request_id, end, states))

    def clear(self) -> None:
        """The cache was emptied."""
        self._needs.clear()
        self._needed_by.clear()
        self._doubtful.clear()
        self._cached = self._pool.cached_block_hash_to_block
        self._say(CacheCleared())

    def _look_at(self, request: Any, position: int) -> str:
        """Name of the state at `position`, watched from now on; "" where it cannot be found."""
        state = key_at(request, position, self._unit, self._recurrent[0])
        if state not in self._needs:
            if not self._has_all(self._keys_of(request, position)):
                return ""
            needs = tuple(self._keys_of(request, position))
            self._needs[state] = needs
            for key in needs:
                self._needed_by.setdefault(key, set()).add(state)
            if len(self._needs) > MAX_STATES:
                oldest = next(iter(self._needs))
                self._forget(oldest)
                self._say(StateEvicted(_name(oldest)))
        return _name(state)

    def _keys_of(self, request: Any, position: int) -> Iterable[bytes]:
        for group in self._recurrent:
            yield key_at(request, position, self._unit, group)
        for group, block_size in self._attention:
            for edge in range(block_size, position + 1, block_size):
                yield key_at(request, edge, self._unit, group)
            if position % block_size:
                yield key_at(request, position, self._unit, group)

    def _has_all(self, keys: Iterable[bytes]) -> bool:
        return all(self._cached.get_one_block(key) is not None for key in keys)

    def _forget(self, state: bytes) -> None:
        for key in self._needs.pop(state):
            states = self._needed_by[key]
            states.discard(state)
            if not states:
                del self._needed_by[key]

    def _say(self, news: StateEvent) -> None:
        self._number += 1
        self._news.append((self._number, news))


def _name(state: bytes) -> str:
    return state[:NAME_BYTES].hex()


def tell_what_is_planned(scheduler: Any, output: Any) -> None:
    """A step is planned to its end: whose states came with it, and which went."""
    checkpoints = scheduler.seamark
    findable = checkpoints.findable
    findable.settle()  # of a pool that was emptied since, nothing may be said to be found
    if output.total_num_scheduled_tokens == len(output.num_scheduled_tokens) and not output.scheduled_new_reqs:
        return  # everybody decodes
    for name, num_tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        end = request.num_computed_tokens  # vLLM has advanced it already
        start = end - num_tokens
        if start < request.num_prompt_tokens and checkpoints.hint_of(request) is not None:
            findable.planned(request, checkpoints.wanted(request), start, end)
    findable.settle()


def notice_what_is_taken_back(original: Callable) -> Callable:
    """Replacement of `BlockPool._remove_cached_block_hashes`, through which every key leaves the cache."""

    def _remove_cached_block_hashes(self, block):
        removed = original(self, block)
        if removed:
            findable = getattr(self, "seamark_findable", None)
            if findable is not None:
                findable.taken_back(removed)
        return removed

    return _remove_cached_block_hashes
