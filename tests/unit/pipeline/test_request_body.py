"""What of a client's body reaches the worker: all of it as it was written, but for what the gateway answers for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.chat.chat import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from proxy.errors import BadRequest
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.json_body import HINT, LOAD, PIN, TRANSFERS, XARGS
from proxy.pipeline.request import RequestBody, request_of

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


def body_of(raw: dict[str, Any], path: str = CHAT, key: ApiKey | None = None) -> RequestBody:
    """A body that has been taken."""
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
    request = request_of(scope, json.dumps(raw).encode(), "r", key)
    request.body.take(dict(raw), request.client, asks_usage=False)
    return request.body


MINE = {"mine": 1}


@pytest.mark.parametrize(
    ("xargs", "hint", "load", "sent", "noted"),
    [
        (None, (), "", None, ()),
        (None, (7,), "", {HINT: [7]}, (7,)),
        (None, (), "g,1,1", {LOAD: "g,1,1"}, ()),
        (None, (7,), "g,1,1", {HINT: [7], LOAD: "g,1,1"}, (7,)),
        (MINE, (), "", MINE, ()),
        (MINE, (7,), "", {**MINE, HINT: [7]}, (7,)),
        (MINE, (7,), "g,1,1", {**MINE, HINT: [7], LOAD: "g,1,1"}, (7,)),
        ({**MINE, HINT: [9]}, (), "", {**MINE, HINT: []}, ()),
        ({**MINE, LOAD: "its own"}, (), "", {**MINE, HINT: []}, ()),
        ({**MINE, LOAD: "its own"}, (7,), "g,1,1", {**MINE, HINT: [7], LOAD: "g,1,1"}, (7,)),
        ("no object", (7,), "", "no object", ()),
    ],
)
def test_what_the_gateway_tells_the_engine_stands_beside_what_the_client_does(xargs, hint, load, sent, noted):
    body = body_of({"model": "m"} if xargs is None else {"model": "m", XARGS: xargs})
    body.hint = (1,)  # of a try before
    reached = json.loads(body.encoded(hint, load=load))
    assert reached == ({"model": "m"} if sent is None else {"model": "m", XARGS: sent})
    assert body.hint == noted


def test_nothing_is_changed_where_nothing_is_to_be():
    body = body_of({"model": "m", XARGS: MINE})
    assert body.encoded(()) is body.raw
    plain = body_of({"model": "m"})
    assert plain.encoded(()) is plain.raw
    assert json.loads(plain.encoded((), {"cache_salt": "s"})) == {"model": "m", "cache_salt": "s"}
    assert plain.put == {} and plain.encoded(()) is plain.raw  # that was for one worker


def test_a_field_that_is_left_out_is_left_out_of_every_try():
    body = body_of({"model": "m", TRANSFERS[0]: EVIL, TRANSFERS[1]: EVIL})
    for hint in ((), (7,)):
        reached = json.loads(body.encoded(hint))
        assert reached == ({"model": "m", XARGS: {HINT: [7]}} if hint else {"model": "m"})
    assert body.parsed == {"model": "m"} and body.names == ("model", *TRANSFERS)


def test_a_key_has_its_salt_in_every_try_and_asks_for_no_usage_unless_that_is_set(key):
    body = body_of({"model": "m", "stream": True}, key=key)
    assert json.loads(body.encoded((7,))) == {"model": "m", "stream": True, "cache_salt": "a salt", XARGS: {HINT: [7]}}
    assert body.parsed["cache_salt"] == "a salt" and not body.strips_usage


@pytest.mark.parametrize(
    ("path", "stream", "options", "strips"),
    [
        (CHAT, True, None, True),
        (COMPLETIONS, True, {"include_usage": False}, True),
        (CHAT, True, {"include_usage": True}, False),
        (CHAT, False, None, False),
        (RESPONSES, True, None, False),
        (MESSAGES, True, None, False),
    ],
)
def test_only_usage_that_the_client_did_not_ask_for_is_taken_out_again(path, stream, options, strips):
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
    parsed = {"model": "m", "stream": stream} | ({} if options is None else {"stream_options": options})
    request = request_of(scope, json.dumps(parsed).encode(), "r")
    request.body.take(parsed, request.client, asks_usage=True)
    assert request.body.strips_usage is strips and ("stream_options" in request.body.put) is strips


def test_arguments_of_a_prompt_of_ids_are_touched_only_where_the_gateway_has_a_say(key):
    for params in ({"seed": 1}, {"extra_args": MINE}, {"extra_args": [1]}, "none", None):
        body = body_of({"token_ids": [1], "sampling_params": params}, GENERATE)
        assert body.put == {} and body.parsed["sampling_params"] == params
    body = body_of({"token_ids": [1], "features": None}, GENERATE, key)
    assert json.loads(body.encoded(())) == {"token_ids": [1], "features": None, "cache_salt": "a salt"}


MESSAGE = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Tide?"}]}


@pytest.mark.parametrize(
    ("xargs", "hint", "load", "sent"),
    [
        (None, (), "", {}),
        (None, (7,), "g,1,1", {HINT: [7], LOAD: "g,1,1"}),
        (MINE, (7,), "", {**MINE, HINT: [7]}),
        ({**MINE, HINT: [9]}, (), "", {**MINE, HINT: []}),
        ({**MINE, PIN: 1}, (7,), "", {**MINE, HINT: [7]}),
    ],
)
def test_a_message_goes_to_the_chat_api_with_the_same_beside_it(xargs, hint, load, sent):
    body = body_of(MESSAGE if xargs is None else {**MESSAGE, XARGS: xargs}, MESSAGES)
    raw = body.as_chat(hint, {"cache_salt": "s"}, load)
    assert raw is not None
    chat = json.loads(raw)
    assert (chat.get(XARGS) or {}) == sent and body.hint == hint
    assert (chat["cache_salt"], chat["max_tokens"], chat["messages"][0]["role"]) == ("s", 8, "user")


def test_a_message_that_holds_no_chat_is_none_for_the_chat_api():
    body = body_of({"model": "m", "messages": 7}, MESSAGES)
    assert body.as_chat((7,), {}, "") is None and body.hint == ()
    odd = body_of({**MESSAGE, XARGS: "no object"}, MESSAGES)
    raw = odd.as_chat((7,), {}, "")
    assert raw is not None and json.loads(raw)[XARGS] == "no object"


def test_a_call_about_the_same_prompt_leaves_the_clients_own_as_it_is(key):
    body = body_of({"model": "m", "stream": True, "logprobs": True, "seed": 1, TRANSFERS[0]: EVIL}, key=key)
    body.put["stream_options"] = {"include_usage": True}
    raw = body.for_prefill((7,), {"stream": False, "max_tokens": 1}, ("logprobs", "stream_options"))
    assert json.loads(raw) == {
        "model": "m",
        "seed": 1,
        "cache_salt": "a salt",
        "stream": False,
        "max_tokens": 1,
        XARGS: {HINT: [7]},
    }
    assert body.hint == () and "stream_options" in body.put and body.dropped == [TRANSFERS[0]]
