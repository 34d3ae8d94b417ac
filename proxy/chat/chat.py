"""A request of any chat API as one chat, taken apart once: what is compared, remembered and rendered by a worker.

Conversions follow vLLM's own (`entrypoints/anthropic/serving.py`, `entrypoints/openai/responses/utils.py`). Where one
of them is off, a variant parts too early from the prompt that the worker rendered itself: that costs a hit, no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from pydantic import TypeAdapter, ValidationError

from proxy.chat.canonical import MARKS, NO_KEYS, Keys

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"  # of token ids, with sampling parameters as the engine has them

# All of vLLM outside `/v1/` that clients reach: what it has there for operators has no key of its own.
_POOLING = ("/classify", "/generative_scoring", "/pooling", "/rerank", "/score", "/v2/rerank", "/v2/embed")
OUTSIDE_V1 = frozenset({*_POOLING, "/detokenize", "/tokenize", GENERATE})

TOOLS = -1  # in `Mark.message`: the mark stands on a tool

# Pydantic reads a flag or a number out of several spellings, and so does vLLM.
_BOOL, _INT = TypeAdapter(bool), TypeAdapter(int)


class Mark(NamedTuple):
    """A place that the client itself marked as worth caching: the end of a content part."""

    message: int  # index, or `TOOLS`
    part: int | None = None  # index of the part; None for the end of the message
    characters: int | None = None  # instead of a part: so far into the message's text


class Chat(msgspec.Struct):
    """One request. `roles` and `texts` hold a value for each of `messages`, which are as the client wrote them."""

    body: Mapping[str, Any]  # in the words of /v1/chat/completions
    messages: Sequence[Any]
    marks: tuple[Mark, ...] = ()
    path: str = CHAT  # where the worker serves the request itself
    native: Mapping[str, Any] | None = None  # the request as `path` takes it, None if that is `body`
    ids: Sequence[int] | None = None  # of a prompt given as token ids
    model: str | None = None  # for `head`: one name for all that the model has; None: as in `body`
    roles: tuple[Any, ...] = ()  # as the client wrote each; None if there is none
    texts: tuple[str | None, ...] = ()
    is_bare: bool = False  # a prompt without messages
    continues: Keys = NO_KEYS  # of a chat that may begin with the same messages

    def __post_init__(self) -> None:
        messages = [message if isinstance(message, dict) else {} for message in self.messages]
        self.roles = tuple([message.get("role") for message in messages])
        contents = [message.get("content") for message in messages]
        self.texts = tuple([each if type(each) is str else _text_in(each) for each in contents])
        self.is_bare = "messages" not in self.asked and "input" not in self.asked

    @property
    def head(self) -> Mapping[str, Any]:
        """The body, by which requests are compared: an alias of the model makes no difference."""
        return self.body if self.model in (None, self.body.get("model")) else {**self.body, "model": self.model}

    @property
    def media(self) -> tuple[tuple[int, Any], ...]:
        """The content parts that are no text, each with the index of its message."""
        return tuple(
            (index, part)
            for index, message in enumerate(self.messages)
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            for part in message["content"]
            if isinstance(part, dict) and not isinstance(part.get("text"), str)
        )

    @property
    def media_bytes(self) -> int:
        """That media take in the body, or in those that it continues: as text, they would be far more tokens."""
        holders = [holder for _, part in self.media for holder in part.values() if type(holder) is dict]
        return sum(len(value) for holder in holders for value in holder.values() if type(value) is str)

    @property
    def asked(self) -> Mapping[str, Any]:
        return self.body if self.native is None else self.native


def _text_in(content: Any) -> str | None:
    """The text of a list content in which others may differ: its last text part. None if there is none."""
    part = last_text_part(content)
    return part["text"] if part is not None else None


def last_text_part(content: Any) -> dict[str, Any] | None:
    """The last part of a list content that holds text; None if there is none."""
    if not isinstance(content, list):
        return None
    return next((part for part in reversed(content) if isinstance(part, dict) and type(part.get("text")) is str), None)


def marked(block: Any) -> bool:
    """Whether a client marked this part, message or tool as the end of something to cache."""
    return isinstance(block, dict) and bool(block.get(MARKS[0]) or block.get(MARKS[1]))


def listed(value: Any) -> list[Any]:
    """`value` if it is a list, else nothing."""
    return value if isinstance(value, list) else []


def flag(value: Any) -> bool | None:
    """What a flag says: 1, "true", "yes" and the like are true, null is false. None for what the worker refuses."""
    if value is None or isinstance(value, bool):
        return bool(value)
    try:
        return _BOOL.validate_python(value)
    except ValidationError:
        return None


def number(value: Any) -> int | None:
    """A whole number, "2" and 2.0 among them. None for null, and for what the worker refuses."""
    if value is None or type(value) is int:
        return value
    try:
        return _INT.validate_python(value)
    except ValidationError:
        return None
