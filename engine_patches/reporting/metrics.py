"""Seamark's numbers on the worker's `/metrics`: a vLLM stat logger, loaded in the process of the API server."""

from __future__ import annotations

from functools import cache, partial
from importlib import metadata
from typing import Any, ClassVar

import vllm
from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from engine_patches import kv_connectors, ledger, speculation
from engine_patches.reporting.events_api import feed
from engine_patches.reporting.stats_channel import EVENT, PIN, REQUEST, decode_event, decode_request, detach, take_cause
from engine_patches.scheduler import match_unit, refusals
from engine_patches.scheduler.state_events import StateEvicted


class Families:
    """The metric families; a Prometheus registry admits each name once per process."""

    def __init__(self) -> None:
        self.info = Gauge(
            "seamark_engine_info",
            "1 while Seamark's patches are live; lengths in tokens",
            ["version", "vllm", "match_unit", "block_size", "ahead", "connector", "lane", "refused"],
            multiprocess_mode="max",
        )
        self.written = Counter("seamark_checkpoints_written_total", "Recurrent states registered", ["kind"])
        self.evicted = Counter(
            "seamark_checkpoints_evicted_total", "Recurrent states of hinted requests that can be found no more"
        )
        self.bytes = Gauge(
            "seamark_checkpoint_bytes", "Bytes of recurrent states held in the cache", multiprocess_mode="max"
        )
        self.hits = Counter("seamark_checkpoint_hits_total", "Requests that resumed from a recurrent state")
        self.hit_tokens = Counter("seamark_checkpoint_hit_tokens_total", "Prompt tokens those requests did not compute")
        self.pinned_blocks = Gauge(
            "seamark_pinned_blocks", "Cache blocks that pinned prompts hold", multiprocess_mode="max"
        )
        self.pins = Counter("seamark_pins_total", "Requests to pin a prompt, or to release it", ["fate"])
        self.disk_bytes = Gauge(
            "seamark_checkpoint_directory_bytes",
            "Bytes of checkpoints in the directory that this engine can load",
            multiprocess_mode="max",
        )
        self.file_bytes = Counter(
            "seamark_checkpoint_bytes_written_total", "Bytes of checkpoints written to the directory for them"
        )
        self.files_refused = Counter(
            "seamark_checkpoint_files_refused_total", "Files of checkpoints not loaded, or not written", ["reason"]
        )
        self.loads_declined = Counter(
            "seamark_loads_declined_total", "Requests that computed what the directory holds, since that is faster"
        )
        self.ignored = Counter("seamark_hints_ignored_total", "Hint entries without effect", ["reason"])
        self.outcomes = Counter(
            "seamark_engine_requests_total", "Requests by why they did or did not resume from the cache", ["reason"]
        )
        self.followers = Counter(
            "seamark_followers_total", "Requests whose prefix another one was computing: held back, or not", ["fate"]
        )
        self.saved = Counter("seamark_seconds_saved_total", "Prefill not computed, at the learnt step times, seconds")
        self.spent = Counter("seamark_seconds_spent_total", "Time that checkpoints cost requests, seconds")
        self.pass_seconds = Gauge(
            "seamark_pass_seconds", "Learnt time of a pass over hardly any tokens", multiprocess_mode="max"
        )
        self.token_seconds = Gauge(
            "seamark_token_seconds", "Learnt time that a prompt token adds to a pass", multiprocess_mode="max"
        )


families = cache(Families)


def own_version() -> str:
    """Version of the installed distribution, "unknown" when run from a bare copy."""
    try:
        return metadata.version("vllm-seamark")
    except metadata.PackageNotFoundError:
        return "unknown"


class EngineMetrics(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped to mypy
    """One per engine of this API server. Exports nothing if the patches are not live."""

    _engines: ClassVar[set[int]] = set()  # of this process

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.shown: tuple[str, ...] | None = None
        connector = kv_connectors.decide(vllm_config)
        self._connector = ("+".join(connector.names), connector.lane.value) if connector.names else ("", "")
        # Each of several API servers gets a part of the events; of several engines, each has a cache of its own.
        EngineMetrics._engines.add(engine_index)
        if getattr(vllm_config.parallel_config, "_api_process_count", 1) > 1 or len(EngineMetrics._engines) > 1:
            feed.has_all_events = False
        if ledger.patches_live():
            # Until the engine core has run its first step: what the same code decides in this process.
            unit = match_unit.expected(vllm_config)
            refusal = refusals.by_configuration(vllm_config)
            self._show(
                unit,
                vllm_config.cache_config.block_size,
                speculation.ahead(vllm_config, match_unit.unit_of(vllm_config)),
                refusal.cause if refusal is not None else "",
            )

    def _show(self, unit: int, block_size: int, ahead: int, refused: str) -> None:
        """Lengths in tokens; `refused`: why hints are, empty if they are not."""
        labels = (str(unit), str(block_size), str(ahead), *self._connector, refused)
        if labels == self.shown:
            return
        self._hide()
        families().info.labels(own_version(), vllm.__version__, *labels).set(1)
        self.shown = labels

    def _hide(self) -> None:
        if self.shown is not None:
            families().info.remove(own_version(), vllm.__version__, *self.shown)
            self.shown = None

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take the engine core's report out of `scheduler_stats` and add it up."""
        if scheduler_stats is None:
            return
        report = detach(scheduler_stats)
        if not report:
            self._hide()  # the engine core runs unpatched, whether or not this process is patched
            return
        self._show(report.pop("match_unit"), report.pop("block_size"), report.pop("ahead"), take_cause(report))
        if not report:
            return
        for name in [name for name in report if name.startswith((f"{REQUEST}/", f"{PIN}/"))]:
            self._add_to_outcomes(name, report.pop(name))  # the head of an answer may tell them
        feed.later(partial(self._add_up, report, engine_idx))

    def _add_to_outcomes(self, name: str, count: int) -> None:
        group, _, label = name.partition("/")
        if group == REQUEST:
            feed.add_outcome(decode_request(label, hit_tokens=count))
        else:
            fate, _, request_id = label.partition("/")
            families().pins.labels(fate).inc()
            feed.add_pin(request_id, fate)

    def _add_up(self, report: dict[str, int], engine_idx: int) -> None:
        metrics = families()
        metrics.bytes.set(report.pop("bytes"))
        metrics.hits.inc(report.pop("hits"))
        metrics.hit_tokens.inc(report.pop("hit_tokens"))
        metrics.saved.inc(report.pop("saved_ns") / 1e9)
        metrics.spent.inc(report.pop("spent_ns") / 1e9)
        metrics.pass_seconds.set(report.pop("pass_ns") / 1e9)
        metrics.token_seconds.set(report.pop("token_ns") / 1e9)
        metrics.pinned_blocks.set(report.pop("pinned_blocks"))
        metrics.file_bytes.inc(report.pop("file_bytes"))
        metrics.disk_bytes.set(report.pop("disk_bytes"))
        metrics.loads_declined.inc(report.pop("loads_declined"))
        labelled = {
            "written": metrics.written,
            "ignored": metrics.ignored,
            "outcome": metrics.outcomes,
            "follower": metrics.followers,
            "refused_file": metrics.files_refused,
        }
        for name, count in report.items():
            group, _, label = name.partition("/")
            if group == EVENT:
                number, event = decode_event(label)
                metrics.evicted.inc(isinstance(event, StateEvicted))
                feed.add_event(engine_idx, number, event)
            else:
                labelled[group].labels(label).inc(count)
        feed.wake_readers()

    def log_engine_initialized(self) -> None:
        """Nothing: vLLM's own loggers describe the engine."""
