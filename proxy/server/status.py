"""What the live page shows, as one object for JSON. Of prompts it holds what explanations hold, and no more."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from proxy.fleet.worker import Worker
from proxy.observability.reasons import REASON_TEXT

if TYPE_CHECKING:
    from proxy.fleet.self_check import SelfCheck
    from proxy.pipeline.gateway import Gateway

MOST_REQUESTS = 50


def live(gateway: Gateway) -> dict[str, Any]:
    """The gateway as it is now; lengths in tokens, times in seconds, `now`, `since` and `began` since the epoch."""
    pool, sums = gateway.pool.workers, gateway.accounting.sums
    minute, hour, whole = sums.last_minute(), sums.last_hour(), sums.since_start()
    newest = gateway.reader.explanations.newest(MOST_REQUESTS)
    return {
        "now": time.time(),
        "since": gateway.created,
        "alarms": alarms(gateway),
        "warnings": warnings(gateway),
        "seconds_saved": gateway.accounting.seconds_saved,
        "shadow": gateway.shadow.would_save() if gateway.shadow.judged else None,
        "sums": {name: sums._asdict() for name, sums in (("minute", minute), ("hour", hour), ("whole", whole))},
        "efficiency": {
            "now": minute.efficiency,
            "hour": hour.efficiency,
            "minutes": [sums.efficiency for sums in sums.by_minute()],
        },
        "inflight": sum(worker.inflight for worker in pool),
        "queued": len(gateway.queue),
        "workers": [worker_told(worker) for worker in pool],
        "redis": redis_told(gateway),
        "self_check": self_check_told(gateway),
        "requests": [told.as_json() for told in newest],
        "words": {reason: words._asdict() for reason, words in REASON_TEXT.items()},
    }


def worker_told(worker: Worker) -> dict[str, Any]:
    """One worker, for the status page and the live one."""
    return {
        "url": worker.url,
        "name": worker.name,
        "up": worker.up,
        "warming": worker.warming,
        "boot": worker.boot,
        "inflight": worker.inflight,
        "prefill_tokens": worker.prefill_tokens,
        "models": [entry.get("id") for entry in worker.models],
        "engine": asdict(worker.engine) if worker.engine is not None else None,
    }


def redis_told(gateway: Gateway) -> dict[str, Any]:
    """What is known of Redis."""
    return gateway.redis_sync.status() if gateway.redis_sync is not None else {"state": "off"}


def self_check_told(gateway: Gateway) -> dict[str, Any] | None:
    """Prompts whose answers from the cache were judged, and what followed; None where that is switched off."""
    check = gateway.self_check
    if not gateway.settings.self_check_interval:
        return None
    return {
        "checked": check.checked,
        "differs": check.differs,
        "hints_off": check.hints_off,
        "cache_off": check.cache_off,
    }


def alarms(gateway: Gateway) -> list[str]:
    """What nobody may overlook, in sentences."""
    told = []
    check = gateway.self_check
    if check.differs:
        told.append(
            f"Answers differ: of {check.checked:,} prompts asked with and without cached prefixes, {check.differs:,} "
            f"gave another answer. {_measures(check)}"
        )
    for worker in gateway.pool.workers:
        if not worker.up:
            never = "" if worker.boot else ", and has not since the gateway started"
            told.append(f"Worker {worker.name} is down: it does not answer{never}.")
    return told


def warnings(gateway: Gateway) -> list[str]:
    """What costs hits or may soon, in sentences."""
    if gateway.settings.shadow:
        told = ["Shadow mode: nothing is changed and no hint is sent; what that costs is counted."]
    else:
        told = [_without_plugin(worker) for worker in gateway.pool.workers if worker.up and worker.engine is None]
    check = gateway.self_check
    if check.hints_off and not check.differs:
        told.append(_measures(check))
    if redis_told(gateway)["state"] == "down":
        told.append("Redis does not answer: this gateway goes on alone, and learns nothing from others.")
    return told


def _measures(check: SelfCheck) -> str:
    if check.cache_off:
        return "Hints are off and nothing is taken from the cache."
    return "Hints are off." if check.hints_off else "Hints are still on."


def _without_plugin(worker: Worker) -> str:
    cure = f"`seamark doctor --worker {worker.url}` says what to do"
    return f"Worker {worker.name} runs without Seamark's plugin: {cure}."
