"""What a gateway does about a worker whose cache it no longer trusts."""

from __future__ import annotations

import json

from tests.harness.gateways import chat
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

BODY = {"model": "m"}


def sent(worker: RecordingWorker) -> dict:
    return json.loads(worker.requests[-1].body)


async def test_a_gateway_sends_it_and_changes_nothing_else(in_memory, worker):
    own = await in_memory(worker)
    cache = own.gateway.pool.workers[0].cache
    cache.quarantine()
    salt = cache.salt(BODY)
    raw = json.dumps(chat("Tide?"), indent=2).encode()
    answer = await own.post(raw)
    assert worker.requests[-1].body == raw[:-1] + b',"cache_salt":"%b"}' % salt.encode()
    assert answer.headers["x-seamark-reason"] == "hint_ignored"
    await own.post(chat("Tide?", cache_salt="own", vllm_xargs={"a": 1}))
    assert sent(worker)["cache_salt"] == "own" + salt and sent(worker)["vllm_xargs"] == {"a": 1}
    await own.post({"model": "m", "input": "x"}, "/v1/embeddings")
    assert sent(worker)["cache_salt"] == salt
    for unread in (b"{audio", b""):
        await own.post(unread, "/v1/audio/transcriptions", content_type="audio/wav")
        assert worker.requests[-1].body == unread
    await own.post(chat("Tide?", cache_salt=""))
    assert sent(worker)["cache_salt"] == ""
    worker.boot = "1.8e+09"
    await until(lambda: cache.salt(BODY) is None)
    await own.post(chat("Tide?"))
    assert "cache_salt" not in sent(worker)
