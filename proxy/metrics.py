"""Every metric of the gateway, by its name behind `PREFIX`. Names and labels are a contract with dashboards.

What each request is counted in are plain numbers, which become families when somebody asks for them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

disable_created_metrics()  # type: ignore[no-untyped-call]  # `*_created`: a quarter of all series, which nobody reads

PREFIX = "seamark_"

# From a warm CPU gateway to a cold prefill of a long prompt on a small machine.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180)

OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


BY_WORKER = ("model", "worker")

Labels = tuple[str, ...]


class Tally(defaultdict[Labels, float]):
    """A counter for the event loop alone, by its labels' values: `tally[model, worker] += 1`."""

    _type = "counter"

    def __init__(self, name: str, counted: str, *labels: str) -> None:
        super().__init__(float)
        self._name, self._documentation, self._labelnames = PREFIX + name.removesuffix("_total"), counted, labels

    def family(self, series: Iterable[Labels]) -> Metric:
        """Those of its series, 0 for what was not counted."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for labels in series:
            family.add_metric(labels, self.get(labels, 0.0))
        return family

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        for series in list(self):
            if labels.items() <= dict(zip(self._labelnames, series, strict=True)).items():
                del self[series]


class Distribution:
    """A histogram for the event loop alone, by its labels' values."""

    _type = "histogram"

    def __init__(self, name: str, measured: str, *labels: str, bounds: tuple[float, ...] = SECONDS) -> None:
        self._name, self._documentation, self._labelnames, self._bounds = PREFIX + name, measured, labels, bounds
        # By labels: the count of each bucket, the one beyond all bounds last, and behind them the sum.
        self._series = defaultdict[Labels, list[float]](lambda: [0.0] * (len(bounds) + 2))
        if not labels:
            self.begin()

    def begin(self, *labels: str) -> None:
        """Show the series from now on."""
        self._series[labels]

    def observe(self, value: float, *labels: str) -> None:
        series = self._series[labels]
        series[bisect_left(self._bounds, value)] += 1
        series[-1] += value

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        names = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        for labels, (*counts, total) in self._series.items():
            family.add_metric(labels, [*zip(names, accumulate(counts), strict=True)], total)
        return family


