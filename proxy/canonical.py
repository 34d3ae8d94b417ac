"""Canonical keys: a 128-bit hash of everything that can move a boundary, chained message by message.

Keys are for remembering only; what is forwarded never passes through here. A wrong match costs a hit, not an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

# Fields beside the messages that a chat template or vLLM's renderer can see, and the salt that parts the caches.
HEAD_FIELDS = (
    "model",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "documents",
    "reasoning_effort",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
    "mm_processor_kwargs",
    "cache_salt",
)


class Keys(NamedTuple):
    """Keys of one chat. `after[i]` stands for everything up to and including message i."""

    head: bytes
    after: tuple[bytes, ...]


def digest(kind: str, *parts: bytes) -> bytes:
    """A key of its own kind from other keys and canonical bytes."""
    return xxh3_128_digest(b"\0".join((kind.encode(), *parts)))


def canonical(value: Any) -> bytes:
    """One spelling for JSON values that differ only in white space and escapes. Key order is kept: templates see it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def chat_keys(body: Mapping[str, Any], messages: Sequence[Any], renderer: bytes) -> Keys:
    """Keys of a chat request; `renderer` identifies the tokenizer and template that will read it."""
    head = digest("head", renderer, canonical([body.get(field) for field in HEAD_FIELDS]))
    after = []
    key = head
    for message in messages:
        key = digest("message", key, canonical(message))
        after.append(key)
    return Keys(head, tuple(after))
