"""A form is forwarded as it is, or refused for what only the gateway may say."""

from __future__ import annotations

from email import message_from_bytes
from io import BytesIO
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from python_multipart import parse_form

from proxy.errors import BadRequest
from proxy.http.form_body import (
    LOOK_BACK_BYTES,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    MAX_NAME_BYTES,
    MOST_FIELDS,
    MOST_LINES,
    STEP_BYTES,
    check_form,
    is_form,
    model_in,
    refuse_urlencoded,
)
from proxy.http.json_body import HINT as HINT_NAME
from proxy.http.json_body import LOAD, PIN, TRANSFERS
from tests.harness.steps import finished

FORM = b"multipart/form-data; boundary=x"


def check(raw: bytes, kind: bytes = FORM) -> None:
    finished(check_form([(b"content-type", kind)], raw))


def passes(raw: bytes) -> bool:
    try:
        check(raw)
    except BadRequest:
        return False
    return True


def form(value: bytes, name: bytes = b"vllm_xargs") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n--x--\r\n' % (name, value)


@pytest.mark.parametrize("name", [HINT_NAME, PIN, LOAD, *TRANSFERS])
@pytest.mark.parametrize("between", [0, STEP_BYTES - 7])
def test_each_name_that_only_the_gateway_may_say_is_refused_and_named_wherever_it_lies(name, between):
    said = form(b"\0" * between, name=b"file") + form(b'{"%b":1}' % name.encode())
    with pytest.raises(BadRequest, match=name) as refused:
        check(said)
    assert refused.value.param == "vllm_xargs"
    check(form(b'{"%b":1}' % name.encode(), name=b"prompt"))


@pytest.mark.parametrize("kind", [FORM, FORM + b'; charset="UTF-8"', FORM + b"; charset=us-ascii"])
@pytest.mark.parametrize(
    "raw",
    [
        form(b'{"a": "b"}'),
        form(b"\\u0041", name=b"prompt"),
        form(bytes(range(256)) * 100, name=b"file"),
    ],
)
def test_what_holds_no_hint_passes(kind, raw):
    check(raw, kind)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (FORM, form(b'{"\\u0073eamark_boundaries":[1]}')),
        (FORM, form(b'{"a":1}') + form(b'{"ec_transfer_params":{}}')),
        *(
            (FORM + charset, form(b"{}"))
            for charset in (b"; charset = utf-7", b"; charset=utf-8; charset=utf-7", b"; charset")
        ),
        (FORM + b'; charset="utf-16"', form(b"{}")),
        (FORM + b"; charset=utf-7", form(b"{}", name=b"+AHY-llm_xargs")),
    ],
)
def test_what_may_hold_one_is_refused(kind, raw):
    with pytest.raises(BadRequest):
        check(raw, kind)


def parts(*fields: tuple[bytes, bytes], boundary: bytes = b"x") -> bytes:
    whole = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, value) for head, value in fields)
    return whole + b"--%b--\r\n" % boundary


FILE = (b'Content-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav', b"\r\n\r\n--y\0")

NAMED = b"Content-Disposition: form-data; name="


@pytest.mark.parametrize(
    ("kind", "raw", "model"),
    [
        (FORM, parts(FILE, (NAMED + b'"model"', b"openai/whisper-small")), "openai/whisper-small"),
        (FORM, parts((b"content-type: text/plain\r\ncontent-disposition:form-data;NAME=model", b"m"), FILE), "m"),
        (b'Multipart/Form-Data; a=b; Boundary="x y"', parts((NAMED + b"model", "é".encode()), boundary=b"x y"), "é"),
        (FORM, parts((NAMED + b"model", b"first"), (NAMED + b"model", b"last")), "last"),
        (FORM, parts(FILE, (NAMED + b'"models"', b"m"), (NAMED + b'"prompt"', b'name="model"\r\n\r\nm')), ""),
        (FORM, parts(*[(NAMED + b"n", b"")] * MOST_FIELDS, (NAMED + b"model", b"m")), ""),
        (FORM, b"--x\r\n" + NAMED + b"model\r\n\r\ncut", ""),
        (b"multipart/form-data", parts((NAMED + b"model", b"m")), ""),
    ],
)
def test_the_model_that_a_form_names_is_read(kind, raw, model):
    assert model_in([(b"accept", b"*/*"), (b"content-type", kind)], raw) == model


