"""Large bodies that begin as an earlier one did, such as an agent's next turn, are read from where they part.

What both have is whole messages, byte for byte. The rest is read with `_MARK` in their place: a reader of JSON that has
read the same bytes expects the same, so where the mark is found to be the first message, it stands for them all.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from proxy.errors import BadRequest
from proxy.http.json_body import NO_BEGIN, NOTHING, Memory, bound_of, check_size, loads, memory_of, parse_object

LEAST_BYTES = 16_384  # of a body: smaller ones are read as fast without
MAX_BODIES = 64
MESSAGE_BYTES = 500  # of a message beside its text, for what its readers remember

_MARK = f'"{secrets.token_hex(16)}"'.encode()  # nobody can write it
_MESSAGES = re.compile(rb'"messages"[ \t\n\r]*:[ \t\n\r]*\[')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(slots=True, eq=False)
class KnownBody:
    """A body up to its last message, and what was read of it. Nobody may change that: other bodies share it."""

    owner: str | None
    start: int  # where its first message begins
    begins: bytes  # up to where its last message does
    messages: list[Any]  # in there
    memory: Memory  # that these take
    weight: int = 0  # most values and elements in there
    tail: bytes = b""  # what stands behind all messages
    others: dict[str, Any] = field(default_factory=dict)  # the whole body, with `_MARK` for its messages
    others_memory: Memory = NOTHING
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
            known = KnownBody(owner, match.end(), raw[: match.end()], [], NOTHING)
        try:
            return self._read_from(known, raw)
        except (msgspec.DecodeError, ValueError, RecursionError, LookupError, BadRequest):
            return None

    def _read_from(self, known: KnownBody, raw: bytes) -> ReadBody | None:
        head, begin = raw[: known.start], len(known.begins)
        rest = b"%b%b,%b" % (head, _MARK, raw[begin:])
        if known.weight + len(rest.translate(None, NO_BEGIN)) > self._max_values:
            return None
        array = bytes(_fields(rest)["messages"])
        first, *new = map(bytes, _elements(array))
        if first != _MARK:
            return None  # there are messages twice, or somewhere else
        tail = rest[known.start - 1 + len(array) :]
        others, others_memory = known.others, known.others_memory
        if tail != known.tail:
            without = b"%b%b]%b" % (head, _MARK, tail)
            others = parse_object(without, self._max_depth, self._max_values)
            others_memory = memory_of(others, len(without), self._most)
        messages, (size, values), weight = known.messages.copy(), known.memory, known.weight
        for each in new:
            before = Memory(size, values), weight  # without the last one
            weight += check_size(each, self._max_depth - 2, self._max_values) + 1
            messages.append(loads(each))
            taken = memory_of(messages[-1], len(each), self._most)
            size, values = size + taken.size, values + taken.values
        memory = Memory(size + others_memory.size, values + others_memory.values)
        parsed = {**others, "messages": messages}
        if memory.values > self._most:
            return ReadBody(parsed, memory)
        cut = begin + len(array[:-1].rstrip(b" \t\n\r")) - len(new[-1]) - len(_MARK) - 2
        if cut == begin and known.messages:
            known.is_shared = True
            self._bodies.move_to_end(known)
            return ReadBody(parsed, memory, known, known.layout)
        made = KnownBody(known.owner, known.start, raw[:cut], messages[:-1], *before, tail, others, others_memory)
        self._keep(made, known, cut + len(tail) + memory.size + MESSAGE_BYTES * len(messages))
        return ReadBody(parsed, memory, made, known.layout)

    def _keep(self, body: KnownBody, known: KnownBody, size: int) -> None:
        if not known.is_shared:
            self.held -= self._bodies.pop(known, 0)
        self._bodies[body] = size
        self.held += size
        while len(self._bodies) > MAX_BODIES or self.held > self._size:
            self.held -= self._bodies.popitem(last=False)[1]
