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

# A beginning that several conversations share is not held twice for nothing: the copy serves those that come there
# next. What is left of its price is the delay; at the full one agents would queue where their head was computed first.
SHARED_PRICE = 2

# A worker gets ahead of the others by whole prompts, and for seconds: conversations that left it then would be computed
# and held twice, for a lead that is soon gone. So a lead of up to LEAD_TOKENS (six passes of vLLM's 8,192 tokens) is
# borne at a higher price for each token. On replayed chats that keeps 1 to 3 of 100 hits more and the last first tokens
# where they were; 65,536 tokens keep still more, but then agents' last first tokens come later.
LEAD_TOKENS, LEAD_PRICE = 49_152, 16

MOST_LENGTHS = 8  # that workers hold are weighed, the longest first: none of the others is worth the time

# Where other gateways send to the same workers, what they sent in the last milliseconds is not known yet, and all would
# give their next requests to the one idlest worker. So workers that are so much busier than it (half of a pass of
# vLLM's 8,192 tokens) count as equally idle, and each gateway takes them in its own turn.
UNSEEN_TOKENS = 4096


def load(worker: Worker) -> int:
    """A worker's work, in tokens to prefill. This gateway's own is counted as it is sent, so a burst sees itself."""
    others = worker.others
    requests = worker.inflight + others.requests
    return worker.prefill_tokens + others.prefill_tokens + requests * REQUEST_TOKENS


def worth_waiting(tokens: int, elsewhere: int = 0, shared: int = 0) -> int:
    """How many tokens to prefill a worker that holds `tokens` of the prompt may be ahead of one that holds `elsewhere`.

    `shared`: tokens of the prompt's beginning that several conversations have.
    """
    lost = tokens - elsewhere
    common = max(0, min(shared, tokens) - elsewhere)
    price = SHARED_PRICE * common + RECOMPUTE_PRICE * (lost - common)
    return max(price, min(LEAD_PRICE * lost, LEAD_TOKENS))


def choose(
    workers: Sequence[Worker],
    held: Mapping[str, Holding],
    load_slack: int,
    affinity_key: Any = None,
    shared: int = 0,
    *,
    waits: bool = True,
) -> Worker:
    """One of `workers` (not empty). `held` is by boot identity; `load_slack` in requests under way.

    A worker may exceed those that hold less by `load_slack` requests and by what its prefix is `worth_waiting` for,
    which depends on how much of it is `shared` (tokens from the start) with other conversations.
    Requests with the same `affinity_key` (those of one conversation) go to one worker unless load or a prefix decides
    otherwise; without `waits`, as soon as another worker has less to do.
    """
    if len(workers) == 1:
        return workers[0]
    loads = [load(worker) for worker in workers]
    least = min(loads)
    slack = load_slack * REQUEST_TOKENS
    # Few of many workers hold anything of a prompt: all else is done for those few.
    by_length: dict[int, list[tuple[Worker, int]]] = {}  # with what each has to do
    for worker, work in [pair for pair in zip(workers, loads, strict=True) if pair[0].boot in held] if held else ():
        unit = worker.match_unit  # a shared head too short to be found is no reason to crowd one worker
        if unit and (usable := held[worker.boot].tokens // unit * unit):
            by_length.setdefault(usable, []).append((worker, work))
    near: list[tuple[Worker, int]] = []
    shorter = {length: min(work for _, work in holders) for length, holders in by_length.items()}
    for length in sorted(by_length, reverse=True)[:MOST_LENGTHS]:
        del shorter[length]
        most = min(work + worth_waiting(length, other, shared) for other, work in [(0, least), *shorter.items()])
        if near := [pair for pair in by_length[length] if pair[1] <= most + slack]:
            break
    is_named = isinstance(affinity_key, str)
    is_shared = not (is_named and waits) and any(worker.others.requests for worker in workers)
    unseen = UNSEEN_TOKENS if is_shared else 0
    if not near:
        most = least + (slack if is_named and waits else unseen)
        near = [pair for pair in zip(workers, loads, strict=True) if pair[1] <= most]
    if is_named:
        # Rendezvous hashing (Thaler and Ravishankar, 1998): workers that come and go move no other conversation. The
        # key is hashed once, because there may be a thousand workers.
        seed = xxh3_64_intdigest(affinity_key.encode(errors="surrogatepass"))
        return min(near, key=lambda pair: xxh3_64_intdigest(pair[0].url.encode(errors="surrogatepass"), seed))[0]
    # Equally idle ones in turn: that spreads new prefixes.
    idle = min(work for _, work in near) + unseen
    return min(near, key=lambda pair: (max(idle, pair[1]), pair[0].dispatched))[0]
