"""Choosing a worker: the one that holds the longest prefix, unless it is much busier than the least busy one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from proxy.directory import Holding
from proxy.workers import Worker


def choose(workers: Sequence[Worker], held: Mapping[str, Holding], load_slack: int, together: Any = None) -> Worker:
    """One of `workers` (not empty). `held` is by boot identity; `load_slack` in requests in flight.

    Requests with the same `together` (a client's `prompt_cache_key`) go to one worker where nothing else speaks.
    """
    least = min(worker.inflight for worker in workers)
    near = [worker for worker in workers if worker.inflight <= least + load_slack]

    def longest_then_idlest(worker: Worker) -> tuple[int, int, int, int]:
        holding = held.get(worker.boot)
        # In match units: a shared head too short to be found again is no reason to crowd one worker.
        usable = holding.tokens // worker.engine.match_unit if holding and worker.engine else 0
        # The third spreads new prefixes over workers that are equally idle.
        named = f"{together} {worker.url}".encode(errors="surrogatepass") if isinstance(together, str) else None
        drawn = xxh3_64_intdigest(named) if named is not None else 0
        return (-usable, 0 if drawn else worker.inflight, drawn, worker.dispatched)

    return min(near, key=longest_then_idlest)
