"""How the engine core's counts and events reach the API server, which is another process.

They travel inside vLLM's scheduler statistics, in a mapping of names to integers that only LoRA serving uses; `detach`
takes them out again before any other reader sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.state_events import AdapterReplaced, CacheCleared, StateEvent, StateEvicted, StateStored

PREFIX = "seamark/"

EVENT = "event"

REQUEST = "request"

PIN = "pin"

REFUSED = "refused"


def attach(stats: Any, checkpoints: Checkpoints) -> None:
    """Put the counts since the last report, and the gauges, into a `SchedulerStats`.

    Every step carries the three lengths, which show the API server that the patches are live, and why hints are refused
    if they are; most carry no more.
    """
    carrier: dict[str, int] = stats.waiting_lora_adapters
    carrier[PREFIX + "match_unit"] = checkpoints.grid.alignment  # what a hit is a multiple of
    carrier[PREFIX + "block_size"] = checkpoints.block_size
    carrier[PREFIX + "ahead"] = checkpoints.grid.ahead if checkpoints.states is not None else 0
    if checkpoints.refusal is not None:
        carrier[f"{PREFIX}{REFUSED}/{checkpoints.refusal.cause}"] = 0
    counters, states = checkpoints.counters, checkpoints.states
    if not (counters.report_due or (states is not None and states.events.pending)):
        return
    counts = counters.take()
    report = {
        "bytes": states.bytes_held if states is not None else 0,
        "hits": counts.hits,
        "hit_tokens": counts.hit_tokens,
        "saved_ns": round(counts.saved_seconds * 1e9),
        "spent_ns": round(counts.spent_seconds * 1e9),
        "pass_ns": round(checkpoints.step_time.floor_seconds * 1e9),
        "token_ns": round(checkpoints.step_time.token_seconds * 1e9),
        **{f"written/{kind}": count for kind, count in counts.written.items()},
        **{f"outcome/{reason}": count for reason, count in counts.outcomes.items()},
        **{f"follower/{fate}": count for fate, count in counts.followers.items()},
        **{f"ignored/{reason}": count for reason, count in counts.ignored.items()},
        **{f"refused_file/{reason}": count for reason, count in counts.files_refused.items()},
        "file_bytes": counts.file_bytes,
        "disk_bytes": counters.disk_bytes,
        "loads_declined": counts.loads_declined,
        "pinned_blocks": states.pins.num_blocks if states is not None else 0,
        **{f"{REQUEST}/{encode_request(request)}": request.hit_tokens for request in counts.requests},
    }
    # Behind the outcomes, which they add to.
    report |= {f"{PIN}/{fate}/{request_id}": 0 for request_id, fate in counts.pinned}
    if states is not None:
        report |= {f"{EVENT}/{number}/{encode_event(event)}": 0 for number, event in states.events.take()}
    carrier.update((PREFIX + name, count) for name, count in report.items())


def detach(stats: Any) -> dict[str, int]:
    """Take the report out of a `SchedulerStats`; empty if the engine core sent none."""
    carrier: dict[str, int] = stats.waiting_lora_adapters
    names = [name for name in carrier if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): carrier.pop(name) for name in names}


def take_cause(report: dict[str, int]) -> str:
    """Take out of a report why hints are refused; empty if they are not."""
    name = next((name for name in report if name.startswith(f"{REFUSED}/")), "")
    report.pop(name, None)
    return name.partition("/")[2]


def encode_request(request: AdmittedRequest) -> str:
    """A request as the name of its hit tokens."""
    # The id last: it is a client's, and may hold anything.
    return f"{request.reason}/{request.shared}/{':'.join(map(str, request.resolved))}/{request.request_id}"


def decode_request(name: str, hit_tokens: int) -> AdmittedRequest:
    """A request out of what `encode_request` made."""
    reason, shared, resolved, request_id = name.split("/", 3)
    positions = tuple(int(position) for position in resolved.split(":") if position)
    return AdmittedRequest(request_id, reason, hit_tokens, int(shared), positions)


def encode_event(event: StateEvent) -> str:
    """An event as the name of a number, the only text that has a place in the statistics."""
    match event:
        case StateStored(request_id, end, states):
            # The id last: it is a client's, and may hold anything.
            return f"came/{end}/{','.join(f'{position}:{name}' for position, name in states)}/{request_id}"
        case StateEvicted(name):
            return f"gone/{name}"
        case CacheCleared():
            return "cleared"
        case AdapterReplaced(name):
            return f"adapter/{name}"


def decode_event(name: str) -> tuple[int, StateEvent]:
    """Number and event out of `NUMBER/` and what `encode_event` made."""
    number, _, rest = name.partition("/")
    kind, _, rest = rest.partition("/")
    if kind == "cleared":
        return int(number), CacheCleared()
    if kind == "gone":
        return int(number), StateEvicted(rest)
    if kind == "adapter":
        return int(number), AdapterReplaced(rest)
    end, states, request_id = rest.split("/", 2)
    pairs = (pair.partition(":") for pair in states.split(",") if pair)
    return int(number), StateStored(request_id, int(end), tuple((int(position), state) for position, _, state in pairs))


def report_with_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `Scheduler.make_stats`: the report travels to the process that serves `/metrics`."""

    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = original(self, *args, **kwargs)
        if stats is not None:
            attach(stats, self.seamark)
        return stats

    return make_stats
