"""The live page, and what it and the status page show, as JSON: no more of prompts than explanations hold."""

from __future__ import annotations

import hashlib
import re
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

from proxy.boundaries.template_facts import OpenerPlace, Role, TemplateFacts
from proxy.fleet.self_check import SelfCheck
from proxy.fleet.worker import TRIAL, Worker
from proxy.observability.explanations import Explanation
from proxy.observability.reasons import REASON_TEXT
from proxy.observability.totals import SLOTS, SLOTS_OF_MINUTE, Totals, by_key
from proxy.pipeline.gateway import Gateway
from proxy.version import version

MOST_REQUESTS = 50
HOUR = 3600.0  # seconds
CHECKED = ("checked", "differs", "hints_off", "cache_off")  # figures of the self-check
OF_WORKER = ("url", "name", "up", "why_down", "refused", "warming", "boot", "inflight", "prefill_tokens")

# Of what prompts have in common with earlier ones: from this part on it is no hit that is worth a headline, but a loss.
CHANGING = 0.1


def _of_both(gateway: Gateway) -> dict[str, Any]:
    check = gateway.self_check
    is_checked = bool(gateway.settings.self_check_interval)
    limited = gateway.keys.limited if gateway.keys is not None else {}
    limits = {name: {"limits": [asdict(window) for window in each.now()]} for name, each in limited.items()}
    return {
        "version": version(),
        "since": gateway.created,
        "workers": [worker_status(worker, gateway) for worker in gateway.pool.workers],
        "warnings": warnings(gateway),
        "keys": [used | limits.get(used["name"], {}) for used in by_key(gateway.metrics)],
        "prefixes": gateway.pinned.as_json(),
        "redis": redis_status(gateway),
        # How many answers from the cache were checked, and what followed; None if the self-check is off.
        "self_check": {name: getattr(check, name) for name in CHECKED} if is_checked else None,
    }


def status(gateway: Gateway) -> dict[str, Any]:
    prefill_workers = gateway.prefill_pool.workers if gateway.prefill_pool is not None else ()
    return {
        **_of_both(gateway),
        "prefill_workers": [worker_status(worker, gateway) for worker in prefill_workers],
        "directory_entries": len(gateway.prefix_index),
        "known_positions": len(gateway.reader.positions),
        "hot_prefixes": len(gateway.warmup),
        "text_bytes_held": gateway.reader.held + gateway.shelf.held,
        "shadow": gateway.shadow.status(),
    }


def live(gateway: Gateway) -> dict[str, Any]:
    """The gateway as it is now; lengths in tokens, times in seconds, `now`, `since` and `began` since the epoch."""
    pool, shadow_mode = gateway.pool.workers, gateway.settings.shadow
    sums = gateway.shadow.sums if shadow_mode else gateway.accounting.sums
    minute, hour = sums.last(SLOTS_OF_MINUTE), sums.last(SLOTS)
    time_saved = gateway.accounting.time_saved()
    newest = gateway.accounting.explanations.newest(MOST_REQUESTS)
    return {
        **_of_both(gateway),
        "now": time.time(),
        "alarms": alarms(gateway),
        "api_port": gateway.settings.port if gateway.settings.admin_port is not None else None,  # None: the page's own
        "seconds_saved": time_saved.net,
        "time": {
            "saved": time_saved.saved,
            "spent": time_saved.spent,
            "unpriced_tokens": time_saved.waiting,
            "vllm_alone_at_most": time_saved.vllm_alone,
            "measurable": any(worker.engine is not None for worker in pool),
        },
        "changing": changing(hour, newest),
        "shadow_mode": shadow_mode,
        "shadow": gateway.shadow.would_save() if gateway.shadow.judged else None,
        "sums": {"minute": asdict(minute), "hour": asdict(hour), "whole": asdict(sums.whole)},
        "efficiency": {
            "now": minute.efficiency,
            "hour": hour.efficiency,
            "minutes": [sums.efficiency for sums in sums.by_minute()],
        },
        "day": [[sums.prompt, sums.shareable, sums.came] for sums in sums.by_ten_minutes()],
        "inflight": sum(worker.inflight for worker in pool),
        "queued": len(gateway.queue.waiting),
        "requests": [explanation.as_json() for explanation in newest],
        "words": {reason: words._asdict() for reason, words in REASON_TEXT.items()},
    }


def changing(hour: Totals, newest: Sequence[Explanation]) -> dict[str, Any] | None:
    """What text that changes early in prompts cost in the last hour, `lost` of `common` tokens; None if it is little.

    `common` is what prompts had in common with earlier ones, before and behind such text. `text` and `cure`: of the
    kind of text that cost most of it, as far as the `newest` requests say.
    """
    common = hour.shareable + hour.changed
    if not hour.changed or hour.changed < CHANGING * common:
        return None
    lost: Counter[tuple[str | None, str | None]] = Counter()
    for change in (request.changed for request in newest if request.began >= time.time() - HOUR):
        if change and (change["what"], change["role"]) != ("setting", "cache_salt"):  # kept apart on purpose
            lost[change["text"], change["cure"]] += change["lost"]
    text, cure = max(lost, key=lost.__getitem__, default=(None, None))
    return {"lost": hour.changed, "common": common, "text": text, "cure": cure}


