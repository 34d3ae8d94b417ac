"""A hint as a request's header `x-seamark-boundaries`, for routers that can add headers and not change bodies.

It is read from trusted hops only (`SEAMARK_HINTS_FROM`, by the address that opened the connection), and goes into the
body as if it had come there. It can cost a hit and never an answer, but it also costs a state: clients must not say it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from ipaddress import ip_address
from typing import Any

from prometheus_client import Counter

from engine_patches import settings
from engine_patches.scheduler.hints import FIELD, entries_in

NAME = b"x-seamark-boundaries"

# The paths whose bodies can carry a hint.
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

XARGS = "vllm_xargs"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


@cache
def counted() -> Counter:
    """By what became of them. A Prometheus registry admits the name once per process."""
    return Counter("seamark_hint_headers_total", "Requests with a hint in a header", ["result"])


networks = cache(settings.hints_from)


def is_in(scope: MutableMapping[str, Any]) -> bool:
    """Whether an HTTP request has the header."""
    return any(name == NAME for name, _ in scope["headers"])


async def into_body(scope: MutableMapping[str, Any], receive: Receive) -> Receive:
    """Take the header out of `scope`, and put the hint into the body that the returned function gives.

    Of a request that is not trusted, or whose header or body makes no sense, the header alone is taken out. A hint that
    the body has already stands.
    """
    values = [value for name, value in scope["headers"] if name == NAME]
    scope["headers"] = [header for header in scope["headers"] if header[0] != NAME]
    if not _is_trusted(scope):
        counted().labels("untrusted").inc()
        return receive
    entries = entries_in(values[0].decode("latin-1")) if len(values) == 1 else None
    if entries is None or scope["method"] != "POST" or scope["path"] not in PATHS:
        counted().labels("malformed").inc()
        return receive
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the client has left
            return _then(message, receive)
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    hinted, result = _with_hint(bytes(body), entries)
    counted().labels(result).inc()
    length = (b"content-length", str(len(hinted)).encode())
    others = [header for header in scope["headers"] if header[0] not in (b"content-length", b"transfer-encoding")]
    scope["headers"] = [*others, length]
    return _then({"type": "http.request", "body": hinted, "more_body": False}, receive)


def _is_trusted(scope: MutableMapping[str, Any]) -> bool:
    client = scope.get("client")
    try:
        address = ip_address(client[0]) if client else None
    except ValueError:
        address = None
    if address is None:
        return False
    plain = getattr(address, "ipv4_mapped", None) or address
    return any(plain in network for network in networks() if network.version == plain.version)


def _with_hint(raw: bytes, entries: list[int | str]) -> tuple[bytes, str]:
    """The body with the hint, and what became of that. Of two fields of one name, JSON readers take the last."""
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return raw, "malformed"  # the server's to refuse
    xargs = parsed.get(XARGS) if isinstance(parsed, dict) else ()
    if xargs is not None and not isinstance(xargs, dict):
        return raw, "malformed"
    if xargs is not None and FIELD in xargs:
        return raw, "in_body"
    field = json.dumps({XARGS: {**(xargs or {}), FIELD: entries}})[1:]
    text = raw.decode(json.detect_encoding(raw), "surrogatepass").rstrip()
    return f"{text[:-1]}{',' if parsed else ''}{field}".encode(errors="surrogatepass"), "used"


def _then(first: Message, receive: Receive) -> Receive:
    """`receive`, with this message before what it gives."""
    waiting = [first]

    async def received() -> Message:
        return waiting.pop() if waiting else await receive()

    return received
