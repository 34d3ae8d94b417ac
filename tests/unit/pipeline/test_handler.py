"""What is taken in of a request, and who is told what of a failure."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.chat.chat import CHAT
from proxy.errors import GatewayError, NotFound, Unauthorized
from proxy.http import asgi
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import InMemoryGateway


@pytest.fixture
async def own(in_memory, worker) -> InMemoryGateway:
    return await in_memory(worker)


def counted(own: InMemoryGateway) -> dict[str, float]:
    samples = (sample for family in own.gateway.metrics.registry.collect() for sample in family.samples)
    return {each.labels["code"]: each.value for each in samples if each.name == "seamark_requests_total"}


DEEP = b'{"a":' * 300 + b"1" + b"}" * 300

FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        *((CHAT, {}, body, 400) for body in (b"", b"{", b"[]", b"nonsense", b"\xff\xfe")),
        (CHAT, {"content-type": "a/b"}, b"{", 400),
        ("/v1/other", {}, DEEP, 400),
        *(
            (path, {"content-encoding": coding}, gzip.compress(b"{}", mtime=0), 415)
            for path in (CHAT, "/tokenize")
            for coding in ("gzip", "identity, GZIP")
        ),
        ("/v1/other", FORM, b"a=b", 400),
    ],
)
async def test_what_no_worker_should_read_is_refused_in_openais_envelope(own, worker, path, headers, body, status):
    refused = await own.post(body, path, **headers)
    error = refused.json()["error"]
    assert refused.status_code == status and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and not worker.requests
    assert counted(own) == {str(status): 1} and float(refused.headers["x-seamark-overhead-ms"]) >= 0
    if status == 415:
        assert (
            refused.headers["accept-encoding"] == "identity"
            and headers["content-encoding"][-4:].lower() in error["message"]
        )


async def test_an_unknown_path_is_refused_in_openais_envelope(own):
    answer = await own.get("/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


async def fails(own: InMemoryGateway, error: BaseException, started: bool = False, delivered: bool = False) -> None:
    """Each request does, with what has been sent by then."""

    async def answer(request: Any, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        request.delivered = delivered
        raise error

    own.gateway.handler._answer = answer


@pytest.mark.parametrize("origin", [None, "https://a"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFound("No such thing."), 404, "not_found"),
        (Unauthorized("Who are you?"), 401, "invalid_api_key"),
        (KeyError("You pilot ships."), 500, None),
        (MemoryError(), 503, "overloaded"),
        (asyncio.CancelledError(), 503, "stopping"),
    ],
)
async def test_a_failure_is_told_in_the_apis_envelope(own, caplog, error, status, code, origin):
    await fails(own, error)
    answer = await own.post(chat("Tide?"), x_request_id="r", **({"origin": origin} if origin else {}))
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], answer.headers["x-request-id"]) == (status, code, "r")
    lets_in = answer.headers.get("access-control-allow-origin")
    assert lets_in == ("*" if origin and status != 401 else None)
    assert ("retry-after" in answer.headers) is (status == 503) and counted(own) == {str(status): 1}
    assert "pilot" not in caplog.text + told["message"] and own.gateway.handler._bodies.held == 0
    assert ("request r failed: KeyError" in caplog.text and "in answer" in caplog.text) is (status == 500)


@pytest.mark.parametrize(
    ("error", "started", "delivered", "status"),
    [
        (GatewayError("no"), True, False, "500"),
        (asgi.ClientGone(), True, False, "499"),
        (asgi.ClientGone(), True, True, "200"),  # it has all of it
        (asgi.ClientGone(), False, True, "499"),
    ],
)
async def test_behind_the_head_of_an_answer_a_failure_ends_it_and_is_counted(own, error, started, delivered, status):
    await fails(own, error, started, delivered)
    call = own.opened(chat("Tide?"))
    types = []
    while (message := await call.message()) is not None:
        types.append(message["type"])
    await call.task
    await own.gateway.idle.caught_up()
    assert types == ["http.response.start"] * started and counted(own) == {status: 1}


async def test_large_bodies_take_turns_and_small_ones_wait_for_none(own):
    def sized(size: int) -> bytes:
        return json.dumps(chat("x" * (size - len(json.dumps(chat("")))))).encode()

    await own.gateway.handler._turns.acquire()
    assert (await own.post(sized(65_536))).status_code == 200
    waiting = asyncio.create_task(own.post(sized(65_537)))
    await asyncio.wait((waiting,), timeout=0.05)
    assert not waiting.done()
    own.gateway.handler._turns.release()
    assert (await waiting).status_code == 200


@pytest.fixture
async def with_keys(in_memory, worker, tmp_path: Path) -> InMemoryGateway:
    (tmp_path / "keys.toml").write_text(entry("ann") + entry("bob"))
    return await in_memory(worker, api_keys=tmp_path / "keys.toml")


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        *((name, True) for name in ("a", "one two/3?#", "x" * 256)),
        *((name, False) for name in ("x" * 257, " a", "a\tb", "\xe9")),
    ],
)
async def test_a_request_is_called_as_its_client_says_if_that_can_be_kept(own, worker, given, is_kept):
    for body, headers in (({}, {"x-request-id": given.encode("latin-1")}), ({"request_id": given}, {})):
        answer = await own.post(chat("Tide?", **body), **headers)
        named = worker.requests[-1].header(b"x-request-id").decode("latin-1")
        assert (answer.headers["x-request-id"] == given) is is_kept and (named == given) is is_kept


@pytest.mark.parametrize(("kind", "status"), [("application/json", 400), ("a/b", 200)])
async def test_with_a_key_what_claims_to_be_json_is_read_or_refused(with_keys, kind, status):
    """A worker that reads it all the same would not see the key's salt."""
    answer = await with_keys.post(b"{", "/v1/embeddings", **{"content-type": kind}, **bearer("ann"))
    assert answer.status_code == status


async def test_who_is_refused_at_the_door_is_no_request(with_keys, worker):
    assert (await with_keys.post(chat("Tide?"))).status_code == 401
    call = with_keys.opened(chat("Tide?"), "/v1/../x", **bearer("ann"))
    assert (await call.message())["status"] == 404
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "query_string": b"", "headers": []}
    got: list[Any] = []

    async def send(message: Any) -> None:
        got.append(message)

    await with_keys.gateway.handler({**scope, "extensions": {asgi.IS_CROWDED: True}}, None, send)
    assert got[0]["status"] == 503
    asks = {"origin": "https://a", "access-control-request-method": "POST"}
    asked = await with_keys.client.options(CHAT, headers=asks)  # a browser asks this without a key
    assert asked.status_code != 401 and asked.headers["x-request-id"]
    assert not counted(with_keys) and with_keys.gateway.handler._bodies.held == 0
    assert [request.method for request in worker.requests] == ["OPTIONS"]
