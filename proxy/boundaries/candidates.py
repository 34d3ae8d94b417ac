"""Candidates for boundaries: where in a chat a prefix may end that others share, each with a variant of the chat.

The variant holds something else behind the candidate: what it has in common with the prompt is the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_128_digest

from proxy.boundaries.sentinel import sentinel_for, with_text
from proxy.chat.canonical import MARKS, Keys, canonical, chat_keys, digest, without_marks
from proxy.chat.chat import TOOLS, Chat, Mark

Kind = Literal["system", "history", "turn", "explicit", "learned"]

# Roles whose text a client writes for each request.
OPEN_ROLES = ("user", "tool", "function")


class Candidate(NamedTuple):
    """A place in a chat where a shared prefix may end."""

    kind: Kind
    key: bytes  # of the content before it, and of whatever else decides its position
    variant: Mapping[str, Any]  # a chat request
    text: int | None  # index of the message whose text follows; None if the template's own words follow


class PromptLayout(NamedTuple):
    """A chat with its keys, and with its first and last text that others may differ in."""

    chat: Chat
    keys: Keys
    first: int | None  # first user text
    last: int  # last user or tool text
    key: bytes  # of the chat before its last text
    generates: bool  # the worker adds the words that ask for an answer
    system_key: bytes  # of tools and system prompt; a different one if turns follow, see `alone`

    @property
    def alone(self) -> bool:
        """Nothing was said before the last text. Some templates put the system prompt into the *last* user message."""
        return self.first == self.last

    @property
    def prefixes(self) -> tuple[bytes, ...]:
        """Content keys of everything this prompt starts with, shortest first."""
        return (
            self.system_key,
            *self.keys.after[: self.last],
            self.key,
            *self.keys.after[self.last :],
        )

    @property
    def last_size(self) -> int:
        """Characters of the last text."""
        return len(self.chat.texts[self.last] or "")

    @property
    def turn_key(self) -> bytes | None:
        """Key of the whole chat; None if no turn ends with it."""
        return self.keys.after[-1] if self.generates and self.chat.roles[-1] in OPEN_ROLES else None


def layout_of(chat: Chat, renderer_id: bytes) -> PromptLayout | None:
    """The layout of a chat; None if it has no text that others may differ in."""
    last = _last_open_text(chat)
    if last is None:
        return None
    keys = chat_keys(chat.body, chat.messages, renderer_id)
    key = keys.before[last]
    if last + 1 < len(chat.messages):
        key = digest("history", key, canonical(chat.messages[last + 1 :]))
    first = _first_open_text(chat)
    system_key = key if first == last else digest("system", keys.head if first is None else keys.before[first])
    generates = bool(chat.body.get("add_generation_prompt", True)) and not chat.body.get("continue_final_message")
    return PromptLayout(chat, keys, first, last, key, generates, system_key)


def _last_open_text(chat: Chat) -> int | None:
    """Index of the last user or tool message with a text."""
    roles, texts = chat.roles, chat.texts
    return next((i for i in range(len(texts) - 1, -1, -1) if texts[i] is not None and roles[i] in OPEN_ROLES), None)


def _first_open_text(chat: Chat) -> int | None:
    """Index of the first message behind the system prompt, if it is a user or tool message with a text."""
    index = next((i for i, role in enumerate(chat.roles) if role in OPEN_ROLES), None)
    return index if index is not None and chat.texts[index] is not None else None


def history_candidate(layout: PromptLayout) -> Candidate:
    """The start of the last user or tool text."""
    return Candidate("history", layout.key, with_last_text(layout, None), layout.last)


def system_candidate(layout: PromptLayout) -> Candidate | None:
    """The end of tools and system prompt; None if that is the history, or nothing is."""
    if layout.first is None or layout.alone:
        return None
    return Candidate("system", layout.system_key, _cut(layout, layout.first, 0), layout.first)


def turn_candidate(layout: PromptLayout) -> Candidate | None:
    """The end of the last turn, before the words that ask for an answer."""
    if layout.turn_key is None:
        return None
    return Candidate("turn", layout.turn_key, {**layout.chat.body, "add_generation_prompt": False}, None)


def user_candidate(layout: PromptLayout) -> Candidate | None:
    """After a tool loop the end of the last user message: templates may drop the loop's thinking in the next turn."""
    index = _user_before_loop(layout)
    return _end_of(layout, index, "turn") if index is not None else None


