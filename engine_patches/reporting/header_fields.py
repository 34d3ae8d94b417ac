"""A hint in a request's header goes into its body, which alone reaches the engine.

`x-seamark-boundaries` is for routers that can add headers and not change bodies. It is read from trusted hops
only (`SEAMARK_HINTS_FROM`, by the address that opened the connection): it can cost a hit and never an answer, but it
also costs a state, and clients must not say it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from ipaddress import ip_address
from typing import Any

from prometheus_client import Counter
from starlette.types import Message, Receive, Scope

from engine_patches import settings
from engine_patches.scheduler.hints import FIELD, entries_in

NAME = b"x-seamark-boundaries"

# By what servers take another address for the one that opened the connection.
FORWARDED = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip"})

# The paths whose bodies can carry a hint.
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

XARGS = "vllm_xargs"


@cache
def counted() -> Counter:
    """By what became of them. A Prometheus registry admits the name once per process."""
    return Counter("seamark_hint_headers_total", "Requests with a hint in a header", ["result"])


networks = cache(settings.hints_from)


async def into_body(scope: Scope, receive: Receive) -> Receive:
    """Take the header out of `scope`, and put what it says into the body that the returned function gives.

    What is not trusted or makes no sense is taken out alone. A hint that the body has already stands.
    """
    hints = [value for name, value in scope["headers"] if name == NAME]
    scope["headers"] = [header for header in scope["headers"] if header[0] != NAME]
    takes_hints = scope["method"] == "POST" and scope["path"] in PATHS
    entries = entries_in(hints[0].decode("latin-1")) if len(hints) == 1 and takes_hints else None
    is_trusted = _is_trusted(_opened_by(scope, receive))
    if not is_trusted or entries is None:
        counted().labels("malformed" if is_trusted else "untrusted").inc()
        return receive
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the client has left
            return _then(message, receive)
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    changed, result = _with_hint(bytes(body), entries)
    counted().labels(result).inc()
    length = (b"content-length", str(len(changed)).encode())
    others = [header for header in scope["headers"] if header[0] not in (b"content-length", b"transfer-encoding")]
    scope["headers"] = [*others, length]
    return _then({"type": "http.request", "body": changed, "more_body": False}, receive)


def _opened_by(scope: Scope, receive: Receive) -> str:
    """The address that opened the connection; empty if it is not known.

    uvicorn believes `X-Forwarded-For` of whoever comes from 127.0.0.1, and puts what it says in place of the address.
    The connection itself is behind `receive`, unless another middleware is in between.
    """
    opened_by = None if any(name in FORWARDED for name, _ in scope["headers"]) else scope.get("client")
    if (connection := getattr(getattr(receive, "__self__", None), "transport", None)) is not None:
        opened_by = connection.get_extra_info("peername")
    return opened_by[0] if isinstance(opened_by, tuple | list) and opened_by else ""


def _is_trusted(opened_by: str) -> bool:
    try:
        address = ip_address(opened_by)
    except ValueError:
        return False
    plain = getattr(address, "ipv4_mapped", None) or address
    return any(plain in network for network in networks() if network.version == plain.version)


def _with_hint(raw: bytes, entries: Sequence[Any]) -> tuple[bytes, str]:
    """The body with the hint, and what became of that.

    Of two fields of one name, JSON readers take the last.
    """
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return raw, "malformed"  # the server's to refuse
    xargs = parsed.get(XARGS) if isinstance(parsed, dict) else ()
    if xargs is not None and not isinstance(xargs, dict):
        return raw, "malformed"
    if FIELD in (xargs or {}):
        return raw, "in_body"
    text = raw.decode(json.detect_encoding(raw), "surrogatepass").rstrip()
    field = json.dumps({XARGS: {FIELD: entries, **(xargs or {})}})[1:]
    return f"{text[:-1]}{',' if parsed else ''}{field}".encode(errors="surrogatepass"), "used"


def _then(first: Message, receive: Receive) -> Receive:
    """`receive`, with this message before what it gives."""
    waiting = [first]

    async def received() -> Message:
        return waiting.pop() if waiting else await receive()

    return received
