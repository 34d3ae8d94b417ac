"""Files an operator writes: TOML checked against a model, complaints that name file and field and never a value."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, TypeAdapter, ValidationError, field_validator

from proxy.errors import SettingsError

M = TypeVar("M", bound=BaseModel)


def read_toml(setting: str, path: Path) -> dict[str, Any]:
    """The file's content. Raises `SettingsError` naming the `setting` that leads to it."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{setting}: {path} is not TOML ({error})") from None


def read_model(setting: str, path: Path, model: type[M]) -> M:
    """The file's content as `model`. Raises `SettingsError`."""
    try:
        return model.model_validate(read_toml(setting, path))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise SettingsError(f"{setting}: {path}: {wrong}") from None


def read_secret(setting: str, path: Path) -> str:
    """The first line of a file that holds a secret. Raises `SettingsError` where there is none."""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{setting}: {path} cannot be read ({type(error).__name__})") from None
    if not secret:
        raise SettingsError(f"{setting}: {path} is empty")
    return secret


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


_HTTP_URL = TypeAdapter(HttpUrl)


def worker_url(url: object) -> str:
    """The base URL, checked. Raises `ValueError`."""
    text = str(url).strip()
    _HTTP_URL.validate_python(text)
    return base_url(text)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    max_inflight: int | None = Field(None, ge=0)

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        return worker_url(url)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: tuple[_Entry, ...] = ()


def read_workers(path: Path) -> tuple[tuple[str, int | None], ...]:
    """`[[worker]]` entries: `url`, and `max_inflight` where it is not the setting's. Raises `SettingsError`."""
    return tuple((entry.url, entry.max_inflight) for entry in read_model("workers_file", path, _File).worker)


def base_url(url: str) -> str:
    """A worker's address as the gateway appends paths to it: users often give it with SDKs' `/v1`."""
    return url.rstrip("/").removesuffix("/v1")
