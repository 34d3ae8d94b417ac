"""Prefill and decode apart, as workers see it: what the two calls are, for which requests, and what stays inside."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.errors import SettingsError
from proxy.settings import Settings
from tests.harness.gateways import CHAT, chat, hint_at
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

NIXL = "NixlConnector"

TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1], [2, 3]],
    "remote_engine_id": "the-engine-of-p",
    "remote_request_id": "request-at-p",
    "remote_num_tokens": 496,
    "remote_prefill_cached_tokens": 0,
}

LONG = "Which tide? " * 300  # some 1,000 tokens, as the gateway counts them


class Apart(NamedTuple):
    prefill: RecordingWorker
    decode: RecordingWorker
    own: InMemoryGateway

    async def post(self, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        answer = await self.own.post(body, path)
        assert answer.status_code == 200 and "remote" not in answer.text, answer.text
        return answer

    def results(self) -> dict[str, float]:
        """What became of first calls."""
        metric = "seamark_prefills_total"
        samples = (sample for family in self.own.gateway.metrics.registry.collect() for sample in family.samples)
        return {each.labels["result"]: each.value for each in samples if each.name == metric}


def body_at(worker: RecordingWorker) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(worker.requests[-1].body)
    return body


@pytest.fixture
async def apart(in_memory) -> Apart:
    prefill = RecordingWorker(connector=NIXL, transfer=TRANSFER, cached=0)
    decode = RecordingWorker(connector=NIXL, cached=0)
    started = Apart(prefill, decode, await in_memory(decode, prefill_workers=(prefill,)))
    pools = (started.own.gateway.pool, started.own.gateway.prefill_pool)
    await until(lambda: all(worker.up and worker.renderer_ids for pool in pools for worker in pool.workers))
    return started


async def test_one_worker_computes_a_long_prompt_and_another_one_answers(apart: Apart):
    body = chat(LONG, max_tokens=50, logprobs=True, cache_salt="salt")
    await apart.post(body)
    (first,), (second,) = apart.prefill.requests, apart.decode.requests
    assert body_at(apart.decode).pop("kv_transfer_params") == TRANSFER
    asked = body_at(apart.prefill)
    assert asked["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "seamark_stops": True,
    }
    assert asked["max_tokens"] == 1 and asked["stream"] is False and "logprobs" not in asked
    assert asked["messages"] == body["messages"] and asked["cache_salt"] == "salt"
    assert hint_at(apart.prefill) == hint_at(apart.decode) != []
    assert first.target == second.target == CHAT
    assert body_at(apart.decode)["max_tokens"] == 50 and apart.results() == {"sent": 1}


async def test_a_stream_is_one_of_the_worker_that_answers(apart: Apart):
    await apart.post(chat(LONG, stream=True, stream_options={"include_usage": True}))
    assert body_at(apart.prefill)["stream"] is False and "stream_options" not in body_at(apart.prefill)
    assert body_at(apart.decode)["stream"] is True and body_at(apart.decode)["kv_transfer_params"] == TRANSFER


@pytest.mark.parametrize(
    ("path", "body", "one"),
    [
        ("/v1/completions", {"prompt": LONG}, {"max_tokens": 1}),
        ("/v1/completions", {"prompt": [7] * 4000, "max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}, {"max_tokens": 1}),
        ("/v1/responses", {"input": LONG}, {"max_output_tokens": 1, "store": False}),
        (CHAT, chat(LONG, max_completion_tokens=9), {"max_tokens": 1, "max_completion_tokens": 1}),
    ],
)
async def test_every_api_has_its_own_word_for_a_single_token(apart: Apart, path: str, body: dict[str, Any], one: Any):
    await apart.post({"model": "m", **body}, path)
    asked = body_at(apart.prefill)
    assert asked | one == asked and apart.prefill.requests[-1].target == path
    assert body_at(apart.decode)["kv_transfer_params"] == TRANSFER


async def test_what_a_client_says_of_transfers_reaches_no_worker(apart: Apart):
    own = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "a-clients-own"}}
    await apart.post(chat(LONG, **own, vllm_xargs=own))
    await apart.post(chat("Short?", **own, vllm_xargs=own))
    everything = b"".join(request.body for request in (*apart.prefill.requests, *apart.decode.requests))
    assert b"a-clients-own" not in everything
    assert "kv_transfer_params" not in body_at(apart.decode) and len(apart.prefill.requests) == 1


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"prompt_logprobs": 1}, {"previous_response_id": "resp_1"}, {"echo": True}]
)
async def test_a_prompt_that_has_to_be_computed_where_it_is_answered_is(apart: Apart, fields: dict[str, Any]):
    await apart.post(chat(LONG, **fields))
    assert not apart.prefill.requests and "kv_transfer_params" not in body_at(apart.decode)


async def test_a_short_prompt_is_computed_where_it_is_answered(apart: Apart):
    await apart.post({"model": "m", "messages": [{"role": "user", "content": "Tide?"}]})
    assert not apart.prefill.requests and apart.results() == {"short": 1}


async def test_how_short_that_is_follows_from_the_measured_step_times(apart: Apart):
    (worker,) = apart.own.gateway.pool.workers
    apart.decode.more_metrics = (
        "seamark_pass_seconds 0.4\nseamark_token_seconds 0.0001\n"  # 8,000 tokens for two passes
    )
    await until(lambda: worker.step_times.known)
    await apart.post(chat(LONG))
    assert not apart.prefill.requests
    apart.decode.more_metrics = "seamark_pass_seconds 0.0004\nseamark_token_seconds 0.1\n"
    await until(lambda: worker.step_times.pass_seconds < 0.1)
    await apart.post({"model": "m", "messages": [{"role": "user", "content": "Which wind?"}]})
    assert len(apart.prefill.requests) == 1


async def test_whatever_becomes_of_the_prefill_worker_the_other_answers(apart: Apart):
    apart.prefill.transfer = None  # as one without a connector
    await apart.post(chat(LONG + "1"))
    apart.prefill.status = 500
    await apart.post(chat(LONG + "2"))
    assert apart.results() == {"failed": 2} and "kv_transfer_params" not in body_at(apart.decode)
    apart.prefill.connector = ""
    (worker,) = apart.own.gateway.prefill_pool.workers
    await until(lambda: worker.engine is not None and not worker.engine.loads_prefills)
    await apart.post(chat(LONG + "3"))
    assert apart.results() == {"failed": 2, "no_worker": 1} and len(apart.decode.requests) == 3


async def test_a_worker_that_cannot_load_is_sent_nothing_to_load(apart: Apart):
    (worker,) = apart.own.gateway.pool.workers
    apart.decode.connector = ""
    await until(lambda: worker.engine is not None and not worker.engine.loads_prefills)
    await apart.post(chat(LONG))
    assert not apart.prefill.requests


async def test_a_client_that_leaves_while_its_prompt_is_computed_ends_that(apart: Apart):
    apart.prefill.hold.set()
    client = apart.own.opened(chat(LONG, stream=True))
    await until(lambda: apart.prefill.requests)
    client.leave()
    await until(apart.prefill.gone.is_set)
    assert not apart.decode.requests


async def test_a_client_that_leaves_when_its_prompt_is_computed_frees_it(apart: Apart):
    apart.prefill.pause_after = 0  # at its head
    apart.prefill.pause.set()
    client = apart.own.opened(chat(LONG, stream=True))
    await until(lambda: apart.prefill.answers)
    client.leave()
    apart.prefill.pause.clear()
    await until(lambda: apart.decode.requests)
    freeing = body_at(apart.decode)
    assert freeing["kv_transfer_params"] == TRANSFER and freeing["max_tokens"] == 1 and freeing["stream"] is False


async def test_prefill_workers_are_shown_and_answer_nobody(apart: Apart):
    status = await apart.own.status()
    assert [worker["name"] for worker in status["prefill_workers"]] == [apart.prefill.url.removeprefix("http://")]
    assert [worker["name"] for worker in status["workers"]] == [apart.decode.url.removeprefix("http://")]


def test_a_worker_has_one_part():
    with pytest.raises((SettingsError, ValueError), match="each has one part"):
        Settings(worker=("http://a:1",), prefill_worker=("http://a:1/v1",))
