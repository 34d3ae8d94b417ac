"""Counters of one scheduler, from report to report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import msgspec

# Seconds between two reports of nothing new.
REPORT_INTERVAL = 1.0

# Requests that wait for the next report, which may never come: nobody collects, or takes what is sent.
MAX_REQUESTS = 1024


class AdmittedRequest(msgspec.Struct, array_like=True, frozen=True, tag="admitted"):
    """What a request started with. Lengths in tokens."""

    request_id: str  # vLLM's
    reason: str  # one of those in `reasons`
    hit_tokens: int  # from the cache
    shared: int  # with an earlier prompt, whole match units
    resolved: tuple[int, ...]  # what each entry of its hint names, in the hint's order; 0: not there


class Counts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What has happened since the last report. Each `dict` is a `Counter`, which msgspec does not know."""

    written: dict[str, int] = msgspec.field(default_factory=Counter)  # states by kind
    ignored: dict[str, int] = msgspec.field(default_factory=Counter)  # hint entries by reason
    outcomes: dict[str, int] = msgspec.field(default_factory=Counter)  # requests by reason
    windows: dict[str, int] = msgspec.field(default_factory=Counter)  # hits by what became of a draft head's rows
    followers: dict[str, int] = msgspec.field(default_factory=Counter)  # requests held back, or not though possible
    files_refused: dict[str, int] = msgspec.field(default_factory=Counter)  # files of states by reason
    file_bytes: int = 0  # of states, written to disk
    loads_declined: int = 0  # requests that computed what a disk holds, since that takes less time
    cache_hit_tokens: int = 0  # that vLLM's prefix cache gave, whatever led to them
    hits: int = 0  # requests that resumed from a state
    hit_tokens: int = 0
    saved_seconds: float = 0.0  # prefill that was not computed, by the learnt step time
    spent_seconds: float = 0.0  # time that requests were held back
    requests: list[AdmittedRequest] = []
    pinned: list[tuple[str, str]] = []  # requests that are among those, now or earlier, and fates

    @property
    def empty(self) -> bool:
        """Whether nothing has happened."""
        counted = (self.written, self.ignored, self.outcomes, self.followers, self.files_refused, self.pinned)
        return not (any(counted) or self.file_bytes or self.loads_declined or self.cache_hit_tokens)


class Counters:
    """Counts events until a report takes them."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.disk_bytes = 0  # of states in files
        self._next_report = 0.0

    def cache_hit(self, tokens: int) -> None:
        """A request found so many tokens in vLLM's prefix cache."""
        self.counts.cache_hit_tokens += tokens

    def state_written(self, kind: str) -> None:
        """A recurrent state was registered in the cache."""
        self.counts.written[kind] += 1

    def hint_ignored(self, reason: str) -> None:
        """One of a request's wishes has no effect, for one of `hints.IGNORED_REASONS`."""
        self.counts.ignored[reason] += 1

    def request_admitted(self, request: AdmittedRequest) -> None:
        """A request starts."""
        self.counts.outcomes[request.reason] += 1
        self.counts.requests.append(request)
        del self.counts.requests[:-MAX_REQUESTS]

    def prompt_pinned(self, request_id: str, fate: str) -> None:
        """What became of a request's wish to pin its prompt, or to release it: one of those in `pins`."""
        self.counts.pinned.append((request_id, fate))
        del self.counts.pinned[:-MAX_REQUESTS]

    def window_found(self, rows: str) -> None:
        """What became of a draft head's rows before a request's hit: `HELD`, `ZEROED` or `HEALED`."""
        self.counts.windows[rows] += 1

    def resumed(self, hit_tokens: int, saved_seconds: float, on_a_state: bool) -> None:
        """A request resumes at `hit_tokens`, `on_a_state` that was counted or loaded."""
        self.counts.saved_seconds += saved_seconds
        if on_a_state:
            self.counts.hits += 1
            self.counts.hit_tokens += hit_tokens

    def disk_used(self, refused: Mapping[str, int], num_bytes: int, bytes_held: int) -> None:
        """Files of states were refused, by one of `files.REASONS`, so many bytes were written, so many are there."""
        self.counts.files_refused.update(refused)
        self.counts.file_bytes += num_bytes
        self.disk_bytes = bytes_held

    def load_declined(self) -> None:
        """A request computes what a disk holds: loading it would take longer."""
        self.counts.loads_declined += 1

    def follower_not_held(self) -> None:
        """A request runs along with one that computes the same prefix, since waiting would not pay."""
        self.counts.followers["not_worth_it"] += 1

    def follower_released(self, held_seconds: float) -> None:
        """A request that was held back goes on."""
        self.counts.followers["held"] += 1
        self.counts.spent_seconds += held_seconds

    def report_soon(self) -> None:
        """Report with the next step."""
        self._next_report = 0.0

    @property
    def report_due(self) -> bool:
        """Whether anything was counted, or the gauges are older than `REPORT_INTERVAL`."""
        return not self.counts.empty or time.monotonic() >= self._next_report

    def take(self) -> Counts:
        """Everything counted since the last call, for a report."""
        self._next_report = time.monotonic() + REPORT_INTERVAL
        counts, self.counts = self.counts, Counts()
        return counts
