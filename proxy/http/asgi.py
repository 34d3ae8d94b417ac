"""HTTP as ASGI speaks it: bodies, headers, errors, and a client that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cache
from typing import Any

from proxy.errors import BodyTooLarge, BodyTooSlow, Overloaded

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

# A key is between a client and the gateway; workers have one of their own, if any.
RECOMPUTED_WITH_KEY = RECOMPUTED | {b"authorization", b"x-api-key"}

# Computed anew, and said by the gateway about itself; a worker that is a gateway too must not be quoted.
OWN_RESPONSE = frozenset(
    {
        b"content-length",
        b"x-request-id",
        b"x-seamark-worker",
        b"x-seamark-boundary",
        b"x-seamark-predicted",
        b"x-seamark-cached",
        b"x-seamark-reason",
    }
)


# ASGI extension of the gateway's own server: a function to give a function to, which is called when the client leaves.
ON_DISCONNECT = "seamark.on_disconnect"

# Another: whether the whole body was received, so that nothing has to be waited for.
BODY_IS_HERE = "seamark.body_is_here"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class BodyRoom:
    """Bytes of all bodies that are in memory together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def take(self, size: int) -> None:
        """Raises `Overloaded` where there is no room for so many bytes."""
        if self.held + size > self._most:
            raise Overloaded("The gateway holds as many request bodies as it may (setting max_bodies_bytes).")
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size


async def read_body(scope: Scope, receive: Receive, limit: int, timeout: float, room: BodyRoom) -> bytes:
    """The whole request body, for which room is taken.

    Raises `BodyTooLarge` past `limit` bytes, `BodyTooSlow` when a piece takes longer than `timeout` seconds,
    `Overloaded`, and `ClientGone` when the client leaves before its end.
    """
    parts: list[bytes] = []
    size = 0
    is_here = scope.get("extensions", {}).get(BODY_IS_HERE)
    try:
        while True:
            if is_here is not None and is_here():
                message = await receive()
            else:
                async with asyncio.timeout(timeout):
                    message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if size + len(part) > limit:
                raise BodyTooLarge(f"The request body is larger than {limit} bytes (setting max_body_bytes).")
            room.take(len(part))
            size += len(part)
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        room.give_back(size)
        raise BodyTooSlow(f"The rest of the request did not come within {timeout:g} seconds.") from None
    except BaseException:
        room.give_back(size)
        raise


def header(scope: Scope, name: bytes) -> str | None:
    """First value of a request header (lower-case `name`)."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> HeaderList:
    """Headers that travel on: no hop-by-hop ones (those that `Connection` names included), none of `dropped`."""
    listed = [(key.lower(), value) for key, value in headers]
    dropped = _with_hop_by_hop(dropped)
    for key, value in listed:
        if key == b"connection":
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return [header for header in listed if header[0] not in dropped]


@cache
def _with_hop_by_hop(dropped: frozenset[bytes]) -> frozenset[bytes]:
    return dropped | HOP_BY_HOP


async def send_whole(send: Send, status: int, headers: HeaderList, body: bytes) -> None:
    """A response with a known body."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class ClientWatch:
    """While it is entered, a client that disconnects cancels the task, and leaving it raises `ClientGone`.

    For requests whose body is read already. The gateway's own server calls back; of any other a second task has to wait
    for the message, which is all that ASGI offers.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None
        self.gone = False
        self.over = False  # the whole answer was given to the server: that it disconnects means nothing any more

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.current_task()
        call_back = self._scope.get("extensions", {}).get(ON_DISCONNECT)
        if call_back is not None:
            call_back(self._left)
        else:
            self._watching = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        if not self.over:
            self.gone = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.over = True
        if self._watching is not None:
            self._watching.cancel()
        if self.gone:
            self._task.uncancel()
            if kind is None or kind is asyncio.CancelledError:
                raise ClientGone
