"""What the engine core knows of hints and checkpoints: the positions of each request, and which keys hold a state.

Lives in the scheduler's process. Everything here runs on its one thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_patches.scheduler import hints
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.fan_out import PrefillGate
from engine_patches.scheduler.hints import EDGE, TAIL, CheckpointTarget, wanted_positions
from engine_patches.scheduler.reasons import Outcomes
from engine_patches.scheduler.retention import Retention
from engine_patches.scheduler.state_events import Findable
from engine_patches.scheduler.step_time import StepTime

# Keys remembered for the byte gauge and for telling a checkpoint hit from another; a key is 36 bytes.
MAX_KNOWN_KEYS = 65_536

# Seconds between two counts of the bytes held (a walk over all keys), and between two reports of nothing new.
CENSUS_INTERVAL = 1.0

# Requests whose outcome waits for the next report; where vLLM reports nothing (--disable-log-stats) none ever comes.
MAX_OUTCOMES = 1024

# A hit below this share of a pass is not felt, and its state takes as much room as any other.
WORTH_OF_A_PASS = 0.05


@dataclass
class Tally:
    """Events since the last report: states written by kind, hint entries ignored by reason, hits and their tokens."""

    written: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)  # requests by what became of their prefix
    # Each of them: id, reason, tokens from the cache.
    requests: deque[tuple[str, str, int]] = field(default_factory=lambda: deque(maxlen=MAX_OUTCOMES))
    followers: Counter[str] = field(default_factory=Counter)  # requests held back, or not though they could have been
    hits: int = 0
    hit_tokens: int = 0
    saved_seconds: float = 0.0  # prefill that was not computed, at the pace learnt
    spent_seconds: float = 0.0  # passes taken for the sake of checkpoints, and requests held back

    @property
    def empty(self) -> bool:
        """Whether nothing has happened."""
        return not (self.written or self.ignored or self.outcomes or self.followers)


@dataclass
class RequestHint:
    """Usable positions (tokens) of one request, and the junction vLLM itself had noticed for it."""

    positions: tuple[int, ...]
    upstream_junction: int = 0
    last_set: int = -1  # what we last wrote over the junction


@dataclass
class Checkpoints:
    """Bookkeeping of one scheduler. Lengths in tokens, sizes in bytes."""

    match_unit: int
    block_size: int
    enabled: bool = False  # the model is a hybrid whose states can be found between blocks
    exporting: bool = False  # states are written inside a pass; where not, chunks are cut for them
    refuse_all: str | None = None  # a reason to ignore that holds for every request of this engine
    block_sizes: dict[int, int] = field(default_factory=dict)  # of each recurrent cache group
    attention_managers: Sequence[Any] = ()
    state_bytes: int = 0  # one checkpoint, all recurrent layers
    alignment: int = 0  # states are placed on multiples of it; the match unit where a kernel asks for no more
    pace: StepTime = field(default_factory=StepTime)
    gate: PrefillGate | None = None  # holds followers back; None where it is switched off
    retention: Retention | None = None  # None where vLLM keeps the states
    findable: Findable | None = None  # None without states
    tally: Tally = field(default_factory=Tally)
    unwritten: dict[int, int] = field(default_factory=dict)  # attention block -> token from which the step fills it
    _keys: dict[bytes, None] = field(default_factory=dict)
    _held: list[Any] = field(default_factory=list)  # blocks written in the running step
    _bytes_held: int = 0
    _next_census: float = 0.0

    def __post_init__(self) -> None:
        self.alignment = self.alignment or self.match_unit
        self.outcomes = Outcomes(self.match_unit)

    @property
    def recurrent_groups(self) -> Iterable[int]:
        """Cache groups that need a block for every state."""
        return self.block_sizes

    @property
    def recurrent_group(self) -> int:
        """The cache group whose keys stand for all recurrent groups."""
        return next(iter(self.block_sizes))

    def hint_of(self, request: Any) -> RequestHint | None:
        """The parsed hint of a vLLM `Request`, None without a usable one. Parsed once per request."""
        try:
            return request.seamark_hint
        except AttributeError:
            request.seamark_hint = hint = self._read_hint(request)
            return hint

    def _read_hint(self, request: Any) -> RequestHint | None:
        carried = hints.carried_by(request)
        if carried is hints.NONE:
            return None
        if self.refuse_all is not None:
            self.tally.ignored[self.refuse_all] += 1
        if not self.enabled:
            return None
        positions = hints.usable_positions(
            carried,
            request.num_prompt_tokens,
            self.alignment,
            lambda reason: self.tally.ignored.update((reason,)),
        )
        return RequestHint(positions) if positions else None

    def wanted(self, request: Any) -> list[CheckpointTarget]:
        """Positions of a request whose states are to be kept, ascending."""
        hint = self.hint_of(request)
        return wanted_positions(request, hint.positions if hint else (), self.alignment, self.block_size)

    def note_keys(self, request: Any, positions: Iterable[int]) -> None:
        """The request's attention blocks carry keys at `positions` from now on."""
        request.seamark_keys = {*getattr(request, "seamark_keys", ()), *positions}

    def positions_with_keys(self, request: Any, num_tokens: int) -> list[int]:
        """Positions up to `num_tokens` at which the request's attention blocks carry keys of ours."""
        if self.exporting:
            return [position for position in getattr(request, "seamark_keys", ()) if position <= num_tokens]
        hint = self.hint_of(request)
        return [position for position in hint.positions if position <= num_tokens] if hint else []

    def release(self, pool: Any) -> None:
        """The blocks of the last step's states are cache like any other.

        That step may still run; workers run steps in order, so whoever is given such a block writes after it.
        """
        if self._held:
            pool.free_blocks(self._held)
            self._held = []

    def begin_step(self, pool: Any, requests: Container[str]) -> None:
        """A step is going to be planned, `requests` are alive."""
        self.release(pool)
        self.unwritten.clear()
        if self.retention is not None:
            self.retention.offer_superseded()
        if self.gate is not None:
            self.gate.forget_gone(requests)

    def about_to_run(self, request: Any, start: int) -> None:
        """A request is going to be computed from token `start`: who shares its prefix may wait for its states."""
        if self.gate is not None:
            positions = (wanted.position for wanted in self.wanted(request))
            self.gate.will_write(request, start, positions)

    def worth_writing(self, position: int) -> bool:
        """Whether a hit at `position` tokens would be felt: more than a small part of a pass."""
        return position >= self.pace.tokens_per_pass * WORTH_OF_A_PASS or not self.pace.known

    def reserve(self, pool: Any, request: Any, wanted: CheckpointTarget) -> list[Any] | None:
        """Blocks for a state that this step writes, one per recurrent group, registered under the position's keys.

        None where the cache has none to spare.
        """
        groups = list(self.block_sizes.items())
        if pool.get_num_free_blocks() < len(groups):
            return None
        if self.retention is not None and not self.retention.make_room(len(groups)):
            return None
        blocks = pool.get_new_blocks(len(groups))
        self._held += blocks
        for (group, block_size), block in zip(groups, blocks, strict=True):
            pool.cache_partial_block(
                request=request,
                block=block,
                num_tokens=wanted.position,
                kv_cache_group_id=group,
                block_size=block_size,
                replace_existing_hashes=True,  # it has none; vLLM 0.31 wants to be told at a block's edge
            )
        key = blocks[0].block_hash
        self.state_written(key, wanted.kind)
        if self.retention is not None:
            hint = self.hint_of(request)
            turn = wanted.kind in (TAIL, EDGE) or (
                hint is not None and len(hint.positions) > 1 and wanted.position == hint.positions[-1]
            )
            self.retention.add(key, blocks, turn)
            resumed = getattr(request, "seamark_resumed", None)
            if turn and resumed is not None:
                self.retention.supersede(resumed)
        return blocks

    def forget_cache(self, pool: Any) -> None:
        """The cache is going to be emptied."""
        self.release(pool)
        if self.retention is not None:
            self.retention.clear()
        if self.gate is not None:
            self.gate.clear()

    def cache_was_emptied(self) -> None:
        """No key is left."""
        if self.findable is not None:
            self.findable.clear()

    def state_written(self, key: bytes, kind: str) -> None:
        """A recurrent state was registered under `key`."""
        self.tally.written[kind] += 1
        self._keys[key] = None
        if len(self._keys) > MAX_KNOWN_KEYS:
            del self._keys[next(iter(self._keys))]

    def admitted(self, request: Any, hit_tokens: int) -> None:
        """A request starts with `hit_tokens` from the cache, 0 for none."""
        hint = self.hint_of(request)
        positions = hint.positions if hint is not None else ()
        reason = self.outcomes.reason_for(request, hints.carried_by(request) is not hints.NONE, positions, hit_tokens)
        self.tally.outcomes[reason] += 1
        self.tally.requests.append((request.request_id, reason, hit_tokens))
        if not hit_tokens:
            return
        key = key_at(request, hit_tokens, self.match_unit, self.recurrent_group)
        self.tally.saved_seconds += self.pace.seconds(hit_tokens)
        if key in self._keys:
            self.tally.hits += 1
            self.tally.hit_tokens += hit_tokens
        if self.retention is not None and self.retention.resumed(key):
            request.seamark_resumed = key
            passed = [position for position in positions if position < hit_tokens]
            self.retention.refresh(key_at(request, p, self.match_unit, self.recurrent_group) for p in passed)

    def follower_not_held(self, request: Any) -> None:
        """A request runs along with one that computes the same prefix: waiting would not pay."""
        if not hasattr(request, "seamark_not_held"):
            request.seamark_not_held = True
            self.tally.followers["not_worth_it"] += 1

    def follower_released(self, held_seconds: float) -> None:
        """A request that was held back goes on."""
        self.tally.followers["held"] += 1
        self.tally.spent_seconds += held_seconds

    def report_due(self) -> bool:
        """Whether there is something to tell: news, counts, or gauges that were not told for `CENSUS_INTERVAL`."""
        news = self.findable is not None and self.findable.has_news
        return news or not self.tally.empty or time.monotonic() >= self._next_census

    def bytes_held(self, block_pool: Any) -> int:
        """Bytes of the known states that are still cached, counted at most once per `CENSUS_INTERVAL`."""
        now = time.monotonic()
        if now >= self._next_census:
            self._next_census = now + CENSUS_INTERVAL
            cached = block_pool.cached_block_hash_to_block
            self._keys = {key: None for key in self._keys if cached.get_one_block(key) is not None}
            self._bytes_held = len(self._keys) * self.state_bytes
        return self._bytes_held

    def take_tally(self) -> Tally:
        """Everything counted since the last call."""
        tally, self.tally = self.tally, Tally()
        return tally
