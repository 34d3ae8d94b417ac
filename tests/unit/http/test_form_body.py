"""A form is forwarded as it is, or refused for what only the gateway may say."""

from __future__ import annotations

import asyncio
import re
from email import message_from_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from proxy.errors import BadRequest
from proxy.http.form_body import MAX_HEAD_BYTES, MAX_NAME_BYTES, MOST_PARTS, STEP_BYTES, is_form, read_form
from proxy.http.json_body import HINT as HINT_NAME
from proxy.http.json_body import LOAD, PIN, TRANSFERS, TRIAL, VERDICT
from tests.harness.steps import finished

FORM = b"multipart/form-data; boundary=x"

NAMED = b"Content-Disposition: form-data; name="

FILE = (b'Content-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav', b"\r\n\r\n--y\0")


def read(raw: bytes, kind: bytes = FORM) -> str:
    return finished(read_form([(b"accept", b"*/*"), (b"content-type", kind)], raw))


def parts(*fields: tuple[bytes, bytes], boundary: bytes = b"x") -> bytes:
    whole = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, value) for head, value in fields)
    return whole + b"--%b--\r\n" % boundary


def form(value: bytes, name: bytes = b"vllm_xargs") -> bytes:
    return parts((NAMED + name, value))


@pytest.mark.parametrize("name", [HINT_NAME, PIN, LOAD, TRIAL, VERDICT, *TRANSFERS])
@pytest.mark.parametrize("between", [0, STEP_BYTES - 7])
def test_each_name_that_only_the_gateway_may_say_is_refused_and_named_wherever_it_lies(name, between):
    said = b"\0" * between + b'{"%b":1}' % name.encode()
    with pytest.raises(BadRequest, match=name) as refused:
        read(parts(FILE, (NAMED + b'"vllm_xargs"', said)))
    assert refused.value.param == "vllm_xargs"
    for spelled in (name.encode(), b"\\u0073" + name.encode()[1:]):
        with pytest.raises(BadRequest, match=name):
            read(parts((NAMED + b"vllm_xargs", b'{"a":1}'), (NAMED + b"VLLM_Xargs", b'{"%b":1}' % spelled)))
    read(form(said, name=b"prompt"))


@pytest.mark.parametrize(
    ("kind", "raw", "model"),
    [
        (FORM, parts(FILE, (NAMED + b'"model"', b"openai/whisper-small")), "openai/whisper-small"),
        (FORM, b"\r\n" + parts((b"A: b\r\ncontent-disposition:form-data;NAME=model", b"m"), FILE), "m"),
        (b'Multipart/Form-Data; a=b; Boundary="x y"', parts((NAMED + b"model", "é".encode()), boundary=b"x y"), "é"),
        (FORM, parts((NAMED + b"model", b"first"), (NAMED + b"model", b"last")), "last"),
        (FORM, parts(FILE, (NAMED + b'"models"', b"m"), (NAMED + b'"prompt"', b'name="model"\r\n\r\nm')), ""),
        (FORM, parts(*[(NAMED + b"n", b"")] * (MOST_PARTS - 1), (NAMED + b"model", b"m")), "m"),
        (FORM, parts((NAMED + b"model", b"\xff")), "\ufffd"),
        (FORM, parts((NAMED + b"model", b"m" * (MAX_NAME_BYTES + 1))), "m" * MAX_NAME_BYTES),
        (FORM, parts((b"a: " + b"x" * (MAX_HEAD_BYTES - 60) + b"\r\n" + NAMED + b"model", b"m")), "m"),
    ],
)
def test_the_model_that_a_form_names_is_read(kind, raw, model):
    assert read(raw, kind) == model


def part(head: bytes, value: bytes = b"e30=") -> bytes:
    return parts((head, value))


BEFORE = parts((NAMED + b'"file"', b"\0" * (STEP_BYTES - 60)))[: -len(b"--x--\r\n")]


