"""API keys for tests: the file's entry, the secret, the header."""

from __future__ import annotations

import hashlib
import json


def entry(name: str, **fields) -> str:
    lines = [f"[keys.{name}]", f'sha256 = "{hashlib.sha256(secret(name).encode()).hexdigest()}"']
    return "\n".join([*lines, *(f"{field} = {json.dumps(value)}" for field, value in fields.items())]) + "\n"


def secret(name: str) -> str:
    return f"sk-{name}-secret"


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret(name)}"}
