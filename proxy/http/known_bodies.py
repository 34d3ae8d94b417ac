"""Large bodies that begin as an earlier one did, such as an agent's next turn, are read from where they part.

What both have is whole messages, byte for byte. The rest is read with `_MARK` in their place: a reader of JSON that has
read the same bytes expects the same, so where the mark is found to be the first message, it stands for them all.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec

from proxy.errors import TooComplex
from proxy.http.json_body import ELEMENTS_PER_VALUE, Memory, bound_of, check_size, loads, memory_of, parse_object

LEAST_BYTES = 16_384  # of a body: smaller ones are read as fast without
MAX_BODIES = 64
MESSAGE_BYTES = 500  # of a message beside its text, for what its readers remember

_MARK = f'"{secrets.token_hex(16)}"'.encode()  # nobody can write it
_MESSAGES = re.compile(rb'"messages"[ \t\n\r]*:[ \t\n\r]*\[')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Part(NamedTuple):
    """A value in a body."""

    raw: bytes
    value: Any
    memory: Memory
    weight: int  # brackets, colons and commas, those in texts as well


@dataclass(slots=True, eq=False)
class KnownBody:
    """A body up to its last message, and what was read of it. Nobody may change that: other bodies share it."""

    owner: str | None
    start: int  # where its first message begins
    begins: bytes = b""  # up to where its last message does
    messages: list[Any] = field(default_factory=list)  # in there
    fields: dict[str, _Part] = field(default_factory=dict)  # all others of the body
    size: int = 0  # of `messages`: as of `Memory`, and weight
    values: int = 0
    weight: int = 0
    layout: Any = None  # what a later reader has made of it
    is_shared: bool = False  # by bodies that part from each other there


class ReadBody(NamedTuple):
    parsed: dict[str, Any]
    memory: Memory
    known: KnownBody | None = None
    earlier: Any = None  # `layout` of the body that it continues


class KnownBodies:
    """The last bodies of each API key's; bounded in bytes."""

    def __init__(self, size: int, max_depth: int, max_values: int, most_values: int) -> None:
        """`size` in bytes, 0 to keep none; limits as of `parse_object` and `memory_of`."""
        self._size, self._max_depth, self._max_values, self._most = size, max_depth, max_values, most_values
        self._bodies: OrderedDict[KnownBody, int] = OrderedDict()  # with the bytes that each takes
        self.held = 0

    def read(self, raw: bytes, owner: str | None) -> ReadBody:
        """A body in UTF-8 that came with the API key `owner`. Raises as `parse_object`."""
        found = self._as_known(raw, owner) if len(raw) >= LEAST_BYTES and self._size else None
        if found is None:
            parsed = parse_object(raw, self._max_depth, self._max_values)
            memory = bound_of(raw)
            if memory is None or memory.values > self._most:
                memory = memory_of(parsed, len(raw), self._most)
            found = ReadBody(parsed, memory)
        return found

    def _as_known(self, raw: bytes, owner: str | None) -> ReadBody | None:
        """None if it has to be read as a whole."""
        known = None
        for each in self._bodies:
            is_longer = known is None or len(each.begins) > len(known.begins)
            if is_longer and each.owner == owner and raw.startswith(each.begins):
                known = each
        if known is None:
            if (match := _MESSAGES.search(raw)) is None:
                return None
            known = KnownBody(owner, match.end(), raw[: match.end()])
        try:
            return self._read_from(known, raw)
        except (msgspec.DecodeError, ValueError, RecursionError, LookupError, TooComplex):
            return None

    def _read_from(self, known: KnownBody, raw: bytes) -> ReadBody | None:
        begin = len(known.begins)
        rest = b"%b%b,%b" % (raw[: known.start], _MARK, raw[begin:])
        if rest.count(b",") > self._max_values:
            return None
        given = _fields(rest)
        first, *new = map(bytes, _elements(given["messages"]))
        if first != _MARK:
            return None  # there are messages twice, or somewhere else
        size, values, weight = known.size, known.values, known.weight
        messages = known.messages.copy()
        made = KnownBody(known.owner, known.start)
        for each in new:
            made.size, made.values, made.weight = size, values, weight  # without the last one
            part = self._part(each, 2)
            size, values, weight = size + part.memory.size, values + part.memory.values, weight + part.weight
            messages.append(part.value)
        parsed: dict[str, Any] = {}
        for name, value in given.items():
            if name == "messages":
                parsed[name] = messages
                continue
            had = known.fields.get(name)
            part = had if had is not None and had.raw == bytes(value) else self._part(bytes(value), 1)
            parsed[name], made.fields[name] = part.value, part
            size, values, weight = size + part.memory.size, values + part.memory.values, weight + part.weight
        size += getsizeof(parsed) + getsizeof(messages) + sum(map(len, parsed))
        values += 2 + len(parsed) + len(messages) // ELEMENTS_PER_VALUE
        if weight > self._max_values:
            return None
        if values > self._most:
            return ReadBody(parsed, Memory(size, values))
        behind = bytes(given["messages"])[:-1].rstrip(b" \t\n\r")
        cut = begin + len(behind) - len(new[-1]) - len(_MARK) - 2
        if cut > begin or not known.messages:
            made.begins, made.messages = raw[:cut], messages[:-1]
            text = cut + sum([len(part.raw) for part in made.fields.values()])
            self._keep(made, known, text + size + MESSAGE_BYTES * len(messages))
        else:
            known.is_shared = True
            self._bodies.move_to_end(known)
            made = known
        return ReadBody(parsed, Memory(size, values), made, known.layout)

    def _part(self, raw: bytes, levels: int) -> _Part:
        """A value that stands so many levels down. Raises `TooComplex`, or `ValueError`."""
        opened = raw.count(b"[") + raw.count(b"{")
        if opened > self._max_depth - levels:
            check_size(raw, self._max_depth - levels, self._max_values)
        value = loads(raw)
        weight = opened + raw.count(b":") + raw.count(b",")
        return _Part(raw, value, memory_of(value, len(raw), self._most), weight)

    def _keep(self, body: KnownBody, known: KnownBody, size: int) -> None:
        if not known.is_shared:
            self.held -= self._bodies.pop(known, 0)
        self._bodies[body] = size
        self.held += size
        while len(self._bodies) > MAX_BODIES or self.held > self._size:
            self.held -= self._bodies.popitem(last=False)[1]
