"""A request of any chat API as one chat: what the gateway compares, remembers and asks the worker to render.

Conversions follow vLLM's own (`entrypoints/anthropic/serving.py`, `entrypoints/openai/responses/utils.py`). Where one
of them is off, a variant parts too early from the prompt that the worker rendered itself: that costs a hit, no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from proxy.chat.canonical import MARKS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

# Boundaries are sought in requests to these.
HINTED = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})

# Answers of these report cached tokens.
REPORTING = HINTED

ENDPOINTS = REPORTING | {"/v1/embeddings", "/tokenize", "/detokenize"}

# Streams of these report tokens where they are asked to; the others always do.
ASKED_FOR_USAGE = frozenset({CHAT, COMPLETIONS})

# In `Mark.message`: the mark stands on a tool.
TOOLS = -1


class Mark(NamedTuple):
    """A place that the client itself marked as worth caching: the end of a content part."""

    message: int  # index, or `TOOLS`
    part: int | None = None  # index of the part; None for the end of the message
    characters: int | None = None  # instead of a part: so far into the message's text


class Chat(NamedTuple):
    """One request."""

    body: Mapping[str, Any]  # in the words of /v1/chat/completions
    messages: Sequence[Any]
    marks: tuple[Mark, ...] = ()
    path: str = CHAT  # where the worker serves the request itself
    native: Mapping[str, Any] | None = None  # the request as `path` takes it, None where that is `body`
    ids: Sequence[int] | None = None  # of a prompt given as token ids

    def spelled(self, variant: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """A variant of this chat as it is to be rendered, and where."""
        if self.is_bare:
            return {**self.asked, "prompt": variant["messages"][0]["content"]}, self.path
        return variant, CHAT

    @property
    def asked(self) -> Mapping[str, Any]:
        """The body to render at `path`."""
        return self.body if self.native is None else self.native

    @property
    def is_bare(self) -> bool:
        """A prompt without messages."""
        return "messages" not in self.asked and "input" not in self.asked


def marked(block: Any) -> bool:
    """Whether a client marked this part, message or tool as the end of something to cache."""
    return isinstance(block, dict) and any(block.get(name) for name in MARKS)


def listed(value: Any) -> list[Any]:
    """`value` where it is a list, nothing where it is not."""
    return value if isinstance(value, list) else []
