"""What is taken in of a request, who is told what of a failure, and how large bodies share the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from proxy.chat.chat import CHAT
from proxy.errors import GatewayError, NotFound, Unauthorized
from proxy.http import asgi
from proxy.http.auth import KeyRing
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.pipeline.handler import RequestHandler
from proxy.pipeline.request import Prompt, ProxiedRequest
from proxy.settings import Settings
from tests.harness.api_keys import bearer, entry


@pytest.fixture
def handler() -> RequestHandler:
    parts = ("pool", "reader", "dispatcher", "answer", "accounting", "idle", "preflights", "adapters")
    return RequestHandler(Settings(), Metrics(), keys=None, **{name: Mock() for name in parts})


async def test_without_memory_a_client_is_asked_to_come_again(handler, caplog):
    handler._answer.side_effect = MemoryError
    sent = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    extensions = {asgi.ON_DISCONNECT: lambda callback: None}
    scope = {"method": "GET", "path": "/v1/x", "query_string": b"", "headers": [], "extensions": extensions}
    await handler(scope, receive, send)
    assert sent[0]["status"] == 503 and b"retry-after" in dict(sent[0]["headers"])
    assert json.loads(sent[1]["body"])["error"]["code"] == "overloaded"
    assert "Traceback" not in caplog.text and handler._bodies.held == 0


class Scene:
    """A handler by itself; its answers are what `answers` does, an empty 200 if it does nothing."""

    def __init__(self, keys: KeyRing | None = None, **settings: Any) -> None:
        self.seen: list[ProxiedRequest] = []  # requests that are to be answered
        self.counted: list[ProxiedRequest] = []
        self.began: list[ProxiedRequest] = []
        self.read: list[tuple[ProxiedRequest, Any]] = []  # and the workers of their models
        self.changed: list[ProxiedRequest] = []  # adapters
        self.tracing, self.stored, self.metrics = Mock(), Mock(), Metrics()
        self.stored.boot.return_value = None
        self.held = 0  # bytes of bodies while a request is answered
        self.answers: Any = None
        accounting, pool, reader = Mock(), Mock(), Mock(stored=self.stored)
        accounting.count, accounting.began = self.counted.append, self.began.append
        pool.find = AsyncMock(return_value=["its workers"])
        reader.read = self._read
        adapters = Mock(serve=self._change)
        self.handler = RequestHandler(
            Settings(**settings),
            self.metrics,
            keys,
            pool,
            reader,
            Mock(has_slot=lambda request: request is self.read[-1][0]),
            self._answer,
            accounting,
            IdleWork(),
            Mock(answer=AsyncMock()),
            adapters,
            self.tracing,
        )

    async def _read(self, request: ProxiedRequest, workers: Any, has_slot: Any) -> Prompt:
        self.read.append((request, workers))
        assert has_slot() is True
        return Prompt(tokens=7)

    async def _change(self, request: ProxiedRequest) -> None:
        self.changed.append(request)

    async def _answer(self, request: ProxiedRequest, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        self.seen.append(request)
        self.held = self.handler._bodies.held
        assert send is request.reply
        if self.answers is not None:
            await self.answers(request)
        if not request.reply.started:
            await asgi.send_whole(send, 200, [], b"")

    async def __call__(
        self,
        path: str = "/v1/x",
        body: bytes = b"",
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
        **extensions: Any,
    ) -> list[Any]:
        """What the client gets."""
        sent = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"method": method, "path": path, "query_string": b"", "headers": list(headers)}
        extensions = {asgi.ON_DISCONNECT: lambda callback: None, **extensions}
        await self.handler({**scope, "extensions": extensions}, receive, send)
        return sent


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def with_keys(tmp_path: Path) -> Scene:
    (tmp_path / "keys.toml").write_text(entry("ann") + entry("root", admin=True))
    return Scene(KeyRing(tmp_path / "keys.toml", "secret"))


JSON = (b"content-type", b"application/json")


def of(name: str) -> tuple[bytes, bytes]:
    return (b"authorization", bearer(name)["authorization"].encode())


async def test_of_two_of_one_name_at_once_the_second_is_called_otherwise_in_its_body_too(scene):
    body = json.dumps({"input": "x", "request_id": "mine"}).encode()

    async def another(request: ProxiedRequest) -> None:
        scene.answers = None
        await scene("/v1/embeddings", body, headers=[JSON])

    scene.answers = another
    await scene("/v1/embeddings", body, headers=[JSON])
    await scene("/v1/embeddings", body, headers=[JSON])  # it is free again
    first, second, third = scene.seen
    assert [each.client.request_id for each in scene.seen] == ["mine"] * 3
    assert (first.engine_id, first.body.put, third.engine_id, third.body.put) == ("mine", {}, "mine", {})
    assert second.engine_id.startswith("mine.") and second.body.put == {"request_id": second.engine_id}


OBJECT = b'{"model": "m"}'


DEEP = b'{"a":' * 300 + b"1" + b"}" * 300


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        (CHAT, [], b"{", 400),
        (CHAT, [JSON], b"", 400),
        (CHAT, [JSON], b"[1]", 400),
        ("/v1/other", [JSON], DEEP, 400),
        ("/v1/other", [(b"content-encoding", b"gzip")], b"x", 415),
        (CHAT, [JSON, (b"content-encoding", b"gzip")], OBJECT, 415),
        ("/v1/other", [(b"content-type", b"application/x-www-form-urlencoded")], b"a=b", 400),
    ],
)
async def test_what_no_worker_should_read_is_refused(scene, path, headers, body, status):
    start, refused = await scene(path, body, headers=headers)
    assert start["status"] == status and json.loads(refused["body"])["error"]["type"] == "invalid_request_error"
    assert not scene.seen and [request.status for request in scene.counted] == [status]


@pytest.mark.parametrize(
    ("headers", "status"),
    [([JSON, of("ann")], 400), ([of("ann")], 200)],
)
async def test_with_a_key_what_claims_to_be_json_is_read_or_refused(with_keys, headers, status):
    """A worker that reads it all the same would not see the key's salt."""
    assert (await with_keys("/v1/other", b"{", headers=headers))[0]["status"] == status


