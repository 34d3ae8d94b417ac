"""What a request says of itself, and what of its body reaches the worker: all but what the gateway answers for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.chat.chat import CHAT, GENERATE, MESSAGES, RESPONSES
from proxy.errors import BadRequest, NotFound
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.json_body import HINT, LOAD, PIN, TRANSFERS, XARGS
from proxy.pipeline import request as request_module
from proxy.pipeline.request import RequestBody, Timings, affinity_key, choices_of, request_of, target_of


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-session-affinity", b"ses_1"), (b"x-session-id", b"ses_other")],  # OpenCode
        *([(name, b"ses_1")] for name in (b"x-session-id", b"session-id", b"session_id")),  # Codex, in two spellings
        [(b"user-agent", b"cli"), (b"x-claude-code-session-id", b"ses_1")],
    ],
)
def test_a_session_of_an_agent_is_kept_together_unless_the_client_itself_wants_otherwise(headers):
    for nothing in ("", 7, None, ["mine"]):
        assert affinity_key(headers, {"prompt_cache_key": nothing}) == "ses_1"
    assert affinity_key(headers, {"prompt_cache_key": "mine"}) == "mine"


def test_only_known_paths_are_labels():
    for path, label in (("/tokenize", "/tokenize"), ("/v1/responses/resp_1", "other"), ("/anything", "other")):
        scope = {"method": "GET", "path": path, "query_string": b"", "headers": []}
        assert request_of(scope, b"", "r").client.endpoint == label


@pytest.mark.parametrize(
    ("path", "raw_path", "query", "target"),
    [
        ("/v1/x", None, b"a=/../b", "/v1/x?a=/../b"),
        ("/v1/a b", b"/v1/a%20b", b"c=%20", "/v1/a%20b?c=%20"),
        ("/v1/a..b", None, b"", "/v1/a..b"),
        ("/v1/../x", None, b"", None),
        ("/v1/..", b"/v1/%2E%2E", b"", None),
    ],
)
def test_a_path_goes_on_as_it_was_written_unless_it_leads_upwards(path, raw_path, query, target):
    scope = {"path": path, "query_string": query, **({} if raw_path is None else {"raw_path": raw_path})}
    if target is None:
        with pytest.raises(NotFound):
            target_of(scope)
    else:
        assert target_of(scope) == target


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({"n": "3"}, 3),
        ({"n": "many"}, 1),
        ({"prompt": []}, 1),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": [7, 8, 9], "n": 2}, 2),
    ],
)
def test_an_answer_has_so_many_choices_for_each_prompt(body, choices):
    assert choices_of(body) == choices


def test_the_gateways_own_time_is_what_it_did_not_wait(monkeypatch):
    monkeypatch.setattr(request_module.time, "perf_counter", lambda: 10.0)
    for arrived, waited, own in ((8.0, 0.5, 1500.0), (8.0, 2.5, 0.0)):
        timings = Timings(arrived=arrived, waited_seconds=waited)
        assert timings.own_milliseconds == own and not (timings.is_stream or timings.was_alone)


EVIL = {"remote_host": "evil"}


def body_of(raw: dict[str, Any], path: str = CHAT, key: ApiKey | None = None) -> RequestBody:
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
    request = request_of(scope, json.dumps(raw).encode(), "r", key)
    request.body.take(dict(raw), request.client, asks_usage=False)
    return request.body


def sent(body: dict[str, Any], key: ApiKey | None = None, path: str = CHAT) -> dict[str, Any]:
    reached: dict[str, Any] = json.loads(body_of(body, path, key).encoded(()))
    return reached


@pytest.fixture
def key() -> ApiKey:
    return ApiKey("ann", KeyEntry(sha256="0" * 64), "a salt")


@pytest.mark.parametrize("name", [HINT, PIN, *TRANSFERS])
def test_nothing_of_the_gateways_comes_from_a_client(name, key):
    body = {"token_ids": [1], "sampling_params": {"seed": 1, "extra_args": {name: EVIL, "mine": 1}}}
    kept = {"token_ids": [1], "sampling_params": {"seed": 1, "extra_args": {"mine": 1}}}
    assert sent(body, path=GENERATE) == kept
    assert sent({**body, "kv_transfer_params": EVIL}, key, GENERATE) == {**kept, "cache_salt": "a salt"}
    if name in TRANSFERS:
        taken = body_of({"model": "m", name: EVIL, XARGS: {name: EVIL, "mine": 1}}, key=key)
        for _ in range(2):
            assert json.loads(taken.encoded(())) == {"model": "m", XARGS: {"mine": 1, HINT: []}, "cache_salt": "a salt"}
        assert EVIL not in taken.parsed.values()


def test_media_that_all_keys_would_share_by_name_are_refused(key):
    body = {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {"image": ["a"]}}}
    with pytest.raises(BadRequest, match="content_parts"):
        sent(body, key, GENERATE)
    assert sent(body, path=GENERATE) == body


def test_a_response_is_not_stored_under_a_name_that_a_client_with_a_key_chose(key):
    body = {"model": "m", "input": "x", "request_id": "resp_of_another"}
    assert sent(body, key, RESPONSES) == {"model": "m", "input": "x", "cache_salt": "a salt"}
    assert sent({**body, "cache_salt": "x"}, path=RESPONSES) == {**body, "cache_salt": "x"}


MINE = {"mine": 1}


@pytest.mark.parametrize(
    ("xargs", "hint", "load", "sent", "noted"),
    [
        (None, (), "", None, ()),
        (None, (7,), "g,1,1", {HINT: [7], LOAD: "g,1,1"}, (7,)),
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
        (None, (), "", None),
        (None, (7,), "g,1,1", {HINT: [7], LOAD: "g,1,1"}),
        ({**MINE, HINT: [9], PIN: 1}, (), "", {**MINE, HINT: []}),
        ("no object", (7,), "", "no object"),
    ],
)
def test_a_message_goes_to_the_chat_api_with_the_same_beside_it(xargs, hint, load, sent):
    body = body_of(MESSAGE if xargs is None else {**MESSAGE, XARGS: xargs}, MESSAGES)
    chat = json.loads(body.as_chat(hint, {"cache_salt": "s"}, load) or b"{}")
    assert (chat.get(XARGS) or None) == sent and body.hint == hint
    assert (chat["cache_salt"], chat["max_tokens"], chat["messages"][0]["role"]) == ("s", 8, "user")
    none = body_of({"model": "m", "messages": 7}, MESSAGES)
    assert none.as_chat((7,), {}, "") is None and none.hint == ()
