"""A file that is read again when it changes. What was read last stays in force while the file is wrong or gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from proxy.errors import SettingsError

logger = logging.getLogger("seamark.settings")
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """A file and what it says."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        """`read` raises `SettingsError` for a file that it cannot use; so does this, the first time."""
        self._path = path
        self._read = read
        self._stamp = self._look()
        self.value: T = read(path)

    def refresh(self) -> bool:
        """Whether there is a new value. One line in the log says so, or says why the old one stays."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.value = self._read(self._path)
        except SettingsError as error:
            logger.error("%s; what it said before stays in force", error)
            return False
        logger.info("%s was read again", self._path)
        return True

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
