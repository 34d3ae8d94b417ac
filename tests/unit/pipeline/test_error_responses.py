"""Errors in the words of the API that was asked, whole or as the last event of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.errors import (
    RETRY_AFTER_SECONDS,
    BadRequest,
    BodyTooLarge,
    Forbidden,
    GatewayError,
    KeyBusy,
    NotFound,
    NoWebSockets,
    Overloaded,
    PinRefused,
    Unauthorized,
    UnreadableCoding,
    WorkerFailed,
)
from proxy.pipeline.error_responses import error_body, error_event, error_headers, send_error


def test_each_apis_last_word():
    error = WorkerFailed("It broke off.")
    assert json.loads(error_event(error, "/v1/chat/completions")[6:])["error"]["code"] == "worker_failed"
    name, data = error_event(error, "/v1/messages").splitlines()[:2]
    assert name == b"event: error"
    told = json.loads(data[6:])
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    created = (
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","status":"in_progress"}}\n\n'
    )
    last = b'event: x\ndata: {"type":"x","sequence_number":7}\n\n'
    name, data = error_event(error, "/v1/responses", created, last).splitlines()[:2]
    told = json.loads(data[6:])
    assert name == b"event: response.failed" and told["sequence_number"] == 8
    assert told["response"]["id"] == "r" and told["response"]["status"] == "failed"
    assert told["response"]["error"]["message"] == "It broke off."


def test_an_error_says_in_its_headers_what_to_do():
    assert error_headers(Unauthorized("no key"))["www-authenticate"] == "Bearer"
    assert error_headers(Overloaded("full"))["retry-after"] == str(RETRY_AFTER_SECONDS)
    assert error_headers(WorkerFailed("x")) == {"content-type": "application/json"}


def test_errors_keep_openais_envelope_in_every_api():
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        assert set(json.loads(error_body(WorkerFailed("x"), path))["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("no"), 400, "invalid_request_error"),
        (Unauthorized("no"), 401, "authentication_error"),
        (Forbidden("no"), 403, "permission_error"),
        (NotFound("no"), 404, "not_found_error"),
        (BodyTooLarge("no"), 413, "request_too_large"),
        (KeyBusy("no"), 429, "rate_limit_error"),
        (Overloaded("no"), 503, "overloaded_error"),
        (PinRefused("no"), 409, "api_error"),
        (WorkerFailed("no"), 502, "api_error"),
        (GatewayError("no"), 500, "api_error"),
    ],
)
def test_anthropics_sdk_is_told_its_own_kinds_of_errors(error, status, kind):
    for told in (error_body(error, "/v1/messages"), error_event(error, "/v1/messages").split(b"data: ")[1]):
        body = json.loads(told)
        assert (error.status, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["error"]["message"] == "no" and body["error"]["code"] == error.code
    assert json.loads(error_body(error))["error"]["type"] == error.type


@pytest.mark.parametrize(
    ("error", "more"),
    [
        (Unauthorized("no"), {"www-authenticate": "Bearer"}),
        (UnreadableCoding("no"), {"accept-encoding": "identity"}),
        (NoWebSockets("no"), {"upgrade": "HTTP/1.1", "connection": "upgrade"}),
        (KeyBusy("no"), {"retry-after": "2"}),
        (Overloaded("no"), {"retry-after": "2"}),
        (Forbidden("no"), {}),
        (NotFound("no"), {}),
    ],
)
async def test_an_error_is_sent_whole_with_what_belongs_to_it(error, more):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await send_error(send, error, "/v1/chat/completions", [(b"x-mine", b"1")])
    start, body = sent
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    length = {"content-length": str(len(body["body"]))}
    assert told == {"x-mine": "1", "content-type": "application/json", **more, **length}
    assert start["status"] == error.status and body["body"] == error.body()


@pytest.mark.parametrize(
    ("first", "last", "number", "response"),
    [
        (b"", b"", 0, {"object": "response", "output": []}),
        (b'data: {"response":{"id":"r"}}\n\n', b'data: {"sequence_number":0}\n\n', 1, {"id": "r"}),
        (b'data: {"response":7}\n\n', b'data: {"sequence_number":"7"}\n\n', 0, {"object": "response", "output": []}),
        (b'data: {"response":{"status":"in_progress"}}\n\n', b"data: 7\n\n", 0, {}),
    ],
)
def test_a_response_fails_as_it_was_announced_and_numbered(first, last, number, response):
    event = error_event(WorkerFailed("It broke off."), "/v1/responses", first, last)
    told = json.loads(event.split(b"data: ")[1])
    error = {"code": "server_error", "message": "It broke off."}
    assert told == {
        "type": "response.failed",
        "sequence_number": number,
        "response": {**response, "status": "failed", "error": error},
    }


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "other"])
def test_an_error_event_is_a_whole_event(endpoint):
    event = error_event(WorkerFailed("gone"), endpoint)
    assert event.endswith(b"\n\n") and event.count(b"\n\n") == 1 and b"data: " in event
