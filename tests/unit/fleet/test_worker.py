"""A worker's circuit breaker, the quarantine of its cache, and the hint that it gets."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT, RESPONSES, Chat
from proxy.fleet.probe import Probed
from proxy.fleet.worker import (
    BREAKER_FAILURES,
    OPEN,
    TRIAL,
    CacheQuarantine,
    CircuitBreaker,
    GateReport,
    Worker,
    prompt_of,
)
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
from tests.harness.probed import probed

BODY = {"model": "m"}


def test_a_first_doubt_parts_requests_from_what_was_there_and_a_second_from_the_cache():
    cache, own = CacheQuarantine(), {**BODY, "cache_salt": "own"}
    assert cache.salt(own) is None
    cache.quarantine()
    apart = cache.salt(BODY)
    assert (cache.hints_allowed, cache.cache_allowed) == (False, True) and len(apart) >= 16
    assert (cache.salt({**BODY, "cache_salt": None}), cache.salt(own)) == (apart, "own" + apart)
    assert [cache.salt({**BODY, "cache_salt": refused}) for refused in ("", 5, ["own"])] == [None] * 3, "vLLM says why"
    cache.restore()
    assert cache.hints_allowed and cache.salt(BODY) == apart, "what was doubted stays out of use"
    cache.restarted()
    assert cache.salt(BODY) is None
    for _ in range(2):
        cache.quarantine()
    cache.restarted()  # that alone does not bring trust back
    assert not cache.hints_allowed and not cache.cache_allowed and len({cache.salt(BODY) for _ in range(3)}) == 3


FOUND = Found((Boundary("system", b"s", "first:1", 40), Boundary("turn", b"t", -5)), renderer_id=b"renderer")


def worker(**metrics: Any) -> Worker:
    told = WorkerMetrics(**(metrics or {"engine": EngineInfo("0.3.0", "0.32.0", 16, 384)}))
    return Worker("http://w", None, probed=Probed(metrics=told), renderer_ids={"m": b"renderer"})


def test_only_a_worker_with_a_plugin_of_this_release_gets_the_hint():
    assert worker().hint(FOUND) == ("first:1", -5)
    other = worker(other_release="update the plugin")
    assert other.hint(FOUND) == worker(engine=None).hint(FOUND) == () and other.refused == "update the plugin"


def test_of_several_engines_behind_an_address_each_ones_feed_tells_its_gate():
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, drafts=OPEN)
    worker = Worker("http://w#1", renderer=WorkerRenderer(None, "http://w", 1.0), probed=probed("w#1", engine, "m"))
    assert worker.draft_state == TRIAL
    worker.draft_gate = GateReport(OPEN, "id", "", read_at=1.0)
    worker.probed = replace(worker.probed, at=2.0)
    assert worker.draft_state == OPEN


def test_a_breaker_waits_twice_as_long_only_after_a_trial_that_failed_and_a_minute_at_most():
    clock = SimpleNamespace(now=0.0)
    breaker = CircuitBreaker(lambda: clock.now)
    assert [breaker.failed(request) for request in range(BREAKER_FAILURES)] == [False] * (BREAKER_FAILURES - 1) + [True]
    clock.now = 4.0
    assert not breaker.failed(9) and not breaker.wants_trial  # one that was sent before it opened
    waits = []
    for _ in range(6):
        began = clock.now
        while not breaker.wants_trial:
            clock.now += 0.5
        waits.append(clock.now - began)
        assert breaker.begin_trial() and not breaker.wants_trial
        assert not breaker.failed(9)
        breaker.end_trial()
    assert waits == [5, 10, 20, 40, 60, 60]
    breaker.reset()
    assert not breaker.wants_trial and not breaker.begin_trial()
    assert [breaker.failed(request) for request in range(3)] == [False, False, True]
    clock.now += 4.5
    assert not breaker.wants_trial
    clock.now += 0.5
    assert breaker.wants_trial


def bare(url: str = "http://w:1", **known) -> Worker:
    return Worker(url, renderer=WorkerRenderer(None, url, 1.0), **known)


def test_a_request_to_one_of_several_engines_says_which_whatever_the_client_said():
    headers = [(b"x-data-parallel-rank", b"9"), (b"a", b"b"), (b"x-data-parallel-rank", b"8")]
    assert bare("http://w:1").addressed(headers) == headers
    assert bare("http://w:1#3").addressed(headers) == [(b"a", b"b"), (b"x-data-parallel-rank", b"3")]


async def test_a_prompt_is_as_the_worker_renders_the_request_or_else_its_chat():
    rendered = []

    def worker_that(*fails: str) -> Worker:
        async def render(body, path=CHAT):
            rendered.append((body, path))
            if path in fails:
                raise RenderFailed("no route")
            return TokenIds.of([1, 2])

        rendered.clear()
        return Worker("http://w", renderer=render)

    chat, native = {"model": "m", "messages": []}, {"model": "m", "input": "Tide?"}
    ids = await prompt_of(Chat(chat, [], ids=[7, 8]), worker_that())
    assert list(ids.ids()) == [7, 8] and not rendered
    response = Chat(chat, [], path=RESPONSES, native=native)
    assert list((await prompt_of(response, worker_that())).ids()) == [1, 2] and rendered == [(native, RESPONSES)]
    await prompt_of(response, worker_that(RESPONSES))
    assert rendered == [(native, RESPONSES), (chat, CHAT)]
    with pytest.raises(RenderFailed):
        await prompt_of(Chat(chat, []), worker_that(CHAT))
    assert rendered == [(chat, CHAT)]
