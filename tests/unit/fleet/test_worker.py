"""A worker's circuit breaker, the quarantine of its cache, and the hint that it gets."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT, RESPONSES, Chat
from proxy.fleet.probe import Probed
from proxy.fleet.reports import Reports
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
    Slot,
    Worker,
    prompt_of,
)
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
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


def worker(**metrics: Any) -> Worker:
    told = WorkerMetrics(**(metrics or {"engine": EngineInfo("0.3.0", "0.32.0", 16, 384)}))
    return Worker("http://w", None, probed=Probed(metrics=told), renderer_ids={"m": b"renderer"})


def test_only_a_worker_with_a_plugin_of_this_release_gets_the_hint():
    assert worker().hint(FOUND) == ("first:1", -5)
    other = worker(other_release="update the plugin")
    assert other.hint(FOUND) == worker(engine=None).hint(FOUND) == () and other.refused == "update the plugin"


def test_a_worker_that_may_keep_nothing_or_has_another_template_gets_no_hint():
    assert worker().hint(None) == ()
    assert worker().hint(FOUND._replace(renderer_id=b"another")) == ()
    quarantined = worker()
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


def test_a_breaker_waits_twice_as_long_only_after_a_trial_that_failed_and_a_minute_at_most():
    clock = Clock()
    breaker = opened(clock)
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


def test_a_request_counts_at_its_worker_until_it_is_given_back_and_its_prompt_until_that_is_computed():
    busy = bare()
    first, second = Slot(busy, 100), Slot(busy, -5)
    assert (busy.inflight, busy.dispatched, busy.prefill_tokens) == (2, 2, 100)
    assert (first.number, second.number, second.prefill_tokens) == (1, 2, 0)
    first.left_to_compute(60)
    assert (busy.prefill_tokens, first.prefill_tokens) == (60, 60)
    first.left_to_compute(80)  # it never becomes more
    assert (busy.prefill_tokens, first.prefill_tokens) == (60, 60)
    third = Slot(busy, 7)
    first.give_back()
    assert (busy.inflight, busy.prefill_tokens, third.number) == (2, 7, 3)
    second.give_back()
    third.give_back()
    assert (busy.inflight, busy.dispatched, busy.prefill_tokens) == (0, 3, 0)


@pytest.mark.parametrize(
    ("most", "inflight", "has_room"), [(0, 0, True), (0, 99, True), (2, 1, True), (2, 2, False), (2, 3, False)]
)
def test_a_worker_has_room_for_as_many_requests_as_it_may_have_at_once(most, inflight, has_room):
    assert bare(max_inflight=most, inflight=inflight).has_room is has_room


@pytest.mark.parametrize(
    ("url", "name", "address", "rank"),
    [
        ("http://w:1", "w:1", "http://w:1", ""),
        ("https://w/base#12", "w/base#12", "https://w/base", "12"),
        ("w:1", "w:1", "w:1", ""),
    ],
)
def test_a_workers_url_names_it_and_its_engine(url, name, address, rank):
    found = bare(url)
    assert (found.name, found.address, found.rank, found.reports_url) == (name, address, rank, address)
    found.probed = replace(found.probed, reports=Reports("http://w:2"))
    assert found.reports_url == "http://w:2"


def test_a_request_to_one_of_several_engines_says_which_whatever_the_client_said():
    headers = [(b"x-data-parallel-rank", b"9"), (b"a", b"b"), (b"x-data-parallel-rank", b"8")]
    assert bare("http://w:1").addressed(headers) == headers
    assert bare("http://w:1#3").addressed(headers) == [(b"a", b"b"), (b"x-data-parallel-rank", b"3")]


def test_why_it_is_down_is_said_while_it_is_and_one_that_sleeps_is_known_by_that():
    found = bare(words="asleep (level 1)")
    assert (found.why_down, found.is_asleep, found.is_sound) == ("asleep (level 1)", True, False)
    found.words = "gone"
    assert (found.why_down, found.is_asleep) == ("gone", False)
    found.up, found.words = True, "asleep"
    assert (found.why_down, found.is_asleep, found.is_sound) == ("", False, True)
    for request in range(BREAKER_FAILURES):
        found.breaker.failed(request)
    assert not found.is_sound


def test_in_shadow_mode_a_plugin_counts_for_nothing_but_its_refusal():
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, refused="a window", drafts=OFF)
    found = bare(probed=probed("w#1", engine, "m"))
    assert (found.engine, found.refused, found.takes_hints, found.draft_state) == (engine, "a window", False, OFF)
    found.in_shadow = True
    assert (found.engine, found.refused, found.takes_hints, found.draft_state) == (None, "a window", False, "")
    assert bare().refused == ""


@pytest.mark.parametrize(
    ("drafts", "patched", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_drafts_are_told_of_where_no_plugin_says_what_it_makes_of_them(drafts, patched, shown):
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384) if patched else None
    assert bare(probed=probed("w#1", engine, drafts=drafts)).drafts is shown


@pytest.mark.parametrize(("read_at", "state"), [(1.9, TRIAL), (2.0, OPEN), (2.1, OPEN)])
def test_of_a_gate_that_was_heard_of_twice_the_later_word_counts(read_at, state):
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, drafts=TRIAL)
    found = bare(probed=replace(probed("w#1", engine), at=2.0), draft_gate=GateReport(OPEN, "id", "", read_at))
    assert found.draft_state == state


@pytest.mark.parametrize("state", [ON, OFF])
def test_of_several_engines_behind_an_address_the_setting_is_that_of_all(state):
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, drafts=state)
    found = bare("http://w#1", probed=replace(probed("w#1", engine), at=2.0))
    found.draft_gate = GateReport(OPEN, "id", "", read_at=1.0)
    assert found.draft_state == state


def test_a_request_on_trial_gets_a_hint_where_clients_get_none():
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384, drafts=TRIAL)
    found = Worker("http://w", None, probed=probed("w#1", engine), renderer_ids={"m": b"renderer"})
    assert found.hint(FOUND) == () and found.hint(FOUND, on_trial=True) == ("first:1", -5)
    assert found.hint(None, on_trial=True) == ()
    assert found.hint(FOUND._replace(renderer_id=b"another"), on_trial=True) == ()
    found.probed = probed("w#1", None)
    assert found.hint(FOUND, on_trial=True) == ()


def test_names_stand_for_the_base_model_whose_template_they_have():
    cards = [{"id": "m"}, {"id": "alias"}, {"id": "lora", "parent": "m"}]
    found = bare(probed=replace(probed(), models=cards, is_vllm=True))
    names = ("m", "alias", "lora", "unknown", None, 7)
    assert [found.serves(name) for name in names] == [True, True, True, False, False, False]
    assert [found.listed(name) for name in names] == ["m", "alias", "lora", "m", "m", "m"]
    assert [found.template_of(name) for name in names] == ["m"] * 6
    found.renderer_ids["m"] = b"renderer"
    assert found.renderer_id("lora") == found.renderer_id("unknown") == b"renderer"
    nameless = bare()
    assert (nameless.listed("m"), nameless.template_of("m"), nameless.listed(7)) == ("m", "m", "")
    assert nameless.renderer_id("m") is None


async def test_what_a_model_is_rendered_with_is_asked_for_until_the_worker_tells():
    asked = []

    async def render(body, path=CHAT):
        asked.append(body["model"])
        if len(asked) == 1:
            raise RenderFailed("no answer") from OSError()
        return TokenIds.of([1, 2])

    found = Worker("http://w", renderer=render, probed=probed("w#1", None, "m"))
    assert await found.identify("m") is None and found.renderer_ids == {}
    known = await found.identify("alias")
    assert known and known == found.renderer_id("m") and set(asked) == {"m"}
    count = len(asked)
    assert await found.identify("m") == known and len(asked) == count


def test_a_restart_takes_what_was_learnt_of_the_worker_and_leaves_its_requests():
    engine = EngineInfo("0.3.0", "0", match_unit=16, block_size=384)
    found = bare(probed=probed("w#1", engine, "m"), inflight=2, takes_any_name=True, renderer_ids={"m": b"renderer"})
    found.draft_gate, found.renderer._has_render_route = GateReport(OPEN, "id", "", 1.0), False
    for request in range(BREAKER_FAILURES):
        found.breaker.failed(request)
    found.restarted()
    assert (found.takes_any_name, found.renderer_ids, found.draft_gate, found.inflight) == (None, {}, None, 2)
    assert not found.breaker.is_open and found.renderer._has_render_route


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


def test_when_a_worker_began_to_answer_last_is_known():
    found = bare()
    assert found.answered_at == float("-inf")
    before = time.monotonic()
    found.answered()
    assert before <= found.answered_at <= time.monotonic()
