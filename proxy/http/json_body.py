"""The bytes of a request body: read once, changed only in the fields that the gateway answers for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from json.decoder import WHITESPACE, JSONDecoder, scanstring
from typing import Any, NamedTuple

from proxy.errors import BadRequest, TooDeep

XARGS = "vllm_xargs"

HINT = "seamark_boundaries"

# Where to fetch whose cache from, which is not a client's to say.
TRANSFERS = ("kv_transfer_params", "ec_transfer_params")

_DECODER = JSONDecoder()

_encode = json.JSONEncoder(separators=(",", ":")).encode

# Python's reader gives up at about a thousand; no chat, tool or schema comes near this.
MAX_DEPTH = 128

# Possessive, and content with a string that never ends: it cannot fail and so never goes back.
_NESTING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.S)


def as_utf8(raw: bytes) -> bytes:
    """A JSON body in UTF-8 without a mark, whatever JSON readers take besides; `raw` itself where it is that."""
    encoding = json.detect_encoding(raw)
    if encoding == "utf-8":
        return raw
    try:
        return raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise BadRequest("The request body is not valid JSON.") from None


def parse_object(raw: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object in a body. Raises `BadRequest` for anything else, and for one nested deeper than `max_depth`."""
    if raw.count(b"[") + raw.count(b"{") > max_depth and _depth(raw) > max_depth:
        raise TooDeep(f"The request body is nested deeper than {max_depth} levels (setting max_json_depth).")
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequest("The request body is not valid JSON.") from None
    if not isinstance(parsed, dict):
        raise BadRequest("The request body must be a JSON object.")
    return parsed


def _depth(raw: bytes) -> int:
    """Levels of objects and arrays."""
    deepest = level = 0
    for match in _NESTING.finditer(raw):
        sign = match[0]
        if sign in (b"[", b"{"):
            level += 1
            deepest = max(deepest, level)
        elif sign in (b"]", b"}"):
            level -= 1
    return deepest


def with_fields(raw: bytes, names: Collection[str], put: Mapping[str, Any], dropped: Collection[str] = ()) -> bytes:
    """`raw` with the outermost fields `put` set to these values and `dropped` gone; every other field byte for byte.

    `names` are the outermost names in `raw`, an object in UTF-8.
    """
    gone = {name for name in (*put, *dropped) if name in names}
    if gone:
        raw = _without(raw, gone)
    if not put:
        return raw
    end = raw.rindex(b"}")
    fields = _encode(put)[1:-1].encode()
    return b"%b%b%b%b" % (raw[:end], b"," if len(names) > len(gone) else b"", fields, raw[end:])


def _without(raw: bytes, names: Collection[str]) -> bytes:
    """`raw` without these outermost fields, all of a name that is there several times."""
    text = raw.decode(errors="surrogatepass")
    spans = _members(text, 0)
    kept = ",".join(text[span.first : span.end] for span in spans if span.name not in names)
    return (text[: spans[0].first] + kept + text[spans[-1].end :]).encode(errors="surrogatepass")


def with_hint(raw: bytes, parsed: dict[str, Any], positions: Sequence[int]) -> bytes:
    """`raw` with the token `positions` as its hint; a hint the client sent is replaced, by an empty one if need be.

    Everything else stays byte for byte. `parsed` is `parse_object(raw)`. Returns `raw` itself where there is nothing to
    change, and where the client's `vllm_xargs` is not an object: that is the worker's to refuse.
    """
    if not json.detect_encoding(raw).startswith("utf-8"):
        return raw
    if XARGS not in parsed:
        return with_fields(raw, parsed, {XARGS: {HINT: list(positions)}}) if positions else raw
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
        start, end = matching[-1].start, matching[-1].end
    return start, end


class _Span(NamedTuple):
    name: str | int
    first: int  # characters; where the member begins: its name, or its value in an array
    start: int  # [start, end) is the value
    end: int


def _members(text: str, start: int) -> list[_Span]:
    """The values of the names of the valid JSON object at or after `start`, in order."""

    def skip(index: int) -> int:
        return WHITESPACE.match(text, index).end()

    spans: list[_Span] = []
    index = skip(text.index("{", start) + 1)
    while text[index] == '"':
        first = index
        name, index = scanstring(text, index + 1)
        start = skip(skip(index) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, start)
        spans.append(_Span(name, first, start, end))
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
        spans.append(_Span(len(spans), index, index, end))
        index = WHITESPACE.match(text, end).end()
        if text[index] == ",":
            index = WHITESPACE.match(text, index + 1).end()
    return spans
