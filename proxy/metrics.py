"""Every metric of the gateway. Names and labels are a contract with dashboards."""

from __future__ import annotations

import math
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # `*_created`: a quarter of all series, which nobody reads

# From a warm CPU gateway to a cold prefill of a long prompt on a small machine.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180)

OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class Metrics:
    """The families, in a registry of their own, so that one process can hold several gateways."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        of_worker = ["model", "worker"]
        self.requests = counter("seamark_requests_total", "Proxied requests", [*of_worker, "endpoint", "code"])
        self.prompt_tokens = counter(
            "seamark_prompt_tokens_total", "Prompt tokens, as the engine reports them", of_worker
        )
        self.shareable_tokens = counter(
            "seamark_shareable_tokens_total",
            "Prompt tokens up to the deepest boundary that had been forwarded before",
            of_worker,
        )
        self.predicted_tokens = counter(
            "seamark_predicted_tokens_total", "Prompt tokens the chosen worker was expected to have", of_worker
        )
        self.cached_tokens = counter(
            "seamark_cached_tokens_total", "Prompt tokens the engine reports as cached", of_worker
        )
        self.shared_tokens = counter(
            "seamark_shareable_cached_tokens_total", "Shareable tokens that the engine reports as cached", of_worker
        )
        self.key_requests = counter("seamark_key_requests_total", "Requests with an API key, by its name", ["key"])
        self.key_tokens = counter(
            "seamark_key_tokens_total",
            "Tokens of its requests: of their prompts, of those the cached ones, and of their answers",
            ["key", "kind"],
        )
        self.seconds_saved = counter(
            "seamark_seconds_saved_total",
            "Prefill time not spent: cached tokens times the cost of a token, as the worker's engine has learnt it",
            of_worker,
        )
        self.seconds_spent = counter(
            "seamark_seconds_spent_total",
            "The gateway's cost: seconds that requests wait for their boundaries, and prefill time of replays",
            of_worker,
        )
        self.misses = counter("seamark_miss_total", "Requests that got less than they could share", ["model", "reason"])
        self.explanations_shed = counter(
            "seamark_explanations_shed_total",
            "Requests that were not compared with recent ones, because the gateway had no time beside requests",
        )
        self.first_token = histogram(
            "seamark_first_token_seconds",
            "Seconds from the request's last byte to the answer's first byte, or to a stream's first event",
            ["model", "cache"],
            buckets=SECONDS,
        )
        self.overhead = histogram(
            "seamark_overhead_seconds", "Seconds that the gateway itself takes", ["phase"], buckets=OVERHEAD_SECONDS
        )
        self.inflight = gauge("seamark_inflight", "Requests at a worker", ["worker"])
        self.queued = gauge("seamark_queued", "Requests waiting in the gateway for a slot at a worker")
        self.queue_seconds = histogram(
            "seamark_queue_seconds",
            "Seconds that requests waited for a slot at a worker, without those that did not wait",
            buckets=SECONDS,
        )
        self.resent = counter(
            "seamark_resent_total",
            "Requests sent again: no connection was made, a kept-alive one was closed, or a worker refused them",
            ["worker", "reason"],
        )
        self.prefills = counter(
            "seamark_prefills_total",
            "Requests that prefill workers might have computed the prompt of, by what became of that",
            ["result"],
        )
        self.heartbeats = counter("seamark_heartbeats_total", "Comments sent on silent streams")
        self.replays = counter(
            "seamark_replays_total", "Hot prefixes replayed on restarted workers", ["worker", "result"]
        )
        self.directory_evictions = counter(
            "seamark_directory_evictions_total", "Prefixes dropped from the full prefix index"
        )
        self.worker_up = gauge("seamark_worker_up", "1 while a worker answers, and not with errors alone", ["worker"])
        self.engine_patched = gauge("seamark_engine_patched", "1 while a worker's engine keeps checkpoints", ["worker"])
        self.renders = counter("seamark_renders_total", "Chats that workers were asked to render")
        self.rewrites = counter(
            "seamark_rewrites_total",
            "Requests that a rewrite rule changed, or would have changed if it were on",
            ["rule", "applied"],
        )
        self.would_save = counter(
            "seamark_would_save_tokens_total",
            "Prompt tokens computed again because text before them changes from request to request by itself",
            ["text"],
        )
        self.lookups = counter(
            "seamark_boundary_lookups_total",
            "Searches for boundaries: by learnt facts of the template, by positions of this head alone, or none found",
            ["result"],
        )
        self.redis_up = gauge("seamark_redis_up", "1 while Redis answers, 0 while it does not, NaN if none is set")
        self.redis_up.set(math.nan)
        self.redis_errors = counter("seamark_redis_errors_total", "Exchanges with Redis that failed")
        self.redis_news = counter(
            "seamark_redis_news_total",
            "Records sent to and received from other gateways, events dropped unsent, entries refused as garbage",
            ["fate"],
        )
        self.shadow_mode = gauge("seamark_shadow", "1 in shadow mode: nothing is changed and no hint is sent")
        self.task_failures = counter(
            "seamark_task_failures_total", "Parts beside the requests that failed and were started again", ["task"]
        )
        self.file_current = gauge(
            "seamark_file_current",
            "1 if the settings' file could be used when it was last read, 0 if its previous content is in force",
            ["setting"],
        )
        self.discovered = gauge("seamark_discovered_workers", "Addresses of a name in workers_dns", ["name"])
        self.discovery_failures = counter(
            "seamark_discovery_failures_total", "Times that a name in workers_dns could not be resolved", ["name"]
        )
        self.config_reload_errors = counter(
            "seamark_config_reload_errors_total",
            "Times that a changed file could not be used, by the setting that names it",
            ["file"],
        )
        self.spans = counter(
            "seamark_spans_total", "OpenTelemetry spans, by whether the collector took them", ["result"]
        )
        self.response_cache_requests = counter(
            "seamark_response_cache_total",
            "Requests that the response cache saw: answered from it, from one under way, computed, or none of its own",
            ["result"],
        )
        self.response_cache_bytes = gauge(
            "seamark_response_cache_bytes", "Memory that stored answers and shared ones take"
        )
        self.response_cache_entries = gauge("seamark_response_cache_entries", "Answers in the response cache")
        self.response_cache_evictions = counter(
            "seamark_response_cache_evictions_total", "Answers dropped from the full response cache"
        )
        # Workers without the plugin.
        of_loss = ["model", "reason"]
        self.shadow_lost_tokens = counter(
            "seamark_shadow_lost_tokens_total", "Prompt tokens computed again at workers without the plugin", of_loss
        )
        self.shadow_lost_seconds = counter(
            "seamark_shadow_lost_seconds_total",
            "Seconds spent on these tokens, estimated from the worker's times to a first token",
            of_loss,
        )
        self.shadow_requests = counter(
            "seamark_shadow_requests_total",
            "Requests answered by workers without the plugin: judged, or the reason why not",
            ["result"],
        )
        self.self_checks = counter(
            "seamark_self_check_total",
            "Prompts continued from the cache and without it: equal answers, arithmetic noise, or different answers; "
            "and why hints stay off beside the drafts of a worker",
            ["result"],
        )
        for result in ("same", "noise", "differs", "drafts", "drafts_worse", "no_hits", "no_counts"):
            self.self_checks.labels(result)
        self.drafts = gauge(
            "seamark_draft_gate",
            "1 for what a worker that drafts makes of hints: trial, open, closed, on, off",
            ["worker", "state"],
        )

    def forget_worker(self, name: str) -> None:
        """Drop all series of a worker that is gone: an autoscaler makes new ones for ever."""
        for family in vars(self).values():
            if "worker" in getattr(family, "_labelnames", ()):
                family.remove_by_labels({"worker": name})