HINT = b'{"seamark_boundaries":[16],"kv_transfer_params":"x"}'


def part(head: bytes, value: bytes = HINT) -> bytes:
    return b"--x\r\n" + head + b"\r\n\r\n" + value + b"\r\n--x--\r\n"


@pytest.mark.parametrize(
    "head",
    [
        # RFC 2231, as python-multipart before 0.0.30 reads it
        b"Content-Disposition: form-data; name*=utf-8''vllm%5Fxargs",
        b'Content-Disposition: form-data; name*0="vllm_"; name*1="xargs"',
        b"Content-Disposition: form-data; name=x; filename=\"a; name*=utf-8''vllm%5Fxargs\"",
        # escapes, encoded words, lines that go on, two names
        b'Content-Disposition: form-data; name="vllm\\_xargs"',
        b'Content-Disposition: form-data; name="vllm%5Fxargs"',
        b'Content-Disposition: form-data; name="vllm_\r\n xargs"',
        b'Content-Disposition: form-data;\r\n\tname="vllm\\_xargs"',
        b'Content-Disposition: form-data; name="x"; filename="\\"; name=\\"vllm\\_xargs\\""',
        b'Content-Disposition: form-data; name="x"; NAME="y"',
        b"Content-Disposition: form-data",
        b'Content-Disposition: attachment; name="x"',
        # as parsers read it that strip lines, or end them otherwise
        b"A: b\r\n" + b" " * 2 * MAX_LINE_BYTES + b"Content-Disposition: form-data; name*=utf-8''vllm%5Fxargs",
        b"A: b\r\n\x0bCONTENT-DISPOSITION : form-data; name*=utf-8''vllm%5Fxargs",
        b"A: b\nContent-Disposition: form-data; name*=utf-8''vllm%5Fxargs\n\nx",
        # the value, or all of them, in other bytes
        b'Content-Disposition: form-data; name="a"\r\nContent-Transfer-Encoding: base64',
        b'Content-Disposition: form-data; name="a"\r\nContent-Type: text/plain; charset=utf-16-le',
        b'Content-Disposition: form-data; name="a"\r\nContent-Type: text/plain;\r\n charset=utf-7',
        b'Content-Disposition: form-data; name="_charset_"',
    ],
)
@pytest.mark.parametrize("before", [b"", b"--x\r\n" + NAMED + b'"file"\r\n\r\n' + b"\0" * (STEP_BYTES - 60) + b"\r\n"])
def test_a_part_that_two_readers_may_take_differently_is_refused(before, head):
    """Wherever it stands: what it holds need not even look like a hint."""
    with pytest.raises(BadRequest, match="A part of this form"):
        check(before + part(head, b"e30="))


@pytest.mark.parametrize(
    "types",
    [
        *([b"multipart/form-data" + more] for more in (b"", b"; boundary*=utf-8''x", b"; boundary*0=x")),
        *([FORM + more] for more in (b"; boundary=y", b", multipart/form-data; boundary=x")),
        *([b"multipart/form-data; boundary=" + odd] for odd in (b'"\\x"', b'"x;charset=utf-8"')),
        *([b"multipart/mixed; boundary=x"], [FORM, FORM], [b"application/json", FORM]),
    ],
)
def test_a_type_that_two_readers_may_take_differently_is_refused(types):
    headers = [(b"content-type", each) for each in types]
    assert is_form(headers) and not is_form([(b"content-type", b"application/json"), (b"x", FORM)])
    with pytest.raises(BadRequest, match="Content-Type"):
        finished(check_form(headers, form(b"{}")))


