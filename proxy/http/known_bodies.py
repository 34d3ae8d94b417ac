"""Large bodies that begin as an earlier one did, such as an agent's next turn, are read from where they part.

What both have is whole messages, byte for byte. The rest is read with `_MARK` in their place: a reader of JSON that has
read the same bytes expects the same, so where the mark is found to be the first message, it stands for them all.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from cachetools import LRUCache
from xxhash import xxh3_128

from proxy.errors import BadRequest
from proxy.http.json_body import NO_BEGIN, NOTHING, Memory, check_size, loads, memory_of, parse_object

LEAST_BYTES = 16_384  # of a body: smaller ones are read as fast without
MOST_BYTES = 2**22  # a million tokens' text: what is larger, and may be no chat at all, is not looked through once more
MAX_BODIES, MAX_BEGINNINGS = 64, 4096  # known, and of those that came (hashes)
ROUNDS = 4  # of reads of all known bodies, after which one that nobody asked for gives way
MAX_NEW = 512  # messages that are read one by one
TELLING_BYTES = 64  # by the last ones, two conversations are mostly told apart
MESSAGE_BYTES = 500  # of a message beside its text, for what its readers remember

_MARK = f'"{secrets.token_hex(16)}"'.encode()  # nobody can write it
_MESSAGES = re.compile(rb'"(messages|input)"[ \t\n\r]*:[ \t\n\r]*\[')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class ReadBody(NamedTuple):
    parsed: dict[str, Any]
    memory: Memory
    known: KnownBody | None = None


_NOTHING_READ = ReadBody({}, NOTHING)


@dataclass(slots=True, eq=False)
class KnownBody:
    """A body up to its last message, and what was read of it. Nobody may change that: other bodies share it."""

    owner: str | None
    name: str  # of the field with the messages
    start: int  # where the first one begins
    begins: bytes  # up to where the last one does
    messages: Sequence[Any] = ()  # in there
    memory: Memory = NOTHING  # that these take
    most_values: int = 0  # in `begins`, by what stands in texts, too
    goes_on: bool = False  # from another known body
    used: int = 0  # by so many reads of all
    tail: bytes = b""  # what stands behind all messages
    others: ReadBody = _NOTHING_READ  # the whole body, with `_MARK` for its messages
    keys: Any = None  # of the last chat that begins like that


def _is_half(known: KnownBody | None, raw: bytes) -> bool:
    return known is not None and 2 * len(known.begins) >= len(raw)


def _beginnings(raw: bytes, owner: str | None) -> Iterator[bytes]:
    """Hashes of a body's beginnings, each twice as long as the one before."""
    hashed, start, end = xxh3_128((owner or "").encode()), 0, LEAST_BYTES
    while end <= len(raw):
        hashed.update(raw[start:end])
        yield hashed.digest()
        start, end = end, 2 * end


