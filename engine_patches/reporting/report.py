"""What an engine core tells of itself, and its end of the one way by which the gateway learns of it.

One `EngineReport` tells all that happened since the one before. It goes to the process that started the engine
(`collector`), by a socket of this machine. Nothing here makes a step wait: what nobody takes is not even made, but goes
on being counted, and events that no longer fit leave a gap in their numbers, which tells the gateway to forget what it
may have missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

from engine_patches import kv_connectors
from engine_patches.scheduler import not_kept
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import Counts, GatewayLoad, loads_of_gateways
from engine_patches.scheduler.states import StateEvent
from engine_patches.settings import logger

MAX_WAITING = 1000  # reports that were sent and not taken: some kilobytes each

_encode = msgspec.msgpack.Encoder().encode


class EngineReport(Counts, kw_only=True, omit_defaults=True):
    """How one engine is, and what was counted in it since its last report. Lengths in tokens."""

    engine: int = 0  # its data parallel rank
    engines: int = 1  # that the same server has behind it

    match_unit: int  # what a hit is a multiple of
    block_size: int
    ahead: int = 0
    refused: str = ""  # why hints are, empty if they are not
    connector: str = ""  # vLLM's names of its KV connectors, joined by "+"
    lane: str = ""
    keep: str = ""  # whether a request can be told to leave nothing behind: `not_kept.TOLD`, or why not
    cache_tokens: int = 0  # that fit into its cache; 0: vLLM does not say

    running: int = 0  # requests
    waiting: int = 0
    loads: dict[str, GatewayLoad] = msgspec.field(default_factory=dict)  # by gateway
    state_bytes: int = 0
    pinned_blocks: int = 0
    disk_bytes: int = 0
    pass_seconds: float = 0.0
    token_seconds: float = 0.0
    drafts: tuple[str, str] = ("", "")  # of hints beside them: state, and figures
    # Numbered without gaps: a missing number is an event that was lost.
    events: list[tuple[int, StateEvent]] = msgspec.field(default_factory=list)


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
        "keep": not_kept.why_not(config) or not_kept.TOLD,
    }


def report_of(scheduler: Any, constant: Mapping[str, Any], loads: dict[str, GatewayLoad]) -> EngineReport:
    """The report of a scheduler that is due now; what it tells is told once. `constant`: of `constants`."""
    checkpoints: Checkpoints = scheduler.seamark
    states, counters = checkpoints.states, checkpoints.counters
    running, waiting = scheduler.get_request_counts()
    return EngineReport(
        **constant,
        **msgspec.structs.asdict(counters.take()),
        match_unit=checkpoints.grid.alignment,
        block_size=checkpoints.block_size,
        ahead=checkpoints.grid.ahead if states is not None else 0,
        refused=checkpoints.refusal.cause if checkpoints.refusal is not None else "",
        drafts=(checkpoints.drafts.state, checkpoints.drafts.figures),
        cache_tokens=getattr(scheduler.vllm_config.cache_config, "kv_cache_size_tokens", None) or 0,
        running=running,
        waiting=waiting,
        loads=loads,
        state_bytes=states.bytes_held if states is not None else 0,
        pinned_blocks=states.pins.num_blocks if states is not None else 0,
        disk_bytes=counters.disk_bytes,
        pass_seconds=checkpoints.step_time.pace.floor,
        token_seconds=checkpoints.step_time.pace.token,
        events=states.events.take() if states is not None else [],
    )


class Reporter:
    def __init__(self, scheduler: Any, address: str) -> None:
        """`address`: ZeroMQ's, of the collector."""
        self._scheduler = scheduler
        self._constant = constants(scheduler.vllm_config)
        self._loads: dict[str, GatewayLoad] = {}
        self._num_requests = 0
        self._has_failed = False  # which is said once
        context: Any = zmq.Context.instance()
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm, self._socket.linger = MAX_WAITING, 0
        self._socket.connect(address)

    def step_ends(self, *, busy: bool) -> None:
        """Report if there is anything to tell. `busy`: prompts were computed, or requests came or went."""
        checkpoints, requests, loads = self._scheduler.seamark, self._scheduler.requests, self._loads
        if busy or len(requests) != self._num_requests:
            self._num_requests = len(requests)
            loads = loads_of_gateways(requests.values())
        states = checkpoints.states
        pending = states is not None and states.events.pending
        if pending or loads != self._loads or checkpoints.counters.report_due:
            self.send(loads)

    def send(self, loads: dict[str, GatewayLoad] | None = None) -> None:
        """Report now, unless too many reports wait to be taken: then what it would tell goes on being counted."""
        if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            return
        self._loads = self._loads if loads is None else loads
        report = report_of(self._scheduler, self._constant, self._loads)
        try:
            self._socket.send(_encode(report), zmq.DONTWAIT)  # it has room, and this thread alone fills it
        except Exception as error:  # a name that is no text, for one: no request may end for that
            if not self._has_failed:
                logger.error("seamark: a report could not be sent: %s", type(error).__name__)
            self._has_failed = True
