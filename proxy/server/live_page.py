"""The live page: one file with its script and style inside, and headers that let a browser run only those.

The file is the same for everybody and holds no data, so it needs no key: a browser that opens an address cannot send
one. The page fetches its data with the key that the user typed into it.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from pathlib import Path

HTML = Path(__file__).with_name("page.html").read_bytes()


def _hash_of(tag: bytes) -> str:
    """The content of the only element of this name, as a content security policy names it."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), HTML, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(content).digest()).decode()}'"


HEADERS = {
    # This script and this style alone may run, and they may talk to their own origin alone.
    "content-security-policy": f"default-src 'none'; script-src {_hash_of(b'script')}; style-src {_hash_of(b'style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
