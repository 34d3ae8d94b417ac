"""Broken HTTP: heads and bodies whose ends two readers could see in two places, and bytes that are no HTTP at all.

What is ambiguous carries a second request inside. A gateway that lets that one through has been smuggled past.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

SMUGGLED = b"/v1/smuggled"

# No gateway takes a body of this length.
TOO_LONG = b"content-length: 99999999999\r\n"

_CHUNKED = b"transfer-encoding: chunked\r\n"

# Fields that say where a body ends, of which the request hidden inside is the body; %d: its length.
_SIZED = {
    "two lengths": b"content-length: 0\r\ncontent-length: %d",
    "two lengths, the longer first": b"content-length: %d\r\ncontent-length: 0",
    "a list of lengths": b"content-length: 0, %d",
    "length with a sign": b"content-length: +%d",
    "negative length": b"content-length: -1",
    "length in hexadecimal": b"content-length: 0x10",
    "length with a space inside": b"content-length: 1 0",
    "length with letters": b"content-length: 10x",
    "length beyond all bounds": b"content-length: 99999999999999999999999",
    "length with a null byte": b"content-length: 0\x00",
    "empty length": b"content-length: ",
    "space before the colon of a length": b"content-length : %d",
    "bare carriage return in a field": b"a: b\rcontent-length: 5",
    "bare line feed in a field": b"a: b\ncontent-length: %d",
    "null byte in a field": b"a: b\x00c\r\ncontent-length: %d",
    "null byte in a name": b"a\x00b: c\r\ncontent-length: %d",
    "space in a name": b"a b: c\r\ncontent-length: %d",
    "field without a colon": b"content-length 5",
}

# The same where the body is an empty one in chunks, and the hidden request comes behind.
_CODED = {
    "length and chunked": b"content-length: %d\r\ntransfer-encoding: chunked",
    "chunked and length": b"transfer-encoding: chunked\r\ncontent-length: %d",
    "space before the colon of a coding": b"transfer-encoding : chunked",
    "tab before the colon of a coding": b"transfer-encoding\t: chunked",
    "unknown coding": b"transfer-encoding: xchunked",
    "coding identity": b"transfer-encoding: identity",
    "chunked not last": b"transfer-encoding: chunked, identity",
    "two codings, chunked first": b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
    "coding with a vertical tab": b"transfer-encoding: \x0bchunked",
    "coding in quotes": b'transfer-encoding: "chunked"',
    "coding with a null byte": b"transfer-encoding: chunked\x00",
    "coding in a folded line and a length": b"content-length: %d\r\ntransfer-encoding:\r\n chunked",
}

# First chunks that are none.
_CHUNKS = {
    "chunk size with 0x": b"0x5\r\nhello\r\n",
    "chunk size with a sign": b"+5\r\nhello\r\n",
    "negative chunk size": b"-1\r\nhello\r\n",
    "chunk size beyond all bounds": b"FFFFFFFFFFFFFFFFFF\r\nhello\r\n",
    "empty chunk size": b"\r\nhello\r\n",
    "chunk longer than its size": b"2\r\nhello\r\n",
    "chunk size with a bare line feed": b"5\nhello\r\n",
    "chunk with a bare line feed": b"5\r\nhello\n",
    "chunk extension with a bare line feed": b"5;a\nx\r\nhello\r\n",
}

# What shows before the request is complete: the answer must not wait for the rest of it.
AT_ONCE = frozenset(_CHUNKS)

# What is no head, with the hidden request behind it.
_HEADS = {
    "first line folded": b"POST /v1/chat/completions HTTP/1.1\r\n host: x\r\n\r\n",
    "no target": b"POST HTTP/1.1\r\nhost: x\r\n\r\n",
    "version 1.2e3": b"POST /v1/chat/completions HTTP/1.2e3\r\nhost: x\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,
}


def inner(name: str) -> bytes:
    """The request that must never arrive."""
    return b"GET %b HTTP/1.1\r\nhost: x\r\nx-mock-id: %b\r\n\r\n" % (SMUGGLED, name.encode())


def _post(name: str, fields: bytes, rest: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    head = b"POST /v1/chat/completions %b\r\nhost: gateway\r\nx-mock-id: %b\r\n" % (version, name.encode())
    return head + fields + b"\r\n" + rest


def ambiguous(name: str) -> Mapping[str, bytes]:
    """By what is wrong: requests that RFC 9112 has refused, or that readers are known to frame differently."""
    hidden = inner(name)
    length = b"%d" % len(hidden)

    def fields(text: bytes) -> bytes:
        return text.replace(b"%d", length) + b"\r\n"

    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    return {
        **{wrong: _post(name, fields(text), hidden) for wrong, text in _SIZED.items()},
        **{wrong: _post(name, fields(text), b"0\r\n\r\n" + hidden) for wrong, text in _CODED.items()},
        **{wrong: _post(name, _CHUNKED, data + b"0\r\n\r\n" + hidden) for wrong, data in _CHUNKS.items()},
        **{wrong: head + hidden for wrong, head in _HEADS.items()},
        "chunked, length in the middle": _post(name, _CHUNKED + b"content-length: 4\r\n", chunk),
        "bare line feeds": _post(name, fields(b"content-length: %d"), hidden).replace(b"\r\n", b"\n"),
        "bare carriage returns": b"POST /v1/chat/completions HTTP/1.1\rhost: x\rx-mock-id: %b\r\r" % name.encode(),
    }


def odd(rng: random.Random, name: str) -> bytes:
    """Correct, mostly, and seldom seen."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    length = b"content-length: %d\r\n" % len(body)
    own = b"x-mock-id: %b\r\n" % name.encode()

    def get(target: bytes, fields: bytes = b"host: gateway\r\n", method: bytes = b"GET") -> bytes:
        return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, target, own, fields)

    upgrade = b"host: g\r\nupgrade: %b\r\nconnection: upgrade, http2-settings\r\nsec-websocket-version: 13\r\n"
    return rng.choice(
        (
            _post(name, _CHUNKED, b'5;ext=1;q="a;b"\r\nhello\r\n0\r\nx-trailer: 1\r\n\r\n'),
            _post(name, _CHUNKED, b"1\r\n{\r\n" * 200 + b"0\r\n\r\n"),
            _post(name, b"transfer-encoding: Chunked\r\n", b"0\r\n\r\n"),
            _post(name, length, body, b"HTTP/1.0"),
            _post(name, _CHUNKED, b"0\r\n\r\n", b"HTTP/1.0"),
            _post(name, b"x-mock: stalled\r\n" + length, body, b"HTTP/1.0"),
            _post(name, b"expect: 100-continue\r\n" + TOO_LONG, b""),
            _post(name, b"expect: 100-continue\r\n" + length, body),
            _post(name, length + length, body),
            _post(name, b"connection: a\r\n" * 4000 + length, body),
            _post(name, b"x-folded: a\r\n b\r\n" + length, body),
            _post(name, b"x-huge: " + b"h" * rng.choice((1000, 70_000, 1_000_000)) + b"\r\n" + length, body),
            _post(name, b"".join(b"x-%d: 1\r\n" % number for number in range(5000)) + length, body),
            _post(name, upgrade % b"websocket" + b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n" + length, body),
            get(b"/v1/realtime", upgrade % b"websocket" + b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"),
            get(b"/v1/x", upgrade % b"h2c"),
            get(b"/v1/x", b"host: g\r\norigin: http://a\r\naccess-control-request-method: PUT\r\n", b"OPTIONS"),
            get(b"http://elsewhere/v1/absolute"),
            get(b"http://elsewhere:99999/v1/x"),
            get(b"http:///v1/x"),
            get(b"//elsewhere/v1/x"),
            get(b"/v1/" + b"u" * rng.choice((60_000, 200_000))),
            get(b"elsewhere:443", method=b"CONNECT"),
            get(b"*", method=b"OPTIONS"),
            get(b"/v1/x", method=b"TRACE"),
            get(b"/v1/\xc3\xa9\xff"),
            get(b"/v1/a\tb"),
            get(b"/v1/x\x00y"),
            get(b"/v1/x", b""),
            get(b"/v1/x", b"host: a\r\nhost: b\r\n"),
            get(b"/v1/x", b"host: \x7f\xff/@\r\n"),
            get(b"/v1/x").replace(b"HTTP/1.1", b"HTTP/1.0"),
            b"\r\n\r\n\r\n" + get(b"/v1/x"),
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
