"""The bytes of a request body: read once, changed only where the hint goes and where a rewrite rule says so."""

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
    """`raw` with the token `positions` as its hint; a hint the client sent is replaced, by an empty one if need be.

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
    text = raw.decode(errors="surrogatepass")
    # JSON readers keep the last of several equal names, so that one is the value to change.
    outer = [span for span in _members(text, 0) if span.name == XARGS][-1]
    hint = json.dumps(list(positions), separators=(",", ":"))
    if HINT in xargs:
        inner = [span for span in _members(text, outer.start) if span.name == HINT][-1]
        start, end, new = inner.start, inner.end, hint
    elif xargs:
        start = end = outer.end - 1  # before the closing brace
        new = f',"{HINT}":{hint}'
    else:
        start, end, new = outer.start, outer.end, f'{{"{HINT}":{hint}}}'
    return (text[:start] + new + text[end:]).encode(errors="surrogatepass")


Path = tuple[str | int, ...]


class Edit(NamedTuple):
    """A value to put in the place of another."""

    path: Path  # names and indices from the outermost object inwards
    new: str  # JSON


def with_edits(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """`raw` with these values replaced and every other byte as it was. Raises `KeyError` where a path leads nowhere."""
    text = raw.decode(errors="surrogatepass")
    spans = [(*_find(text, edit.path), edit.new) for edit in edits]
    for start, end, new in sorted(spans, reverse=True):
        text = text[:start] + new + text[end:]
    return text.encode(errors="surrogatepass")


def _find(text: str, path: Path) -> tuple[int, int]:
    start, end = 0, len(text)
    for step in path:
        spans = _members(text, start) if isinstance(step, str) else _elements(text, start)
        matching = [span for span in spans if span.name == step]
        if not matching:
            raise KeyError(step)
        _, start, end = matching[-1]
    return start, end


def _append(raw: bytes, parsed: dict[str, Any], positions: Sequence[int]) -> bytes:
    end = raw.rindex(b"}")
    hint = json.dumps({HINT: list(positions)}, separators=(",", ":"))
    return b'%b%b"%b":%b%b' % (raw[:end], b"," if parsed else b"", XARGS.encode(), hint.encode(), raw[end:])


class _Span(NamedTuple):
    name: str | int
    start: int  # characters; [start, end) is the value
    end: int


def _members(text: str, start: int) -> list[_Span]:
    """The values of the names of the valid JSON object at or after `start`, in order."""

    def skip(index: int) -> int:
        return WHITESPACE.match(text, index).end()

    spans: list[_Span] = []
    index = skip(text.index("{", start) + 1)
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


def _elements(text: str, start: int) -> list[_Span]:
    """The values of the valid JSON array at or after `start`, in order."""
    spans: list[_Span] = []
    index = WHITESPACE.match(text, text.index("[", start) + 1).end()
    while text[index] != "]":
        _, end = _DECODER.raw_decode(text, index)
        spans.append(_Span(len(spans), index, end))
        index = WHITESPACE.match(text, end).end()
        if text[index] == ",":
            index = WHITESPACE.match(text, index + 1).end()
    return spans
