"""How gateways tell each other what they learnt: streams of packed batches of hashes and numbers, never text.

A batch is believed whole or not at all: one that no gateway would have written is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

KEY_BYTES = 16
WRITER_BYTES = 8
# Of one batch: applying it stays far below a millisecond.
MAX_RECORDS = 64
# Longer prompts than any engine takes are garbage.
MAX_TOKENS = 2**24

# Kinds of records in a stream of what a worker holds.
HELD, GONE = 1, 2


class Form(NamedTuple):
    """What the batches of a stream look like: magic, writer, records whose last field is a number of tokens."""

    magic: bytes  # with the version: batches of another one are refused
    record: struct.Struct


HOLDINGS = Form(b"smh1", struct.Struct(f"<B{KEY_BYTES}sI"))  # kind, key of a prefix, tokens (0 where gone)
POSITIONS = Form(b"smp1", struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sI"))  # content key, key of the prefix, tokens

_HEADER = struct.Struct(f"<4s{WRITER_BYTES}s")

POSITIONS_STREAM = b"seamark:positions:1"


def holdings_stream(boot: str) -> bytes:
    """The stream about the worker that booted as `boot`; a restarted worker has another."""
    return b"seamark:held:" + xxh3_128_hexdigest(boot.encode()).encode()


class Batch(NamedTuple):
    """One entry of a stream."""

    writer: bytes  # names the gateway, at random
    records: tuple[tuple[Any, ...], ...]


def pack(form: Form, writer: bytes, records: Iterable[tuple[Any, ...]]) -> bytes:
    """The batch as bytes; `records`, at most `MAX_RECORDS`, as `form` has them."""
    return b"".join((_HEADER.pack(form.magic, writer), *(form.record.pack(*record) for record in records)))


def unpack(form: Form, raw: bytes) -> Batch | None:
    """The batch in these bytes; None where they are none."""
    length = len(raw) - _HEADER.size
    if not 0 < length <= MAX_RECORDS * form.record.size or length % form.record.size:
        return None
    magic, writer = _HEADER.unpack_from(raw)
    if magic != form.magic:
        return None
    records = tuple(form.record.iter_unpack(memoryview(raw)[_HEADER.size :]))
    if any(record[-1] > MAX_TOKENS for record in records):
        return None
    if form is HOLDINGS and any((kind, tokens > 0) not in _SOUND for kind, _, tokens in records):
        return None
    return Batch(writer, records)


_SOUND = frozenset({(HELD, True), (GONE, False)})
