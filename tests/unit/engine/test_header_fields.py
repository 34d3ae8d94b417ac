"""A hint in a header, and a load: whose is heard, what it becomes in the body, and that nothing else changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from engine_patches import settings
from engine_patches.reporting import header_fields
from engine_patches.reporting.events_api import EventsEndpoint
from tests.harness.waiting import until

CHAT = "/v1/chat/completions"

TRUSTED = "10.1.2.3"


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    monkeypatch.setenv(settings.HINTS_FROM, "10.0.0.0/8, 2001:db8::1")
    header_fields.networks.cache_clear()
    yield
    header_fields.networks.cache_clear()


def counted(result: str) -> float:
    return header_fields.counted().labels(result)._value.get()


async def sent_on(
    body: bytes, *hints: bytes, peer: Any = (TRUSTED, 5), path: str = CHAT, method: str = "POST", more: Any = ()
):
    """Headers and body as the server behind the middleware gets them."""
    parts = [body[:7], body[7:]]

    async def receive() -> Any:
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        whole = b""
        while True:
            message = await receive()
            whole += message["body"]
            if not message["more_body"]:
                break
        assert (await receive())["type"] == "http.disconnect"
        seen.update(headers=scope["headers"], body=whole)

    headers = [
        (b"content-length", str(len(body)).encode()),
        (b"x-other", b"1"),
        *((header_fields.NAME, h) for h in hints),
        *more,
    ]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": peer}
    await EventsEndpoint(app)(scope, receive, None)
    assert header_fields.NAME not in dict(seen["headers"])
    assert (b"x-other", b"1") in seen["headers"]
    assert dict(seen["headers"])[b"content-length"] == str(len(seen["body"])).encode()
    return seen["body"]


@pytest.mark.parametrize(
    ("body", "xargs"),
    [
        (b'{"model": "m", "n": 1e400, "a": "\\u00e9"}', {}),
        (b'{"vllm_xargs": {"mine": 1}}', {"mine": 1}),
        (b'{"vllm_xargs": null}', {}),
        (b"{}", {}),
        (b' {"a":"}"} \n', {}),
    ],
)
async def test_a_hint_joins_the_body_and_everything_else_stays(body, xargs):
    before = counted("used")
    found = await sent_on(body, b"163; -5;last:7,8;last-2:9")
    parsed = json.loads(found)
    assert parsed["vllm_xargs"] == {**xargs, "seamark_boundaries": [163, -5, "last:7,8", "last-2:9"]}
    assert found.startswith(body.rstrip()[:-1]) and counted("used") == before + 1
    plain = json.loads(body)
    assert {name: parsed[name] for name in plain if name != "vllm_xargs"} == {
        name: value for name, value in plain.items() if name != "vllm_xargs"
    }


@pytest.mark.parametrize("peer", [("10.255.0.1", 5), ("2001:db8::1", 5), ("::ffff:10.0.0.1", 5)])
async def test_addresses_of_both_kinds_are_known(peer):
    assert b"163" in await sent_on(b'{"model": "m"}', b"163", peer=peer)


@pytest.mark.parametrize("header", [b"x-forwarded-for", b"forwarded", b"x-real-ip"])
async def test_an_address_that_a_header_may_have_put_there_is_not_believed(header):
    """Behind another middleware nobody knows who opened the connection."""
    assert await sent_on(b"{}", b"163", more=[(header, b"10.1.2.3")]) == b"{}"


def plain(app: Any) -> Any:
    return EventsEndpoint(app)


def as_in_vllm(app: Any) -> Any:
    """Added last, so behind nothing but what FastAPI puts around everything."""
    around = FastAPI()
    around.mount("/", app)
    around.add_middleware(CORSMiddleware, allow_origins=["*"])
    around.add_middleware(EventsEndpoint)
    return around


@pytest.mark.parametrize("put_around", [plain, as_in_vllm])
@pytest.mark.parametrize("protocol", ["h11", "httptools"])
@pytest.mark.parametrize(
    ("trusted", "forwarded", "is_heard"),
    [
        ("10.0.0.5", {}, False),
        ("10.0.0.5", {"x-forwarded-for": "10.0.0.5"}, False),
        ("10.0.0.5", {"x-forwarded-for": "203.0.113.9, 10.0.0.5"}, False),
        ("127.0.0.1", {}, True),
        ("127.0.0.1", {"x-forwarded-for": "203.0.113.9"}, True),  # a router that says for whom it asks, as Envoy does
        ("127.0.0.1", {"x-forwarded-for": "::ffff:127.0.0.1", "x-forwarded-proto": "https"}, True),
    ],
)
async def test_trusted_is_who_opened_the_connection(monkeypatch, put_around, protocol, trusted, forwarded, is_heard):
    """Under uvicorn, which believes the header of whoever comes from 127.0.0.1, as vLLM's launcher starts it."""
    monkeypatch.setenv(settings.HINTS_FROM, trusted)
    header_fields.networks.cache_clear()

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    server = uvicorn.Server(uvicorn.Config(put_around(echo), port=0, http=protocol, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient() as client:
            headers = {"x-seamark-boundaries": "64;-3", **forwarded}
            answer = await client.post(f"http://127.0.0.1:{port}{CHAT}", json={"model": "m"}, headers=headers)
        assert ("vllm_xargs" in answer.json()) is is_heard
    finally:
        server.should_exit = True
        await serving


async def test_by_default_nobody_is_heard_and_a_star_hears_all(monkeypatch):
    for value, heard in (("", False), ("*", True), ("nonsense, 127.0.0.1", False)):
        monkeypatch.setenv(settings.HINTS_FROM, value)
        header_fields.networks.cache_clear()
        assert (b"163" in await sent_on(b'{"model": "m"}', b"163")) is heard


@pytest.mark.parametrize("hint", [b"", b"x", b"1;", b"1,2", b"last:", b"0x10", b"1e3", b"\xff", b"1;" * 20 + b"1"])
async def test_a_malformed_header_is_counted_and_left_out(hint):
    before = counted("malformed")
    assert await sent_on(b'{"model": "m"}', hint) == b'{"model": "m"}'
    assert counted("malformed") == before + 1


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'{"vllm_xargs": [1]}', b'"x"', b"", b"[" * 5000])
async def test_a_body_that_can_carry_none_is_the_servers_to_judge(body):
    assert await sent_on(body, b"163") == body


