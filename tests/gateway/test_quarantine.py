"""What a gateway does about a worker whose cache it no longer trusts."""

from __future__ import annotations

import json

import httpx

from tests.harness.gateways import CHAT, chat, own_gateway, wait_for
from tests.harness.recording_worker import RecordingWorker

BODY = {"model": "m"}


def sent(worker: RecordingWorker) -> dict:
    return json.loads(worker.requests[-1].body)


def test_a_gateway_sends_it_and_changes_nothing_else(worker):
    with own_gateway(worker) as own:
        wait_for(lambda: own.gateway.pool.up)
        cache = own.gateway.pool.workers[0].cache
        cache.quarantine()
        salt = cache.salt(BODY)
        raw = json.dumps(chat("Tide?"), indent=2).encode()
        answer = httpx.post(own.url + CHAT, content=raw)
        assert worker.requests[-1].body == raw[:-1] + b',"cache_salt":"%b"}' % salt.encode()
        assert answer.headers["x-seamark-reason"] == "hint_ignored"
        httpx.post(own.url + CHAT, json=chat("Tide?", cache_salt="own", vllm_xargs={"a": 1}))
        assert sent(worker)["cache_salt"] == "own" + salt and sent(worker)["vllm_xargs"] == {"a": 1}
        httpx.post(own.url + "/v1/embeddings", json={"model": "m", "input": "x"})
        assert sent(worker)["cache_salt"] == salt
        for unread in (b"{audio", b""):
            httpx.post(own.url + "/v1/audio/transcriptions", content=unread, headers={"content-type": "audio/wav"})
            assert worker.requests[-1].body == unread
        httpx.post(own.url + CHAT, json=chat("Tide?", cache_salt=""))
        assert sent(worker)["cache_salt"] == ""
        worker.boot = "1.8e+09"
        wait_for(lambda: cache.salt(BODY) is None)
        httpx.post(own.url + CHAT, json=chat("Tide?"))
        assert "cache_salt" not in sent(worker)
