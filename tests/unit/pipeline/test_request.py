"""What a request says of itself: its path, its client, its model, its conversation, the response that it names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.errors import NotFound
from proxy.http import asgi
from proxy.http.auth import ApiKey, KeyEntry
from proxy.pipeline import request as module
from proxy.pipeline.request import (
    CLIENT_GONE,
    Choice,
    ProxiedRequest,
    Reply,
    Timings,
    affinity_key,
    choices_of,
    request_of,
    target_of,
)

SESSION = "0b5c9a52-3d5f-4a56-9a0e-6f6f1f6a7b10"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-session-affinity", b"ses_1"), (b"x-session-id", b"ses_other")],  # OpenCode
        [(b"x-session-id", b"ses_1")],
        [(b"session-id", b"ses_1")],  # Codex
        [(b"session_id", b"ses_1")],
        [(b"user-agent", b"cli"), (b"x-claude-code-session-id", b"ses_1")],
    ],
)
def test_a_session_of_an_agent_is_kept_together(headers):
    assert affinity_key(headers, {"model": "m"}) == "ses_1"


def test_two_sessions_of_one_agent_are_kept_apart():
    names = [b"ses_1", b"ses_2", SESSION.encode()]
    assert len({affinity_key([(b"x-session-id", name)], {}) for name in names}) == 3


def test_what_the_client_itself_wants_kept_together_comes_first():
    headers = [(b"session_id", b"ses_1")]
    assert affinity_key(headers, {"prompt_cache_key": "mine"}) == "mine"
    for nothing in ("", 7, None, ["mine"]):
        assert affinity_key(headers, {"prompt_cache_key": nothing}) == "ses_1"


def test_a_request_of_no_session_has_no_key():
    assert affinity_key([(b"x-request-id", b"r"), (b"x-session-id", b"")], {}) is None
    assert affinity_key([(b"x-session-id", b"\xff\xfe")], {}) == "\xff\xfe"  # any bytes make a name


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/", ""),
        ("/v1/responses", "resp_0"),
        ("/v1/responses/render", "resp_0"),
    ],
)
def test_a_stored_response_is_named_by_the_path_or_by_the_body(path, named):
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
    request = request_of(scope, b"", "r")
    request.body.parsed = {"previous_response_id": "resp_0"}
    assert request.response_id == named


def scope_of(path: str = "/v1/chat/completions", query: bytes = b"", *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"method": "POST", "path": path, "query_string": query, "headers": list(headers)}


def asked(path: str = "/v1/chat/completions", *headers: tuple[bytes, bytes], **body: Any) -> ProxiedRequest:
    request = request_of(scope_of(path, b"", *headers), b"x", "r")
    request.body.parsed = body
    return request


@pytest.mark.parametrize(
    ("path", "raw_path", "query", "target"),
    [
        ("/v1/x", None, b"", "/v1/x"),
        ("/v1/x", None, b"a=/../b", "/v1/x?a=/../b"),
        ("/v1/a b", b"/v1/a%20b", b"c=%20", "/v1/a%20b?c=%20"),
        ("/v1/.hidden", None, b"", "/v1/.hidden"),
        ("/v1/...", None, b"", "/v1/..."),
        ("/v1/a..b", None, b"", "/v1/a..b"),
        ("/v1/../x", None, b"", None),
        ("/v1/./x", None, b"", None),
        ("/v1/..", b"/v1/%2E%2E", b"", None),
        ("/.", None, b"", None),
    ],
)
def test_a_path_goes_on_as_it_was_written_unless_it_leads_upwards(path, raw_path, query, target):
    scope = scope_of(path, query) | ({} if raw_path is None else {"raw_path": raw_path})
    if target is None:
        with pytest.raises(NotFound):
            target_of(scope)
    else:
        assert target_of(scope) == target


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/tokenize", "/tokenize"),
        ("/v1/responses/resp_1", "other"),
        ("/anything", "other"),
    ],
)
def test_only_known_paths_are_labels(path, label):
    assert asked(path).client.endpoint == label


def test_a_key_stays_at_the_gateway_that_has_keys():
    headers = [(b"authorization", b"Bearer x"), (b"x-api-key", b"x"), (b"host", b"h"), (b"X-Mine", b"1")]
    without = request_of(scope_of("/v1/x", b"", *headers), b"", "r").client
    assert without.headers == [headers[0], headers[1], (b"x-mine", b"1")] and without.owner is None
    key = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")
    known = request_of(scope_of("/v1/x", b"", *headers), b"", "r", key).client
    assert known.headers == [(b"x-mine", b"1")] and known.owner == "ann"


@pytest.mark.parametrize(
    ("headers", "is_json"),
    [
        ([(b"content-type", b"application/json; charset=utf-8")], True),
        ([(b"content-type", b"application/vnd.api+JSON")], True),
        ([(b"accept", b"application/json"), (b"content-type", b"text/plain")], False),
        ([(b"accept", b"application/json")], False),
        ([], False),
    ],
)
def test_a_client_says_by_one_header_that_its_body_is_json(headers, is_json):
    assert asked("/v1/x", *headers).client.is_json is is_json


def test_a_client_is_called_what_it_calls_itself():
    assert asked("/v1/x", (b"accept", b"a"), (b"user-agent", b"one \xe9"), (b"user-agent", b"b")).client.user_agent == (
        "one \xe9"
    )
    assert asked("/v1/x", (b"accept", b"a")).client.user_agent is None


def test_a_request_has_two_names_one_for_its_client_and_one_for_its_worker():
    request = asked()
    request.client, request.engine_id = request.client._replace(request_id="\xe9"), "\xe9.1"
    assert request.client.id_header == (b"x-request-id", b"\xe9")
    assert request.engine_id_header == (b"x-request-id", b"\xe9.1")


@pytest.mark.parametrize(
    ("path", "body", "form", "model"),
    [
        ("/v1/chat/completions", {"model": "m"}, None, "m"),
        ("/v1/chat/completions", {"model": ["m"]}, None, ["m"]),
        ("/v1/chat/completions", {"model": ""}, None, ""),
        ("/v1/chat/completions", {"model": None}, None, ""),
        ("/v1/chat/completions", {"messages": []}, None, ""),
        ("/v1/responses/resp_1/cancel", {"x": 1}, None, None),
        ("/v1/responses/resp_1/cancel", {"model": "m"}, None, "m"),
        ("/v1/chat/completions", {}, None, None),
        ("/v1/audio/transcriptions", {}, "whisper", "whisper"),
        ("/v1/audio/transcriptions", {}, "", ""),
    ],
)
def test_a_model_is_named_in_the_body_or_left_to_the_worker(path, body, form, model):
    request = asked(path, **body)
    request.body.form_model = form
    assert request.model == model


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": "3"}, 3),
        ({"n": None}, 1),
        ({"n": 0}, 1),
        ({"n": "many"}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": []}, 1),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": [7, 8, 9], "n": 2}, 2),
    ],
)
def test_an_answer_has_so_many_choices_for_each_prompt(body, choices):
    assert choices_of(body) == choices


def test_a_request_is_one_of_the_worker_it_was_given_to_last():
    request = asked()
    assert request.worker is None and request.expected is None and request.status == 0
    one, other, expected = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    request.give(Choice(one, expected))
    assert request.worker is one and request.expected is expected
    request.give(Choice(other))
    assert request.worker is other and request.expected is None


async def test_a_request_counts_as_what_its_answer_began_with_unless_it_failed_behind_that():
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    request = request_of(scope_of(), b"", "r", send=send)
    assert (request.status, request.reply.started) == (0, False)
    await request.reply({"type": "http.response.start", "status": 201, "headers": []})
    assert (request.status, request.reply.started, request.reply.failure) == (201, True, 0)
    await request.reply({"type": "http.response.body", "body": b"x"})
    assert request.status == 201 and [each["type"][14:] for each in sent] == ["start", "body"]
    request.reply.failed(CLIENT_GONE)
    assert (request.status, request.reply.failure) == (499, 499)


async def test_without_a_client_an_answer_goes_nowhere():
    request = request_of(scope_of(), b"", "r")
    await request.reply({"type": "http.response.start", "status": 200, "headers": []})
    assert request.status == 200


async def test_the_head_is_held_back_by_the_server_that_can_and_for_whole_answers_alone():
    held, request = [], None
    extensions = {asgi.HOLD_HEAD: lambda: held.append(1)}

    async def send(message: Any) -> None:
        """Nobody looks at it."""

    request = request_of({**scope_of(), "extensions": extensions}, b"", "r", send=send)
    await request.reply({"type": "http.response.start", "status": 200, "headers": []})
    assert held == []
    await asgi.send_whole(request.reply, 200, [], b"")
    assert held == [1]
    await asgi.send_whole(Reply(send, Timings()), 200, [], b"")
    assert held == [1]


def test_no_gateway_is_quicker_than_no_time(monkeypatch):
    now = 10.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    timings = Timings(arrived=10.0)
    assert (timings.own_milliseconds, timings.is_stream, timings.was_alone) == (0.0, False, False)
    assert (timings.choosing, timings.leased, timings.reading_seconds, timings.waited_seconds) == (0.0,) * 4
    assert timings.asked is None and timings.first_byte is None
    now = 10.25
    assert timings.own_milliseconds == 250.0
    timings.waited_seconds = 0.125
    assert timings.own_milliseconds == 125.0
    timings.waited_seconds = 1.0  # some of it side by side
    assert timings.own_milliseconds == 0.0
