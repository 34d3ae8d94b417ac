"""The engine core's end of the one way by which the gateway learns of it.

A report goes to the process that started the engine (`collector`), by a socket of this machine. Nothing here makes a
step wait: what nobody takes is not even made, but goes on being counted, and events that no longer fit leave a gap in
their numbers, which tells the gateway to forget what it may have missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from engine_patches.footprint import REPORTS
from engine_patches.reporting.report import FOLDER, MAX_WAITING, READ_AT, SENT_TO, constants, report_of
from engine_patches.scheduler import load
from engine_patches.scheduler.load import GatewayLoad

# How vLLM's list of KV event publishers names one that is none, but where reports are read.
TOPIC = "seamark"

_encode = msgspec.msgpack.Encoder().encode


class Reporter:
    """Of one scheduler."""

    def __init__(self, scheduler: Any, address: str) -> None:
        """`address`: ZeroMQ's, of the collector."""
        self._scheduler = scheduler
        self._constant = constants(scheduler.vllm_config)
        self._loads: dict[str, GatewayLoad] = {}
        self._num_requests = 0
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
            loads = load.of_gateways(requests.values())
        states = checkpoints.states
        pending = states is not None and states.events.pending
        if pending or loads != self._loads or checkpoints.counters.report_due:
            self.send(loads)

    def send(self, loads: dict[str, GatewayLoad] | None = None) -> None:
        """Report now, unless too many reports wait to be taken: then what it would tell goes on being counted."""
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            if loads is not None:
                self._loads = loads
            # The socket has room, and this thread alone fills it.
            self._socket.send(_encode(report_of(self._scheduler, self._constant, self._loads)), zmq.DONTWAIT)


def report_from_the_start(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement of `Scheduler.__init__`: what the engine is, is known before its first request."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        folder = os.environ.get(FOLDER)
        if folder:
            reporter = Reporter(self, f"ipc://{folder}/{SENT_TO}")
            setattr(self, REPORTS, reporter)
            reporter.send()

    return __init__


def report_with_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `Scheduler.make_stats`, called at the end of each step, also with `--disable-log-stats`."""

    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        reporter: Reporter | None = getattr(self, REPORTS, None)
        if reporter is not None:
            reporter.step_ends(busy=load.may_have_changed(self.seamark.last_planned))
        return original(self, *args, **kwargs)

    return make_stats


def report_resets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `Scheduler.reset_prefix_cache`, which no step may follow for hours."""

    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        emptied = original(self, *args, **kwargs)
        reporter: Reporter | None = getattr(self, REPORTS, None)
        if reporter is not None:
            reporter.send()
        return emptied

    return reset_prefix_cache


def tell_where(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `Scheduler.get_kv_event_publisher_config`, by which every frontend answers `/kv_event_sources`.

    A frontend in Rust has no other route of ours. A publisher of KV events is left as it is.
    """

    def get_kv_event_publisher_config(self: Any) -> Any:
        config = original(self)
        at = os.environ.get(READ_AT)
        if config is not None or not at:
            return config
        from vllm.config.kv_events import KVEventsConfig

        return KVEventsConfig(publisher="null", endpoint=f"tcp://{at}", topic=TOPIC)

    return get_kv_event_publisher_config
