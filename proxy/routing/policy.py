"""Choosing a worker: the one that holds the longest prefix, unless it has much more to do than the least busy one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from proxy.fleet.worker import Worker
from proxy.routing.prefix_index import Holding

# The weight of a request under way beside its prefill, in tokens to prefill: it takes part in every pass.
REQUEST_TOKENS = 512

# What a token computed again costs, in tokens that the request would wait for. Waiting at the holder delays the request
# and nobody else. Computing again elsewhere delays it, and as much whoever comes behind it there (2); and the copy puts
# as much out of a full cache, which its owner computes again at the same price (2 x 2). On replayed traces, 1 keeps
# fewer hits than a session bound to one worker, and 4 the most with the earliest first tokens.
RECOMPUTE_PRICE = 4


def load(worker: Worker) -> int:
    """A worker's work, in tokens to prefill. It is counted when requests are sent, so a burst sees itself."""
    return worker.prefill_tokens + worker.inflight * REQUEST_TOKENS


def choose(workers: Sequence[Worker], held: Mapping[str, Holding], load_slack: int, affinity_key: Any = None) -> Worker:
    """One of `workers` (not empty). `held` is by boot identity; `load_slack` in requests under way.

    A worker may exceed the least loaded one by `load_slack` requests and by what computing its prefix elsewhere would
    cost the fleet: `RECOMPUTE_PRICE` for each token. Requests with the same `affinity_key` (those of
    one conversation) go to one worker unless load or a prefix decides otherwise.
    """
    if len(workers) == 1:
        return workers[0]
    loads = [worker.prefill_tokens + worker.inflight * REQUEST_TOKENS for worker in workers]
    least = min(loads)
    bound = least + load_slack * REQUEST_TOKENS
    # Few of many workers hold anything of a prompt: all else is done for those few.
    longest = 0
    near: list[Worker] = []
    if held:
        for worker, work in zip(workers, loads, strict=True):
            usable = _usable(worker, held) if worker.boot in held else 0
            if usable and usable >= longest and work <= bound + RECOMPUTE_PRICE * usable:
                near = [*near, worker] if usable == longest else [worker]
                longest = usable
    if not near:
        most = bound if isinstance(affinity_key, str) else least
        near = [worker for worker, work in zip(workers, loads, strict=True) if work <= most]

    def idlest(worker: Worker) -> tuple[int, int, int]:
        # The second spreads new prefixes over workers that are equally idle.
        named = f"{affinity_key} {worker.url}".encode(errors="surrogatepass") if isinstance(affinity_key, str) else None
        drawn = xxh3_64_intdigest(named) if named is not None else 0
        return (0 if drawn else load(worker), drawn, worker.dispatched)

    return min(near, key=idlest)


def _usable(worker: Worker, held: Mapping[str, Holding]) -> int:
    """Held tokens in whole match units: a shared head too short to be found is no reason to crowd one worker."""
    holding = held.get(worker.boot)
    if holding is None or worker.engine is None or not worker.takes_hints:
        return 0
    return holding.tokens // worker.engine.match_unit * worker.engine.match_unit
