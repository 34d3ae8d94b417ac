"""The worker that holds the prefix, unless it is much busier: beside the same rule in its plainest words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.fleet.worker import Load, Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.routing.policy import (
    LEAD_PRICE,
    LEAD_TOKENS,
    RECOMPUTE_PRICE,
    REQUEST_TOKENS,
    SHARED_PRICE,
    UNSEEN_TOKENS,
    choose,
    worth_waiting,
)
from proxy.routing.prefix_index import Holding
from tests.harness.probed import probed


def worker(name: str, **fields: int) -> Worker:
    engine = EngineInfo("0.1.0", "0.32.0", match_unit=16, block_size=384)
    return Worker(f"http://{name}", renderer=None, probed=probed(name, engine), **fields)


TOKENS = st.sampled_from([0, 15, 16, 31, 400, 407, 8192, 60_000])

WORKERS = st.lists(
    st.tuples(
        TOKENS,  # that it holds
        st.booleans(),  # whether its answers differed
        st.integers(0, 3),  # requests under way
        st.integers(0, 2),  # that it was sent
        st.sampled_from([0, 1500, 4096, 49_152, 49_153, 240_000]),  # tokens to prefill
        st.sampled_from([Load(), Load(), Load(1, 700)]),  # of other gateways
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200)
@given(WORKERS, st.sampled_from([0, 8]), st.sampled_from([0, 16, 8192]), st.sampled_from([None, "session"]))
def test_the_longest_prefix_decides_unless_its_worker_is_ahead_by_more_than_that_is_worth(
    drawn, slack, shared, session
):
    workers, held, has, work = [], {}, {}, {}
    for name, (tokens, differed, inflight, dispatched, prefill, others) in zip("abcd", drawn, strict=False):
        one = worker(name, inflight=inflight, dispatched=dispatched, prefill_tokens=prefill)
        one.others = others
        if differed:
            one.cache.quarantine()
        workers.append(one)
        held[name] = Holding(tokens, b"key", is_told=True)
        has[name] = 0 if differed else tokens // 16 * 16
        work[name] = prefill + others.prefill_tokens + REQUEST_TOKENS * (inflight + others.requests)
    least, more = min(work.values()), slack * REQUEST_TOKENS
    unseen = UNSEEN_TOKENS if any(one.others.requests for one in workers) and session is None else 0
    for length in sorted(filter(None, has.values()), reverse=True):
        bars = [(0, least), *((has[name], work[name]) for name in has if 0 < has[name] < length)]
        most = more + min(other_work + worth_waiting(length, other, shared) for other, other_work in bars)
        if near := [name for name in has if has[name] == length and work[name] <= most]:
            break
    else:
        near = [name for name in has if work[name] <= least + (more if session else unseen)]
    chosen = choose(workers, held, slack, session, shared)
    assert chosen.boot in near
    if session is None:
        idle = min(work[name] for name in near) + unseen
        ranks = {one.boot: (max(idle, work[one.boot]), one.dispatched) for one in workers}
        assert ranks[chosen.boot] == min(ranks[name] for name in near)


@pytest.mark.parametrize(
    ("tokens", "elsewhere", "shared", "worth"),
    [
        (100, 0, 0, LEAD_PRICE * 100),  # a short lead is soon gone
        (8192, 0, 8192, LEAD_TOKENS),
        (60_000, 0, 0, RECOMPUTE_PRICE * 60_000),
        (60_000, 0, 99_999, SHARED_PRICE * 60_000),  # a head of many, which is soon as useful elsewhere
        (60_000, 40_000, 50_000, SHARED_PRICE * 10_000 + RECOMPUTE_PRICE * 10_000),
    ],
)
def test_a_request_waits_for_what_computing_again_would_cost(tokens, elsewhere, shared, worth):
    assert worth_waiting(tokens, elsewhere, shared) == worth


def test_a_conversation_stays_at_its_worker_and_one_that_goes_moves_no_other():
    workers = [worker(name) for name in "abcde"]
    keys = [f"session {number} \ud800" for number in range(50)]
    before = {key: choose(workers, {}, 8, key).boot for key in keys}
    assert set(before.values()) == set("abcde")
    after = {key: choose(workers[1:], {}, 8, key).boot for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "a")
