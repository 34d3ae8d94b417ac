"""The batches that gateways share through Redis: what is packed is read again, anything else is refused."""

from __future__ import annotations

import struct

import pytest

from proxy.routing.redis_sync import (
    GONE,
    HELD,
    HOLDINGS,
    KEPT,
    MAX_RECORDS,
    MAX_TOKENS,
    POSITIONS,
    Form,
    pack,
    unpack,
)

WRITER = b"w" * 8

KEY = b"k" * 16

RECORDS = {HOLDINGS: ((HELD, KEY, 160), (GONE, KEY, 0), (KEPT, KEY, 0)), POSITIONS: ((KEY, 163), (KEY, MAX_TOKENS))}


@pytest.mark.parametrize(("form", "magic", "record"), [(HOLDINGS, b"smh2", "<B16sI"), (POSITIONS, b"smp1", "<16s16sI")])
def test_batches_of_an_earlier_version_are_refused_whatever_their_size(form, magic, record):
    """Their keys name other things: the tokens of a prompt."""
    size = struct.calcsize(record)
    for count in (1, 2, form.record.size, MAX_RECORDS):
        assert unpack(form, magic + WRITER + bytes(size * count)) is None
    older = Form(magic, form.record)
    assert unpack(form, pack(older, WRITER, RECORDS[form])) is None
    assert unpack(older, pack(older, WRITER, RECORDS[form])) is not None  # for its magic alone


@pytest.mark.parametrize(
    ("form", "record"),
    [
        (HOLDINGS, (HELD, KEY, 0)),
        (HOLDINGS, (GONE, KEY, 160)),
        (HOLDINGS, (3, KEY, 160)),
        (HOLDINGS, (HELD, KEY, MAX_TOKENS + 1)),
        (POSITIONS, (KEY, MAX_TOKENS + 1)),
        (POSITIONS, (KEY, 0)),
    ],
)
def test_one_record_that_cannot_be_makes_its_batch_none(form, record):
    assert unpack(form, pack(form, WRITER, (*RECORDS[form], record))) is None
