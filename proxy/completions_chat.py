"""A request to /v1/completions as a chat of one text: no message ends in it, only what traffic shows is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.canonical import HEAD_FIELDS
from proxy.chat import Chat

COMPLETIONS = "/v1/completions"


def completions_request(body: Mapping[str, Any]) -> Chat | None:
    """The prompt of a request to /v1/completions, text or token ids; None for a batch of prompts."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = None
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        ids, prompt = prompt, as_text(prompt)
    if not isinstance(prompt, str) or not prompt:
        return None
    head = {name: body[name] for name in HEAD_FIELDS if name in body}
    messages = [{"role": "user", "content": prompt}]
    return Chat({**head, "add_generation_prompt": False}, messages, (), COMPLETIONS, body, ids)


def as_text(ids: Sequence[int]) -> str:
    """Token ids as a text of one character each, so that shared text and shared tokens are the same thing."""
    return "".join(map(chr, ids)) if max(ids) <= 0x10FFFF else ""
