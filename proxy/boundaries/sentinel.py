"""Where the shared part of a chat ends, by sentinel substitution.

Replace a text by a sentinel, render both, compare token ids: the common prefix is what any other text in that place
would share. Comparing with the real prompt keeps this right where a template lets the content decide how earlier turns
render. Rendering fewer messages instead would not do: many templates render a shorter list differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Plain words; which one is used depends on the text it replaces, so that the first characters never agree.
SENTINELS = ("Quartz", "83 jigsaw")

# Texts that could grow together with the token before them, where a template leaves nothing but text in between.
# Nothing at all is one of them: what follows the text then follows that token.
MERGING = ("", "the tide", "\nQuartz", " Quartz", ")Quartz")

# What a template could take for a command or for markup of its own: such a text may change how earlier turns render.
_TELLING = re.compile(r"[<\[{|/]\w|[<\[{|]/")

# Roles whose text a client chooses anew for each request.
OPEN_ROLES = ("user", "tool", "function")


def text_of(message: Any) -> str | None:
    """The text a sentinel can take the place of: a string content, or its last text part. None if there is none."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return content
    part = _last_text_part(content)
    return part["text"] if part is not None else None


def role_of(message: Any) -> Any:
    """Its role as the client wrote it; None where there is none."""
    return message.get("role") if isinstance(message, Mapping) else None


def with_text(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A copy of `message` with that text replaced; its shape, other parts and fields stay."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": text}
    target = _last_text_part(content)
    return {**message, "content": [{**part, "text": text} if part is target else part for part in content]}


def sentinel_for(text: str) -> str:
    """A sentinel that starts unlike `text`, and unlike what a template that trims white space makes of it."""
    starts = {text[:1].lower(), text.lstrip()[:1].lower()}
    return next(sentinel for sentinel in SENTINELS if sentinel[0].lower() not in starts)


def other_sentinel(sentinel: str) -> str:
    """Another one, with another first character."""
    return next(other for other in SENTINELS if other != sentinel)


def is_telling(text: str) -> bool:
    """Whether a template might read this text and not only print it."""
    return _TELLING.search(text) is not None


def last_open_text(messages: Sequence[Any]) -> int | None:
    """Index of the last user or tool message with a text."""
    return next(
        (i for i in reversed(range(len(messages))) if is_open(messages[i]) and text_of(messages[i]) is not None), None
    )


def first_user_text(messages: Sequence[Any]) -> int | None:
    """Index of the first message that is not part of the system prompt, if it is an open one with a text."""
    index = next((i for i, message in enumerate(messages) if is_open(message)), None)
    return index if index is not None and text_of(messages[index]) is not None else None


def is_open(message: Any) -> bool:
    """Whether the message's text is one that a client chooses anew."""
    return role_of(message) in OPEN_ROLES


def _last_text_part(content: Any) -> Mapping[str, Any] | None:
    if not isinstance(content, list):
        return None
    texts = [part for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return texts[-1] if texts else None
