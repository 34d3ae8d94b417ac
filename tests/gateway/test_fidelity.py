"""What clients rely on, by the SDKs that they use, where no real engine can show it."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from proxy.bench.harness.servers import Server
from tests.harness.forked_gateways import GatewayForks
from tests.harness.gateways import metric, post, start_gateway
from tests.harness.recording_worker import EVENTS, RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


ASK = [{"role": "user", "content": "Tide?"}]


@pytest.fixture
def worker() -> Iterator[RecordingWorker]:
    with recording_worker(streams={CHAT: EVENTS, MESSAGES: events("messages"), RESPONSES: events("responses")}) as made:
        yield made


@pytest.fixture
def gateway(worker: RecordingWorker, tmp_path: Path) -> Iterator[Server]:
    with GatewayForks(tmp_path) as fleet:
        yield start_gateway(fleet, worker)


WITH_USAGE = {"stream_options": {"include_usage": True}}  # the recorded chat has the usage at its end


def events(name: str) -> list[bytes]:
    """A stream of vLLM 0.32's for three tokens, as it came."""
    text = (Path(__file__).parents[1] / "streams" / f"{name}.sse").read_bytes()
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


def test_a_body_of_32_mib_arrives_whole(tmp_path):
    """Before a worker without an engine, which would make a list of 32 million tokens of it."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 32 * 2**20}]}).encode()
    with recording_worker(patched=False) as plain, GatewayForks(tmp_path) as fleet:
        server = start_gateway(fleet, plain)
        assert httpx.post(server.url + CHAT, content=body, timeout=120).status_code == 200
        assert plain.requests[-1].body == body


def test_an_answer_that_is_read_is_compressed_by_nobody(worker, gateway):
    worker.gzips = "accepted"
    every = ("gzip, deflate, br, zstd", "gzip;q=1.0, identity; q=0.5, *;q=0")
    for accepted, stream in itertools.product(every, (True, False)):
        body = {"model": "m", "messages": ASK * 200, "stream": stream, **(WITH_USAGE if stream else {})}
        answer = post(gateway, body, headers={"accept-encoding": accepted})
        assert "content-encoding" not in answer.headers and answer.content == worker.answers[-1]
        assert dict(worker.requests[-1].headers)[b"accept-encoding"] == b"identity"
    wait_for(lambda: metric(gateway, "seamark_cached_tokens_total") == 4 * 160)


@pytest.mark.parametrize(
    ("gzips", "accepted", "flags"),
    [("accepted", "gzip, identity;q=0", ()), ("always", "br, *;q=0", ("--shadow",)), ("always", "gzip", ())],
)
def test_a_stream_that_is_compressed_passes_as_it_comes_and_nothing_is_put_into_it(
    worker, tmp_path, flags, gzips, accepted
):
    """No comment before its first byte, although a stream beside it that is as silent gets some."""
    body = {"model": "m", "messages": ASK, "stream": True, **WITH_USAGE}
    worker.gzips = gzips
    with recording_worker(models=("plain",)) as silent, GatewayForks(tmp_path) as fleet, ExitStack() as stack:
        gateway = start_gateway(fleet, worker, silent, flags=("--heartbeat", "0.1", *flags))
        client = stack.enter_context(httpx.Client(timeout=30, headers={"accept-encoding": accepted}))
        for each in (worker, silent):
            each.pause_after = 0
            each.pause.set()
        packed, _ = (
            stack.enter_context(client.stream("POST", gateway.url + CHAT, json={**body, "model": model}))
            for model in ("m", "plain")
        )
        wait_for(lambda: metric(gateway, "seamark_heartbeats_total") >= 3)  # on the other one
        worker.pause_after = 2
        unpacked, unpacker = b"", zlib.decompressobj(wbits=31)
        for piece in packed.iter_raw():
            unpacked += unpacker.decompress(piece)
            if unpacked.count(b"\n\n") == worker.pause_after:
                break
        assert unpacked == b"".join(
            event + b"\n\n" for event in worker.answers[-1].split(b"\n\n")[: worker.pause_after]
        )


def test_openais_sdk_raises_where_a_chat_breaks_off(worker, gateway):
    worker.cut_after = 1
    sdk = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)
    got = []
    with pytest.raises(openai.APIError, match="broke off") as raised:
        got.extend(sdk.chat.completions.create(model="m", messages=ASK, stream=True))
    assert got and got[0].choices[0].delta.content == "é"
    assert raised.value.code == "worker_failed" and raised.value.body["type"] == "upstream_error"


def test_anthropics_sdk_raises_where_a_message_breaks_off(worker, gateway):
    worker.cut_after = 6
    claude = anthropic.Anthropic(base_url=gateway.url, api_key="unused", max_retries=0)
    got = []
    with pytest.raises(anthropic.APIStatusError) as raised:
        got.extend(claude.messages.create(model="m", messages=ASK, max_tokens=3, stream=True))
    assert len(got) == worker.cut_after and got[0].type == "message_start"
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "api_error" and "broke off" in raised.value.body["error"]["message"]


def test_a_response_that_breaks_off_has_failed_for_openais_sdk(worker, gateway):
    worker.cut_after = 9
    sdk = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)
    got = list(sdk.responses.create(model="m", input="Tide?", stream=True))
    assert [event.type for event in got[:1]] == ["response.created"] and len(got) == worker.cut_after + 1
    failed = got[-1]
    assert failed.type == "response.failed" and failed.sequence_number == worker.cut_after
    assert failed.response.id == got[0].response.id and failed.response.status == "failed"
    assert failed.response.error.code == "server_error" and "broke off" in failed.response.error.message
