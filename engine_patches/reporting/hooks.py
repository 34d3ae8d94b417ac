"""Where this room meets vLLM: its scheduler reports, and who starts engines collects what they report.

Every process of vLLM has this module, and the tools that have no vLLM, too; what else the room needs is imported where
it is used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine_patches import settings
from engine_patches.footprint import FOLDER, READ_AT, REPORTS, SENT_TO
from engine_patches.ledger import SCHEDULER, Function, Patch, Shape, ours
from engine_patches.scheduler.counters import loads_may_have_changed
from engine_patches.settings import logger

# How vLLM's list of KV event publishers names one that is none, but where reports are read.
TOPIC = "seamark"


@ours(
    "reports-collected",
    "vllm.v1.engine.utils:CoreEngineProcManager.__init__",
    why="no API server has all reports if there are several, or none that runs Python",
    mentions=("vllm_config: VllmConfig", "local_client: bool", "target=EngineCoreProc.run_engine_core"),
)
@ours(
    "reports-collected-ray",
    "vllm.v1.engine.utils:CoreEngineActorManager.__init__",
    why="the same where engines are Ray's actors; those on other machines do not report",
    mentions=("vllm_config: VllmConfig",),
)
def collect_before_the_engines(self: Any, *args: Any, original: Function, **kwargs: Any) -> None:
    config = kwargs.get("vllm_config") or next(each for each in args if hasattr(each, "parallel_config"))
    answers_http = _answers_http(config, kwargs)
    if answers_http is not None and FOLDER not in os.environ:
        _start(config, answers_http=answers_http)
    original(self, *args, **kwargs)


def _answers_http(config: Any, kwargs: Mapping[str, Any]) -> bool | None:
    """Whether this process, which starts engines, does; else other API servers, a frontend in Rust or another machine.

    None if nobody does: those are the engines of the class `LLM`, for which no gateway asks.
    """
    if getattr(config.parallel_config, "_api_process_rank", 0) == -1 or kwargs.get("local_client") is False:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return True


def _start(config: Any, *, answers_http: bool) -> None:
    host, port = settings.reports_at()
    events = getattr(config, "kv_events_config", None)
    if not port and events is not None and events.enable_kv_cache_events:
        port = _beside(events.endpoint)
    from engine_patches.reporting.collector import Collector
    from engine_patches.reporting.metrics import CollectedMetrics

    try:
        collector = Collector((host, port), keys_in(sys.argv, os.environ))
    except Exception as error:  # vLLM serves without
        logger.error("seamark: no reports, gateways learn nothing of this worker: %s", error)
        return
    os.environ[FOLDER], os.environ[READ_AT] = str(collector.folder), collector.read_at
    collector.start(CollectedMetrics(collector.read_at, beside_vllms=answers_http))
    if collector.read_at:
        logger.info("seamark: a gateway reads what engines report at %s", collector.read_at)


def _beside(endpoint: str) -> int:
    """The port before that of KV events, where a gateway looks if `/kv_event_sources` tells of those; 0: any."""
    port = endpoint.rpartition(":")[2]
    candidate = int(port) - 1 if port.isdecimal() and len(port) <= 5 else 0
    if not 0 < candidate < 65536:
        return 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", candidate))
        except OSError:
            return 0
    return candidate


def keys_in(arguments: Iterable[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that a `vllm serve` of these arguments asks for: its `--api-key`, or `VLLM_API_KEY`.

    A file that `--config` names is read for them, too, as vLLM reads it.
    """
    given = list(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", "--api_key", nargs="*", default=[])
    keys: list[str] = parser.parse_known_args(given)[0].api_key
    if not keys and "--config" in given[:-1]:
        with suppress(ValueError):  # vLLM says so
            file = settings.read_config(Path(given[given.index("--config") + 1]))
            told = {name.replace("_", "-"): value for name, value in file.items()}.get("api-key") or []
            keys = [str(key) for key in told] if isinstance(told, list) else [str(told)]
    return tuple(keys) or tuple(filter(None, [environment.get("VLLM_API_KEY")]))


@ours(
    "report-start",
    f"{SCHEDULER}.__init__",
    why="what an engine is has to be known before its first request",
    mentions=("self.vllm_config = vllm_config", "self.requests: dict[str, Request] = {}"),
    relies_on=(Shape(f"{SCHEDULER}.get_request_counts", "self"),),
)
def report_from_the_start(self: Any, *args: Any, original: Function, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    folder = os.environ.get(FOLDER)
    if folder:
        from engine_patches.reporting.report import Reporter

        try:
            reporter = Reporter(self, f"ipc://{folder}/{SENT_TO}")
        except Exception as error:
            logger.error("seamark: no reports, gateways learn nothing of this engine: %s", error)
            return
        setattr(self, REPORTS, reporter)
        reporter.send()


@Patch(
    "report",
    f"{SCHEDULER}.make_stats",
    why="the counts have to reach the process that the gateway reads them from",
    until="vLLM lets plugins add to what its engines send",
    mentions=("return SchedulerStats(",),
    relies_on=(Shape(f"{SCHEDULER}.update_from_output", mentions=("stats := self.make_stats(",)),),
)
def report_with_stats(self: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    """Replacement of `Scheduler.make_stats`, called at the end of each step, also with `--disable-log-stats`."""
    reporter = getattr(self, REPORTS, None)
    if reporter is not None:
        reporter.step_ends(busy=loads_may_have_changed(self.seamark.last_planned))
    return original(self, *args, **kwargs)


@ours(
    "report-reset",
    f"{SCHEDULER}.reset_prefix_cache",
    why="no step may follow an emptied cache for hours",
)
def report_resets(self: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    emptied = original(self, *args, **kwargs)
    reporter = getattr(self, REPORTS, None)
    if reporter is not None:
        reporter.send()
    return emptied


@ours(
    "reports-found",
    f"{SCHEDULER}.get_kv_event_publisher_config",
    why="a gateway knows a worker by the address of its HTTP server, and reports are read at another one",
)
def tell_where(self: Any, *, original: Function) -> Any:
    """Replacement of `Scheduler.get_kv_event_publisher_config`, by which every frontend answers `/kv_event_sources`.

    A frontend in Rust has no other route of ours. A publisher of KV events is left as it is.
    """
    config = original(self)
    at = os.environ.get(READ_AT)
    if config is not None or not at:
        return config
    from vllm.config.kv_events import KVEventsConfig

    return KVEventsConfig(publisher="null", endpoint=f"tcp://{at}", topic=TOPIC)
