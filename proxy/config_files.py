"""Files an operator writes: TOML checked against a model, files that are read again when they change, secrets, workers.

Complaints name the setting, the file and the field, and never show a value: it may be a secret in the wrong place.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tomllib
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, TypeAdapter, ValidationError, field_validator

from proxy.errors import SettingsError, did_you_mean

logger = logging.getLogger("seamark.settings")

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_HTTP_URL = TypeAdapter(HttpUrl)

_ENDPOINT = re.compile(r"/v1/(?:(?:chat/)?completions|responses|messages|models|embeddings)/?$")

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts that are this machine

MOST_BYTES = 2**26  # of a file
MOST_NUMBER = 2**31  # in one, of requests


def read_file(setting: str, path: Path) -> bytes:
    """The file's content. Raises `SettingsError` naming the `setting` that leads to it.

    It is read while requests go on, so it must be a regular file: to open a FIFO or a device may take for ever.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SettingsError(f"{setting}: {path} is no regular file")
        if status.st_size > MOST_BYTES:
            raise SettingsError(f"{setting}: {path} has more than {MOST_BYTES:,} bytes")
        # It may have been replaced meanwhile: what is no file neither holds this up nor fills the memory.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as opened:
            return opened.read(MOST_BYTES).removeprefix(BOM_UTF8)  # of Windows' editors
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise SettingsError(f"{setting}: {path} cannot be read ({getattr(error, 'strerror', 'no path')})") from None


def read_toml(setting: str, path: Path) -> dict[str, Any]:
    """The file's content. Raises `SettingsError` naming the `setting` that leads to it."""
    return toml_in(read_file(setting, path), f"{setting}: {path}")


def toml_in(raw: bytes, where: str) -> dict[str, Any]:
    """What a file holds; `where` it is names its setting and its path. Raises `SettingsError`."""
    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} is not TOML ({error})") from None
    except Exception as error:  # such as a number of more digits than Python reads, or more depth
        raise SettingsError(f"{where} is not TOML ({type(error).__name__})") from None


def model_in(raw: bytes, where: str, model: type[M]) -> M:
    """The same, as `model`."""
    try:
        return model.model_validate(toml_in(raw, where))
    except ValidationError as error:
        schema = model.model_json_schema()  # of it and of all models in it
        fields = [name for each in (schema, *schema.get("$defs", {}).values()) for name in each.get("properties", {})]
        raise SettingsError(f"{where}: {'; '.join(complaint_of(each, fields) for each in error.errors())}") from None


def complaint_of(error: Mapping[str, Any], fields: Sequence[str] = ()) -> str:
    """One of pydantic's, and where it is, without what was given. `fields`: that there are."""
    place, words = error["loc"], error["msg"].removeprefix("Value error, ")
    if fields and error["type"] == "extra_forbidden":
        words = f"there is no such field{did_you_mean(str(place[-1]).replace('-', '_').lower(), fields)}"
    elif fields and error["type"] == "missing":
        words = "it is missing"
    return f"{'.'.join(map(str, place))}: {words}" if place else words


def read_secret(setting: str, path: Path) -> str:
    """The content of a file that holds one secret and nothing else. Raises `SettingsError` for any other."""
    try:
        secret = read_file(setting, path).decode().strip()
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {path} is not UTF-8") from None
    if not secret:
        raise SettingsError(f"{setting}: {path} is empty")
    if setting.endswith("key_file") and (not secret.isprintable() or not secret.isascii() or secret[0] in "\"'"):
        raise SettingsError(f"{setting}: {path} must hold the key alone: one line of ASCII, without quotes")
    return secret


MOST_CHANGES = 5  # looks in a row at a file that is being written


