"""When a worker's drafts are tried, told and believed."""

from __future__ import annotations

import logging
import time

from proxy.fleet.draft_gates import MOST_AGAIN_SECONDS, OVERDUE_SECONDS, REST_BESIDE, DraftGates
from proxy.fleet.draft_reports import NAMED
from proxy.metrics import Metrics
from tests.harness.drafting_engine import DraftingEngine, DraftingUpstream, drafting_worker


async def no_clients():
    return ()


def gates_of(engine: DraftingEngine, **named) -> DraftGates:
    return DraftGates(DraftingUpstream(engine), Metrics().self_checks, 10.0, **named)


async def test_a_verdict_that_the_feed_does_not_show_is_sent_again(monkeypatch):
    monkeypatch.setattr("proxy.fleet.draft_trial.BELIEVED_SECONDS", 0.0)
    monkeypatch.setattr("proxy.fleet.draft_gates.AGAIN_SECONDS", 0.0)
    engine, worker, opened = DraftingEngine(obeys=False), drafting_worker(), []

    async def note(worker):
        opened.append(worker)

    gates = gates_of(engine, opened=note)
    while len(engine.commands) < 2:
        await gates.step(worker, no_clients)
    assert not worker.takes_hints and gates.wants(worker) and not opened
    engine.obeys = True
    await gates.step(worker, no_clients)
    assert worker.takes_hints and not gates.wants(worker) and opened == [worker]


async def test_another_process_of_the_engine_begins_anew():
    engine, worker = DraftingEngine(), drafting_worker()
    gates = gates_of(engine)
    for _ in range(3):
        await gates.step(worker, no_clients)
    assert gates.words(worker).startswith("3 of 3")
    engine.id = "engine-2"
    await gates.step(worker, no_clients)
    assert gates.words(worker).startswith("1 of 1")


async def test_a_worker_that_cannot_be_judged_is_left_alone_longer_and_longer(caplog):
    caplog.set_level(logging.INFO, "seamark.drafts")
    engine, worker = DraftingEngine(vocabulary=10), drafting_worker()
    gates, rests = gates_of(engine), []
    for _ in range(1100):
        before = time.monotonic()
        await gates.step(worker, no_clients)
        rests.append(gates._phase(worker).next_at - before)
        if len(rests) > 12:
            gates._phase(worker).failed = 2000  # days later
            break
    await gates.step(worker, no_clients)
    assert rests[1] > rests[0] and rests[-1] <= MOST_AGAIN_SECONDS + 60 and not gates.wants(worker)
    assert "was not judged (Unanswered: no known token ids)" in caplog.text


async def test_who_sorts_behind_another_that_tries_stands_back():
    engine, worker = DraftingEngine(), drafting_worker()
    gates = gates_of(engine, own="worker")
    await gates.step(worker, no_clients)
    asked = len(engine.asked)
    engine.entries.append((f"{NAMED}abc-1", 0, None))
    await gates.step(worker, no_clients)
    assert len(engine.asked) == asked and not gates.wants(worker)
    first = gates_of(engine, own="0")
    await first.step(worker, no_clients)
    engine.entries.append((f"{NAMED}abc-2", 0, None))
    asked = len(engine.asked)
    await first.step(worker, no_clients)
    assert len(engine.asked) > asked


async def test_beside_clients_a_prompt_is_followed_by_nine_times_its_rest():
    engine, worker = DraftingEngine(), drafting_worker()
    gates = gates_of(engine)
    assert gates.wants(worker) and not gates.is_overdue(worker)
    gates._phase(worker).since -= OVERDUE_SECONDS
    assert gates.is_overdue(worker)
    before = time.monotonic()
    await gates.step(worker, no_clients, beside=True)
    after = time.monotonic()
    assert gates._phase(worker).next_at >= after and REST_BESIDE == 9
    assert gates._phase(worker).next_at - after <= REST_BESIDE * (after - before)


async def test_a_worker_that_does_not_draft_or_is_down_or_has_decided_is_not_tried():
    engine = DraftingEngine()
    gates = gates_of(engine)
    for state in ("", "on", "off", "open", "closed"):
        assert not gates.wants(drafting_worker(state=state))
    down = drafting_worker()
    down.up = False
    assert not gates.wants(down)
