"""A form is forwarded as it is, or refused for what only the gateway may say."""

from __future__ import annotations

import pytest

from proxy.errors import BadRequest
from proxy.http.form_body import MOST_FIELDS, check_form, is_form, model_in

FORM = b"multipart/form-data; boundary=x"


def form(value: bytes, name: bytes = b"vllm_xargs") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n--x--\r\n' % (name, value)


@pytest.mark.parametrize("kind", [FORM, b"Multipart/Form-Data;boundary=x"])
def test_a_form_is_known_by_its_type(kind):
    assert is_form([(b"content-type", kind)])
    assert not is_form([(b"content-type", b"application/json"), (b"x", kind)])


@pytest.mark.parametrize("kind", [FORM, FORM + b'; charset="UTF-8"', FORM + b"; charset=us-ascii"])
@pytest.mark.parametrize(
    "raw",
    [
        form(b'{"a": "b"}'),
        form(b"the words seamark_boundaries", name=b"prompt"),
        form(b"\\u0041", name=b"prompt"),
        form(bytes(range(256)) * 100, name=b"file"),
    ],
)
def test_what_holds_no_hint_passes(kind, raw):
    check_form([(b"content-type", kind)], raw)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (FORM, form(b'{"seamark_boundaries":[1]}')),
        (FORM, form(b'{"\\u0073eamark_boundaries":[1]}')),
        (FORM, form(b'{"kv_transfer_params":{}}')),
        (FORM, form(b'{"a":1}') + form(b'{"ec_transfer_params":{}}')),
        (FORM + b"; charset=utf-7", form(b"{}", name=b"+AHY-llm_xargs")),
        (FORM + b'; charset="utf-16"', form(b"{}")),
        (FORM + b"; charset = utf-7", form(b"{}")),
        (FORM + b"; charset=utf-8; charset=utf-7", form(b"{}")),
        (FORM + b"; charset", form(b"{}")),
    ],
)
def test_what_may_hold_one_is_refused(kind, raw):
    with pytest.raises(BadRequest):
        check_form([(b"content-type", kind)], raw)


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
