"""The way of the engine core's counts to the API server, which is another process.

They ride inside vLLM's scheduler statistics, in a mapping of names to integers that only LoRA serving uses; `detach`
takes them out again before any other reader sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.state_events import CacheCleared, StateEvent, StateEvicted, StateStored

PREFIX = "seamark/"

NEWS = "news"


def attach(stats: Any, checkpoints: Checkpoints, block_pool: Any) -> None:
    """Put the counts since the last report, and the gauges, into a `SchedulerStats`.

    Each step carries the two lengths, by which the other side knows that the patches are live; most carry no more.
    """
    carrier = stats.waiting_lora_adapters
    carrier[PREFIX + "match_unit"] = checkpoints.match_unit
    carrier[PREFIX + "block_size"] = checkpoints.block_size
    if not checkpoints.report_due():
        return
    tally = checkpoints.take_tally()
    report = {
        "bytes": checkpoints.bytes_held(block_pool),
        "hits": tally.hits,
        "hit_tokens": tally.hit_tokens,
        "saved_ns": round(tally.saved_seconds * 1e9),
        "spent_ns": round(tally.spent_seconds * 1e9),
        "pass_ns": round(checkpoints.pace.floor_seconds * 1e9),
        "token_ns": round(checkpoints.pace.token_seconds * 1e9),
        **{f"written/{kind}": count for kind, count in tally.written.items()},
        **{f"outcome/{reason}": count for reason, count in tally.outcomes.items()},
        **{f"follower/{fate}": count for fate, count in tally.followers.items()},
        **{f"ignored/{reason}": count for reason, count in tally.ignored.items()},
        **{f"request/{reason}/{name}": hit_tokens for name, reason, hit_tokens in tally.requests},
    }
    if checkpoints.findable is not None:
        report |= {f"{NEWS}/{number}/{_written(news)}": 0 for number, news in checkpoints.findable.take_news()}
    carrier.update((PREFIX + name, count) for name, count in report.items())


def detach(stats: Any) -> dict[str, int]:
    """Take the report out of a `SchedulerStats`; empty if the engine core sent none."""
    carrier = stats.waiting_lora_adapters
    names = [name for name in carrier if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): carrier.pop(name) for name in names}


def _written(news: StateEvent) -> str:
    """News in the one kind of word that has a place in the statistics: the name of a number."""
    match news:
        case StateStored(request_id, end, states):
            # The id last: it is a client's, and may hold anything.
            return f"came/{end}/{','.join(f'{position}:{name}' for position, name in states)}/{request_id}"
        case StateEvicted(name):
            return f"gone/{name}"
        case CacheCleared():
            return "cleared"


def news_in(name: str) -> tuple[int, StateEvent]:
    """Number and news out of what `_written` made of them, without the leading `NEWS`."""
    number, _, rest = name.partition("/")
    kind, _, rest = rest.partition("/")
    if kind == "cleared":
        return int(number), CacheCleared()
    if kind == "gone":
        return int(number), StateEvicted(rest)
    end, states, request_id = rest.split("/", 2)
    pairs = (pair.partition(":") for pair in states.split(",") if pair)
    return int(number), StateStored(request_id, int(end), tuple((int(position), state) for position, _, state in pairs))


def report_with_stats(original: Callable) -> Callable:
    """Replacement of `Scheduler.make_stats`: the counts ride to the process that serves `/metrics`."""

    def make_stats(self, *args, **kwargs):
        stats = original(self, *args, **kwargs)
        if stats is not None:
            attach(stats, self.seamark, self.kv_cache_manager.block_pool)
        return stats

    return make_stats
