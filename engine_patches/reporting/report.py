"""What an engine core tells of itself: one `EngineReport` for all that happened in it since the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from engine_patches import kv_connectors
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.states import AdapterReplaced, CacheCleared, StateEvent, StateEvicted, StateStored

# An event, as the gateway reads it: ["came", REQUEST, END, [[POSITION, STATE]..]], ["gone", STATE], ["cleared"] or
# ["adapter", NAME]. Positions in tokens.
Event = list[Any]


class EngineReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How one engine is, and what has happened in it since its last report. Lengths in tokens."""

    engine: int = 0  # its data parallel rank
    engines: int = 1  # that the same server has behind it

    match_unit: int  # what a hit is a multiple of
    block_size: int
    ahead: int = 0
    refused: str = ""  # why hints are, empty if they are not
    connector: str = ""  # vLLM's names of its KV connectors, joined by "+"
    lane: str = ""
    cache_tokens: int = 0  # that fit into its cache; 0: vLLM does not say

    running: int = 0  # requests
    waiting: int = 0
    loads: dict[str, tuple[int, int]] = {}  # by gateway: its requests, and tokens of their prompts to compute
    state_bytes: int = 0
    pinned_blocks: int = 0
    disk_bytes: int = 0
    pass_seconds: float = 0.0
    token_seconds: float = 0.0

    cache_hit_tokens: int = 0  # of prompts, from vLLM's prefix cache, on a state or not
    hits: int = 0
    hit_tokens: int = 0
    saved_seconds: float = 0.0
    spent_seconds: float = 0.0
    file_bytes: int = 0
    loads_declined: int = 0
    written: dict[str, int] = {}  # states by kind
    outcomes: dict[str, int] = {}  # requests by reason
    followers: dict[str, int] = {}  # requests by fate
    ignored: dict[str, int] = {}  # hint entries by reason
    files_refused: dict[str, int] = {}  # by reason
    requests: list[AdmittedRequest] = []
    pinned: list[tuple[str, str]] = []  # requests that are among those, now or earlier, and fates
    drafts: tuple[str, str, str] = ("", "", "")  # of hints beside them: state, why they are not used, and figures
    windows: dict[str, int] = {}  # hits by what became of a draft head's rows
    window_of: list[tuple[str, str]] = []  # requests that are among those, and what became of the rows
    events: list[tuple[int, Event]] = []  # numbered without gaps: a missing number is an event that was lost


def constants(config: Any) -> dict[str, Any]:
    """Fields that all reports of an engine with this `VllmConfig` have in common."""
    parallel, connector = config.parallel_config, kv_connectors.decide(config)
    # With a server for each rank there is no other engine behind any of them.
    alone = getattr(parallel, "data_parallel_external_lb", False)
    return {
        "engine": 0 if alone else getattr(parallel, "data_parallel_index", parallel.data_parallel_rank),
        "engines": 1 if alone else parallel.data_parallel_size,
        "connector": "+".join(connector.names),
        "lane": connector.lane.value if connector.names else "",
    }


def report_of(scheduler: Any, constant: Mapping[str, Any], loads: Mapping[str, tuple[int, int]]) -> EngineReport:
    """The report of a scheduler that is due now; what it tells is told once.

    `constant`: of `constants`; `loads`: as of `EngineReport`.
    """
    checkpoints: Checkpoints = scheduler.seamark
    states, counters = checkpoints.states, checkpoints.counters
    counts = vars(counters.take())  # by the names that they have here
    counts |= {name: list(counted) for name, counted in counts.items() if isinstance(counted, deque)}
    running, waiting = scheduler.get_request_counts()
    return EngineReport(
        **constant,
        **counts,
        match_unit=checkpoints.grid.alignment,
        block_size=checkpoints.block_size,
        ahead=checkpoints.grid.ahead if states is not None else 0,
        refused=checkpoints.refusal.cause if checkpoints.refusal is not None else "",
        drafts=(checkpoints.drafts.state, checkpoints.drafts.why, checkpoints.drafts.figures),
        cache_tokens=getattr(scheduler.vllm_config.cache_config, "kv_cache_size_tokens", None) or 0,
        running=running,
        waiting=waiting,
        loads=dict(loads),
        state_bytes=states.bytes_held if states is not None else 0,
        pinned_blocks=states.pins.num_blocks if states is not None else 0,
        disk_bytes=counters.disk_bytes,
        pass_seconds=checkpoints.step_time.pace.floor,
        token_seconds=checkpoints.step_time.pace.token,
        events=[(number, as_read(event)) for number, event in states.events.take()] if states is not None else [],
    )


def as_read(event: StateEvent) -> Event:
    """An event, as it is read."""
    match event:
        case StateStored(request_id, end, states):
            return ["came", request_id, end, states]
        case StateEvicted(name):
            return ["gone", name]
        case CacheCleared():
            return ["cleared"]
        case AdapterReplaced(name):
            return ["adapter", name]