async def headers_sent_on(*headers: tuple[bytes, bytes], body: bytes = b"{}") -> list[tuple[bytes, bytes]]:
    """Headers as the server behind the middleware gets them."""
    seen: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [*headers], "client": (TRUSTED, 5)}
    await EventsEndpoint(app)(scope, receive, None)
    return seen


async def test_a_body_that_nothing_joins_keeps_its_headers():
    given = [(b"content-length", b"2"), (b"transfer-encoding", b"chunked")]
    assert await headers_sent_on(*given) == given
    assert await headers_sent_on(*given, (header_fields.NAME, b"nonsense")) == given


@pytest.mark.parametrize("peer", [(), [], "10.1.2.3", ["10.1.2.3", 5]])
async def test_an_address_is_the_first_of_a_pair(peer):
    heard = peer == ["10.1.2.3", 5]
    assert (b"163" in await sent_on(b"{}", b"163", peer=peer)) is heard


async def test_a_client_that_leaves_before_its_body_is_there_has_left():
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
        {"type": "late"},
    ]
    before = {result: counted(result) for result in ("used", "in_body", "malformed", "untrusted")}

    async def receive() -> Any:
        return messages.pop(0)

    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([await receive(), await receive(), scope["headers"]])

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": [(header_fields.NAME, b"1")],
        "client": (TRUSTED, 5),
    }
    await EventsEndpoint(app)(scope, receive, None)
    assert seen == [{"type": "http.disconnect"}, {"type": "late"}, []]
    assert {result: counted(result) for result in before} == before


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b"{}", "used"),
        (b'{"vllm_xargs": {"a": 1}}', "used"),
        (b'{"vllm_xargs": {"seamark_boundaries": null}}', "in_body"),
        (b"[]", "malformed"),
        (b'{"vllm_xargs": 1}', "malformed"),
        (b"x", "malformed"),
    ],
)
async def test_what_became_of_each_hint_is_counted_once(body, result):
    before = {each: counted(each) for each in ("used", "in_body", "malformed", "untrusted")}
    await sent_on(body, b"163")
    assert {each: counted(each) - before[each] for each in before} == {each: each == result for each in before}
