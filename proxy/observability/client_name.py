"""What a client calls itself, short enough to be shown and kept: the first name and version of its user agent."""

from __future__ import annotations

import re

MAX_CHARACTERS = 32

# A product as RFC 9110 writes it, without a comment; OpenAI's SDKs put a space before the version.
_PRODUCT = re.compile(r"([A-Za-z][\w.+@/-]*)(?: (\d[\w.+-]*))?")

# Browsers all begin with Mozilla/5.0; the first of these that is there names the browser.
_BROWSER = re.compile(r"\b(Edg|OPR|Firefox|Chrome|Safari)/\d+")


def client_name(user_agent: str | None) -> str | None:
    """The client's name and version, at most `MAX_CHARACTERS`; None if its header says nothing of that form."""
    if user_agent is None:
        return None
    if user_agent.startswith("Mozilla/"):
        browser = _BROWSER.search(user_agent)
        return browser[0] if browser is not None else "a browser"
    product = _PRODUCT.match(user_agent)
    return " ".join(filter(None, product.groups()))[:MAX_CHARACTERS] if product is not None else None
