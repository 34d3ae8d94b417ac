"""What one scheduler counts from report to report, and what each gateway has it do: so gateways learn of one another.

A gateway names itself in `vllm_xargs`, beside its hint: `seamark_load: "GATEWAY,PROMPT,LEFT"`, the prompt's tokens and
how many of them it expects to be computed. Requests that name none came past all gateways.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine_patches.footprint import SENDER
from engine_patches.scheduler.drafts import is_own
from engine_patches.scheduler.hints import arguments_of
from engine_patches.structs import Struct, field

# Seconds between two reports of nothing new.
REPORT_INTERVAL = 1.0

# Requests that wait for the next report, which may never come: nobody collects, or takes what is sent.
MAX_REQUESTS = 1024

LOAD_FIELD, NO_GATEWAY = "seamark_load", ""

_LOAD = re.compile(r"([0-9a-f]{1,32}),(\d{1,8}),(\d{1,8})", re.ASCII)


class AdmittedRequest(Struct, array_like=True, frozen=True, tag="admitted"):
    """What a request started with. Lengths in tokens."""

    request_id: str  # vLLM's
    reason: str  # one of those in `earlier_prompts`
    hit_tokens: int  # from the cache
    shared: int  # with an earlier prompt, whole match units
    resolved: tuple[int, ...]  # what each entry of its hint names, in the hint's order; 0: not there


class Counts(Struct, kw_only=True, omit_defaults=True):
    """What has happened since the last report. Each `dict` counts from 0, of a class that msgspec does not know."""

    written: dict[str, int] = field(default_factory=Counter)  # states by kind
    ignored: dict[str, int] = field(default_factory=Counter)  # hint entries by reason
    outcomes: dict[str, int] = field(default_factory=Counter)  # requests by reason
    windows: dict[str, int] = field(default_factory=Counter)  # hits by what became of a draft head's rows
    followers: dict[str, int] = field(default_factory=Counter)  # requests held back, or not though possible
    files_refused: dict[str, int] = field(default_factory=Counter)  # files of states by reason
    file_bytes: int = 0  # of states, written to disk
    loads_declined: int = 0  # requests that computed what a disk holds, since that takes less time
    cache_hit_tokens: int = 0  # that vLLM's prefix cache gave, whatever led to them
    hits: int = 0  # requests that resumed from a state that was counted or loaded
    hit_tokens: int = 0
    saved_seconds: float = 0.0  # prefill that was not computed, by the learnt step time
    spent_seconds: float = 0.0  # time that requests were held back
    # Seconds that requests waited behind long prompts, by the threshold (tokens) that would have let them by.
    long_prefill_waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    requests: list[AdmittedRequest] = field(default_factory=list)
    # Requests that are among those, now or earlier, and fates.
    pinned: list[tuple[str, str]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        counted = (self.written, self.ignored, self.outcomes, self.followers, self.files_refused, self.pinned)
        return not (any(counted) or self.file_bytes or self.loads_declined or self.cache_hit_tokens)


class Counters:
    def __init__(self) -> None:
        self.counts = Counts()
        self.disk_bytes = 0  # of states in files
        self._next_report = 0.0

    def hint_ignored(self, reason: str) -> None:
        """One of a request's wishes has no effect, for one of `hints.IGNORED_REASONS`."""
        self.counts.ignored[reason] += 1

    def request_admitted(self, request: AdmittedRequest) -> None:
        self.counts.outcomes[request.reason] += 1
        self.counts.requests.append(request)
        del self.counts.requests[:-MAX_REQUESTS]

    def prompt_pinned(self, request_id: str, fate: str) -> None:
        """What became of a request's wish to pin its prompt, or to release it: one of those in `states`."""
        self.counts.pinned.append((request_id, fate))
        del self.counts.pinned[:-MAX_REQUESTS]

    def disk_used(self, refused: Mapping[str, int], num_bytes: int, bytes_held: int) -> None:
        """Files of states were refused, by one of `files.REASONS`, so many bytes were written, so many are there."""
        self.counts.files_refused.update(refused)
        self.counts.file_bytes += num_bytes
        self.disk_bytes = bytes_held

    def report_soon(self) -> None:
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


class GatewayLoad(NamedTuple):
    requests: int  # under way
    prefill_tokens: int  # of their prompts, still to be computed


def loads_of_gateways(requests: Iterable[Any]) -> dict[str, GatewayLoad]:
    """The load of each gateway that has any, by the vLLM `Request`s that are under way."""
    loads: dict[str, GatewayLoad] = {}
    for request in requests:
        if is_own(request):
            continue
        gateway, expected = getattr(request, SENDER, None) or _sender(request)
        left = max(0, request.num_prompt_tokens - request.num_computed_tokens)
        if not request.num_computed_tokens and expected is not None:  # the cache was not looked at yet
            left = min(left, expected)
        before, tokens = loads.get(gateway, (0, 0))
        loads[gateway] = GatewayLoad(before + 1, tokens + left)
    return loads


def _sender(request: Any) -> tuple[str, int | None]:
    """The gateway that sent a request, and the tokens that it expects to be computed; None if it does not say."""
    told = arguments_of(request).get(LOAD_FIELD)
    match = _LOAD.fullmatch(told) if isinstance(told, str) else None
    sender = (match[1], int(match[3])) if match is not None else (NO_GATEWAY, None)
    setattr(request, SENDER, sender)  # it is asked for with each step that computes any prompt
    return sender


def loads_may_have_changed(planned: Any) -> bool:
    """Whether any load may be another after the step `planned` (vLLM's `SchedulerOutput`; None: not known)."""
    return planned is None or bool(planned.scheduled_new_reqs) or not only_generates(planned)


def only_generates(planned: Any) -> bool:
    """Whether a step has one token of each of its requests, besides drafts: vLLM schedules no fewer of any."""
    num_drafts = sum(map(len, (planned.scheduled_spec_decode_tokens or {}).values()))
    return bool(planned.total_num_scheduled_tokens - num_drafts == len(planned.num_scheduled_tokens))
