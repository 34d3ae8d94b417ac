"""Who may see what of the gateway itself: metrics, status and explanations are for operators.

The live page's own file is for anyone who may reach its address: it is the same everywhere and holds nothing. What it
shows comes from `LIVE`, which is for operators.
"""

from __future__ import annotations

from proxy import wire
from proxy.errors import Forbidden, NotFound
from proxy.keys import ApiKey, KeyRing

# Adapters are loaded by paths on the worker's disk.
ADMIN_OF_WORKERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
TELLS_THE_SALT = ("/render", "/render/")
OPEN = frozenset({"/health", "/ready"})
EXPLANATIONS = "/seamark/requests/"
PAGE = "/ui"
LIVE = "/seamark/live"


def is_for_operators(path: str) -> bool:
    """Whether `path` is one of the gateway's own pages that tell of all clients."""
    return path in ("/metrics", PAGE) or path.startswith(("/seamark/", PAGE + "/"))


def client(scope: wire.Scope, keys: KeyRing) -> ApiKey:
    """The key of a request for a worker. Raises `Unauthorized` or `Forbidden`."""
    key = keys.who(scope)
    path = scope["path"]
    if (path in ADMIN_OF_WORKERS or path.endswith(TELLS_THE_SALT)) and not key.entry.admin:
        raise Forbidden("This API key may not use this path (admin = true in the keys file).")
    return key


def admit(scope: wire.Scope, keys: KeyRing | None, own_address: bool, at_own_address: bool) -> ApiKey | None:
    """The key of a request for a page of the gateway; None where none is needed.

    `own_address`: such pages have an address of their own; `at_own_address`: the request came there. Raises `NotFound`,
    `Unauthorized` or `Forbidden`.
    """
    path = scope["path"]
    if at_own_address or path in OPEN:
        return None
    if is_for_operators(path) and own_address:
        raise NotFound(f"No such path: {path}")
    if keys is None or path in (PAGE, PAGE + "/"):
        return None
    key = keys.who(scope)
    if is_for_operators(path) and not key.entry.admin and not path.startswith(EXPLANATIONS):
        raise Forbidden("This API key may not read pages for operators (admin = true in the keys file).")
    return key