class KnownBodies:
    """The last bodies of all API keys; bounded in bytes, the least recently used forgotten first."""

    def __init__(self, size: int, max_depth: int, max_values: int, most_values: int) -> None:
        """`size` in bytes, 0 to keep none; limits as of `parse_object` and `memory_of`."""
        self._max_depth, self._max_values, self._most = max_depth, max_values, most_values
        self._bodies: LRUCache[KnownBody, int] = LRUCache(size, getsizeof=lambda taken: max(taken, size // MAX_BODIES))
        # By hashes of beginnings that came: whether a body of which that is half was read in parts in vain.
        self._in_vain: LRUCache[bytes, bool] = LRUCache(MAX_BEGINNINGS)
        self._reads = 0

    @property
    def held(self) -> int:
        return int(self._bodies.currsize)

    def read(self, raw: bytes, owner: str | None, *, is_chat: bool) -> ReadBody:
        """A body in UTF-8 that came with the API key `owner`. Raises as `parse_object`."""
        read = None
        if is_chat and LEAST_BYTES <= len(raw) <= MOST_BYTES and self._bodies.maxsize:
            self._reads += 1
            known = self._known_beginning(raw, owner)
            half = None if _is_half(known, raw) else self._came(raw, owner)
            if known is None and half is not None and (match := _MESSAGES.search(raw)) is not None:
                known = KnownBody(owner, match[1].decode(), match.end(), raw[: match.end()])
            if known is not None and (half is not None or _is_half(known, raw)):
                # What fails may have to be refused in other words.
                with suppress(msgspec.DecodeError, ValueError, RecursionError, LookupError, BadRequest):
                    read = self._read_from(known, raw)
            if half is not None and not _is_half(read.known if read is not None else None, raw):
                self._in_vain[half] = True
        return read or self._read_whole(raw)

    def forget(self, raw: bytes, owner: str | None, read: ReadBody) -> ReadBody:
        if read.known is not None:
            self._bodies.pop(read.known, None)
        for each in _beginnings(raw, owner):
            self._in_vain.pop(each, None)
        return read._replace(known=None)

    def _known_beginning(self, raw: bytes, owner: str | None) -> KnownBody | None:
        known = None
        for each in reversed([*self._bodies]):  # longer ones first, mostly
            begins, end = each.begins, len(each.begins)
            if (known is None or end > len(known.begins)) and each.owner == owner:
                tells = max(0, end - TELLING_BYTES)
                if raw.startswith(begins[tells:], tells) and raw.startswith(begins):
                    known = each
        return known

    def _came(self, raw: bytes, owner: str | None) -> bytes | None:
        """The hash of half a body or more, if that came before, and reading it in parts pays for those that follow.

        It takes longer, and pays unless it was in vain: there is room, or a known body that several rounds passed by.
        """
        half, in_vain = b"", None
        for half in _beginnings(raw, owner):
            in_vain = self._in_vain.get(half)
            self._in_vain[half] = bool(in_vain)
        has_room = self._bodies.currsize <= self._bodies.maxsize * 3 // 4
        pays = has_room or self._reads - min(each.used for each in self._bodies) > ROUNDS * len(self._bodies)
        return half if in_vain is False and pays else None

    def _read_whole(self, raw: bytes) -> ReadBody:
        parsed = parse_object(raw, self._max_depth, self._max_values)
        return ReadBody(parsed, memory_of(parsed, len(raw), self._most))

    def _read_from(self, known: KnownBody, raw: bytes) -> ReadBody | None:
        head, begin = raw[: known.start], len(known.begins)
        rest = b"%b%b,%b" % (head, _MARK, raw[begin:])
        begun = rest.translate(None, NO_BEGIN)
        if known.most_values + len(begun) > self._max_values:
            return None
        may_be_deep = begun.count(b"[") + begun.count(b"{") > self._max_depth - 2
        array = bytes(_fields(rest)[known.name])
        elements = _elements(array)
        if bytes(elements[0]) != _MARK or len(elements) > MAX_NEW:
            return None  # there are messages twice, or somewhere else
        new = [*map(bytes, elements[1:])]
        tail = rest[known.start - 1 + len(array) :]
        others = known.others if tail == known.tail else self._read_whole(b"%b%b]%b" % (head, _MARK, tail))
        messages, memory = [*known.messages], known.memory
        for each in new:
            if may_be_deep:
                check_size(each, self._max_depth - 2, self._max_values)
            messages.append(loads(each))
            before, taken = memory, memory_of(messages[-1], len(each), self._most)
            memory = Memory(before.size + taken.size, before.values + taken.values)
        whole = Memory(memory.size + others.memory.size, memory.values + others.memory.values)
        cut = begin + len(array[:-1].rstrip(b" \t\n\r")) - len(new[-1]) - len(_MARK) - 2
        goes_on = self._bodies.get(known) is not None  # which makes it the last one used
        if cut > begin or not goes_on:
            if known.goes_on:
                self._bodies.pop(known, None)  # what all conversations begin with stays
            most = known.most_values + len(raw[begin:cut].translate(None, NO_BEGIN))
            known = replace(known, begins=raw[:cut], messages=messages[:-1], memory=before, most_values=most)
            known.tail, known.others, known.goes_on = tail, others, goes_on
        known.used = self._reads
        size = cut + len(tail) + whole.size + MESSAGE_BYTES * len(messages)
        if size <= self._bodies.maxsize:
            self._bodies[known] = size
        return ReadBody({**others.parsed, known.name: messages}, whole, known)
