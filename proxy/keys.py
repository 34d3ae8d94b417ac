"""API keys: who may ask, how much at once, and whose prefixes are whose.

The file holds SHA-256 hashes; a key itself is seen for the length of one comparison. Each key gets a cache salt of its
own, because a shared prefix cache tells by its speed what others have asked; keys with one `share` have one salt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from proxy import wire
from proxy.errors import Unauthorized
from proxy.files import read_model
from proxy.watched import WatchedFile

SALT_BYTES = 24


class KeyEntry(BaseModel):
    """What the file says of one key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: tuple[str, ...] = Field(min_length=1)  # several while one is exchanged for another
    max_inflight: int = Field(0, ge=0)  # requests at workers at once, 0: no limit of its own
    max_queued: int = Field(64, ge=0)  # requests waiting in the gateway
    share: str | None = None  # keys that name the same group share cached prefixes
    admin: bool = False  # may read /seamark/* and /metrics, and change the worker's LoRA adapters

    @field_validator("sha256", mode="before")
    @classmethod
    def _hashes(cls, value: object) -> object:
        found = [value] if isinstance(value, str) else value
        if isinstance(found, list | tuple):
            for each in found:
                if not isinstance(each, str) or len(each) != 64 or set(each.lower()) - set("0123456789abcdef"):
                    raise ValueError("a SHA-256 has 64 hexadecimal digits; `seamark key NAME` makes one")
            return tuple(each.lower() for each in found)
        return value


class KeyFile(BaseModel):
    """`[keys.NAME]` for each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: dict[str, KeyEntry]


@dataclass(eq=False)
class ApiKey:
    """A key as the gateway counts it. It lives on when the file is read again."""

    name: str
    entry: KeyEntry
    salt: str = field(repr=False)
    inflight: int = 0
    queued: int = 0

    @property
    def has_room(self) -> bool:
        """Whether another request of it may go to a worker."""
        return not self.entry.max_inflight or self.inflight < self.entry.max_inflight


class KeyRing:
    """All keys of a file."""

    def __init__(self, path: Path, secret: str | None) -> None:
        """Salts are derived from `secret`, a random one where it is None. Raises `SettingsError` for the file."""
        self._secret = (secret or secrets.token_hex(32)).encode()
        self._file = WatchedFile(path, lambda path: read_model("api_keys", path, KeyFile))
        self._keys: dict[str, ApiKey] = {}
        self._by_hash: dict[bytes, ApiKey] = {}
        self._take()

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self._file.refresh():
            self._take()

    def who(self, scope: wire.Scope) -> ApiKey:
        """Whose request this is. Raises `Unauthorized`."""
        presented = _presented(scope)
        if presented is None:
            raise Unauthorized("No API key was given. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        digest = hashlib.sha256(presented).digest()
        # Which hash is stored cannot be steered towards by trying, so finding it may take its time; comparing may not.
        key = self._by_hash.get(digest)
        known = (hmac.compare_digest(digest, bytes.fromhex(each)) for each in key.entry.sha256) if key else ()
        if key is None or not any(list(known)):
            raise Unauthorized("The API key is not known here.")
        return key

    def _take(self) -> None:
        previous, self._keys, self._by_hash = self._keys, {}, {}
        for name, entry in self._file.value.keys.items():
            key = previous.get(name) or ApiKey(name, entry, "")
            key.entry, key.salt = (
                entry,
                self._salt(f"group:{entry.share}" if entry.share is not None else f"key:{name}"),
            )
            self._keys[name] = key
            self._by_hash.update((bytes.fromhex(each), key) for each in entry.sha256)

    def _salt(self, owner: str) -> str:
        mac = hmac.digest(self._secret, b"seamark cache salt\0" + owner.encode(errors="surrogatepass"), "sha256")
        return urlsafe_b64encode(mac[:SALT_BYTES]).decode()


def _presented(scope: wire.Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
