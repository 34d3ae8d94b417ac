"""A form as a request body: the model that it names, and what vLLM would read in it and clients must not say.

vLLM's routes for audio take `vllm_xargs` as a form's field, in which hints and transfers travel. A form is forwarded as
it is or refused: it is looked through as bytes, so that no two readers can see different fields in it.
"""

from __future__ import annotations

import re
from email.message import Message

from proxy.errors import BadRequest
from proxy.http.asgi import HeaderList
from proxy.http.json_body import HINT, LOAD, PIN, TRANSFERS, TRIAL, VERDICT, XARGS

# In JSON, a name may be written with escapes.
_NAMES = (HINT, PIN, LOAD, TRIAL, VERDICT, *TRANSFERS)
_FORBIDDEN = re.compile("|".join((*map(re.escape, _NAMES), r"\\u00[0-9A-Fa-f]{2}")).encode())

_CHARSET = re.compile(rb"charset[^;=]*=?([^;]*)")

MAX_HEAD_BYTES, MAX_NAME_BYTES = 8192, 1024  # of a field, and of the name of a model

MOST_FIELDS = 256  # that are looked through

_DISPOSITION = re.compile(rb"(?i)\r\ncontent-disposition[ \t]*:([^\r\n]{1,1024})")

# Others could spell a field's name in other bytes.
_PLAIN_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"})


def is_form(headers: HeaderList) -> bool:
    """Whether the headers (names in lower case) announce a form with files, the only one that vLLM takes."""
    return any(name == b"content-type" and b"multipart/form-data" in value.lower() for name, value in headers)


def model_in(headers: HeaderList, raw: bytes) -> str:
    """The field `model` of a form, empty if it has none. As vLLM reads it: of several ones the last counts."""
    boundary = next((_parameter(value, "boundary") for name, value in headers if name == b"content-type"), "")
    delimiter = b"--" + boundary.encode("latin-1")
    model = ""
    at = raw.find(delimiter) if boundary else -1
    for _ in range(MOST_FIELDS):
        if at < 0:
            break
        start = at + len(delimiter)
        at = raw.find(b"\r\n" + delimiter, start)
        head_end = raw.find(b"\r\n\r\n", start, at)
        found = _DISPOSITION.search(raw, start, head_end) if start <= head_end < start + MAX_HEAD_BYTES else None
        if at >= 0 and found is not None and _parameter(found[1], "name") == "model":
            model = raw[head_end + 4 : min(at, head_end + 4 + MAX_NAME_BYTES)].decode(errors="replace")
    return model


def _parameter(header: bytes, name: str) -> str:
    """A parameter in the value of a header, empty if it is not there."""
    message = Message()
    message["content-type"] = header.decode("latin-1").strip()
    value = message.get_param(name, "")
    return value if isinstance(value, str) else value[2]


def check_form(headers: HeaderList, raw: bytes) -> None:
    """Raises `BadRequest` for a form that holds, or may hold, what only the gateway may say."""
    for name, value in headers:
        if name == b"content-type":
            for charset in _CHARSET.findall(value.lower()):
                if charset.strip(b" \t\"'") not in _PLAIN_CHARSETS:
                    raise BadRequest("A form in this character set is not read here. Send it in UTF-8.")
    if XARGS.encode() in raw and _FORBIDDEN.search(raw) is not None:
        text = f"A form's {XARGS} must not hold {', '.join(_NAMES)}, nor names with escapes."
        raise BadRequest(text, param=XARGS)
