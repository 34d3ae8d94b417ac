"""A form as a request body: what vLLM would read in it, and clients must not say.

vLLM's routes for audio take `vllm_xargs` as a form's field, in which hints and transfers travel. A form is forwarded as
it is or refused: it is looked through as bytes, so that no two readers can see different fields in it.
"""

from __future__ import annotations

import re

from proxy.errors import BadRequest
from proxy.http.asgi import HeaderList
from proxy.http.json_body import HINT, PIN, TRANSFERS, XARGS

# In JSON, a name may be written with escapes.
_NAMES = (HINT, PIN, *TRANSFERS)
_FORBIDDEN = re.compile("|".join((*map(re.escape, _NAMES), r"\\u00[0-9A-Fa-f]{2}")).encode())

_CHARSET = re.compile(rb"charset[^;=]*=?([^;]*)")

# Others could spell a field's name in other bytes.
_PLAIN_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii", b"ascii", b"iso-8859-1", b"latin-1"})


def is_form(headers: HeaderList) -> bool:
    """Whether the headers (names in lower case) announce a form with files, the only one that vLLM takes."""
    return any(name == b"content-type" and b"multipart/form-data" in value.lower() for name, value in headers)


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
