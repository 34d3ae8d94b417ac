"""The engine core's end of the one way by which the gateway learns of it.

A report goes to the process that started the engine (`collector`), by a socket of this machine. Nothing here makes a
step wait: what nobody takes is not even made, but goes on being counted, and events that no longer fit leave a gap in
their numbers, which tells the gateway to forget what it may have missed.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import zmq

from engine_patches.reporting.addresses import MAX_WAITING
from engine_patches.reporting.report import constants, report_of
from engine_patches.scheduler.counters import GatewayLoad, loads_of_gateways

logger = logging.getLogger("vllm.seamark")

_encode = msgspec.msgpack.Encoder().encode


class Reporter:
    """Of one scheduler."""

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
        checkpoints = self._scheduler.seamark
        requests = self._scheduler.requests
        loads = self._loads
        if busy or len(requests) != self._num_requests:
            self._num_requests = len(requests)
            loads = loads_of_gateways(requests.values())
        states = checkpoints.states
        pending = states is not None and states.events.pending
        if pending or loads != self._loads or checkpoints.counters.report_due:
            self.send(loads)

    def send(self, loads: dict[str, GatewayLoad] | None = None) -> None:
        """Report now, unless too many reports wait to be taken: then what it would tell goes on being counted."""
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            if loads is not None:
                self._loads = loads
            report = report_of(self._scheduler, self._constant, self._loads)
            try:
                # The socket has room, and this thread alone fills it.
                self._socket.send(_encode(report), zmq.DONTWAIT)
            except Exception as error:  # a name that is no text, for one: no request may end for that
                if not self._has_failed:
                    logger.error("seamark: a report could not be sent: %s", type(error).__name__)
                self._has_failed = True
