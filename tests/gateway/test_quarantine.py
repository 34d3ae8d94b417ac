"""What a gateway does about a worker whose cache it no longer trusts."""

from __future__ import annotations

import json

import httpx
import pytest

from proxy.fleet.worker import CacheQuarantine
from tests.harness.gateways import CHAT, chat, own_gateway, wait_for
from tests.harness.recording_worker import RecordingWorker

BODY = {"model": "m"}


def test_a_trusted_worker_gets_the_salt_that_the_request_has():
    assert CacheQuarantine().salt({**BODY, "cache_salt": "own"}) is None


def test_the_first_doubt_parts_requests_from_what_was_there_and_keeps_who_was_apart_apart():
    trust = CacheQuarantine()
    trust.doubt()
    salts = [trust.salt(body) for body in (BODY, {**BODY, "cache_salt": None}, {**BODY, "cache_salt": "own"})]
    assert not trust.in_hints and trust.in_cache
    assert salts[0] == salts[1] != salts[2] and len(salts[0]) >= 16
    assert salts[2] == "own" + salts[0]
    assert trust.salt(BODY) == salts[0]  # whoever comes next finds what vLLM cached since


def test_the_second_takes_nothing_from_the_cache():
    trust = CacheQuarantine()
    trust.doubt()
    trust.doubt()
    assert not trust.in_cache and len({trust.salt(BODY) for _ in range(3)}) == 3


def test_what_was_doubted_stays_out_of_use_until_the_worker_restarts():
    trust = CacheQuarantine()
    trust.doubt()
    apart = trust.salt(BODY)
    trust.restore()
    assert trust.in_hints and trust.salt(BODY) == apart
    trust.restarted()
    assert trust.salt(BODY) is None


def test_a_restart_alone_does_not_bring_trust_back():
    trust = CacheQuarantine()
    trust.doubt()
    trust.doubt()
    trust.restarted()
    assert not trust.in_hints and not trust.in_cache and trust.salt(BODY)


@pytest.mark.parametrize("salt", ["", 5, ["own"]])
def test_a_salt_that_vllm_refuses_is_left_to_it(salt):
    trust = CacheQuarantine()
    trust.doubt()
    assert trust.salt({**BODY, "cache_salt": salt}) is None


def sent(worker: RecordingWorker) -> dict:
    return json.loads(worker.requests[-1].body)


def test_a_gateway_sends_it_and_changes_nothing_else(worker):
    with own_gateway(worker) as own:
        wait_for(lambda: own.gateway.pool.up)
        trust = own.gateway.pool.workers[0].trust
        trust.doubt()
        salt = trust.salt(BODY)
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
        wait_for(lambda: trust.salt(BODY) is None)
        httpx.post(own.url + CHAT, json=chat("Tide?"))
        assert "cache_salt" not in sent(worker)