@pytest.mark.parametrize(
    "raw",
    [
        # RFC 2231, as python-multipart before 0.0.30 reads it
        part(b"Content-Disposition: form-data; name*=utf-8''vllm%5Fxargs"),
        part(b'Content-Disposition: form-data; name*0="vllm_"; name*1="xargs"'),
        part(b'Content-Disposition: form-data; name=x; filename="a\\"; name*=utf-8\'\'vllm%5Fxargs"'),
        # escapes, lines that go on, two names, names in what some reader takes for quotes
        part(NAMED + b'"vllm\\_xargs"'),
        part(NAMED + b'"vllm%5Fxargs"'),
        part(NAMED + b'"vllm_\r\n xargs"'),
        part(b'Content-Disposition: form-data;\r\n\tname="x"'),
        part(NAMED + b'"x"; filename="\\"; name=\\"vllm\\_xargs\\""'),
        part(NAMED + b'"x"; NAME="y"'),
        part(NAMED + b'"x"\r\n' + NAMED + b"model"),
        part(b'Content-Disposition: form-data; filename="a name=model; "; name="x"'),
        part(b"Content-Disposition: form-data"),
        part(b'Content-Disposition: attachment; name="x"'),
        # as parsers read it that strip lines, or end them otherwise
        part(b"A: b\r\n Content-Disposition: form-data; name=y\r\n" + NAMED + b"x"),
        part(b"\x0bCONTENT-DISPOSITION : form-data; name=x"),
        part(b"A: b\n" + NAMED + b"y\r\n" + NAMED + b"x"),
        # the value, or all of them, in other bytes, or parts in a part
        part(NAMED + b'"a"\r\nContent-Transfer-Encoding: base64'),
        part(NAMED + b'"a"\r\nContent-Type: text/plain; charset=utf-16-le'),
        part(NAMED + b'"a"\r\nContent-Type: text/plain;\r\n charset=utf-7'),
        part(NAMED + b'"a"\r\nContent-Type: multipart/mixed; boundary=y'),
        part(NAMED + b'"_charset_"'),
        # parts that are none for others
        b"--x\r\n" + NAMED + b"model\r\n\r\ncut",
        *(part(NAMED + b"x", broken + b"--x\r\n" + NAMED + b"model\r\n\r\nm") for broken in (b"\n", b"\r")),
        part(NAMED + b"x", b"\r\n--xy\r\n" + NAMED + b"model\r\n\r\nm"),
        part(NAMED + b"x", b"\r\n--x \r\n" + NAMED + b"model\r\n\r\nm"),
        part(NAMED + b"x") + part(NAMED + b"model", b"m"),
        part(b"A: " + b"x" * MAX_HEAD_BYTES + b"\r\n" + NAMED + b"x"),
        parts(*[(NAMED + b"n", b"")] * (MOST_PARTS + 1)),
    ],
)
@pytest.mark.parametrize("before", [b"", BEFORE])
def test_a_part_that_two_readers_may_take_differently_is_refused(before, raw):
    """Wherever it stands: what it holds need not even look like a hint."""
    with pytest.raises(BadRequest, match="A part of this form"):
        read(before + raw)


@pytest.mark.parametrize(
    "types",
    [
        *(
            [b"multipart/form-data" + more]
            for more in (b"", b'; boundary=""', b"; boundary*=utf-8''x", b"; boundary*0=x")
        ),
        *([FORM + more] for more in (b"; boundary=y", b", multipart/form-data; boundary=x", b"; charset=utf-7")),
        *([FORM + b"; charset" + more] for more in (b"", b" = utf-8", b"=utf-8; charset=utf-7", b'="utf-16"')),
        *([b"multipart/form-data; boundary=" + odd] for odd in (b'""', b'"\\x"', b'"x;charset=utf-8"')),
        *([b"multipart/mixed; boundary=x"], [FORM, FORM], [b"application/json", FORM]),
    ],
)
def test_a_type_that_two_readers_may_take_differently_is_refused(types):
    headers = [(b"content-type", each) for each in types]
    assert is_form(headers) and not is_form([(b"content-type", b"application/json"), (b"x", FORM)])
    with pytest.raises(BadRequest, match="Content-Type"):
        finished(read_form(headers, form(b"{}")))


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
    text = b"the header\r\ncontent-disposition: is used as\r\nContent-Transfer-Encoding: base64\\u0041" + bytes(
        range(256)
    )
    for boundary, kind in ((b"--a b", b'boundary="--a b"'), (b"----=_Part_1", b"boundary=----=_Part_1; charset=UTF-8")):
        raw = parts((head, text), (NAMED + b"vllm_xargs", b'{"a": "b"}'), boundary=boundary)
        assert read(raw, b"multipart/form-data; " + kind) == ""


