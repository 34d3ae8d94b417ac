"""What of a client's body reaches the worker: all of it as it was written, but for what the gateway answers for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.chat.chat import CHAT, GENERATE, RESPONSES
from proxy.errors import BadRequest
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.json_body import HINT, PIN, TRANSFERS, XARGS
from proxy.pipeline.request import request_of

EVIL = {"remote_host": "evil"}


def sent(
    body: dict[str, Any], key: ApiKey | None = None, path: str = CHAT, hint: tuple = (), asks_usage: bool = False
) -> dict[str, Any]:
    """The body that the worker gets."""
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
    request = request_of(scope, json.dumps(body).encode(), "r", key)
    request.body.take(dict(body), request.client, asks_usage)
    reached: dict[str, Any] = json.loads(request.body.encoded(hint))
    return reached


@pytest.fixture
def key() -> ApiKey:
    return ApiKey("ann", KeyEntry(sha256="0" * 64), "a salt")


@pytest.mark.parametrize("name", TRANSFERS)
@pytest.mark.parametrize("hint", [(), (160,)])
def test_transfers_between_workers_are_no_clients_business_wherever_they_stand(name, hint):
    body = {"model": "m", name: EVIL, XARGS: {name: EVIL, "mine": 1}}
    assert sent(body, hint=hint) == {"model": "m", XARGS: {"mine": 1, HINT: list(hint)}}


@pytest.mark.parametrize("name", [HINT, PIN, *TRANSFERS])
def test_nothing_of_the_gateways_comes_with_token_ids_either(name, key):
    body = {"token_ids": [1], "sampling_params": {"seed": 1, "extra_args": {name: EVIL, "mine": 1}}}
    kept = {"token_ids": [1], "sampling_params": {"seed": 1, "extra_args": {"mine": 1}}}
    assert sent(body, path=GENERATE) == kept
    assert sent({**body, "kv_transfer_params": EVIL}, key, GENERATE) == {**kept, "cache_salt": "a salt"}


def test_media_that_all_keys_would_share_by_name_are_refused(key):
    body = {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {"image": ["a"]}}}
    with pytest.raises(BadRequest, match="content_parts"):
        sent(body, key, GENERATE)
    assert sent(body, path=GENERATE) == body


def test_other_arguments_of_the_client_stay():
    assert sent({"model": "m", XARGS: {"mine": 1}}) == {"model": "m", XARGS: {"mine": 1}}
    assert sent({"model": "m", XARGS: {"mine": 1}}, hint=(160,))[XARGS] == {"mine": 1, HINT: [160]}


def test_the_salt_is_the_keys_and_without_keys_the_clients_own(key):
    body = {"model": "m", "cache_salt": "guess"}
    assert sent(body, key)["cache_salt"] == "a salt"
    assert sent(body)["cache_salt"] == "guess"


def test_a_response_is_not_stored_under_a_name_that_a_client_with_a_key_chose(key):
    body = {"model": "m", "request_id": "another's"}
    assert "request_id" not in sent(body, key, RESPONSES)
    assert sent(body, path=RESPONSES)["request_id"] == sent(body, key)["request_id"] == "another's"


@pytest.mark.parametrize("stream", [True, 1, 1.0, "true", "TRUE", "on", "y", "1"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": "off"}])
def test_a_stream_is_asked_for_usage_however_vllm_is_told_to_stream(stream, options):
    body = {"model": "m", "stream": stream, "stream_options": options, "n": 2}
    assert sent(body, asks_usage=True) == {**body, "stream_options": {"include_usage": True}}


def test_usage_in_every_event_is_not_what_the_gateway_asks_for():
    asked = sent({"stream": True, "stream_options": {"continuous_usage_stats": True, "x": 1}}, asks_usage=True)
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": False, "x": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": "off"},
        {"stream": None},
        {"stream": 2},
        {"stream": "tru"},
        {"stream": ["true"]},
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        {"stream": True, "stream_options": {"include_usage": "perhaps"}},
        {"stream": True, "stream_options": ["include_usage"]},
    ],
)
def test_what_is_no_stream_or_is_refused_by_the_worker_reaches_it_as_it_is(fields):
    assert sent(fields, asks_usage=True) == fields