class WatchedFile(Generic[T]):
    """A file and its last good content, which one that is gone, empty, cut off or wrong leaves in force.

    So `read` refuses what does not say outright that there is nothing.
    """

    def __init__(self, setting: str, path: Path, read: Callable[[bytes, str], T], example: str) -> None:
        """`read` gets the content, and where it is: its complaints (`SettingsError`) begin with that.

        Each complaint ends with `example`, what a correct file holds. Raises `SettingsError` itself.
        """
        self._setting, self._path = setting, path
        self._read = read
        self._example = example
        self._raw = b""
        self._stamp = self._looked_at = self._status()
        self._changes = 0  # from look to look, in a row
        self.value: T = self._content()
        self.is_current = True  # the file could be used when it was last read
        self.failures = 0  # times that it had changed, and could not be used

    def is_still(self) -> bool:
        """Whether it is as it was at the last look, or has been changing for so long that it has to be read."""
        last, self._looked_at = self._looked_at, self._status()
        self._changes = 0 if self._looked_at == last else self._changes + 1
        return self._changes % MOST_CHANGES == 0

    def refresh(self) -> bool:
        """Whether there is a new value. A line in the log says so, or says why the old value stays."""
        stamp = self._status()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.value = self._content()
        except SettingsError as error:
            self.is_current = False
            logger.error("%s; its previous content stays in force", str(error).partition("\n")[0])
            self.failures += 1
            return False
        self.is_current = True
        logger.info("%s was read again", self._path)
        return True

    def _content(self) -> T:
        """Raises `SettingsError`, whatever the reader raises: what is in force then is not what the file says."""
        where = f"{self._setting}: {self._path}"
        try:
            raw = read_file(self._setting, self._path)
            value = self._read(raw, where)
            if self._raw.endswith(b"\n") and not raw.endswith(b"\n"):
                raise SettingsError(f"{where} ends within a line, as if cut off: if it is not, end that line")
        except SettingsError as error:
            raise SettingsError(f"{error}\n{self._example}") from None
        except Exception as error:  # the kind alone: its words may be what the file holds
            raise SettingsError(f"{where} cannot be used ({type(error).__name__})") from None
        self._raw = raw
        return value

    def _status(self) -> tuple[int, int, int] | None:
        """Another one after each change of the file."""
        try:
            status = self._path.stat()
        except (OSError, ValueError):
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def worker_url(url: object) -> str:
    """The base URL, checked. Raises `ValueError`, which does not show it: it may hold a password."""
    text = str(url).strip()
    if not text.lower().startswith(("http://", "https://")):
        raise ValueError("a worker's URL begins with http:// or https://, for example http://127.0.0.1:8000")
    if not text.isprintable() or " " in text:  # a line of its own in a file of settings, or in a log
        raise ValueError("a URL has no spaces, line ends or other characters that cannot be shown")
    try:
        _HTTP_URL.validate_python(text)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    if endpoint := _ENDPOINT.search(text):
        raise ValueError(f"leave out {endpoint[0]}: it is the address alone, for example http://127.0.0.1:8000")
    return base_url(text)


def service_url(name: object) -> str:
    """The base URL of a service whose addresses are workers, from `NAME:PORT`. Raises `ValueError`."""
    text = str(name).strip()
    if text.lower().startswith("https://"):
        raise ValueError("https is not for addresses, which no certificate names: give each worker with worker")
    url = worker_url(text if text.lower().startswith("http://") else f"http://{text}")
    if without_credentials(url)[1] is not None:
        raise ValueError("it may hold no credentials: give each worker with worker")
    if urlsplit(url).port is None:
        raise ValueError("it must be NAME:PORT, for example vllm.default.svc:8000")
    return url


def without_credentials(url: str) -> tuple[str, str | None]:
    """A worker's address, which may be shown, and the `user:password` that its URL holds."""
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = userinfo.partition(":")
    return urlunsplit(parts._replace(netloc=host)), f"{unquote(user)}:{unquote(password)}"


def base_url(url: str) -> str:
    """A worker's address as paths are appended to it. Users often give it with `/v1`, as SDKs want it, or with more."""
    return _ENDPOINT.sub("", url).rstrip("/").removesuffix("/v1")


class WorkerEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    max_inflight: int | None = Field(None, ge=0, le=MOST_NUMBER)  # None: the setting's

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        return worker_url(url)


class _WorkersFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: tuple[WorkerEntry, ...]


EXAMPLE_WORKERS = """\
A correct entry:
    [[worker]]
    url = "http://127.0.0.1:8000"
    # or, for none: worker = []"""


def workers_in(raw: bytes, where: str) -> tuple[tuple[str, int | None], ...]:
    """URL and `max_inflight` of each `[[worker]]` entry. Raises `SettingsError`."""
    return tuple((entry.url, entry.max_inflight) for entry in model_in(raw, where, _WorkersFile).worker)
