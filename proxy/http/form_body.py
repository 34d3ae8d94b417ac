"""A form as a request body: the model that it names, and what vLLM would read in it and clients must not say.

vLLM's routes for audio take `vllm_xargs` as a form's field, in which hints and transfers travel. A form is forwarded as
it is or refused. Readers of forms differ in how they take escapes, encodings, quotes and continued names, and in what
they forgive between parts. A form is refused where two could see other parts or fields of other names; names of files
may be written in any way.
"""

from __future__ import annotations

import re

from proxy.errors import BadRequest
from proxy.http.asgi import HeaderList
from proxy.http.json_body import HINT, LOAD, PIN, TRANSFERS, XARGS
from proxy.idle_work import Steps

# In JSON, a name may be written with escapes.
_NAMES = (HINT, PIN, LOAD, *TRANSFERS)
_FORBIDDEN = re.compile("|".join((*map(re.escape, _NAMES), r"\\u00[0-9A-Fa-f]{2}")).encode())
_XARGS = XARGS.encode()
MULTIPART, URLENCODED = b"multipart/", b"application/x-www-form-urlencoded"

# What every reader takes in the same way. Others know escapes, encoded words, and `boundary*=utf-8''..`.
_TYPE = re.compile(rb"""multipart/form-data((?:[ \t]*;[ \t]*[\w-]+=(?:"[^"\\;]*"|[^\s"\\;]+))+)""", re.I | re.ASCII)
_PARAMETER = re.compile(rb""";[ \t]*([\w-]+)=("[^"]*"|[^\s;]*)""", re.ASCII)

# What stands before a field's name, and that with what follows it.
_BEFORE_NAME = re.compile(rb"[ \t]*form-data[ \t]*;(?:.*;)?[ \t]*", re.I | re.S)
_NAMED = re.compile(rb"""name[ \t]*=[ \t]*("[\w.:\[\]-]*"|[\w.:\[\]-]+)[ \t]*((?:;.*)?)""", re.I | re.S)

# What some reader may take for a name: with escapes or a part of it, or within quotes that it does not know.
_A_NAME = re.compile(rb"""(?<![\w-])name["\s]*+[*=]""", re.I)
_QUOTED = re.compile(rb"""=[ \t]*"[^"\\]*\"""")

CHARSET_FIELD = b"_charset_"  # RFC 7578: its value is the character set of all others

# Others could spell a field's name in other bytes.
_PLAIN_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"})
_PLAIN_ENCODINGS = frozenset({b"7bit", b"8bit", b"binary"})
_CHARSET = re.compile(rb"charset[^;=]*=?([^;]*)")
_HEAD_LINE = re.compile(rb"([\w!#$%&'*+.^`|~-]+):([^\r\n\0]*)")
MAX_HEAD_BYTES, MAX_NAME_BYTES = 8192, 1024  # of a part, and of the name of a model
MOST_PARTS = 256
STEP_BYTES = 2**15  # looked through in one step

_WRONG_TYPE = (
    "The Content-Type of this form could be read in two ways. Send it once, as "
    "`multipart/form-data; boundary=...`, with no other parameter but charset=utf-8."
)

_WRONG_PART = (
    "A part of this form could be read in two ways. Begin each part behind a line with the boundary, as "
    '`Content-Disposition: form-data; name="file"; filename="a.wav"` does: once, in one line, with one `name=` in '
    "plain ASCII, no Content-Transfer-Encoding, and no character set but UTF-8. The boundary begins no other line, and "
    f"the last one ends with `--`. A form has at most {MOST_PARTS} parts."
)


def is_form(headers: HeaderList) -> bool:
    """Whether the headers (names in lower case) announce a form, or what some reader takes for one."""
    return any(name == b"content-type" and MULTIPART in value.lower() for name, value in headers)


def refuse_urlencoded(headers: HeaderList) -> None:
    """Raises `BadRequest` for a form without files: no route of vLLM takes one, and it might be JSON, too."""
    if any(name == b"content-type" and URLENCODED in value.lower() for name, value in headers):
        raise BadRequest(f"vLLM reads no {URLENCODED.decode()}. Send application/json or multipart/form-data.")


