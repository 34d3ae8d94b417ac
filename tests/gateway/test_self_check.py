"""The self-check: what is replayed, what is not, and what becomes of a worker whose cache is no longer trusted."""

from __future__ import annotations

import json

import pytest

from tests.harness.gateways import chat
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

OFTEN = {"self_check_interval": 0.1}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle workers are checked sooner."""
    monkeypatch.setattr("proxy.fleet.idle_turns.IDLE_SECONDS", 0.3)


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
