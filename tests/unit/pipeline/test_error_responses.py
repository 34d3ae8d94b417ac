"""Errors in the words of the API that was asked, whole or as the last event of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy import errors
from proxy.errors import WorkerFailed
from proxy.pipeline.error_responses import error_event, send_error

ERROR = WorkerFailed("It broke off.")

CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","status":"in_progress"}}\n\n'

RESPONSE = {"status": "failed", "error": {"code": "server_error", "message": "It broke off."}}

UNKNOWN = {"object": "response", "output": []}


@pytest.mark.parametrize(
    ("endpoint", "first", "last", "name", "told"),
    [
        ("/v1/chat/completions", b"", b"", b"", json.loads(ERROR.body())),
        (
            "/v1/messages", b"", b"", b"error",
            {"type": "error", "error": {**ERROR.as_dict(), "type": "api_error"}},
        ),
        (
            "/v1/responses", CREATED, b'event: x\ndata: {"type":"x","sequence_number":7}\n\n', b"response.failed",
            {"type": "response.failed", "sequence_number": 8, "response": {"id": "r", **RESPONSE}},
        ),
        (
            "/v1/responses", b"", b"data: {\n\n", b"response.failed",
            {"type": "response.failed", "sequence_number": 0, "response": {**UNKNOWN, **RESPONSE}},
        ),
    ],
)  # fmt: skip
def test_each_apis_last_word_is_a_whole_event(endpoint, first, last, name, told):
    event = error_event(ERROR, endpoint, first, last)
    assert event.endswith(b"\n\n") and event.count(b"\n\n") == 1
    fields = dict(line.split(b": ", 1) for line in event.strip().splitlines())
    assert fields.get(b"event", b"") == name and json.loads(fields[b"data"]) == told


BUSY = {"retry-after": "2"}


@pytest.mark.parametrize(
    ("kind", "more", "anthropic"),
    [
        ("Unauthorized", {"www-authenticate": "Bearer"}, "authentication_error"),
        ("UnreadableCoding", {"accept-encoding": "identity"}, "api_error"),
        ("KeyBusy", BUSY, "rate_limit_error"),
        ("Overloaded", BUSY, "overloaded_error"),
    ],
)
async def test_an_error_is_sent_whole_with_what_belongs_to_it(kind, more, anthropic):
    error: Any = getattr(errors, kind)("no")
    for path in ("/v1/chat/completions", "/v1/messages"):
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        await send_error(send, error, path, [(b"x-mine", b"1")])
        start, body = sent
        told = {name.decode(): value.decode() for name, value in start["headers"]}
        length = {"content-length": str(len(body["body"]))}
        assert told == {"x-mine": "1", "content-type": "application/json", **more, **length}
        assert start["status"] == error.status
        assert body["body"] == error.body() or json.loads(body["body"])["error"]["type"] == anthropic