def read_form(headers: HeaderList, raw: bytes) -> Steps[str]:
    """The field `model` of a form, empty if it has none. As vLLM reads it: of several ones the last counts.

    Raises `BadRequest` for a form that holds, or may hold, what only the gateway may say.
    """
    boundary, charset = _type_in(headers)
    delimiter, model = b"--" + boundary, b""
    at = raw.find(delimiter, 0, len(delimiter) + 2)
    if raw[: max(at, 0)] not in (b"", b"\r\n"):
        at = -1
    for _ in range(MOST_PARTS + 1):
        if at < 0:
            break
        start = at + len(delimiter)
        line = yield from _line_with(delimiter, raw, start)
        if line < 0 and raw.startswith(b"--", start):
            return model.decode(charset, "replace")
        head_end = raw.find(b"\r\n\r\n", start, start + MAX_HEAD_BYTES)
        name = _name_in(raw[start:head_end]) if head_end >= 0 else None
        value_at, end, at = head_end + 4, line - 1, line + 1
        if name is None or end < value_at or raw[end:at] != b"\r\n":
            break
        if name == b"model":
            model = raw[value_at : min(end, value_at + MAX_NAME_BYTES)]
        if name.lower() == _XARGS and (end > value_at + STEP_BYTES or _FORBIDDEN.search(raw, value_at, end)):
            text = f"A form's {XARGS} must not hold {', '.join(_NAMES)}, names with escapes, or {STEP_BYTES} bytes."
            raise BadRequest(text, param=XARGS)
    raise BadRequest(_WRONG_PART)


def _type_in(headers: HeaderList) -> tuple[bytes, str]:
    types = [value.strip() for name, value in headers if name == b"content-type"]
    found = _TYPE.fullmatch(types[0].rstrip(b"; \t"))
    if len(types) > 1 or found is None:
        raise BadRequest(_WRONG_TYPE)
    given = [(name.lower(), value.strip(b'"')) for name, value in _PARAMETER.findall(found[1])]
    parameters = dict(given)
    boundary, charset = parameters.get(b"boundary"), parameters.get(b"charset", b"utf-8")
    if not boundary or len(given) > len(parameters) or charset.lower() not in _PLAIN_CHARSETS:
        raise BadRequest(_WRONG_TYPE)
    return boundary, charset.decode()


def _line_with(delimiter: bytes, raw: bytes, start: int) -> Steps[int]:
    """Where the break before the next line that begins with it ends, whatever breaks lines; -1 if there is none."""
    for at in range(start, len(raw), STEP_BYTES):
        end = at + STEP_BYTES + len(delimiter)
        found = [where for each in (b"\r", b"\n") if (where := raw.find(each + delimiter, at, end)) >= 0]
        yield
        if found:
            return min(found)
    return -1


def _name_in(head: bytes) -> bytes | None:
    """The name of the field in a part's head; None if two readers may find others."""
    field = None
    before, *lines = head.split(b"\r\n")
    for line in lines:
        if (found := _HEAD_LINE.fullmatch(line)) is None:
            return None
        kind, value = found[1].lower(), found[2].lower().strip(b" \t")
        if kind == b"content-disposition":
            if field is not None or (first := _A_NAME.search(found[2])) is None:
                return None
            named = _NAMED.fullmatch(found[2], first.start())
            if named is None or _BEFORE_NAME.fullmatch(found[2], 0, first.start()) is None:
                return None
            if _A_NAME.search(_QUOTED.sub(b"=", named[2])):
                return None
            field = named[1].strip(b'"')
        elif kind == b"content-type":
            charsets = {charset.strip(b" \t\"'") for charset in _CHARSET.findall(value)}
            if not charsets <= _PLAIN_CHARSETS or MULTIPART in value:
                return None
        elif kind == b"content-transfer-encoding" and value not in _PLAIN_ENCODINGS:
            return None
    return None if before or field is None or field.lower() == CHARSET_FIELD else field
