"""Errors in the words of the API that was asked, whole or as the last event of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.errors import (
    Forbidden,
    KeyBusy,
    NotFound,
    NoWebSockets,
    Overloaded,
    Unauthorized,
    UnreadableCoding,
    WorkerFailed,
)
from proxy.pipeline.error_responses import error_event, send_error


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


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "other"])
def test_an_error_event_is_a_whole_event(endpoint):
    event = error_event(WorkerFailed("gone"), endpoint)
    assert event.endswith(b"\n\n") and event.count(b"\n\n") == 1 and b"data: " in event
