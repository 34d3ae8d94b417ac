"""A hint in a header: whose is heard, what it becomes in the body, and that nothing else changes."""

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
from engine_patches.reporting.header_fields import NAME, PATHS
from tests.harness.waiting import until

CHAT = "/v1/chat/completions"


def trust(monkeypatch: pytest.MonkeyPatch, networks: str) -> None:
    monkeypatch.setenv(settings.HINTS_FROM, networks)
    header_fields.networks.cache_clear()


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    trust(monkeypatch, "10.0.0.0/8, 2001:db8::1")
    yield
    header_fields.networks.cache_clear()


def counted() -> dict[str, float]:
    results = ("used", "in_body", "malformed", "untrusted")
    return {result: header_fields.counted().labels(result)._value.get() for result in results}


async def sent_on(*messages: Any, headers: Any, **scope: Any) -> tuple[list[Any], list[Any], str]:
    """What the server behind the middleware gets of a request's messages and headers, and what became of a hint."""
    waiting, got = [*messages, {"type": "http.disconnect"}], []

    async def receive() -> Any:
        return waiting.pop(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not got or got[-1]["type"] != "http.disconnect":
            got.append(await receive())

    before = counted()
    scope = {"type": "http", "method": "POST", "path": CHAT, "client": ("10.1.2.3", 5), "headers": headers, **scope}
    await EventsEndpoint(app)(scope, receive, None)
    changed = [result for result, count in counted().items() for _ in range(round(count - before[result]))]
    return got, scope["headers"], " ".join(changed)


async def joined(body: bytes, *hints: bytes, **scope: Any) -> tuple[bytes, str]:
    """The body that the server gets, in any pieces, and what became of the hint."""
    length = [(b"content-length", b"%d" % len(body))]
    length += [(b"transfer-encoding", b"chunked"), (b"x-other", b"content-length")]
    given = [*length, *((NAME, hint) for hint in hints)]
    pieces: list[Any] = [{"type": "http.request", "body": part} for part in (body[:7], body[7:])]
    pieces[0]["more_body"], pieces[1]["more_body"] = True, False
    got, headers, result = await sent_on(*pieces, headers=[*given, *scope.pop("more", ())], **scope)
    found = b"".join(message.get("body", b"") for message in got)
    own = [header for header in headers if header[0] not in header_fields.FORWARDED]
    if found == body and len(got) == 3:
        assert own[:3] == length, "what nothing joins stays as it is"
    else:
        assert own == [(b"x-other", b"content-length"), (b"content-length", b"%d" % len(found))] and len(got) == 2
    assert NAME not in dict(headers)
    return found, result


HINT = b"163; -5;last:7,8;last-2:9" + b";1" * 12  # as many as may be

ENTRIES = {"seamark_boundaries": [163, -5, "last:7,8", "last-2:9", *[1] * 12]}


@pytest.mark.parametrize(
    ("body", "xargs"),
    [
        (b'{"model": "m", "n": 1e400, "a": "\\u00e9"}', {}),
        (b'{"vllm_xargs": {"mine": 1}}', {"mine": 1}),
        (b"{}", {}),
        *(('{"a": "\u00e9"}'.encode(encoding), {}) for encoding in ("utf-8-sig", "utf-16-le", "utf-32-be")),
    ],
)
@pytest.mark.parametrize("path", sorted(PATHS))
async def test_a_hint_joins_the_body_and_everything_else_stays(body, xargs, path):
    found, result = await joined(body, HINT, path=path)
    parsed, plain = json.loads(found), json.loads(body)
    assert parsed.pop("vllm_xargs") == {**xargs, **ENTRIES} and result == "used"
    plain.pop("vllm_xargs", None)
    assert parsed == plain and (b"\x00" in body or body[:1] == b"\xef" or found.startswith(body.rstrip()[:-1]))


@pytest.mark.parametrize(
    ("body", "hints", "how", "result"),
    [
        (b'{"vllm_xargs": {"seamark_boundaries": [1]}}', [HINT], {}, "in_body"),
        *((body, [HINT], {}, "malformed") for body in (b"x", b"[1]", b'{"vllm_xargs": [1]}', b'"x"', b"", b"[" * 5000)),
        *(
            (b"{}", [hint], {}, "malformed")
            for hint in (b"", b"x", b"1;", b"1,2", b"last:", b"0x10", b"1e3", b"\xff", b"1;" * 16 + b"1")
        ),
        (b"{}", [b"1", b"2"], {}, "malformed"),
        (b"{}", [HINT], {"method": "PUT"}, "malformed"),
        (b"{}", [HINT], {"path": "/v1/embeddings"}, "malformed"),
        *(
            (b"{}", [HINT], {"client": peer}, "untrusted")
            for peer in (("192.0.2.1", 5), ("2001:db8::2", 5), ("/socket", 0), None, (), [], ("", 0), "10.1.2.3")
        ),
        # Behind another middleware nobody knows who opened the connection.
        (b"{}", [HINT], {"more": [(b"x-forwarded-for", b"10.1.2.3")]}, "untrusted"),
        (b"{}", [HINT], {"more": [(b"forwarded", b"10.1.2.3")]}, "untrusted"),
        (b"{}", [HINT], {"more": [(b"x-real-ip", b"10.1.2.3")]}, "untrusted"),
    ],
)
async def test_a_body_that_no_hint_joins_stays_as_it_is_and_why_is_counted(body, hints, how, result):
    assert (await joined(body, *hints, **how))[1] == result


@pytest.mark.parametrize(
    ("networks", "peer", "is_heard"),
    [
        ("10.0.0.0/8, 2001:db8::1", "10.255.0.1", True),
        ("10.0.0.0/8, 2001:db8::1", "::ffff:10.0.0.1", True),
        ("::/0", "10.0.0.1", False),
        ("", "127.0.0.1", False),  # by default
        ("*", "127.0.0.1", True),
        ("nonsense, 10.0.0.1", "127.0.0.1", False),
    ],
)
async def test_heard_is_who_is_in_a_trusted_network(monkeypatch, networks, peer, is_heard):
    trust(monkeypatch, networks)
    assert (await joined(b"{}", b"163", client=[peer, 5]))[1] == ("used" if is_heard else "untrusted")


def as_in_vllm(app: Any) -> Any:
    """Added last, so behind nothing but what FastAPI puts around everything."""
    around = FastAPI()
    around.mount("/", app)
    around.add_middleware(CORSMiddleware, allow_origins=["*"])
    around.add_middleware(EventsEndpoint)
    return around


@pytest.mark.parametrize("put_around", [EventsEndpoint, as_in_vllm])
@pytest.mark.parametrize("protocol", ["h11", "httptools"])
@pytest.mark.parametrize(
    ("trusted", "forwarded", "is_heard"),
    [
        ("10.0.0.5", {}, False),
        ("10.0.0.5", {"x-forwarded-for": "203.0.113.9, 10.0.0.5"}, False),
        ("127.0.0.1", {}, True),
        ("127.0.0.1", {"x-forwarded-for": "203.0.113.9"}, True),  # a router that says for whom it asks, as Envoy does
        ("127.0.0.1", {"x-forwarded-for": "::ffff:127.0.0.1", "x-forwarded-proto": "https"}, True),
    ],
)
async def test_trusted_is_who_opened_the_connection(monkeypatch, put_around, protocol, trusted, forwarded, is_heard):
    """Under uvicorn, which believes the header of whoever comes from 127.0.0.1, as vLLM's launcher starts it."""
    trust(monkeypatch, trusted)

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
