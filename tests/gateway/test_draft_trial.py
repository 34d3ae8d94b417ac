"""Answers that check a worker: drafts on trial, replays, and what is seen and sent once it is not trusted."""

from __future__ import annotations

import json
import logging

import pytest

from tests.harness.drafting_engine import DraftingEngine
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

OFTEN = {"self_check_interval": 0.1}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Idle workers are tried sooner; what is logged is seen."""
    monkeypatch.setattr("proxy.fleet.idle_turns.IDLE_SECONDS", 0.05)
    monkeypatch.setattr("proxy.fleet.self_check.POLL_SECONDS", 0.01)
    monkeypatch.setattr("proxy.fleet.draft_gates.REST_OF_ATTEMPT", 0.0)
    monkeypatch.setattr("proxy.fleet.draft_gates.AGAIN_SECONDS", 0.01)
    monkeypatch.setattr("proxy.fleet.draft_reports.DRAFTED_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "seamark.drafts")


def drafting(**engine: object) -> RecordingWorker:
    return RecordingWorker(drafting=DraftingEngine(**engine), ahead=1)


def hinted(worker: RecordingWorker) -> list[bool]:
    """Of the clients' requests, whether they carried a hint."""
    asked = [each.fields.get("vllm_xargs", {}) for each in worker.requests if "chat" in each.path]
    return ["seamark_boundaries" in xargs for xargs in asked]


async def becomes(gateway: InMemoryGateway, state: str) -> None:
    await gateway.shows(lambda status: status["workers"][0]["drafts"]["state"] == state)
    await until(lambda: gateway.metric("seamark_draft_gate", state=state) == 1)


async def test_a_worker_that_is_right_gets_hints_once_it_was_tried_and_is_tried_again_after_a_restart(
    in_memory, caplog
):
    worker = drafting()
    gateway = await in_memory(worker, **OFTEN)
    await gateway.post(chat("one"))
    assert hinted(worker) == [False]
    await becomes(gateway, "open")
    await gateway.post(chat("two"))
    assert hinted(worker)[-1] and worker.drafting.commands == ["open:engine-1"]
    assert "hints are on trial" in caplog.text and "hints are on beside drafts after" in caplog.text
    worker.drafting, worker.boot = DraftingEngine(id="engine-2"), "1.8e+09"
    await gateway.post(chat("one"))
    await until(lambda: worker.drafting.state == "open")
    assert worker.drafting.commands == ["open:engine-2"]


@pytest.mark.parametrize(
    ("fault", "result", "words"),
    [
        ({"hits_off": 0.25}, "differs", "answers from the cache differ"),
        ({"accepts_on_hits": 0.1}, "drafts_worse", "are accepted behind hits"),
    ],
)
async def test_a_faulty_worker_stays_closed_and_everyone_sees_why_until_a_reset(
    in_memory, caplog, fault, result, words
):
    worker = drafting(**fault)
    gateway = await in_memory(worker, **OFTEN)
    await becomes(gateway, "closed")
    await gateway.shows(lambda status: words in status["workers"][0]["refused"])
    await gateway.post(chat("one"))
    assert hinted(worker) == [False] and "cache_salt" not in worker.requests[-1].fields  # its cache is left alone
    assert gateway.metric("seamark_self_check_total", result=result) == 1
    assert words in caplog.text and "POST /seamark/self-check/reset" in caplog.text
    assert any(words in warning for warning in (await gateway.get("/seamark/live")).json()["warnings"])
    worker.drafting.hits_off, worker.drafting.accepts_on_hits = 0.0, None
    await gateway.post(b"", "/seamark/self-check/reset")
    await becomes(gateway, "open")


async def test_two_gateways_come_to_one_verdict_and_a_third_finds_it(in_memory):
    worker = drafting()
    for gateway in [await in_memory(worker, **OFTEN) for _ in range(2)]:
        await becomes(gateway, "open")
    assert set(worker.drafting.commands) == {"open:engine-1"}
    before = len(worker.drafting.commands)
    third = await in_memory(worker, **OFTEN)
    await becomes(third, "open")
    await third.post(chat("one"))
    assert hinted(worker)[-1] and len(worker.drafting.commands) == before


async def test_clients_cannot_try_or_judge_drafts(in_memory, worker):
    gateway = await in_memory(worker)
    await gateway.post(chat("one", vllm_xargs={"seamark_trial": 1, "seamark_drafts": "open:engine-1", "a": 1}))
    xargs = worker.requests[-1].fields["vllm_xargs"]
    assert not xargs.keys() & {"seamark_trial", "seamark_drafts"} and xargs["a"] == 1
    form = b'--x\r\ncontent-disposition: form-data; name="vllm_xargs"\r\n\r\n{"seamark_drafts": "open:1"}\r\n--x--\r\n'
    answer = await gateway.post(form, "/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
    assert answer.status_code == 400


def replays(worker: RecordingWorker) -> list[bytes]:
    return [each.body for each in worker.requests if each.target == "/v1/completions"]


async def test_without_memory_for_texts_nothing_is_replayed(in_memory, worker):
    off = await in_memory(worker, **OFTEN, text_bytes=0)
    for question in ("one", "two", "three"):
        await off.post(chat(question))
    other = RecordingWorker()
    on = await in_memory(other, **OFTEN)
    for question in ("one", "two", "three"):
        await on.post(chat(question))
    await until(lambda: replays(other))
    assert not replays(worker)


async def test_a_worker_in_quarantine_gets_the_salt_and_no_other_change(in_memory, worker):
    own = await in_memory(worker)
    cache = own.gateway.pool.workers[0].cache
    cache.quarantine()
    salt = cache.salt({"model": "m"})

    def sent() -> dict:
        return json.loads(worker.requests[-1].body)

    raw = json.dumps(chat("Tide?"), indent=2).encode()
    answer = await own.post(raw)
    assert worker.requests[-1].body.startswith(raw[:-1] + b',"cache_salt":"%b"' % salt.encode())
    assert "seamark_boundaries" not in sent()["vllm_xargs"]
    assert answer.headers["x-seamark-reason"] == "hint_ignored"
    await own.post(chat("Tide?", cache_salt="own", vllm_xargs={"a": 1}))
    assert (sent()["cache_salt"], sent()["vllm_xargs"].keys()) == ("own" + salt, {"a", "seamark_load"})
    await own.post({"model": "m", "input": "x"}, "/v1/embeddings")
    assert sent()["cache_salt"] == salt
    for unread in (b"{audio", b""):
        await own.post(unread, "/v1/audio/transcriptions", content_type="audio/wav")
        assert worker.requests[-1].body == unread
    await own.post(chat("Tide?", cache_salt=""))
    assert sent()["cache_salt"] == ""
    worker.boot = "1.8e+09"
    await until(lambda: cache.salt({"model": "m"}) is None)
    await own.post(chat("Tide?"))
    assert "cache_salt" not in sent()