@pytest.mark.parametrize(
    "head",
    [
        b'Content-Disposition: form-data; name="timestamp_granularities[]"',
        b"Content-Disposition: form-data; name=file; filename=a-b.wav; \r\nContent-Type: audio/wav",
        'Content-Disposition: form-data; name="file"; filename="Lied; größer (2).wav"'.encode(),
        b'Content-Disposition: form-data; filename=""; name="file"\r\nContent-Transfer-Encoding: binary',
        b'Content-Disposition: form-data; name="prompt"\r\nContent-Type: text/plain; charset=UTF-8\r\nA: 4',
    ],
)
def test_what_clients_write_passes(head):
    text = b"the header content-disposition: is used as Content-Transfer-Encoding: base64 is"
    check(part(head, text), b'multipart/form-data; boundary="--a b"')
    check(part(head), b"multipart/form-data; boundary=----=_Part_1; charset=utf-8")


def test_the_lines_that_are_looked_at_are_bounded():
    for each in (b"\r\n" + NAMED + b"n\r\n", b"a content-type: "):
        assert [passes(b"--x" + each * (MOST_LINES + more)) for more in (0, 1)] == [True, False]


def test_a_form_without_files_is_refused():
    with pytest.raises(BadRequest, match="multipart/form-data"):
        refuse_urlencoded([(b"content-type", b"Application/X-WWW-Form-Urlencoded; charset=utf-8")])
    refuse_urlencoded([(b"content-type", b"application/json"), (b"x", b"application/x-www-form-urlencoded")])


@pytest.mark.parametrize("spaces", [1, LOOK_BACK_BYTES - 1, LOOK_BACK_BYTES, LOOK_BACK_BYTES + 1])
def test_words_inside_a_line_are_no_head_unless_too_much_space_stands_before_them(spaces):
    raw = form(b"see" + b" " * spaces + b"content-transfer-encoding: base64", name=b"prompt")
    assert passes(raw) is (spaces < LOOK_BACK_BYTES)
    assert not passes(form(b"see\n" + b" " * spaces + b"content-transfer-encoding: base64", name=b"prompt"))


def test_a_field_of_the_model_is_read_within_its_bounds():
    headers = [(b"content-type", FORM)]
    name = b"m" * (MAX_NAME_BYTES + 1)
    assert model_in(headers, parts((NAMED + b"model", name))) == "m" * MAX_NAME_BYTES
    for size, found in ((MAX_HEAD_BYTES - len(NAMED + b"model") - 60, "m"), (MAX_HEAD_BYTES, "")):
        head = b"a: " + b"x" * size + b"\r\n" + NAMED + b"model"
        assert model_in(headers, parts((head, b"m"))) == found
    most = [(NAMED + b"n", b"")] * (MOST_FIELDS - 1)
    assert model_in(headers, parts(*most, (NAMED + b"model", b"m"))) == "m"
    assert model_in(headers, parts((NAMED + b"model", b"\xff"))) == "\ufffd"
    assert model_in([], parts((NAMED + b"model", b"m"))) == ""
    extended = [(b"content-type", b"multipart/form-data; boundary*=utf-8''x")]
    assert model_in(extended, parts((NAMED + b"model", b"m"))) == "m"


PIECES = [b"name=a", b'name="a"', b"name=", b"; ", b";", b'"', b"\\", b"*=utf-8''a", b"*0=v", b"vllm_xargs"]
PIECES += [b"\r\n ", b"\r\nContent-Type: text/plain", b"\r\n", b"\r", b"\n", b"\0", b"=?utf-8?q?a?=", b"%61"]
PIECES += [b"filename=b", b"attachment"]


@given(st.lists(st.sampled_from(PIECES), max_size=7))
@example([b"; ", b'name="a"', b"; ", b'filename="a b; name=c"'])
def test_what_passes_is_read_alike_by_two_readers(pieces):
    raw = part(b"Content-Disposition: form-data" + b"".join(pieces), b"{}")
    if passes(raw):
        names: list[bytes] = []

        def see(field: Any) -> None:
            names.append(field.field_name)

        parse_form({"Content-Type": FORM}, BytesIO(raw), see, see)
        mail = message_from_bytes(b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" + raw)
        theirs = [each.get_param("name", header="content-disposition").encode() for each in mail.get_payload()]
        assert names == theirs and len(names) == 1
