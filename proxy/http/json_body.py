"""The bytes of a request body: read once, changed only in the fields that the gateway answers for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec

from proxy.errors import BadRequest, TooComplex

XARGS = "vllm_xargs"
HINT = "seamark_boundaries"

# Also in `vllm_xargs`, and never from clients: 1 has the engine keep the prompt in its cache, 0 let it go.
PIN = "seamark_pin"

# Also in `vllm_xargs`: GATEWAY,PROMPT,LEFT. Who sends the request, its tokens, and how many of them are to be computed.
LOAD = "seamark_load"

# Also in `vllm_xargs`. "no": nothing of the request may be found by others; "private": nor does it find anything;
# "low", from the gateway alone: what it leaves goes first.
KEEP = "seamark_keep"

# Fields that say where to fetch whose cache from. A client must not set them.
TRANSFERS = ("kv_transfer_params", "ec_transfer_params")

_DECODER = json.JSONDecoder()
_decode_fast = msgspec.json.Decoder().decode
_WHITESPACE = re.compile(r"[\ufeff \t\n\r]*")
_TO_A_CHARACTER = re.compile(rb"\\*.?", re.DOTALL)  # with what escapes it, whether that has begun or not
_encode = json.JSONEncoder(separators=(",", ":")).encode

# Values are objects, arrays and named values. Other elements of arrays, such as token ids, are counted by the ten.
ELEMENTS_PER_VALUE = 10

# Of a JSON text, its structure, the ends of its strings and what escapes are made of stay. To take escapes out of the
# whole text took longer than anything else.
_NO_STRUCTURE_NOR_ESCAPE = bytes(set(range(256)) - set(b'[{]},:"\\/bfnrtu'))

NO_BEGIN = bytes(set(range(256)) - set(b"[{:,"))  # of a value or element
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[{]},:"))

# Then brackets become steps up (1) and down (-1, as an unsigned byte).
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")

_CONTAINERS = frozenset((dict, list))
_NUMBERS = frozenset((int, float))
NUMBERS_PER_VALUE = 100  # in a list of nothing else
NUMBER_BYTES = 32  # of one that is not shared, as small ones are
MOST_PER_BYTE = 32  # bytes that a byte of JSON can become: in objects with one short name


class Memory(NamedTuple):
    """What parsed JSON takes: bytes, and values as the limit of `parse_object` counts them."""

    size: int
    values: int


NOTHING = Memory(0, 0)
SLICE = 1 << 20  # bytes looked through at once: one of quotes alone becomes fifty times as many


def as_utf8(raw: bytes) -> bytes:
    """A JSON body of any encoding in UTF-8 without a byte order mark; `raw` if it is one. Raises `BadRequest`."""
    if raw[:1] == b"{" and raw[1:2] != b"\0":
        return raw
    encoding = json.detect_encoding(raw)
    if encoding == "utf-8":
        return raw
    try:
        return raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise BadRequest("The request body is not valid JSON.") from None


def parse_object(raw: bytes, max_depth: int, max_values: int) -> dict[str, Any]:
    """The JSON object in a body. Raises `BadRequest` for anything else, and for one deeper or of more values."""
    check_size(raw, max_depth, max_values)
    try:
        parsed = loads(raw)
    except ValueError:
        raise BadRequest("The request body is not valid JSON.") from None
    if not isinstance(parsed, dict):
        raise BadRequest("The request body must be a JSON object.")
    return parsed


def check_size(raw: bytes, max_depth: int, max_values: int) -> None:
    """Raises `TooComplex` before anything is built of a body. What is no JSON may pass, or be refused as well."""
    if len(raw) <= SLICE:  # more is looked through once only
        begun = raw.translate(None, NO_BEGIN)  # in strings, too
        if len(begun) <= max_values and begun.count(b"[") + begun.count(b"{") <= max_depth:
            return
    max_elements = ELEMENTS_PER_VALUE * max_values
    values = elements = depth = 0
    for structure in _structure(raw):
        values += structure.count(b"[") + structure.count(b"{") + structure.count(b":")
        elements += structure.count(b",")
        if values > max_values or elements > max_elements:
            raise TooComplex(
                f"The request body has more than {max_values} objects, arrays and named values, or more than "
                f"{max_elements} elements in arrays (setting max_json_values)."
            )
        steps = structure.translate(_STEPS, b",:")
        if steps:
            levels = list(accumulate(memoryview(steps).cast("b"), initial=depth))
            depth = levels[-1]
            if max(levels) > max_depth:
                raise TooComplex(f"The request body is nested deeper than {max_depth} levels (setting max_json_depth).")


def memory_of(parsed: Any, raw_size: int, most_values: int) -> Memory:
    """What JSON takes that was parsed from `raw_size` bytes. Of one with more than `most_values`, the most it can take.

    Numbers in a list of numbers, such as token ids, are counted by the hundred.
    """
    size, values, elements = getsizeof(parsed), 0, 0
    level = [parsed] if type(parsed) in _CONTAINERS else []
    while level:
        names: list[str] = []  # short ones are shared
        inner: list[Any] = []
        for container in level:
            if type(container) is dict:
                names += container
                inner += container.values()
            elif len(container) >= NUMBERS_PER_VALUE and set(map(type, container)) <= _NUMBERS:
                values += len(container) // NUMBERS_PER_VALUE
                size += len(container) * NUMBER_BYTES
            else:
                elements += len(container)
                inner += container
        values += len(level) + len(names)
        if values + elements // ELEMENTS_PER_VALUE > most_values:
            return Memory(MOST_PER_BYTE * raw_size, most_values + 1)
        size += sum(map(len, names)) + sum(map(getsizeof, inner))
        level = [value for value in inner if type(value) in _CONTAINERS]
    return Memory(size, values + elements // ELEMENTS_PER_VALUE)


def _structure(raw: bytes) -> Iterator[bytes]:
    """The brackets, colons and commas of a JSON text that stand outside strings, slice by slice."""
    is_string = False
    start = 0
    while start < len(raw):
        end = start + SLICE
        if more := _TO_A_CHARACTER.match(raw, end):  # a character and its escape stay together
            end = more.end()
        kept = raw[start:end].translate(None, _NO_STRUCTURE_NOR_ESCAPE)
        pieces = kept.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[is_string::2]).translate(None, _NO_STRUCTURE)
        is_string ^= len(pieces) % 2 == 0
        start = end


def loads(raw: bytes) -> Any:
    """What `json.loads` returns. Raises `ValueError`, for what is nested too deep as well.

    msgspec reads two to three times faster and returns equal values, but refuses what Python's reader accepts besides:
    NaN and Infinity, numbers too large for a float, halves of surrogate pairs, byte order marks, UTF-16 and UTF-32.
    """
    try:
        return _decode_fast(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def words_in(answer: bytes) -> str:
    """What another server says in an error, in any of the usual shapes; all of it as it is if it has none."""
    text = answer.decode(errors="replace")
    with suppress(ValueError, AttributeError):
        said = loads(answer)
        said = said.get("error", said)
        text = str(said if isinstance(said, str) else said.get("message") or said.get("detail") or text)
    return text.strip()


class OverBound(ValueError):
    """JSON of another server that is larger than what such a server says."""


def with_fields(raw: bytes, names: Collection[str], put: Mapping[str, Any], dropped: Collection[str] = ()) -> bytes:
    """`raw`, an object of these `names` in UTF-8, with `put` set and `dropped` removed; the rest byte for byte."""
    gone = {name for name in (*put, *dropped) if name in names}
    if gone:  # each time, if one occurs several times
        text = raw.decode(errors="surrogatepass")
        spans = _values(text)
        kept = ",".join(text[span.first : span.end] for span in spans if span.name not in gone)
        raw = (text[: spans[0].first] + kept + text[spans[-1].end :]).encode(errors="surrogatepass")
    if not put:
        return raw
    end = raw.rindex(b"}")
    fields = _encode(put)[1:-1].encode()
    return b"%b%b%b%b" % (raw[:end], b"," if len(names) > len(gone) else b"", fields, raw[end:])


def with_xargs(raw: bytes, xargs: Mapping[str, Any] | None, put: Mapping[str, Any]) -> bytes:
    """`raw`, in UTF-8, with `put` in its `vllm_xargs`, which says `xargs` now. Everything else stays byte for byte."""
    text = raw.decode(errors="surrogatepass")
    start, end = _find(text, (XARGS,))
    given = text[start:end].encode(errors="surrogatepass")
    new = with_fields(given, xargs, put) if xargs else _encode(put).encode()
    return b"%b%b%b" % (text[:start].encode(errors="surrogatepass"), new, text[end:].encode(errors="surrogatepass"))


Path = tuple[str | int, ...]


class Edit(NamedTuple):
    path: Path  # names and indices from the outermost object inwards
    new: Any


def with_edits(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """`raw` with these values replaced and every other byte as it was. Raises `KeyError` if a path does not exist."""
    text = raw.decode(errors="surrogatepass")
    spans = [(*_find(text, edit.path), json.dumps(edit.new)) for edit in edits]
    for start, end, new in sorted(spans, reverse=True):
        text = text[:start] + new + text[end:]
    return text.encode(errors="surrogatepass")


def _find(text: str, path: Path) -> tuple[int, int]:
    """Where a value stands. JSON readers keep the last of several equal names, so that one is meant."""
    start, end = 0, len(text)
    for step in path:
        matching = [span for span in _values(text, start) if span.name == step]
        if not matching:
            raise KeyError(step)
        start, end = matching[-1].start, matching[-1].end
    return start, end


class _Span(NamedTuple):
    name: str | int
    first: int  # characters; where the member begins: its name, or its value in an array
    start: int  # [start, end) is the value
    end: int


def _skip_whitespace(text: str, index: int) -> int:
    match = _WHITESPACE.match(text, index)
    return match.end() if match else index


def _values(text: str, start: int = 0) -> list[_Span]:
    """What the valid JSON object or array at `start` holds, in order: each value with its name, or its index."""
    spans: list[_Span] = []
    start = _skip_whitespace(text, start)
    is_object = text[start] == "{"
    index = _skip_whitespace(text, start + 1)
    while text[index] not in "]}":
        name: str | int = len(spans)
        first = index
        if is_object:
            name, index = _DECODER.raw_decode(text, first)
            index = _skip_whitespace(text, _skip_whitespace(text, index) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, index)
        spans.append(_Span(name, first, index, end))
        index = _skip_whitespace(text, end)
        if text[index] == ",":
            index = _skip_whitespace(text, index + 1)
    return spans