def worker_reads(raw: bytes) -> list[tuple[str, str | None]] | None:
    """Names and texts of the fields, None of a file's, as vLLM has them from Starlette; None if it refuses the form."""

    async def stream():
        yield raw

    try:
        read = asyncio.run(MultiPartParser(Headers(raw=[(b"content-type", FORM)]), stream()).parse())
    except MultiPartException:
        return None
    return [(name, value if isinstance(value, str) else None) for name, value in read.multi_items()]


# As .NET, RestSharp, Postman, Go, browsers, reqwest, Apache and old systems write them.
BARE = st.text("ab.-_[]:", min_size=1).filter(lambda name: name != "_charset_")
NAMES = st.one_of(BARE, BARE.map('"{}"'.format), st.sampled_from(["model", '"model"', '"timestamp_granularities[]"']))
NAMES = NAMES.map(lambda name: f"name={name}")
MARKS = ['\\"', "\\\\", "C:\\tmp", "*2*", "; ", "潮é", "=?utf-8?B?5g==?=", "%22", "'", " a"]
OTHERS = st.one_of(
    st.lists(st.sampled_from(MARKS)).map("".join).map('filename="{}"'.format),
    st.sampled_from(["filename=a.wav", "filename*=utf-8''my%20note.wav", "filename*=\"UTF-8''a\"", "size=12", "x=y"]),
)
LINES = st.sampled_from(["Content-Type: text/plain; charset=utf-8\r\n", "Content-ID: <1>\r\n", ""])


@given(
    LINES, NAMES, *[st.lists(OTHERS, max_size=2)] * 2, st.sampled_from(["; ", ";", " ; "]), st.sampled_from(["", ";"])
)
def test_whatever_else_is_said_of_a_field_with_a_plain_name_it_passes_and_is_read_as_the_worker_reads_it(
    line, name, before, behind, between, end
):
    said = between.join(["Content-Disposition: form-data", *before, name, *behind]) + end
    raw = part((line + said).encode(), b"whisper")
    read_there = worker_reads(raw)
    assert read_there or (before and "\\" in said)  # which it may not see the end of
    for found, value in read_there or ():
        assert found == name.removeprefix("name=").strip('"') and value in ("whisper", None)
        assert read(raw) == ("whisper" if found == "model" else "")


PIECES = [b"name=a", b'name="a"', b"name=", b"; ", b";", b'"', b"\\", b"*=utf-8''a", b"*0=v", b"name=model", b" "]
PIECES += [b"\r\n ", b"\r\nContent-Type: text/plain", b"\r\n", b"\r", b"\n", b"\0", b"=?utf-8?q?a?=", b"%61"]
PIECES += [b"filename=b", b'filename="', b"attachment", b"\r\n--x", b"\r\n\r\n", b"--", b"\r\n" + NAMED + b"model"]


@given(st.lists(st.sampled_from(PIECES), max_size=9))
@example([b"; ", b'name="a"', b"; ", b'filename="a b; name=c"'])
@example([b"; ", b'filename="', b"\\", b'"; ', b"name=model", b"; ", b'filename="', b'"'])
def test_what_passes_is_read_alike_by_three_readers(pieces):
    raw = part(b"Content-Disposition: form-data" + b"".join(pieces), b"m")
    try:
        model = read(raw)
    except BadRequest:
        return
    read_there = worker_reads(raw)
    mail = message_from_bytes(b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" + raw)
    by_mail = [each.get_param("name", header="content-disposition") for each in mail.get_payload()]
    naive = re.findall(rb'content-disposition:[^\r\n]*?[;\s]name="?([^";\s]*)', raw, re.I)
    if read_there is not None:
        names = [name for name, _ in read_there]
        assert names == by_mail == [name.decode() for name in naive]
        assert model == next((value for name, value in reversed(read_there) if name == "model"), "")
