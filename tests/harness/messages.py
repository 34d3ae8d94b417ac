"""Messages of chats."""

from __future__ import annotations

from typing import Any


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}
