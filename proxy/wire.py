"""HTTP as ASGI speaks it: bodies, headers, errors, and a client that goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any

from proxy.errors import BodyTooLarge, GatewayError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

# RFC 9110, 7.6.1; and what the sending side computes anew.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
RECOMPUTED = frozenset({b"content-length", b"host", b"expect", b"x-request-id"})
# Said by the gateway about itself; a worker that is a gateway too must not be quoted.
OWN_RESPONSE = frozenset(
    {b"x-request-id", b"x-seamark-worker", b"x-seamark-boundary", b"x-seamark-predicted", b"x-seamark-cached"}
)


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises `BodyTooLarge` past `limit` bytes, `ClientGone` when it never ends."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"The request body is larger than {limit} bytes (setting max_body_bytes).")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def header(scope: Scope, name: bytes) -> str | None:
    """First value of a request header (lower-case `name`)."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> HeaderList:
    """Headers that travel on: no hop-by-hop ones (those that `Connection` names included), none of `dropped`."""
    listed = [(key.lower(), value) for key, value in headers]
    named = {token.strip().lower() for key, value in listed if key == b"connection" for token in value.split(b",")}
    return [(key, value) for key, value in listed if key not in HOP_BY_HOP and key not in dropped and key not in named]


async def send_whole(send: Send, status: int, headers: HeaderList, body: bytes) -> None:
    """A response with a known body."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: GatewayError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """The error in OpenAI's envelope."""
    listed = [*headers, (b"content-type", b"application/json")]
    if error.retry_after is not None:
        listed.append((b"retry-after", str(error.retry_after).encode()))
    await send_whole(send, error.status, listed, error.body())


def error_event(error: GatewayError) -> bytes:
    """The error as an event of a stream that has begun; the blank line ends whatever was cut off."""
    return b"\n\ndata: " + json.dumps({"error": error.as_dict()}).encode() + b"\n\n"


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; the moment the client disconnects, cancel it and raise `ClientGone`. The body is read already."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        await task
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
