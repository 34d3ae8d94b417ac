"""The bytes of a request body: read once, changed only where the hint goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.decoder import WHITESPACE, JSONDecoder, scanstring
from typing import Any, NamedTuple

from proxy.errors import BadRequest

XARGS = "vllm_xargs"
HINT = "seamark_boundaries"
_DECODER = JSONDecoder()


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `BadRequest` for anything else."""
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequest("The request body is not valid JSON.") from None
    if not isinstance(parsed, dict):
        raise BadRequest("The request body must be a JSON object.")
    return parsed


def with_hint(raw: bytes, parsed: dict[str, Any], positions: Sequence[int]) -> bytes:
    """`raw` with the token `positions` as its hint; a hint the client sent is replaced, or dropped if there are none.

    Everything else stays byte for byte. `parsed` is `parse_object(raw)`. Returns `raw` itself where there is nothing to
    change, and where the client's `vllm_xargs` is not an object: that is the worker's to refuse.
    """
    if not json.detect_encoding(raw).startswith("utf-8"):
        return raw
    if XARGS not in parsed:
        return _append(raw, parsed, positions) if positions else raw
    xargs = parsed[XARGS]
    if xargs is None:
        xargs = {}
    if not isinstance(xargs, dict) or (not positions and HINT not in xargs):
        return raw
    merged = {name: value for name, value in xargs.items() if name != HINT}
    if positions:
        merged[HINT] = list(positions)
    text = raw.decode(errors="surrogatepass")
    # JSON readers keep the last of several equal names, so that one is the value to replace.
    last = [span for span in _top_level(text) if span.name == XARGS][-1]
    return (text[: last.start] + json.dumps(merged) + text[last.end :]).encode(errors="surrogatepass")


def _append(raw: bytes, parsed: dict[str, Any], positions: Sequence[int]) -> bytes:
    end = raw.rindex(b"}")
    hint = json.dumps({HINT: list(positions)}, separators=(",", ":"))
    return b'%b%b"%b":%b%b' % (raw[:end], b"," if parsed else b"", XARGS.encode(), hint.encode(), raw[end:])


class _Span(NamedTuple):
    name: str
    start: int  # characters; [start, end) is the value
    end: int


def _top_level(text: str) -> list[_Span]:
    """The values of a valid JSON object's own names, in order."""

    def skip(index: int) -> int:
        return WHITESPACE.match(text, index).end()

    spans = []
    index = skip(text.index("{") + 1)
    while text[index] == '"':
        name, index = scanstring(text, index + 1)
        start = skip(skip(index) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, start)
        spans.append(_Span(name, start, end))
        index = skip(end)
        if text[index] != ",":
            break
        index = skip(index + 1)
    return spans
