"""API keys: who may ask, how much at once, which pages, and which prefixes a key shares.

The file holds SHA-256 hashes; a key itself is in memory for one comparison only. Each key gets a cache salt of its own,
because the speed of a shared prefix cache reveals what others have asked. Keys with the same `share` have one salt.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from proxy.config_files import MOST_NUMBER, WatchedFile, model_in
from proxy.errors import Forbidden, NotFound, Unauthorized
from proxy.http import asgi
from proxy.http.token_limits import TokenLimits

MOST_TOKENS = 2**50  # in a limit

SALT_BYTES = 24
ID_BYTES = 16  # at random in a response's id, and of the proof behind them
_SHA256 = re.compile("[0-9a-fA-F]{64}")
_RESPONSE_ID = re.compile(rf"resp_([0-9a-f]{{{2 * ID_BYTES}}})([0-9a-f]{{{2 * ID_BYTES}}})")


class KeyEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: tuple[str, ...] = Field(min_length=1)  # several while one key replaces another
    max_inflight: int = Field(0, ge=0, le=MOST_NUMBER)  # requests at workers at once; 0: no limit of its own
    max_queued: int = Field(64, ge=0, le=MOST_NUMBER)  # requests waiting in the gateway
    tokens_per_minute: int = Field(0, ge=0, le=MOST_TOKENS)  # 0: no limit
    tokens_per_day: int = Field(0, ge=0, le=MOST_TOKENS)
    count: Literal["total", "prompt", "computed", "output"] = "total"  # which tokens are limited
    cached_weight: float | None = Field(None, ge=0, le=1)  # of a prompt's cached tokens; None: as `count` has it
    share: str | None = None  # keys that name the same group share cached prefixes
    keep: Literal["no", "private"] | None = None  # what its clients may leave in caches, and none of them can lift
    priority: Literal["low"] | None = None  # what they leave goes first
    admin: bool = False  # may read /seamark/* and /metrics, and change the worker's LoRA adapters

    @field_validator("sha256", mode="before")
    @classmethod
    def _hashes(cls, value: object) -> object:
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list | tuple):
            return value
        if not all(isinstance(each, str) and _SHA256.fullmatch(each) for each in found):
            raise ValueError("a SHA-256 has 64 hexadecimal digits; `seamark key NAME` makes one")
        return tuple(each.lower() for each in found)


EXAMPLE = """\
A correct entry:
    [keys.ann]
    sha256 = "<64 hexadecimal digits>"   # `seamark key ann` prints a new key and this entry for it"""