async def test_a_form_is_read_for_the_model_alone(scene):
    body = b'--B\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--B--\r\n'
    await scene("/v1/audio/transcriptions", body, headers=[(b"content-type", b"multipart/form-data; boundary=B")])
    (request,) = scene.seen
    assert request.model == "whisper" and request.body.raw == body and request.body.parsed == {}


@pytest.mark.parametrize("origin", [None, b"https://a"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFound("No such thing."), 404, "not_found"),
        (Unauthorized("Who are you?"), 401, "invalid_api_key"),
        (KeyError("You pilot ships."), 500, None),
        (asyncio.CancelledError(), 503, "stopping"),
    ],
)
async def test_a_failure_is_told_in_the_apis_envelope(scene, caplog, error, status, code, origin):
    async def fails(request: ProxiedRequest) -> None:
        raise error

    scene.answers = fails
    headers = [(b"x-request-id", b"r")] + ([(b"origin", origin)] if origin else [])
    start, body = await scene(headers=headers)
    named, told = dict(start["headers"]), json.loads(body["body"])["error"]
    assert (start["status"], told["code"], named[b"x-request-id"]) == (status, code, b"r")
    lets_in = named.get(b"access-control-allow-origin")
    assert lets_in == (b"*" if origin and status != 401 else None)
    assert [request.status for request in scene.counted] == [status]
    assert "pilot" not in caplog.text + told["message"]
    assert ("request r failed: KeyError" in caplog.text and "in fails" in caplog.text) is (status == 500)


@pytest.mark.parametrize(("error", "status"), [(GatewayError("no"), 500), (asgi.ClientGone(), 499)])
async def test_behind_the_head_of_an_answer_a_failure_ends_it_and_is_counted(scene, error, status):
    async def fails(request: ProxiedRequest) -> None:
        await request.reply({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    scene.answers = fails
    assert [message["type"] for message in await scene()] == ["http.response.start"]
    assert [request.status for request in scene.counted] == [status]


@pytest.mark.parametrize(
    ("delivered", "started", "status"), [(True, True, 200), (True, False, 499), (False, True, 499)]
)
async def test_who_leaves_with_all_of_an_answer_has_been_answered(scene, delivered, started, status):
    async def leaves(request: ProxiedRequest) -> None:
        if started:
            await request.reply({"type": "http.response.start", "status": 200, "headers": []})
        request.delivered = delivered
        raise asgi.ClientGone

    scene.answers = leaves
    await scene()
    assert [request.status for request in scene.counted] == [status]


async def test_who_is_refused_at_the_door_is_no_request(with_keys):
    start, _ = await with_keys()
    assert start["status"] == 401 and not with_keys.seen and not with_keys.counted
    start, _ = await with_keys(headers=[of("ann")], **{asgi.IS_CROWDED: True})
    assert start["status"] == 503 and not with_keys.counted
    start, _ = await with_keys("/v1/../x", headers=[of("ann")])
    assert start["status"] == 404 and not with_keys.counted and with_keys.handler._bodies.held == 0


async def test_a_browsers_question_needs_no_key(with_keys):
    asks = [(b"origin", b"https://a"), (b"access-control-request-method", b"POST")]
    assert await with_keys(method="OPTIONS", headers=asks) == []
    with_keys.handler._preflights.answer.assert_awaited_once()
    assert not with_keys.seen and not with_keys.counted
