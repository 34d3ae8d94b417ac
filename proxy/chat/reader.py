"""The routes whose requests get hints, a row each, and the chat in the body of any of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from proxy.chat.anthropic import messages_request
from proxy.chat.canonical import HEAD_FIELDS, MARKS
from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, OUTSIDE_V1, RESPONSES, TOOLS, Chat, Mark, listed, marked
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
        # A character for each, so that shared text and shared tokens are the same thing.
        ids, prompt = prompt, "".join(map(chr, prompt)) if max(prompt) <= sys.maxunicode else ""
    if not isinstance(prompt, str) or not prompt:
        return None
    head = {name: body[name] for name in HEAD_FIELDS if name in body}
    messages = [{"role": "user", "content": prompt}]
    return Chat({**head, "add_generation_prompt": False}, messages, (), COMPLETIONS, body, ids)


def chat_request(body: Mapping[str, Any]) -> Chat | None:
    """The chat in a request to /v1/chat/completions; None if there is none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    marks = [Mark(TOOLS)] if "tools" in body and any(map(marked, listed(body["tools"]))) else []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if type(content := message.get("content")) is list:
            marks += [Mark(index, part) for part, block in enumerate(content) if marked(block)]
        if (MARKS[0] in message or MARKS[1] in message) and marked(message):
            marks.append(Mark(index))
    return Chat(body, messages, tuple(marks))


class HintedRoute(NamedTuple):
    """A route in whose requests boundaries are sought; its answers report cached tokens."""

    read: Callable[[Mapping[str, Any]], Chat | None]
    one_token: Mapping[str, Any]  # fields by which an answer is one token that is kept nowhere
    ends: frozenset[str] = frozenset()  # reasons for which an answer ends by itself; none: it says so otherwise
    asks_usage: bool = False  # a stream reports tokens only if it is asked to
    takes_seed: bool = True  # vLLM samples by it; it drops one in requests to other routes


_ONE, _CUT, _CALLS = {"max_tokens": 1}, {"stop", "length"}, {"tool_calls", "function_call"}
_MESSAGE_ENDS = frozenset({"end_turn", "max_tokens", "stop_sequence", "tool_use"})

HINTED = {
    CHAT: HintedRoute(chat_request, _ONE, frozenset(_CUT | _CALLS), asks_usage=True),
    COMPLETIONS: HintedRoute(completions_request, _ONE, frozenset(_CUT), asks_usage=True),
    MESSAGES: HintedRoute(messages_request, _ONE, _MESSAGE_ENDS, takes_seed=False),
    RESPONSES: HintedRoute(responses_request, {"max_output_tokens": 1, "store": False}),
}

EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = HINTED.keys() | OUTSIDE_V1 | {EMBEDDINGS}


def chat_in(endpoint: str, body: Mapping[str, Any], stored: StoredResponses, owner: str | None = None) -> Chat | None:
    """The chat in a request to `endpoint`, one of `HINTED`, with the API key `owner`; None if there is none."""
    if endpoint == RESPONSES and (previous := body.get("previous_response_id")) is not None:
        messages = stored.chat(previous, owner)
        return responses_request(body, messages) if messages is not None else None
    return HINTED[endpoint].read(body)
