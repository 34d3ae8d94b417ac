"""Choosing a worker: the one that holds the longest prefix, unless it has much more to do than the least busy one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from proxy.fleet.worker import Worker
from proxy.routing.prefix_index import Holding

# The weight of a request under way beside its prefill, in tokens to prefill: it takes part in every pass.
REQUEST_TOKENS = 512


def load(worker: Worker) -> int:
    """A worker's work, in tokens to prefill. It is counted when requests are sent, so a burst sees itself."""
    return worker.prefill_tokens + worker.inflight * REQUEST_TOKENS


def choose(workers: Sequence[Worker], held: Mapping[str, Holding], load_slack: int, affinity_key: Any = None) -> Worker:
    """One of `workers` (not empty). `held` is by boot identity; `load_slack` in requests under way.

    A worker may exceed the least loaded one by `load_slack` requests and by what its prefix saves: waiting that long
    costs no more than computing the prefix elsewhere. Requests with the same `affinity_key` (those of
    one conversation) go to one worker unless load or a prefix decides otherwise.
    """
    if len(workers) == 1:
        return workers[0]
    usable = {worker.url: _usable(worker, held) for worker in workers}
    bound = min(map(load, workers)) + load_slack * REQUEST_TOKENS
    near = [worker for worker in workers if load(worker) <= bound + usable[worker.url]]

    def longest_then_idlest(worker: Worker) -> tuple[int, int, int, int]:
        # The third spreads new prefixes over workers that are equally idle.
        named = f"{affinity_key} {worker.url}".encode(errors="surrogatepass") if isinstance(affinity_key, str) else None
        drawn = xxh3_64_intdigest(named) if named is not None else 0
        return (-usable[worker.url], 0 if drawn else load(worker), drawn, worker.dispatched)

    return min(near, key=longest_then_idlest)


def _usable(worker: Worker, held: Mapping[str, Holding]) -> int:
    """Held tokens in whole match units: a shared head too short to be found is no reason to crowd one worker."""
    holding = held.get(worker.boot)
    if holding is None or worker.engine is None or not worker.takes_hints:
        return 0
    return holding.tokens // worker.engine.match_unit * worker.engine.match_unit
