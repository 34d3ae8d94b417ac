"""What of a client's body reaches the worker: all of it as it was written, but for what the gateway answers for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.chat.chat import CHAT, GENERATE, MESSAGES
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
