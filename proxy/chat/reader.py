"""From the body of any endpoint to the chat in it; the chat and completions endpoints are read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.chat.anthropic import messages_request
from proxy.chat.canonical import HEAD_FIELDS
from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOOLS, Chat, Mark, listed, marked
from proxy.chat.responses import StoredResponses, responses_request


def completions_request(body: Mapping[str, Any]) -> Chat | None:
    """The prompt of a request to /v1/completions, text or token ids, as one user text; None for a batch of prompts.

    No message ends in it, so its only boundaries are those that traffic shows or a client marks.
    """
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


def chat_request(body: Mapping[str, Any]) -> Chat | None:
    """The chat in a request to /v1/chat/completions; None if there is none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    marks = [Mark(TOOLS)] if any(marked(tool) for tool in listed(body.get("tools"))) else []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if type(content := message.get("content")) is list:
            marks += [Mark(index, part) for part, block in enumerate(content) if marked(block)]
        if len(message) > 2 and marked(message):
            marks.append(Mark(index))
    return Chat(body, messages, tuple(marks))


READERS: dict[str, Callable[[Mapping[str, Any]], Chat | None]] = {
    CHAT: chat_request,
    MESSAGES: messages_request,
    COMPLETIONS: completions_request,
}


def chat_in(endpoint: str, body: Mapping[str, Any], stored: StoredResponses, owner: str | None = None) -> Chat | None:
    """The chat in a request to `endpoint`, one of `HINTED`, with the API key `owner`; None if there is none."""
    if endpoint == RESPONSES:
        previous = body.get("previous_response_id")
        if previous is None:
            return responses_request(body)
        messages = stored.chat(previous, owner)
        return responses_request(body, messages) if messages is not None else None
    return READERS[endpoint](body)
