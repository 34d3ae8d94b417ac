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
    POSITIONS_STREAM,
    Batch,
    Form,
    holdings_stream,
    pack,
    unpack,
)

WRITER = b"w" * 8

KEY = b"k" * 16

RECORDS = {HOLDINGS: ((HELD, KEY, 160), (GONE, KEY, 0), (KEPT, KEY, 0)), POSITIONS: ((KEY, 163), (KEY, MAX_TOKENS))}


@pytest.mark.parametrize("form", [HOLDINGS, POSITIONS])
def test_a_batch_is_read_as_it_was_packed(form):
    assert unpack(form, pack(form, WRITER, RECORDS[form])) == Batch(WRITER, RECORDS[form])
    most = RECORDS[form][:1] * MAX_RECORDS
    assert unpack(form, pack(form, WRITER, most)) == Batch(WRITER, most)


def test_a_batch_has_the_bytes_that_gateways_of_the_same_formats_read_in_other_versions():
    number = (160).to_bytes(4, "little")
    holdings = [b"\x01" + KEY + number, b"\x02" + KEY + bytes(4), b"\x03" + KEY + bytes(4)]
    assert pack(HOLDINGS, WRITER, RECORDS[HOLDINGS]) == b"smh3" + WRITER + b"".join(holdings)
    assert pack(POSITIONS, WRITER, [(KEY, 160)]) == b"smp2" + WRITER + KEY + number
    assert (holdings_stream("a#1")[:15], POSITIONS_STREAM) == (b"seamark:held:3:", b"seamark:positions:2")
    assert (MAX_RECORDS, MAX_TOKENS) == (64, 2**24)  # of what others write


@pytest.mark.parametrize("form", [HOLDINGS, POSITIONS])
def test_what_is_no_batch_is_refused(form):
    whole = pack(form, WRITER, RECORDS[form])
    for raw in (b"", whole[:4], whole[:12], whole[:-1], whole + b"x", pack(form, WRITER, ())):
        assert unpack(form, raw) is None
    assert unpack(form, pack(form, WRITER, RECORDS[form][:1] * (MAX_RECORDS + 1))) is None


@pytest.mark.parametrize(("form", "magic", "record"), [(HOLDINGS, b"smh2", "<B16sI"), (POSITIONS, b"smp1", "<16s16sI")])
def test_batches_of_an_earlier_version_are_refused_whatever_their_size(form, magic, record):
    """Their keys name other things: the tokens of a prompt."""
    size = struct.calcsize(record)
    for count in (1, 2, form.record.size, MAX_RECORDS):
        assert unpack(form, magic + WRITER + bytes(size * count)) is None
    older = Form(magic, form.record)
    assert unpack(form, pack(older, WRITER, RECORDS[form])) is None
    assert unpack(older, pack(older, WRITER, RECORDS[form])) is not None  # for its magic alone


def test_a_batch_is_not_read_as_one_of_the_other_kind():
    assert unpack(POSITIONS, pack(HOLDINGS, WRITER, RECORDS[HOLDINGS])) is None
    assert unpack(HOLDINGS, pack(POSITIONS, WRITER, RECORDS[POSITIONS])) is None


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


def test_streams_have_names_of_their_own_version_and_a_restarted_worker_has_another():
    names = {POSITIONS_STREAM: POSITIONS, **dict.fromkeys(map(holdings_stream, ("a#1", "a#2")), HOLDINGS)}
    assert len(names) == 3 and all(b":" + form.magic[-1:] in name for name, form in names.items())
