"""Broken HTTP: heads and bodies whose ends two readers could see in two places, and bytes that are no HTTP at all.

What is ambiguous carries a second request inside. A gateway that lets that one through has been smuggled past.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

SMUGGLED = b"/v1/smuggled"

# No gateway takes a body of this length.
TOO_LONG = b"content-length: 99999999999\r\n"

# Ambiguities that show before the request is complete: the answer must not wait for the rest of it.
AT_ONCE = frozenset(
    {
        "chunk size with 0x",
        "chunk size with a sign",
        "negative chunk size",
        "chunk size beyond all bounds",
        "empty chunk size",
        "chunk longer than its size",
        "chunk size with a bare line feed",
        "chunk with a bare line feed",
        "chunk extension with a bare line feed",
    }
)


def inner(name: str) -> bytes:
    """The request that must never arrive."""
    return b"GET %b HTTP/1.1\r\nhost: x\r\nx-mock-id: %b\r\n\r\n" % (SMUGGLED, name.encode())


def _post(name: str, fields: bytes, rest: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    head = b"POST /v1/chat/completions %b\r\nhost: gateway\r\nx-mock-id: %b\r\n" % (version, name.encode())
    return head + fields + b"\r\n" + rest


def ambiguous(name: str) -> Mapping[str, bytes]:
    """By what is wrong: requests that RFC 9112 has refused, or that readers are known to frame differently."""
    hidden = inner(name)
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    length = b"content-length: %d\r\n" % len(hidden)
    chunked = b"transfer-encoding: chunked\r\n"

    def coded(field: bytes) -> bytes:
        return _post(name, field, b"0\r\n\r\n" + hidden)

    def sized(field: bytes, body: bytes = hidden) -> bytes:
        return _post(name, field, body)

    return {
        "length and chunked": _post(name, length + chunked, b"0\r\n\r\n" + hidden),
        "chunked and length": _post(name, chunked + length, b"0\r\n\r\n" + hidden),
        "chunked, length in the middle": _post(name, chunked + b"content-length: 4\r\n", chunk),
        "two lengths": sized(b"content-length: 0\r\n" + length),
        "two lengths, the longer first": sized(length + b"content-length: 0\r\n"),
        "a list of lengths": sized(b"content-length: 0, %d\r\n" % len(hidden)),
        "length with a sign": sized(b"content-length: +%d\r\n" % len(hidden)),
        "negative length": sized(b"content-length: -1\r\n"),
        "length in hexadecimal": sized(b"content-length: 0x10\r\n"),
        "length with a space inside": sized(b"content-length: 1 0\r\n"),
        "length with letters": sized(b"content-length: 10x\r\n"),
        "length beyond all bounds": sized(b"content-length: 99999999999999999999999\r\n"),
        "length with a null byte": sized(b"content-length: 0\x00\r\n"),
        "empty length": sized(b"content-length: \r\n"),
        "space before the colon of a length": sized(b"content-length : %d\r\n" % len(hidden)),
        "space before the colon of a coding": coded(b"transfer-encoding : chunked\r\n"),
        "tab before the colon of a coding": coded(b"transfer-encoding\t: chunked\r\n"),
        "unknown coding": coded(b"transfer-encoding: xchunked\r\n"),
        "coding identity": coded(b"transfer-encoding: identity\r\n"),
        "chunked not last": coded(b"transfer-encoding: chunked, identity\r\n"),
        "two codings, chunked first": coded(chunked + b"transfer-encoding: identity\r\n"),
        "coding with a vertical tab": coded(b"transfer-encoding: \x0bchunked\r\n"),
        "coding in quotes": coded(b'transfer-encoding: "chunked"\r\n'),
        "coding with a null byte": coded(b"transfer-encoding: chunked\x00\r\n"),
        "coding in a folded line and a length": _post(
            name, length + b"transfer-encoding:\r\n chunked\r\n", b"0\r\n\r\n" + hidden
        ),
        "chunk size with 0x": _post(name, chunked, b"0x5\r\nhello\r\n0\r\n\r\n" + hidden),
        "chunk size with a sign": _post(name, chunked, b"+5\r\nhello\r\n0\r\n\r\n" + hidden),
        "negative chunk size": _post(name, chunked, b"-1\r\nhello\r\n0\r\n\r\n" + hidden),
        "chunk size beyond all bounds": _post(name, chunked, b"FFFFFFFFFFFFFFFFFF\r\nhello\r\n0\r\n\r\n" + hidden),
        "empty chunk size": _post(name, chunked, b"\r\nhello\r\n0\r\n\r\n" + hidden),
        "chunk longer than its size": _post(name, chunked, b"2\r\nhello\r\n0\r\n\r\n" + hidden),
        "chunk size with a bare line feed": _post(name, chunked, b"5\nhello\r\n0\r\n\r\n" + hidden),
        "chunk with a bare line feed": _post(name, chunked, b"5\r\nhello\n0\r\n\r\n" + hidden),
        "chunk extension with a bare line feed": _post(name, chunked, b"5;a\nx\r\nhello\r\n0\r\n\r\n" + hidden),
        "bare line feeds": _post(name, length, hidden).replace(b"\r\n", b"\n"),
        "bare carriage returns": b"POST /v1/chat/completions HTTP/1.1\rhost: x\rx-mock-id: %b\r\r" % name.encode(),
        "bare carriage return in a field": _post(name, b"a: b\rcontent-length: 5\r\n", b"") + hidden,
        "bare line feed in a field": _post(name, b"a: b\ncontent-length: %d\r\n" % len(hidden), hidden),
        "null byte in a field": _post(name, b"a: b\x00c\r\n" + length, hidden),
        "null byte in a name": _post(name, b"a\x00b: c\r\n" + length, hidden),
        "space in a name": _post(name, b"a b: c\r\n" + length, hidden),
        "field without a colon": _post(name, b"content-length 5\r\n", b"") + hidden,
        "first line folded": b"POST /v1/chat/completions HTTP/1.1\r\n host: x\r\n\r\n" + hidden,
        "no target": b"POST HTTP/1.1\r\nhost: x\r\n\r\n" + hidden,
        "version 1.2e3": b"POST /v1/chat/completions HTTP/1.2e3\r\nhost: x\r\n\r\n" + hidden,
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + hidden,
        "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60 + hidden,
    }


def odd(rng: random.Random, name: str) -> bytes:
    """Correct, mostly, and seldom seen."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    length = b"content-length: %d\r\n" % len(body)
    chunked = b"transfer-encoding: chunked\r\n"
    named = b"host: gateway\r\nx-mock-id: %b\r\n" % name.encode()
    return rng.choice(
        (
            _post(name, chunked, b'5;ext=1;q="a;b"\r\nhello\r\n0\r\nx-trailer: 1\r\n\r\n'),
            _post(name, chunked, b"1\r\n{\r\n" * 200 + b"0\r\n\r\n"),
            _post(name, b"transfer-encoding: Chunked\r\n", b"0\r\n\r\n"),
            _post(name, length, body, b"HTTP/1.0"),
            _post(name, chunked, b"0\r\n\r\n", b"HTTP/1.0"),
            _post(name, b"x-mock: stalled\r\n" + length, body, b"HTTP/1.0"),
            b"GET /v1/x HTTP/1.0\r\n" + named + b"\r\n",
            _post(name, b"connection: a\r\n" * 4000 + length, body),
            _post(name, b"expect: 100-continue\r\n" + TOO_LONG, b""),
            b"OPTIONS /v1/x HTTP/1.1\r\n" + named + b"origin: http://a\r\naccess-control-request-method: PUT\r\n\r\n",
            _post(name, length + length, body),
            _post(name, b"x-folded: a\r\n b\r\n" + length, body),
            _post(name, b"x-huge: " + b"h" * rng.choice((1000, 70_000, 1_000_000)) + b"\r\n" + length, body),
            _post(name, b"".join(b"x-%d: 1\r\n" % number for number in range(5000)) + length, body),
            _post(name, b"expect: 100-continue\r\n" + length, body),
            _post(
                name,
                b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
                b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n" + length,
                body,
            ),
            b"GET /v1/realtime HTTP/1.1\r\n" + named + b"upgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
            b"GET /v1/x HTTP/1.1\r\n" + named + b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n\r\n",
            b"GET http://elsewhere/v1/absolute HTTP/1.1\r\n" + named + b"\r\n",
            b"GET http://elsewhere:99999/v1/x HTTP/1.1\r\n" + named + b"\r\n",
            b"GET http:///v1/x HTTP/1.1\r\n" + named + b"\r\n",
            b"GET //elsewhere/v1/x HTTP/1.1\r\n" + named + b"\r\n",
            b"GET /v1/" + b"u" * rng.choice((60_000, 200_000)) + b" HTTP/1.1\r\n" + named + b"\r\n",
            b"CONNECT elsewhere:443 HTTP/1.1\r\n" + named + b"\r\n",
            b"OPTIONS * HTTP/1.1\r\n" + named + b"\r\n",
            b"TRACE /v1/x HTTP/1.1\r\n" + named + b"\r\n",
            b"GET /v1/\xc3\xa9\xff HTTP/1.1\r\n" + named + b"\r\n",
            b"GET /v1/a\tb HTTP/1.1\r\n" + named + b"\r\n",
            b"GET /v1/x\x00y HTTP/1.1\r\n" + named + b"\r\n",
            b"GET /v1/x HTTP/1.1\r\nx-mock-id: %b\r\n\r\n" % name.encode(),
            b"GET /v1/x HTTP/1.1\r\nhost: a\r\nhost: b\r\nx-mock-id: %b\r\n\r\n" % name.encode(),
            b"GET /v1/x HTTP/1.1\r\nhost: \x7f\xff/@\r\nx-mock-id: %b\r\n\r\n" % name.encode(),
            b"\r\n\r\n\r\nGET /v1/x HTTP/1.1\r\n" + named + b"\r\n",
            b"GET /v1/x\r\n",
            b"G" * 100_000,
            b"\x00" * 1000,
        )
    )


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with some bytes changed, cut out, doubled or put elsewhere."""
    for _ in range(rng.randrange(1, 6)):
        # Most of what matters stands at the beginning.
        at = rng.randrange(len(data) + 1) if rng.random() < 0.3 else rng.randrange(min(len(data), 400) + 1)
        size = rng.choice((0, 1, 1, 2, 5, 40))
        put = rng.choice(
            (b"", b"\r", b"\n", b"\r\n", b"\x00", b" ", b":", b"\t", data[at : at + size] * 2, rng.randbytes(3))
        )
        data = data[:at] + put + data[at + size :]
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data