class KeyFile(BaseModel):
    """The whole file: `[keys.NAME]` for each key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: dict[str, KeyEntry]

    @field_validator("keys")
    @classmethod
    def _keys(cls, keys: dict[str, KeyEntry]) -> dict[str, KeyEntry]:
        owners: dict[str, str] = {}
        for name, entry in keys.items():
            if not name.isprintable():
                raise ValueError(f"the name {name!a} has characters that cannot be shown")
            for each in entry.sha256:
                if (owner := owners.setdefault(each, name)) is not name or entry.sha256.count(each) > 1:
                    raise ValueError(f"{name} and {owner} have the same sha256: one key has one owner")
        return keys


@dataclass(eq=False)
class ApiKey:
    """A key and its requests. It stays the same object when the file is read again."""

    name: str
    entry: KeyEntry
    salt: str = field(repr=False)
    id_secrets: tuple[bytes, ...] = field(default=(), repr=False)  # any of them proves that an id is this key's
    limits: TokenLimits | None = None  # None: as many tokens as it likes
    under_way: int = 0
    queued: int = 0

    def __post_init__(self) -> None:
        # Whose something is in this gateway: whoever is given the name later has another key.
        self.owner = f"{self.name} {self.entry.sha256[0]}"

    @property
    def has_room(self) -> bool:
        """Whether another request with this key may go to a worker."""
        return not self.entry.max_inflight or self.under_way < self.entry.max_inflight

    def new_response_id(self) -> str:
        """A name under which a worker is to store a response: each gateway with this key knows by it whose it is."""
        nonce = secrets.token_bytes(ID_BYTES)
        return f"resp_{nonce.hex()}{self._proof(nonce, self.id_secrets[0]).hex()}"

    def made(self, response_id: str) -> bool:
        """Whether that is a `new_response_id` of this key, of any gateway."""
        found = _RESPONSE_ID.fullmatch(response_id)
        if found is None:
            return False
        nonce, proof = map(bytes.fromhex, found.groups())
        return any(hmac.compare_digest(proof, self._proof(nonce, secret)) for secret in self.id_secrets)

    def _proof(self, nonce: bytes, secret: bytes) -> bytes:
        named = nonce + self.name.encode(errors="surrogatepass")
        return hmac.digest(secret, b"seamark response\0" + named, "sha256")[:ID_BYTES]


class KeyRing:
    def __init__(self, path: Path, secret: str | None) -> None:
        """Salts are derived from `secret`, or from a random one if it is None. Raises `SettingsError` for the file.

        Ids of responses outlive a gateway: without `secret` they are proved by what the file holds of their key.
        """
        self._id_secret = secret.encode() if secret else None
        self.salts_last = self._id_secret is not None  # another start of the gateway, or another one, has the same
        self._secret = self._id_secret or secrets.token_hex(32).encode()
        self.file = WatchedFile("api_keys", path, lambda raw, where: model_in(raw, where, KeyFile), EXAMPLE)
        self._keys: dict[str, ApiKey] = {}
        self.limited: dict[str, TokenLimits] = {}  # limits in tokens of keys that have some, by name
        self._by_hash: dict[bytes, ApiKey] = {}
        self._load()

    def refresh(self) -> None:
        if self.file.refresh():
            self._load()

    def authenticate(self, scope: asgi.Scope) -> ApiKey:
        """The key of a request. Raises `Unauthorized`.

        Clients send what they hold in both headers, and one may be another server's. If both are keys of this gateway,
        `Authorization` counts, in whatever order they come: it is the one that vLLM reads.
        """
        headers: asgi.HeaderList = scope["headers"]  # of each header, its first value
        bearer = (v[7:] for name, v in headers if name == b"authorization" and v[:7].lower() == b"bearer ")
        plain = (value for name, value in headers if name == b"x-api-key")
        presented = [each for each in (next(bearer, None), next(plain, None)) if each is not None]
        if not presented:
            raise Unauthorized("No API key was given. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        for each in presented:
            if (key := self._known(each.strip())) is not None:
                return key
        raise Unauthorized("The gateway does not know this API key.")

    def named(self, name: str) -> ApiKey | None:
        return self._keys.get(name)

    def _known(self, presented: bytes) -> ApiKey | None:
        digest = hashlib.sha256(presented).digest()
        # Nobody can steer a digest, so looking it up may take any time; comparing must take the same time always.
        key = self._by_hash.get(digest)
        known = [hmac.compare_digest(digest, bytes.fromhex(each)) for each in key.entry.sha256] if key else []
        return key if any(known) else None

    def _load(self) -> None:
        limits, self.limited = self.limited, {}
        previous, self._keys, self._by_hash = self._keys, {}, {}
        for name, entry in self.file.value.keys.items():
            key = previous.get(name)
            if key is None or set(entry.sha256).isdisjoint(key.entry.sha256):
                key = ApiKey(name, entry, "")
            key.entry, key.limits = entry, None
            if entry.tokens_per_minute or entry.tokens_per_day:  # used under a name counts for it, as in metrics
                key.limits = self.limited[name] = limits.get(name) or TokenLimits(name)
                key.limits.set(entry.tokens_per_minute, entry.tokens_per_day, entry.count, entry.cached_weight)
            hashes = tuple(map(bytes.fromhex, entry.sha256))
            secret = self._id_secret
            key.id_secrets = tuple(each if secret is None else hmac.digest(secret, each, "sha256") for each in hashes)
            key.salt = self._salt(f"group:{entry.share}" if entry.share is not None else f"key:{name}")
            self._keys[name] = key
            self._by_hash.update((each, key) for each in hashes)

    def _salt(self, owner: str) -> str:
        mac = hmac.digest(self._secret, b"seamark cache salt\0" + owner.encode(errors="surrogatepass"), "sha256")
        return urlsafe_b64encode(mac[:SALT_BYTES]).decode()


# These load adapters from paths on the worker's disk.
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADMIN_OF_WORKERS = frozenset({LOAD_ADAPTER, UNLOAD_ADAPTER})
UNSALTED = frozenset({"/v2/embed"})  # the worker reads no cache salt there
SHOWS_THE_SALT = ("/render", "/render/")  # rendering a request shows the salt in it
OPEN = frozenset({"/health", "/ready"})
EXPLANATIONS = "/seamark/requests/"
PREFIXES = "/seamark/prefixes"
ROOT = "/"  # leads to the page
PAGE = "/ui"
LIVE = "/seamark/live"


def is_for_operators(path: str) -> bool:
    """Whether `path` is one of the gateway's own pages, which show all clients' requests."""
    return path in ("/metrics", PAGE) or path.startswith(("/seamark/", PAGE + "/"))


def client(scope: asgi.Scope, keys: KeyRing) -> ApiKey:
    """The key of a request for a worker. Raises `Unauthorized`, `NotFound` or `Forbidden`."""
    key = keys.authenticate(scope)
    path = scope["path"]
    if path in UNSALTED:
        raise NotFound(f"No such path: {path}. It knows no cache of a key's own; /v1/embeddings does.")
    if (path in ADMIN_OF_WORKERS or path.endswith(SHOWS_THE_SALT)) and not key.entry.admin:
        raise Forbidden("This API key may not use this path; it needs admin = true in the keys file.")
    return key


def admit(scope: asgi.Scope, keys: KeyRing | None, own_address: bool, at_own_address: bool) -> ApiKey | None:
    """The key of a request for a page of the gateway; None if the page needs none.

    `own_address`: operators' pages have an address of their own; `at_own_address`: the request came there. Raises
    `NotFound`, `Unauthorized` or `Forbidden`.
    """
    path = scope["path"]
    if at_own_address or path in OPEN:
        return None
    if is_for_operators(path) and own_address:
        raise NotFound(f"No such path: {path}")
    if keys is None or path in (ROOT, PAGE, PAGE + "/"):
        return None
    key = keys.authenticate(scope)
    if is_for_operators(path) and not key.entry.admin and not path.startswith(EXPLANATIONS):
        raise Forbidden("This API key may not read pages for operators; it needs admin = true in the keys file.")
    return key