def user_key(layout: PromptLayout) -> bytes | None:
    """Content key of the user candidate."""
    index = _user_before_loop(layout)
    return layout.keys.after[index] if index is not None else None


def _user_before_loop(layout: PromptLayout) -> int | None:
    roles = layout.chat.roles
    if roles[layout.last] == "user":
        return None
    return next((i for i in range(layout.last - 1, -1, -1) if roles[i] == "user"), None)


def marked_candidate(layout: PromptLayout, mark: Mark) -> Candidate | None:
    """The end of something that a client marked for caching; None if nothing can be told apart there."""
    chat = layout.chat
    if mark.message == TOOLS:
        if chat.roles[0] == "system" and chat.texts[0] is not None:
            return Candidate("explicit", digest("tools", layout.keys.before[0]), _cut(layout, 0, 0), 0)
        return system_candidate(layout)
    if mark.characters is not None:
        return cut_candidate(layout, mark.message, mark.characters, "explicit")
    message = chat.messages[mark.message]
    content = message.get("content")
    following = [
        number
        for number, part in enumerate(content if isinstance(content, list) else ())
        if mark.part is not None and number > mark.part and isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    if following:
        number = following[0]
        part = {**content[number], "text": sentinel_for(content[number]["text"])}
        changed = {**message, "content": [*content[:number], part]}
        before = layout.keys.after[mark.message - 1] if mark.message else layout.keys.head
        # The message's role and other fields belong to the key; the marks themselves move nothing.
        beside = {name: value for name, value in message.items() if name not in ("content", *MARKS)}
        shape = canonical([beside, [without_marks(each) for each in content[:number]]])
        key = digest("part", before, shape, str(mark.message == layout.last).encode())
        return Candidate("explicit", key, _ending_with(layout, mark.message, changed), mark.message)
    if layout.first is not None and mark.message < layout.first:
        if mark.message + 1 == layout.first:
            return system_candidate(layout)
        return None
    return _end_of(layout, mark.message, "explicit") if mark.message < len(chat.messages) - 1 else None


def cut_candidate(layout: PromptLayout, index: int, characters: int, kind: Kind) -> Candidate | None:
    """So many characters into the text of message `index`."""
    text = layout.chat.texts[index]
    if text is None or not 0 < characters < len(text):
        return None
    key = cut_key(layout, index, xxh3_128_digest(text[:characters].encode(errors="surrogatepass")))
    return Candidate(kind, key, _cut(layout, index, characters), index)


def cut_key(layout: PromptLayout, index: int, head: bytes) -> bytes:
    """Content key of a beginning of the text of message `index`; `head` is the hash of that beginning."""
    return digest("cut", layout.keys.before[index], b"last" if index == layout.last else b"earlier", head)


def with_last_text(layout: PromptLayout, text: str | None) -> dict[str, Any]:
    """The chat with its last text replaced, by a sentinel if `text` is None."""
    messages, last = list(layout.chat.messages), layout.last
    messages[last] = with_text(messages[last], sentinel_for(layout.chat.texts[last] or "") if text is None else text)
    return {**layout.chat.body, "messages": messages}


def with_text_at(layout: PromptLayout, index: int, text: str) -> dict[str, Any]:
    """The chat with another text in message `index`; what follows goes, unless it follows the last text."""
    if index == layout.last:
        return with_last_text(layout, text)
    return _ending_with(layout, index, with_text(layout.chat.messages[index], text))


def _cut(layout: PromptLayout, index: int, characters: int) -> dict[str, Any]:
    """The chat with a sentinel so many characters into the text of message `index`."""
    text = layout.chat.texts[index] or ""
    return with_text_at(layout, index, text[:characters] + sentinel_for(text[characters:]))


def _end_of(layout: PromptLayout, index: int, kind: Kind) -> Candidate:
    body = {**layout.chat.body, "messages": list(layout.chat.messages[: index + 1]), "add_generation_prompt": False}
    body.pop("continue_final_message", None)
    return Candidate(kind, layout.keys.after[index], body, None)


def _ending_with(layout: PromptLayout, index: int, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The chat up to message `index`, with that one `changed`."""
    messages: list[Any] = [*layout.chat.messages[:index], changed]
    if layout.chat.roles[index] == "system":
        messages.append({"role": "user", "content": "Quartz"})  # templates want one to answer
    body = {**layout.chat.body, "messages": messages}
    if not layout.generates:
        body.pop("continue_final_message", None)
    return body
