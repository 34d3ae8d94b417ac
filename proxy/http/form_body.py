"""A form as a request body: the model that it names, and what vLLM would read in it and clients must not say.

vLLM's routes for audio take `vllm_xargs` as a form's field, in which hints and transfers travel. A form is forwarded as
it is or refused. Readers of forms differ in how they take escapes, encodings and continued names, so it is looked
through as bytes, wherever its parts may begin, and refused where two readers could see fields of different names.
"""

from __future__ import annotations

import re
from email.message import Message

from proxy.errors import BadRequest
from proxy.http.asgi import HeaderList
from proxy.http.json_body import HINT, LOAD, PIN, TRANSFERS, XARGS
from proxy.idle_work import Steps

# In JSON, a name may be written with escapes.
_NAMES = (HINT, PIN, LOAD, *TRANSFERS)
_FORBIDDEN = re.compile("|".join((*map(re.escape, _NAMES), r"\\u00[0-9A-Fa-f]{2}")).encode())

_XARGS = XARGS.encode()

MULTIPART, URLENCODED = b"multipart/", b"application/x-www-form-urlencoded"

# What every reader takes in the same way. Others know escapes, encoded words, and `name*=utf-8''..` or `name*0=..`.
_TYPE = re.compile(rb"""multipart/form-data((?:[ \t]*;[ \t]*[\w-]+=(?:"[^"\\;]*"|[^\s"\\;]+))+)""", re.I | re.ASCII)
_DISPOSITION_VALUE = re.compile(
    rb"""form-data((?:[ \t]*;[ \t]*(?:name=(?:"[\w.:\[\]-]+"|[\w.:-]+)|filename=(?:"[^"\\*\0]*"|[\w.-]+)))+)""",
    re.I | re.ASCII,
)
_PARAMETER = re.compile(rb""";[ \t]*([\w-]+)=("[^"]*"|[^\s;]*)""", re.ASCII)

CHARSET_FIELD = b"_charset_"  # RFC 7578: its value is the character set of all others

# Others could spell a field's name in other bytes.
_PLAIN_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"})
_PLAIN_ENCODINGS = frozenset({b"7bit", b"8bit", b"binary"})

_CHARSET = re.compile(rb"charset[^;=]*=?([^;]*)")

# A line of a part's head. One in a file or a text counts as well, for readers differ in where a part begins.
_LINE = re.compile(rb"content-(disposition|type|transfer-encoding)[ \t]*:")

MAX_LINE_BYTES = 4096  # of those lines

MOST_LINES = 4096  # of a form, and of places in its texts that look like one

STEP_BYTES = 2**15  # looked through in one step

LOOK_BACK_BYTES = 256  # for a line's beginning; behind more spaces, it counts as one

MAX_HEAD_BYTES, MAX_NAME_BYTES = 8192, 1024  # of a field, and of the name of a model

MOST_FIELDS = 256  # that are looked through for the model

_DISPOSITION = re.compile(rb"(?i)\r\ncontent-disposition[ \t]*:([^\r\n]{1,1024})")

_WRONG_TYPE = (
    "The Content-Type of this form could be read in two ways. Send it once, as "
    "`multipart/form-data; boundary=...`, with no other parameter but charset=utf-8."
)

_WRONG_PART = (
    'A part of this form could be read in two ways. Begin each part as `Content-Disposition: form-data; name="file"; '
    'filename="a.wav"` does, in one line: a name in plain ASCII, a file\'s name without quotes, backslashes and '
    "asterisks, no Content-Transfer-Encoding, and no character set but UTF-8."
)


def is_form(headers: HeaderList) -> bool:
    """Whether the headers (names in lower case) announce a form, or what some reader takes for one."""
    types = [value.lower() for name, value in headers if name == b"content-type"]
    return any(MULTIPART in each for each in types)


def refuse_urlencoded(headers: HeaderList) -> None:
    """Raises `BadRequest` if the headers (names in lower case) announce a form without files.

    No route of vLLM takes one, and it might be JSON at the same time.
    """
    if any(name == b"content-type" and URLENCODED in value.lower() for name, value in headers):
        raise BadRequest(
            f"vLLM reads no {URLENCODED.decode()}. Send application/json, or files as multipart/form-data."
        )


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


def check_form(headers: HeaderList, raw: bytes) -> Steps[None]:
    """Raises `BadRequest` for a form that holds, or may hold, what only the gateway may say."""
    types = [value.strip() for name, value in headers if name == b"content-type"]
    found = _TYPE.fullmatch(types[0].rstrip(b"; \t"))
    if len(types) > 1 or found is None:
        raise BadRequest(_WRONG_TYPE)
    parameters = [name.lower() for name, _ in _PARAMETER.findall(found[1])]
    if b"boundary" not in parameters or len(parameters) > len(set(parameters)):
        raise BadRequest(_WRONG_TYPE)
    if not _has_plain_charset(types[0].lower()):
        raise BadRequest("A form in this character set is not read here. Send it in UTF-8.")
    lines, has_xargs = 0, False
    for start in range(0, len(raw), STEP_BYTES):
        piece = raw[start : start + STEP_BYTES + MAX_LINE_BYTES].lower()
        has_xargs = has_xargs or _XARGS in piece
        for line in _LINE.finditer(piece):
            if line.start() >= STEP_BYTES:  # the next step's
                break
            lines += 1
            if lines > MOST_LINES:
                raise BadRequest(_WRONG_PART)
            at = start + line.start()
            before = raw[max(0, at - LOOK_BACK_BYTES) : at]
            if (said := before.rstrip()) and not before[len(said) :].strip(b" \t"):
                continue  # inside a line
            value_at = start + line.end()
            if not _is_plain(line[1], raw[value_at : value_at + MAX_LINE_BYTES + 3]):
                raise BadRequest(_WRONG_PART)
        yield
    for start in range(0, len(raw) if has_xargs else 0, STEP_BYTES):
        if _FORBIDDEN.search(raw, start, start + STEP_BYTES + MAX_LINE_BYTES) is not None:
            text = f"A form's {XARGS} must not hold {', '.join(_NAMES)}, nor names with escapes."
            raise BadRequest(text, param=XARGS)
        yield


def _is_plain(header: bytes, rest: bytes) -> bool:
    """Whether all readers take the value of a part's header alike; `rest` is what follows its colon."""
    value, end, following = rest.partition(b"\r\n")
    if not end or following[:1] in (b" ", b"\t") or len(value) > MAX_LINE_BYTES or b"\n" in value or b"\r" in value:
        return False
    value = value.strip(b"; \t")
    if header == b"type":
        return _has_plain_charset(value.lower())
    if header == b"transfer-encoding":
        return value.lower() in _PLAIN_ENCODINGS
    if (found := _DISPOSITION_VALUE.fullmatch(value)) is None:
        return False
    parameters = [(name.lower(), given.strip(b'"').lower()) for name, given in _PARAMETER.findall(found[1])]
    names = sorted(name for name, _ in parameters)
    return names in ([b"name"], [b"filename", b"name"]) and (b"name", CHARSET_FIELD) not in parameters


def _has_plain_charset(value: bytes) -> bool:
    """Of a content type in lower case: whether it names no character set but those with ASCII in ASCII's bytes."""
    return all(charset.strip(b" \t\"'") in _PLAIN_CHARSETS for charset in _CHARSET.findall(value))
