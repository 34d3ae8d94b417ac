"""Seamark's numbers, as they are collected: on the worker's `/metrics` if its frontend is Python, and on our own.

In the process of the one API server they stand beside vLLM's. Of several, each gives what all processes have written to
the folder of Prometheus' client; there the collecting process writes, too. A frontend in Rust gives vLLM's alone.
"""

from __future__ import annotations

import os
from collections import Counter as Counting
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial

import msgspec
import vllm
from prometheus_client import REGISTRY, Gauge, values
from prometheus_client import Counter as WholeCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample

from engine_patches.disk.files import REASONS
from engine_patches.reporting.events_api import feeds
from engine_patches.reporting.report import EngineReport
from engine_patches.scheduler.draft_windows import HEALED, HELD, ZEROED
from engine_patches.scheduler.states import StateEvicted
from engine_patches.version import version


class Counter(WholeCounter):
    """Without a series `*_created` beside each. vLLM's stay as they are: the client's own switch is the process's."""

    def _child_samples(self) -> Iterable[Sample]:
        return [each for each in super()._child_samples() if each.name != "_created"]


# By the field of a report that is added up: the counter's name, what it counts, and the label of what has several.
COUNTERS = {
    "written": ("seamark_checkpoints_written_total", "Recurrent states registered", "kind"),
    "evicted": ("seamark_checkpoints_evicted_total", "States of hinted requests that can be found no more", ""),
    "hits": ("seamark_checkpoint_hits_total", "Requests that resumed from a recurrent state", ""),
    "hit_tokens": ("seamark_checkpoint_hit_tokens_total", "Prompt tokens those requests did not compute", ""),
    "pins": ("seamark_pins_total", "Requests to pin a prompt, or to release it", "fate"),
    "file_bytes": ("seamark_checkpoint_bytes_written_total", "Bytes of checkpoints written to the directory", ""),
    "files_refused": ("seamark_checkpoint_files_refused_total", "Files of states not loaded, or not written", "reason"),
    "loads_declined": ("seamark_loads_declined_total", "Requests that computed anew what the directory holds", ""),
    "ignored": ("seamark_hints_ignored_total", "Hint entries without effect", "reason"),
    "outcomes": ("seamark_engine_requests_total", "Requests by why they did or did not hit the cache", "reason"),
    "windows": ("seamark_draft_windows_total", "Hits of draft heads with windows, by their rows", "rows"),
    "followers": ("seamark_followers_total", "Requests whose prefix another one computed: held back, or not", "fate"),
    "saved_seconds": ("seamark_seconds_saved_total", "Prefill not computed, at the learnt step times, seconds", ""),
    "spent_seconds": ("seamark_seconds_spent_total", "Time that checkpoints cost requests, seconds", ""),
    "long_prefill_waits": ("seamark_long_prefill_waits_seconds_total", "Waits behind long prompts", "threshold"),
}

# By the field of a report that is shown as it is.
GAUGES = {
    "state_bytes": ("seamark_checkpoint_bytes", "Bytes of recurrent states held in the cache"),
    "pinned_blocks": ("seamark_pinned_blocks", "Cache blocks that pinned prompts hold"),
    "disk_bytes": ("seamark_checkpoint_directory_bytes", "Bytes of checkpoints in the directory that can be loaded"),
    "pass_seconds": ("seamark_pass_seconds", "Learnt time of a pass with a prompt, apart from its tokens"),
    "token_seconds": ("seamark_token_seconds", "Learnt time that a prompt token adds to a pass"),
}

# Alerts see no first increase of a series that was not there before.
FROM_THE_START = {"files_refused": REASONS, "windows": (HELD, ZEROED, HEALED)}


