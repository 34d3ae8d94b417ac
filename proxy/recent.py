"""Recent requests, to say what changed: the message, tool or setting where a request leaves the one it is most alike.

Hashes of each part, and the tokens of the prompt where it was rendered, bounded in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from proxy.canonical import HEAD_FIELDS, canonical
from proxy.places import Layout
from proxy.sentinel import common_prefix, text_of
from proxy.tokens import Tokens

MAX_REQUESTS = 64
# Shared content behind a change has to be this long (bytes) and longer than what changed, to call it a change of the
# prefix; else the request is simply another one.
MIN_BEHIND = 128
EXCERPT_CHARACTERS = 80

What = Literal["tool", "message", "setting"]


class Part(NamedTuple):
    """A tool or a message of a request."""

    own: int  # hash of it alone
    size: int  # bytes, roughly


class Change(NamedTuple):
    """Where a request first differs from the nearest recent one."""

    what: What
    index: int | None  # of the message or tool
    role: str | None  # of the message; the name of a tool or a setting
    token: int | None  # first token that differs, None where one of the prompts was not rendered
    characters: int | None  # into the message's text
    behind: int  # bytes that both have behind it
    salt: bool = False  # the cache salt is all that differs
    old: Any = None  # the recent request's part, and this one's: for the rules that look for volatile text
    new: Any = None

    def as_json(self, excerpts: bool) -> dict[str, Any]:
        """For a page; prompt text only with `excerpts`."""
        told = {"what": self.what, "index": self.index, "role": self.role, "token": self.token}
        told["characters"] = self.characters
        if excerpts:
            told["before"], told["now"] = (_excerpt(part, self.characters) for part in (self.old, self.new))
        return told


@dataclass(eq=False)
class Recent:
    """One request as remembered."""

    settings: dict[str, int]  # hash by head field
    tools: tuple[Part, ...]
    messages: tuple[Part, ...]
    raw_tools: Sequence[Any]
    raw_messages: Sequence[Any]
    tokens: Tokens | None
    number: int = 0
    parts: frozenset[int] = field(default_factory=frozenset)

    @property
    def size(self) -> int:
        """Bytes it keeps alive."""
        texts = sum(part.size for part in (*self.tools, *self.messages))
        return (
            1000 + 100 * (len(self.messages) + len(self.tools)) + texts + (len(self.tokens.raw) if self.tokens else 0)
        )


def remembered(layout: Layout, tokens: Tokens | None) -> Recent:
    """The request of `layout` as it is to be remembered."""
    body = layout.chat.body
    raw_tools = body.get("tools") if isinstance(body.get("tools"), list) else []
    settings = {
        name: xxh3_64_intdigest(canonical(body.get(name)))
        for name in HEAD_FIELDS
        if name != "tools" and body.get(name) is not None
    }
    tools = tuple(Part(xxh3_64_intdigest(raw := canonical(tool)), len(raw)) for tool in raw_tools)
    messages = tuple(
        Part(own, len(text_of(message) or "") + 20)
        for own, message in zip(layout.keys.own, layout.chat.messages, strict=True)
    )
    parts = frozenset(part.own for part in (*tools, *messages))
    return Recent(settings, tools, messages, raw_tools, layout.chat.messages, tokens, 0, parts)


class RecentRequests:
    """The last few dozen requests; one that continues another takes its place."""

    def __init__(self, size: int) -> None:
        """`size` in bytes; 0 keeps nothing, and no change is ever named."""
        self._size = size
        self._number = 0
        self._requests: list[Recent] = []

    def add(self, request: Recent) -> None:
        """Remember it as the newest."""
        if not self._size:
            return
        self._number += 1
        request.number = self._number
        self._requests = [other for other in self._requests if not _continues(request, other)]
        self._requests.append(request)
        while len(self._requests) > MAX_REQUESTS or (self._requests and self.held > self._size):
            del self._requests[0]

    @property
    def held(self) -> int:
        """Bytes kept."""
        return sum(request.size for request in self._requests)

    def change(self, request: Recent) -> Change | None:
        """Where `request` leaves the nearest of those before it; None where it leaves none in the middle.

        A request that shares nothing behind its first difference is another request, not a changed one.
        """
        changes = [
            found
            for other in reversed(self._requests)
            if other is not request and (other.parts & request.parts) and (found := _difference(request, other))
        ]
        return max(changes, key=lambda change: change.behind, default=None)


def _continues(request: Recent, other: Recent) -> bool:
    length = len(other.messages)
    same = request.settings == other.settings and request.tools == other.tools
    return same and request.messages[: max(0, length)] == other.messages


def _difference(new: Recent, old: Recent) -> Change | None:
    salts = new.settings.get("cache_salt"), old.settings.get("cache_salt")
    token = new.tokens.common_prefix(old.tokens) if new.tokens is not None and old.tokens is not None else None
    names = (name for name in HEAD_FIELDS if name not in ("tools", "cache_salt"))
    setting = next((name for name in names if new.settings.get(name) != old.settings.get(name)), None)
    if setting == "model":
        return None
    tool = _first_difference(new.tools, old.tools)
    message = _first_difference(new.messages, old.messages)
    whole = _bytes(new.messages[:message]) + _bytes(new.tools)
    if salts[0] != salts[1]:
        alike = setting is None and tool is None and whole >= MIN_BEHIND
        return Change("setting", None, "cache_salt", 0, None, whole, salt=True) if alike else None
    if setting is not None:
        # A setting that only the end of the prompt shows parts nothing.
        if tool is not None or whole < MIN_BEHIND or (token is not None and token * 2 > len(new.tokens or ())):
            return None
        return Change("setting", None, setting, token, None, whole)
    if tool is not None:
        behind = _shared_behind(new.tools, old.tools, tool) + _bytes(new.messages[: message or len(new.messages)])
        if behind < MIN_BEHIND:
            return None
        name = _tool_name(new.raw_tools[tool]) if tool < len(new.tools) else _tool_name(old.raw_tools[tool])
        parts = (old.raw_tools, new.raw_tools)  # the whole lists: an order is a matter of all of them
        return Change("tool", tool, name, token, None, behind, False, *parts)
    if message is None or message >= len(new.messages) or message >= len(old.messages):
        return None  # one continues the other, or is cut off earlier
    behind = _shared_behind(new.messages, old.messages, message)
    here, there = new.raw_messages[message], old.raw_messages[message]
    texts = text_of(here), text_of(there)
    characters = common_prefix(*texts) if None not in texts else None
    changed = new.messages[message].size
    role = here.get("role") if isinstance(here, Mapping) else None
    if role in ("system", "developer") and characters is not None:
        behind += characters if characters >= MIN_BEHIND else 0
        behind += _common_end(*texts)
        changed -= characters
    if behind < MIN_BEHIND or behind < changed:
        return None
    return Change("message", message, role, token, characters, behind, False, there, here)


def _first_difference(new: Sequence[Part], old: Sequence[Part]) -> int | None:
    if new == old:
        return None
    both = zip(new, old, strict=False)
    return next((i for i, (one, other) in enumerate(both) if one.own != other.own), min(len(new), len(old)))


def _shared_behind(new: Sequence[Part], old: Sequence[Part], index: int) -> int:
    theirs = {part.own for part in old[index:]}
    return sum(part.size for part in new[index:] if part.own in theirs)


def _bytes(parts: Sequence[Part]) -> int:
    return sum(part.size for part in parts)


def _common_end(new: str, old: str) -> int:
    return common_prefix(new[::-1], old[::-1])


def _tool_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _excerpt(part: Any, characters: int | None) -> str:
    text = text_of(part)
    if text is None:
        text = json.dumps(part, ensure_ascii=False)
    start = max(0, (characters or 0) - EXCERPT_CHARACTERS // 2)
    return text[start : start + EXCERPT_CHARACTERS]
