"""How far a worker's cache is trusted, and how requests are kept from what is not.

vLLM puts a request's cache salt into the hash of its first block: under another salt nothing is found that was there
before. So a gateway can put what a worker holds out of use at once, without the worker's help.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

SALT_BYTES = 16


class Trust:
    """In one worker. Each doubt takes a step: its hints and all it holds first, then whatever it caches."""

    def __init__(self) -> None:
        self.in_hints = True  # states may be kept on it
        self.in_cache = True  # anything may be taken from its cache
        self._salt = ""  # that parts requests from what was there when it was doubted; empty: nothing was

    def doubt(self) -> None:
        """Its answers from the cache were found to differ from those computed anew."""
        self.in_cache = self.in_hints
        self.in_hints = False
        self._salt = fresh_salt()

    def restore(self) -> None:
        """An operator has seen to it. What was there when it was doubted stays out of use."""
        self.in_hints = self.in_cache = True

    def restarted(self) -> None:
        """The worker has, and its cache is empty."""
        self._salt = ""

    def salt(self, body: Mapping[str, Any]) -> str | None:
        """The cache salt to send with the request `body` instead of its own; None where that stands.

        `body` is empty where it was not read: then it is no request for tokens.
        """
        if (self.in_cache and not self._salt) or not body:
            return None
        given = body.get("cache_salt")
        if given is None:
            given = ""
        elif not isinstance(given, str) or not given:
            return None  # the worker's to refuse
        return given + (self._salt if self.in_cache else fresh_salt())


def fresh_salt() -> str:
    """Under which nothing is in any cache."""
    return os.urandom(SALT_BYTES).hex()