class Metrics:
    """The families, in a registry of their own, so that one process can hold several gateways."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(self)

        def counter(name: str, counted: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, counted, labels, registry=registry)

        def gauge(name: str, shown: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, shown, labels, registry=registry)

        self.requests = Tally("requests_total", "Proxied requests", *BY_WORKER, "endpoint", "code")
        self.prompt_tokens = Tally("prompt_tokens_total", "Prompt tokens, as the engine reports them", *BY_WORKER)
        self.shareable_tokens = Tally(
            "shareable_tokens_total",
            "Prompt tokens up to the deepest boundary that had been forwarded before",
            *BY_WORKER,
        )
        self.predicted_tokens = Tally(
            "predicted_tokens_total", "Prompt tokens the chosen worker was expected to have", *BY_WORKER
        )
        self.cached_tokens = Tally("cached_tokens_total", "Prompt tokens the engine reports as cached", *BY_WORKER)
        self.shared_tokens = Tally(
            "shareable_cached_tokens_total", "Shareable tokens that the engine reports as cached", *BY_WORKER
        )
        self.not_kept = Tally(
            "not_kept_total", "Requests of which nothing is kept, by what keeps them out of a worker's cache", "by"
        )
        self.key_requests = Tally("key_requests_total", "Requests with an API key, by its name", "key")
        self.key_tokens = Tally(
            "key_tokens_total",
            "Tokens of its requests: of prompts, of those the cached ones, and of answers",
            "key",
            "kind",
        )
        self.key_refused = Tally("key_refused_total", "Requests refused by a key's limit in tokens", "key", "per")
        self.seconds_saved = Tally(
            "seconds_saved_total",
            "Prefill time not spent: cached tokens times what one costs its worker's engine",
            *BY_WORKER,
        )
        self.seconds_spent = Tally(
            "seconds_spent_total",
            "Seconds that requests wait for their boundaries, and prefill time of replays",
            *BY_WORKER,
        )
        self.misses = Tally("miss_total", "Requests that got less than they could share", "model", "reason")
        self.explanations_shed = counter(
            "explanations_shed_total", "Requests not compared with recent ones, for want of time"
        )
        self.first_token = Distribution(
            "first_token_seconds",
            "From a request's last byte to its answer's first byte, or first event",
            "model",
            "cache",
        )
        self.overhead = Distribution(
            "overhead_seconds", "Seconds that the gateway itself takes", "phase", bounds=OVERHEAD_SECONDS
        )
        self.overhead.begin("boundary")
        self.inflight = gauge("inflight", "Requests at a worker", "worker")
        self.queued = gauge("queued", "Requests waiting in the gateway for a slot at a worker")
        self.queue_seconds = Distribution("queue_seconds", "Seconds that those waited which did not get a slot at once")
        self.resent = counter(
            "resent_total", "Requests sent again: no connection, a closed one, or a refusal", "worker", "reason"
        )
        self.prefills = counter(
            "prefills_total", "Requests whose prompt a prefill worker might have computed, by what came of it", "result"
        )
        self.heartbeats = counter("heartbeats_total", "Comments sent on silent streams")
        self.replays = counter("replays_total", "Hot prefixes replayed on restarted workers", "worker", "result")
        self.directory_evictions = counter("directory_evictions_total", "Prefixes dropped from the full prefix index")
        self.worker_up = gauge("worker_up", "1 while a worker answers, and not with errors alone", "worker")
        self.engine_patched = gauge("engine_patched", "1 while a worker's engine keeps checkpoints", "worker")
        self.renders = counter("renders_total", "Chats that workers were asked to render")
        self.rewrites = counter(
            "rewrites_total", "Requests that a rule changed, or would have changed if it were on", "rule", "applied"
        )
        self.would_save = Tally(
            "would_save_tokens_total", "Prompt tokens computed again because text before them changes by itself", "text"
        )
        self.lookups = Tally(
            "boundary_lookups_total", "Searches for boundaries: by learnt facts, by this head, or in vain", "result"
        )
        self.redis_up = gauge("redis_up", "1 while Redis answers, 0 while it does not, NaN if none is set")
        self.redis_up.set(math.nan)
        self.redis_errors = counter("redis_errors_total", "Exchanges with Redis that failed")
        self.redis_news = counter(
            "redis_news_total", "Records sent to and received from gateways, dropped unsent, refused as garbage", "fate"
        )
        self.shadow_mode = gauge("shadow", "1 in shadow mode: nothing is changed and no hint is sent")
        self.task_failures = counter(
            "task_failures_total", "Background parts that failed and were started again", "task"
        )
        self.file_current = gauge(
            "file_current", "1 if the settings' file is in force as last read, 0 if its previous content is", "setting"
        )
        self.discovered = gauge("discovered_workers", "Addresses of a name in workers_dns", "name")
        self.discovery_failures = counter(
            "discovery_failures_total", "Times that a name in workers_dns could not be resolved", "name"
        )
        self.config_reload_errors = counter(
            "config_reload_errors_total",
            "Times that a changed file could not be used, by the setting that names it",
            "file",
        )
        self.spans = counter("spans_total", "OpenTelemetry spans, by whether the collector took them", "result")
        self.traced = Tally("trace_requests_total", "Requests for the trace, by what became of their lines", "result")
        self.response_cache_requests = counter(
            "response_cache_total",
            "Requests answered from it, from one under way, computed, or none of its own",
            "result",
        )
        self.response_cache_bytes = gauge("response_cache_bytes", "Memory that stored answers and shared ones take")
        self.response_cache_entries = gauge("response_cache_entries", "Answers in the response cache")
        self.response_cache_evictions = counter("response_cache_evictions_total", "Answers dropped from the full cache")
        self.shadow_lost_tokens = Tally(
            "shadow_lost_tokens_total", "Prompt tokens computed again at workers without the plugin", "model", "reason"
        )
        self.shadow_lost_seconds = Tally(
            "shadow_lost_seconds_total",
            "Seconds spent on these, by the worker's times to a first token",
            "model",
            "reason",
        )
        self.shadow_requests = Tally(
            "shadow_requests_total", "Requests answered by workers without the plugin: judged, or why not", "result"
        )
        self.self_checks = counter(
            "self_check_total", "Prompts continued from the cache and without it, by how the answers compare", "result"
        )
        for result in ("same", "noise", "differs", "unanswered"):
            self.self_checks.labels(result)
        self.drafts = gauge("draft_gate", "1 for what a worker that drafts makes of hints", "worker", "state")

    def collect(self) -> Iterator[Metric]:
        """What is counted in plain numbers. Alerts compare what is counted by worker: 0, where others were counted."""
        families = vars(self).values()
        tallies = [family for family in families if isinstance(family, Tally)]
        by_worker = {labels: None for tally in tallies if tally._labelnames == BY_WORKER for labels in tally}
        for tally in tallies:
            yield tally.family(by_worker if tally._labelnames == BY_WORKER else tally)
        for family in families:
            if isinstance(family, Distribution):
                yield family.family()

    def forget_worker(self, name: str) -> None:
        """Drop all series of a worker that is gone: an autoscaler makes new ones for ever."""
        for family in vars(self).values():
            if "worker" in getattr(family, "_labelnames", ()):
                family.remove_by_labels({"worker": name})
