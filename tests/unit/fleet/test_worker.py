"""A worker's circuit breaker, the quarantine of its cache, and the hint that it gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.renderer import WorkerRenderer
from proxy.fleet.worker import (
    BREAKER_FAILURES,
    CLOSED,
    MAX_TRIAL_SECONDS,
    OFF,
    ON,
    OPEN,
    TRIAL,
    TRIAL_SECONDS,
    CacheQuarantine,
    CircuitBreaker,
    GateReport,
    Worker,
)
from proxy.fleet.worker_metrics import EngineInfo
from tests.harness.probed import probed

BODY = {"model": "m"}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(clock)
    assert [breaker.failed(request) for request in range(BREAKER_FAILURES)] == [False] * (BREAKER_FAILURES - 1) + [True]
    return breaker


def test_the_breaker_opens_after_different_failures_in_a_row_and_a_success_closes_it():
    breaker = opened(Clock())
    assert breaker.is_open
    breaker.reset()
    assert not breaker.is_open
    assert not any(breaker.failed(request) for request in range(BREAKER_FAILURES - 1))


def test_an_answer_between_failures_keeps_the_breaker_closed():
    breaker = CircuitBreaker()
    for _ in range(3 * BREAKER_FAILURES):
        breaker.reset()
        assert not any(breaker.failed(request) for request in range(BREAKER_FAILURES - 1))


def test_one_request_that_always_fails_does_not_open_the_breaker():
    breaker = CircuitBreaker()
    assert not any(breaker.failed(7) for _ in range(10 * BREAKER_FAILURES))


def test_an_open_breaker_lets_one_request_through_at_a_time_and_waits_longer_after_each_that_fails():
    clock = Clock()
    breaker = opened(clock)
    for wait in (TRIAL_SECONDS, 2 * TRIAL_SECONDS, 4 * TRIAL_SECONDS):
        clock.now += wait - 0.1
        assert not breaker.begin_trial()
        clock.now += 0.1
        assert breaker.begin_trial() and not breaker.begin_trial()
        breaker.failed(9)
        breaker.end_trial()
    clock.now += MAX_TRIAL_SECONDS
    assert breaker.begin_trial()
    breaker.end_trial()  # its client has left: that says nothing
    assert breaker.begin_trial()
    breaker.reset()
    assert not breaker.is_open


def test_a_trusted_worker_gets_the_salt_that_the_request_has():
    assert CacheQuarantine().salt({**BODY, "cache_salt": "own"}) is None


def test_the_first_doubt_parts_requests_from_what_was_there_and_keeps_who_was_apart_apart():
    cache = CacheQuarantine()
    cache.quarantine()
    salts = [cache.salt(body) for body in (BODY, {**BODY, "cache_salt": None}, {**BODY, "cache_salt": "own"})]
    assert not cache.hints_allowed and cache.cache_allowed
    assert salts[0] == salts[1] != salts[2] and len(salts[0]) >= 16
    assert salts[2] == "own" + salts[0]
    assert cache.salt(BODY) == salts[0]  # whoever comes next finds what vLLM cached since


def test_the_second_takes_nothing_from_the_cache():
    cache = CacheQuarantine()
    cache.quarantine()
    cache.quarantine()
    assert not cache.cache_allowed and len({cache.salt(BODY) for _ in range(3)}) == 3


def test_what_was_doubted_stays_out_of_use_until_the_worker_restarts():
    cache = CacheQuarantine()
    cache.quarantine()
    apart = cache.salt(BODY)
    cache.restore()
    assert cache.hints_allowed and cache.salt(BODY) == apart
    cache.restarted()
    assert cache.salt(BODY) is None


def test_a_restart_alone_does_not_bring_trust_back():
    cache = CacheQuarantine()
    cache.quarantine()
    cache.quarantine()
    cache.restarted()
    assert not cache.hints_allowed and not cache.cache_allowed and cache.salt(BODY)


@pytest.mark.parametrize("salt", ["", 5, ["own"]])
def test_a_salt_that_vllm_refuses_is_left_to_it(salt):
    cache = CacheQuarantine()
    cache.quarantine()
    assert cache.salt({**BODY, "cache_salt": salt}) is None


FOUND = Found((Boundary("system", b"s", "first:1", 40), Boundary("turn", b"t", -5)), renderer_id=b"renderer")


def worker(version: str | None) -> Worker:
    engine = EngineInfo(version, "0.32.0", match_unit=16, block_size=384) if version is not None else None
    return Worker("http://w", None, probed=probed("w#1", engine), renderer_ids={"m": b"renderer"})


@pytest.mark.parametrize(
    ("version", "hint"),
    [
        ("0.3.0", ("first:1", -5)),
        ("0.10.2rc1", ("first:1", -5)),
        ("1.0", ("first:1", -5)),
        ("0.2.9", (40,)),
        ("0.1.0", (40,)),
        ("unknown", (40,)),
        (None, ()),
    ],
)
def test_an_older_plugin_gets_the_positions_that_were_told_only(version, hint):
    assert worker(version).hint(FOUND) == hint


def test_a_worker_that_may_keep_nothing_or_has_another_template_gets_no_hint():
    assert worker("0.3.0").hint(None) == ()
    assert worker("0.3.0").hint(FOUND._replace(renderer_id=b"another")) == ()
    quarantined = worker("0.3.0")
    quarantined.cache.quarantine()
    assert quarantined.hint(FOUND) == ()


def test_a_model_that_rendered_nothing_is_tried_again_once_its_worker_has_restarted():
    restarted = Worker("http://w", WorkerRenderer(None, "http://w", 1.0))
    restarted.mute_models.add("m")  # as whoever has tried in vain notes it
    restarted.restarted()
    assert not restarted.mute_models


def test_hints_are_for_a_worker_with_the_plugin_that_is_not_in_quarantine():
    async def render(body, path):
        raise NotImplementedError

    plain = Worker("http://w", renderer=render)
    engine = EngineInfo("0", "0", match_unit=16, block_size=384)
    patched = Worker("http://w", renderer=render, probed=probed("w#1", engine))
    assert (plain.takes_hints, patched.takes_hints) == (False, True)
    patched.cache.quarantine()
    assert not patched.takes_hints


def test_what_was_heard_last_of_the_gate_beside_drafts_decides_on_hints():
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, drafts=TRIAL)
    worker = Worker("http://w", renderer=WorkerRenderer(None, "http://w", 1.0), probed=probed("w#1", engine, "m"))
    assert (worker.draft_state, worker.takes_hints) == (TRIAL, False)
    worker.draft_gate = GateReport(OPEN, "id", "", read_at=1.0)
    assert worker.takes_hints
    worker.probed = replace(worker.probed, at=2.0)  # asked again since: it is on trial, as after another's verdict
    assert not worker.takes_hints
    worker.restarted()
    assert worker.draft_gate is None


def test_of_several_engines_behind_an_address_each_ones_feed_tells_its_gate():
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, drafts=OPEN)
    worker = Worker("http://w#1", renderer=WorkerRenderer(None, "http://w", 1.0), probed=probed("w#1", engine, "m"))
    assert worker.draft_state == TRIAL
    worker.draft_gate = GateReport(OPEN, "id", "", read_at=1.0)
    worker.probed = replace(worker.probed, at=2.0)
    assert worker.draft_state == OPEN


@pytest.mark.parametrize(("state", "takes"), [("", True), (ON, True), (OPEN, True), (OFF, False), (CLOSED, False)])
def test_hints_go_to_workers_that_draft_once_they_are_on_there(state, takes):
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, drafts=state)
    assert (
        Worker(
            "http://w", renderer=WorkerRenderer(None, "http://w", 1.0), probed=probed("w#1", engine, "m")
        ).takes_hints
        is takes
    )
