"""What engines call the requests that are under way: each name is one request's for as long as that lasts."""

from __future__ import annotations

import os


class EngineNames:
    """The names that are taken."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def hold(self) -> EngineName:
        """No name yet; enter it."""
        return EngineName(self._taken)


class EngineName:
    """One request's name, which is free again when its context is left."""

    __slots__ = ("_taken", "_value")

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken
        self._value = ""  # none yet; no request is called so

    def __enter__(self) -> EngineName:
        return self

    def __exit__(self, *_: object) -> None:
        self._taken.discard(self._value)

    def take(self, wanted: str) -> str:
        """Be called so, or else, if another request is called so, something longer; the former name is free again."""
        self._taken.discard(self._value)
        # One name may be that of a whole fan-out; the engine must tell its requests apart.
        self._value = f"{wanted}.{os.urandom(4).hex()}" if wanted in self._taken else wanted
        self._taken.add(self._value)
        return self._value