def worker_status(worker: Worker, gateway: Gateway) -> dict[str, Any]:
    """One worker, for both pages; `templates` by model: what is known of its chat template by now."""
    facts, metrics = gateway.facts, worker.probed.metrics
    return {
        **{name: getattr(worker, name) for name in OF_WORKER},
        "asleep": worker.is_asleep,
        "breaker": "open" if worker.breaker.is_open else "closed",
        "others": worker.others._asdict(),
        "frontend": worker.probed.frontend._asdict(),
        "reports": {"url": worker.probed.reports.url, "why_not": worker.probed.reports.why_not},
        "models": [entry.get("id") for entry in worker.probed.models],
        "drafts": drafts_status(worker),
        "long_prefills": {"waits": metrics.long_prefill_waits, "threshold": metrics.long_prefill_threshold},
        "engine": asdict(worker.engine) if worker.engine is not None else None,
        "templates": {
            model: template_status(facts.facts(renderer_id) if (renderer_id := worker.renderer_id(model)) else None)
            for model in sorted(worker.names.templates)
        },
    }


def drafts_status(worker: Worker) -> dict[str, str] | None:
    """Whether hints are in use beside a worker's drafts, and how far its trial is; None if it does not draft."""
    return {"state": worker.draft_state, "trial": worker.trial_figures} if worker.draft_state else None


def template_status(facts: TemplateFacts | None) -> dict[str, Any]:
    """Which facts of a template are learnt under its default setting, and which it does not determine."""
    if facts is None:
        return {"learnt": False, "known": [], "unknown": []}
    found: dict[str, object] = {f"end of a {role} turn": facts.ends.get(role) for role in get_args(Role)}
    for place, tools in product(get_args(OpenerPlace), (False, True)):
        opener = facts.openers.get((place, tools))
        # Without tools there are no results, and in most templates nothing moves.
        if (tools or place not in ("tool", "results")) and (place != "next" or opener):
            found[f"opener: {place}{' with tools' if tools else ''}"] = opener
    unknown = [name for name, fact in found.items() if fact is None]
    return {"learnt": True, "known": [name for name in found if name not in unknown], "unknown": unknown}


def redis_status(gateway: Gateway) -> dict[str, Any]:
    return gateway.redis_sync.status() if gateway.redis_sync is not None else {"state": "off"}


def alarms(gateway: Gateway) -> list[str]:
    sentences = []
    check = gateway.self_check
    if check.differs:
        sentences.append(
            f"Answers differ: {check.checked:,} prompts were asked with and without cached prefixes, and "
            f"{check.differs:,} of them gave another answer. {_measures(check)}"
        )
    for worker in gateway.pool.workers:
        if not worker.up:
            never = "" if worker.boot else " It has not served since the gateway started."
            down = worker.why_down if worker.is_asleep else f"down: {worker.why_down or 'it does not answer'}"
            sentences.append(f"Worker {worker.name} is {down}.{never}")
        elif worker.breaker.is_open:
            sentences.append(f"Worker {worker.name} fails: it gets one request at a time until one succeeds.")
    return sentences


def warnings(gateway: Gateway) -> list[str]:
    up = [worker for worker in gateway.pool.workers if worker.up]
    sentences = [f"Worker {worker.name} gets no hints: {worker.refused}." for worker in up if worker.refused]
    sentences += [f"Worker {worker.name}: {worker.other_version}." for worker in up if worker.other_version]
    for worker in up:
        if worker.draft_state == TRIAL:
            so_far = f" ({worker.trial_figures})" if worker.trial_figures else ""
            sentences.append(f"Worker {worker.name} drafts: hints are off until its trial is over{so_far}.")
    unread = ((worker.name, why_not) for worker in up if (why_not := worker.probed.reports.why_not))
    sentences += [f"What the engine of worker {name} reports cannot be read: {why_not}." for name, why_not in unread]
    sentences += [
        f"Workers differ in the tokens they take for {model} (max_model_len): what is too long for one goes to another."
        for model in gateway.pool.uneven_models()
    ]
    if gateway.settings.shadow:
        sentences.insert(0, "Shadow mode: nothing is changed and no hint is sent; what that costs is counted.")
        counted = "what the plugin would save is counted as if it used hints with drafts"
        drafting = f"drafts: {counted}, which it does once they have passed a trial, at each start"
        told = ((worker.name, worker.probed.metrics) for worker in up)
        sentences += [f"Worker {name} {drafting}." for name, metrics in told if metrics.drafts and not metrics.engine]
    else:
        for worker in up:
            if worker.engine is None and not worker.refused:
                cure = f"`seamark doctor --worker {worker.address}` says what to do"
                sentences.append(f"Worker {worker.name} runs without Seamark's plugin: {cure}.")
    check = gateway.self_check
    if check.hints_off and not check.differs:
        sentences.append(_measures(check))
    if redis_status(gateway)["state"] == "down":
        sentences.append("Redis does not answer: this gateway works alone, and learns nothing from others.")
    return sentences


def _measures(check: SelfCheck) -> str:
    if check.cache_off:
        return "Hints are off and nothing is taken from the cache."
    return "Hints are off." if check.hints_off else "Hints are still on."


# One file with its script and style inside. It holds no data, so it needs no key: a browser that opens an address
# cannot send one. The page fetches its data with the key that the user typed into it.
PAGE = Path(__file__).with_name("page.html").read_bytes()


def _hash_of(tag: bytes) -> str:
    """The content of the only element of this name, as a content security policy names it."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(content).digest()).decode()}'"


PAGE_HEADERS = {
    # This script and this style alone may run, and they may talk to their own origin alone.
    "content-security-policy": f"default-src 'none'; script-src {_hash_of(b'script')}; style-src {_hash_of(b'style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