@cache
def families() -> tuple[Gauge, Mapping[str, Counter], Mapping[str, Gauge]]:
    """What an engine is, and its counters and gauges by the fields of a report.

    A Prometheus registry admits each name once per process.
    """
    lengths = ["match_unit", "block_size", "ahead"]
    info = Gauge(
        "seamark_engine_info",
        "1 while Seamark's patches are live; lengths in tokens; `reports`: HOST:PORT where they are read",
        ["version", "vllm", *lengths, "connector", "lane", "keep", "refused", "drafts", "reports"],
        multiprocess_mode="max",
    )
    counters = {
        field: Counter(name, words, [label] if label else []) for field, (name, words, label) in COUNTERS.items()
    }
    gauges = {field: Gauge(name, words, multiprocess_mode="max") for field, (name, words) in GAUGES.items()}
    for field, labels in FROM_THE_START.items():
        for label in labels:
            counters[field].labels(label)
    return info, counters, gauges


class EngineNumbers:
    """What a gateway reads of vLLM's own metrics, where the process that serves these has none of them."""

    def __init__(self) -> None:
        self._last: dict[int, EngineReport] = {}  # by engine
        self._hit_tokens: Counting[int] = Counting()  # by engine

    def take(self, report: EngineReport) -> None:
        self._last[report.engine] = report
        self._hit_tokens[report.engine] += report.cache_hit_tokens

    def collect(self) -> Iterator[Metric]:
        """As a collector of Prometheus' client. Not its own metrics: those would be added to vLLM's in a folder."""
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in steps", labels=["engine"])
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait", labels=["engine"])
        hits = CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens from the prefix cache", labels=["engine"])
        sizes = GaugeMetricFamily("vllm:cache_config_info", "1", labels=["engine", "kv_cache_size_tokens"])
        for number, report in self._last.items():
            engine = str(number)
            running.add_metric([engine], report.running)
            waiting.add_metric([engine], report.waiting)
            hits.add_metric([engine], self._hit_tokens[number])
            sizes.add_metric([engine, str(report.cache_tokens)], 1)
        yield from (running, waiting, hits, sizes)


class CollectedMetrics:
    """Everything that the reports of all engines of this process add up to."""

    def __init__(self, read_at: str, *, beside_vllms: bool) -> None:
        """`read_at`: HOST:PORT of the reports' own address; empty: they have none.

        `beside_vllms`: vLLM's own metrics stand in this process, too.
        """
        self._read_at, self._versions = read_at, (version(), vllm.__version__)
        self._shown: dict[int, tuple[str, ...]] = {}  # labels of `seamark_engine_info`, by engine
        self._of_vllm = None if beside_vllms else EngineNumbers()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            # vLLM sets it once the client is imported, for the API servers, which add up what stands in the folder.
            values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
        families()
        if self._of_vllm is not None:
            REGISTRY.register(self._of_vllm)

    def take(self, report: EngineReport) -> None:
        """A report of one engine. Outcomes are there at once, for heads of answers; the rest when tokens are out."""
        self._show(report)
        feeds.add_requests(report)
        feeds.later(partial(self._add_up, report))

    def _show(self, report: EngineReport) -> None:
        lengths = (str(report.match_unit), str(report.block_size), str(report.ahead))
        connector = (report.connector, report.lane, report.keep)
        of_engine = (*lengths, *connector, report.refused, report.drafts[0], self._read_at)
        labels = (*self._versions, *of_engine)
        shown = self._shown.get(report.engine)
        if labels == shown:
            return
        self._shown[report.engine] = labels
        info, _, _ = families()
        if shown is not None and shown not in self._shown.values():
            info.labels(*shown).set(0)  # files of several processes keep it for ever
            info.remove(*shown)
        info.labels(*labels).set(1)

    def _add_up(self, report: EngineReport) -> None:
        _, counters, gauges = families()
        told = msgspec.structs.asdict(report)
        told["evicted"] = sum(isinstance(event, StateEvicted) for _, event in report.events)
        told["pins"] = Counting(fate for _, fate in report.pinned)
        for field, counter in counters.items():
            if isinstance(told[field], dict):
                for label, count in told[field].items():
                    counter.labels(label).inc(count)
            else:
                counter.inc(told[field])
        for field, gauge in gauges.items():
            gauge.set(told[field])
        if self._of_vllm is not None:
            self._of_vllm.take(report)
        feeds.add_events(report)
