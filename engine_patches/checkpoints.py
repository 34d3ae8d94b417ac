"""What the engine core knows of hints and checkpoints: the positions of each request, and which keys hold a state.

Lives in the scheduler's process. Everything here runs on its one thread.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine_patches import hints

# Keys remembered for the byte gauge and for telling a checkpoint hit from another; a key is 36 bytes.
MAX_KNOWN_KEYS = 65_536
# Seconds between two counts of the bytes held: a walk over all keys.
CENSUS_INTERVAL = 1.0


@dataclass
class Tally:
    """Events since the last report: states written by kind, hint entries ignored by reason, hits and their tokens."""

    written: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    hit_tokens: int = 0


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
    refuse_all: str | None = None  # a reason to ignore that holds for every request of this engine
    recurrent_group: int = -1  # cache group whose keys stand for all recurrent groups
    state_bytes: int = 0  # one checkpoint, all recurrent layers
    tally: Tally = field(default_factory=Tally)
    _keys: dict[bytes, None] = field(default_factory=dict)
    _bytes_held: int = 0
    _next_census: float = 0.0

    def hint_of(self, request: Any) -> RequestHint | None:
        """The parsed hint of a vLLM `Request`, None without a usable one. Parsed once per request."""
        try:
            return request.seamark_hint
        except AttributeError:
            request.seamark_hint = hint = self._read_hint(request)
            return hint

    def _read_hint(self, request: Any) -> RequestHint | None:
        extra_args = getattr(request.sampling_params, "extra_args", None)
        if not self.enabled or not extra_args or hints.FIELD not in extra_args:
            return None
        if self.refuse_all is not None:
            self.tally.ignored[self.refuse_all] += 1
            return None
        positions = hints.usable_positions(
            extra_args[hints.FIELD],
            request.num_prompt_tokens,
            self.match_unit,
            lambda reason: self.tally.ignored.update((reason,)),
        )
        return RequestHint(positions) if positions else None

    def state_written(self, key: bytes, kind: str) -> None:
        """A recurrent state was registered under `key`."""
        self.tally.written[kind] += 1
        self._keys[key] = None
        if len(self._keys) > MAX_KNOWN_KEYS:
            del self._keys[next(iter(self._keys))]

    def prefix_reused(self, key: bytes, num_tokens: int) -> None:
        """A request starts with `num_tokens` from the cache; `key` names the state it resumes from."""
        if key in self._keys:
            self.tally.hits += 1
            self.tally.hit_tokens += num_tokens

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
