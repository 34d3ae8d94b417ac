"""States of peers: vLLM's tiers, sessions and sockets; what NIXL would copy between processes is copied here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.p2p import manager as p2p

from engine_patches.disk import flags, peers
from tests.harness.copied_rows import CopiedRows
from tests.harness.peer_worker import KEYS, OTHER, Worker, loaded, until


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(p2p, "NixlTransport", CopiedRows)
    started: list[Worker] = []

    def start(*arguments: Any) -> Worker:
        started.append(Worker(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.tier.shutdown()


def test_what_a_peer_holds_is_loaded_and_what_it_lacks_is_not(worker):
    a, b = worker(), worker()
    a.store(KEYS[:2], 5)
    context = b.request(a)
    assert loaded(b, context, KEYS[:2], a) and [b.row(key) for key in KEYS[:2]] == [5, 5]
    assert not loaded(b, context, KEYS[2:3], a)
    b.manager.on_request_finished(context)
    assert b.tier.cost.seconds(0) == 0 and b.tier.cost._loads and not b.tier.lost


def test_requests_that_are_given_one_name_do_not_end_each_others_loads(worker):
    a, b = worker(), worker()
    a.store(KEYS[:2], 5)
    one, other = (b.request(a, kv_request_id="same") for _ in range(2))
    until(lambda: b.tier.ask(KEYS[:2], other, 60) and b.tier.ask(KEYS[:1], one, 60), a, b)
    b.manager.lookup(KEYS[1], other)
    b.manager.on_request_finished(one)  # between a lookup and the step's end
    assert loaded(b, other, KEYS[1:2], a) and b.row(KEYS[1]) == 5


@pytest.mark.parametrize("leaves_the_fingerprint_out", [False, True])
def test_a_peer_of_another_identity_gives_nothing_and_gets_nothing(worker, leaves_the_fingerprint_out):
    a, b = worker(OTHER), worker()
    a.store(KEYS[:1], 5)
    b.store(KEYS[1:2], 6)
    if leaves_the_fingerprint_out:  # vLLM takes that for one that fits
        a.tier._data._config_fingerprint = ""
    for one, other, key in ((b, a, KEYS[0]), (a, b, KEYS[1])):
        assert not loaded(one, one.request(other), [key], other)
        assert one.primary._policy.get(key) is None
    assert not a.tier._data.waiting and not b.tier._data.waiting


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        [],
        {"remote_kv_source": None},
        {"remote_kv_source": {"remote_host": "127.0.0.1"}},
        {"remote_kv_source": {"remote_host": 5, "remote_port": 5710}},
        {"remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": "5710"}},
        {"remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": 70_000}},
        {"remote_prefiller": {"remote_host": "127.0.0.1", "remote_port": 5710, "kv_request_id": "x"}},
        {"remote_decoder": {"kv_request_id": "x"}},
    ],
    ids=str,
)
def test_a_request_that_names_no_peer_or_another_of_vllms_roles_is_served_alone(worker, params):
    b = worker()
    context = ReqContext("request", params)
    b.manager.on_new_request(context)
    assert b.tier.ask(KEYS, context, 60) and not b.tier._sessions
    assert b.manager.lookup(KEYS[0], context) is LookupResult.MISS


def test_a_worker_is_no_peer_of_its_own(worker):
    b = worker()
    assert b.tier.ask(KEYS, b.request(b), 60) and not b.tier._sessions


def test_a_peer_that_does_not_answer_is_waited_for_so_long_and_then_not_asked_for_a_while(worker, monkeypatch):
    a, b = worker(), worker()
    context = b.request(a)
    began = time.monotonic()
    until(lambda: b.tier.ask(KEYS, context, 0.2), b)  # A takes no step
    assert time.monotonic() - began >= 0.2 and not b.tier.holds(KEYS[0], context)
    assert b.tier.ask(KEYS, b.request(a), 60)
    monkeypatch.setattr(b.tier, "_resting", {})
    assert not b.tier.ask(KEYS, b.request(a), 60)


def test_a_peer_that_is_gone_is_no_longer_waited_for(worker):
    a, b = worker(), worker()
    a.store(KEYS[:1], 5)
    assert loaded(b, b.request(a), KEYS[:1], a)
    a.tier.shutdown()
    assert not loaded(b, b.request(a), KEYS[1:2])
    until(lambda: not b.tier._sessions, b)
    assert b.tier.ask(KEYS, b.request(a), 60) and not b.tier._sessions  # nor asked again at once


def test_rows_that_a_peer_may_still_write_to_are_nobodys_until_the_cache_is_emptied(worker, monkeypatch):
    a, b = worker(), worker()
    a.store(KEYS[:2], 5)
    a.tier._data.held = True
    context = b.request(a)
    until(lambda: b.tier.ask(KEYS[:2], context, 60), a, b)
    for key in KEYS[:2]:
        b.manager.lookup(key, context)
    until(lambda: a.tier._data.waiting, a, b)
    monkeypatch.setattr(peers, "LATEST", 0.0)
    a.tier._data.held = False
    (session,) = b.tier._sessions.values()
    session._conn.mark_dead()  # A has gone, as far as B knows
    until(lambda: b.tier.lost, b)
    b.manager.on_request_finished(context)
    assert b.tier.lost == {*KEYS[:2]} and b.manager.lookup(KEYS[0], b.request()) is LookupResult.HIT_PENDING
    b.store(KEYS[2:], 6)
    until(lambda: not a.tier._data.waiting, a)  # and writes what it was asked for
    assert all(b.row(key) == 6 for key in KEYS[2:])
    b.manager.reset_cache()
    assert b.tier.ask(KEYS, b.request(a), 60) and not b.tier._asking


def test_what_comes_too_late_is_not_taken_though_the_peer_says_that_it_is_right(worker, monkeypatch):
    a, b = worker(), worker()
    a.store(KEYS[:1], 5)
    monkeypatch.setattr(peers, "LATEST", 0.0)
    context = b.request(a)
    until(lambda: b.tier.ask(KEYS[:1], context, 60), a, b)
    b.manager.lookup(KEYS[0], context)
    until(lambda: b.tier.lost, a, b)
    assert b.manager.lookup(KEYS[0], context) is LookupResult.HIT_PENDING


def test_after_too_many_lost_rows_no_peer_is_asked(worker, monkeypatch, engine_log):
    a, b = worker(), worker()
    a.store(KEYS[:6], 5)
    monkeypatch.setattr(peers, "LATEST", 0.0)
    context = b.request(a)
    until(lambda: b.tier.ask(KEYS[:6], context, 60), a, b)
    for key in KEYS[:6]:
        b.manager.lookup(key, context)
    until(lambda: b.tier.lost, a, b)
    assert b.tier.ask(KEYS[6:], b.request(a), 60)
    assert sum("none is asked any more" in record.getMessage() for record in engine_log.records) == 1


def test_this_vllms_tier_is_the_one_that_was_shown():
    for shape in flags._PEERS:
        shape.check()


def test_it_says_at_the_start_who_can_read_and_write(engine_log, worker):
    b = worker()
    (line,) = [record.getMessage() for record in engine_log.records if "peers take states" in record.getMessage()]
    assert f"127.0.0.1:{b.port}" in line


def test_without_nixl_it_does_not_start(monkeypatch):
    monkeypatch.setattr(p2p, "NixlTransport", type("Missing", (CopiedRows,), {"available": False}))
    with pytest.raises(ValueError, match="pip install nixl"):
        Worker()
