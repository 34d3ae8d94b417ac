"""What changed since a recent request: the message, tool or setting where a request differs from the one most like it.

Recent requests are remembered as hashes of their parts, with the tokens of the prompt if it was rendered, bounded in
bytes. A change that is only volatile text (a date, an order of tools) is recognised, so that its cure can be named.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from proxy.boundaries.layout import PromptLayout
from proxy.boundaries.token_ids import TokenIds, common_prefix
from proxy.chat.canonical import HEAD_FIELDS, canonical, own_hash
from proxy.chat.chat import listed, text_of
from proxy.chat.rewrites import sorted_by_name

MAX_REQUESTS = 64

ENTRY_BYTES = 2000  # of a request beside its texts and tokens

MESSAGE_BYTES = 500  # of a message beside its text

# A change of the prefix has this much shared content behind it (bytes), and more than what changed; otherwise the
# request is simply another one.
MIN_BEHIND = 128

EXCERPT_CHARACTERS = 80

MAX_ROLE_CHARACTERS = 64

DATES = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:Z|[+-]\d{2}:?\d{2})?)?|\b\d{1,2}:\d{2}(?::\d{2})?\b"
    r"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{1,2},? \d{4}"
    r"|\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{4}"
)

COUNTERS = re.compile(
    r"<total_tokens>[^<]{0,40}</total_tokens>|(?<![\d,])\d[\d,]{0,15} tokens (?:left|remaining|used)\b"
)

FOLDERS = re.compile(r"(?im)^[^\n]{0,200}\b(?:working directory|cwd|current directory)\b.*$")

# Longer parts are not searched for volatile text: several patterns run over a part on the event loop.
MAX_CHARACTERS = 200_000

MAX_NESTING = 50

What = Literal["tool", "message", "setting"]


class Part(NamedTuple):
    """A tool or a message of a request."""

    hash: int  # of it alone
    size: int  # bytes, roughly


class PrefixChange(NamedTuple):
    """Where a request first differs from the nearest recent one."""

    what: What
    position: int | None  # of the message or tool
    role: str | None  # of the message; the name of a tool or a setting
    token: int | None  # first token that differs, None if one of the prompts was not rendered
    characters: int | None  # into the message's text
    behind: int  # bytes that both have behind it
    salt: bool = False  # the cache salt is all that differs
    old: Any = None  # the recent request's part, and this one's: for the rules that look for volatile text
    new: Any = None

    def as_json(self, excerpts: bool) -> dict[str, Any]:
        """For a page; prompt text only with `excerpts`."""
        # A client may write anything as a role; only text is shown.
        role = self.role[:MAX_ROLE_CHARACTERS] if isinstance(self.role, str) else None
        shown: dict[str, Any] = {"what": self.what, "index": self.position, "role": role, "token": self.token}
        shown["characters"] = self.characters
        if excerpts:
            shown["before"], shown["now"] = (_excerpt(part, self.characters) for part in (self.old, self.new))
        return shown


class Volatile(NamedTuple):
    """A kind of text that changes from request to request."""

    name: str
    neutral: Callable[[Any], Any]  # a part (the list of tools, a message) without its volatile text


class RememberedRequest:
    """One request as remembered; what is compared is computed when a comparison is wanted."""

    def __init__(self, layout: PromptLayout, tokens: TokenIds | None, size: int, owner: str | None = None) -> None:
        """`size` in bytes, of the text it keeps alive; `owner` is the API key it came with."""
        self.owner = owner
        self.layout = layout
        self.tokens = tokens
        held = size * (2 if layout.chat.native is not None else 1)  # converted, and as it came
        self.size = ENTRY_BYTES + held + MESSAGE_BYTES * len(layout.chat.messages)
        self.size += len(tokens.raw) if tokens is not None else 0

    @cached_property
    def settings(self) -> dict[str, int]:
        """Hash by head field."""
        body = self.layout.chat.body
        names = [name for name in HEAD_FIELDS if name != "tools" and body.get(name) is not None]
        return {name: xxh3_64_intdigest(canonical(body[name])) for name in names}

    @property
    def raw_tools(self) -> Sequence[Any]:
        return listed(self.layout.chat.body.get("tools"))

    @property
    def raw_messages(self) -> Sequence[Any]:
        return self.layout.chat.messages

    @cached_property
    def tools(self) -> tuple[Part, ...]:
        return tuple(Part(xxh3_64_intdigest(raw := canonical(tool)), len(raw)) for tool in self.raw_tools)

    @cached_property
    def messages(self) -> tuple[Part, ...]:
        chat = self.layout.chat
        return tuple(
            Part(own_hash(message), len(text or "") + 20)
            for message, text in zip(chat.messages, chat.texts, strict=True)
        )

    @cached_property
    def parts(self) -> frozenset[int]:
        """Hashes of all tools and messages."""
        return frozenset(part.hash for part in (*self.tools, *self.messages))


class RequestMemory:
    """The last few dozen requests; one that continues another takes its place."""

    def __init__(self, size: int) -> None:
        """`size` in bytes; 0 keeps nothing, and no change is ever named."""
        self._size = size
        self.held = 0
        self._requests: OrderedDict[bytes, RememberedRequest] = OrderedDict()  # by the key after their last message

    def add(self, request: RememberedRequest) -> None:
        """Remember it as the newest."""
        if request.size > self._size:
            return
        for key in request.layout.keys.after:
            if key in self._requests:
                self.held -= self._requests.pop(key).size
        self._requests[request.layout.keys.after[-1]] = request
        self.held += request.size
        while len(self._requests) > MAX_REQUESTS or self.held > self._size:
            _, oldest = self._requests.popitem(last=False)
            self.held -= oldest.size

    def change(self, request: RememberedRequest) -> PrefixChange | None:
        """Where `request` differs from the nearest of the others; None if it differs from none in the middle.

        A request that shares nothing behind its first difference is another request, not a changed one.
        """
        changes = [
            found
            for other in reversed(self._requests.values())
            # A client does not even learn that another client's request is alike.
            if other is not request
            and other.owner == request.owner
            and (other.parts & request.parts)
            and (found := _difference(request, other))
        ]
        return max(changes, key=lambda change: change.behind, default=None)


def _difference(new: RememberedRequest, old: RememberedRequest) -> PrefixChange | None:
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
        return PrefixChange("setting", None, "cache_salt", 0, None, whole, salt=True) if alike else None
    if setting is not None:
        # A setting that shows only at the end of the prompt changes no prefix.
        if tool is not None or whole < MIN_BEHIND or (token is not None and token * 2 > len(new.tokens or ())):
            return None
        return PrefixChange("setting", None, setting, token, None, whole)
    if tool is not None:
        behind = _shared_behind(new.tools, old.tools, tool) + _bytes(
            new.messages if message is None else new.messages[:message]
        )
        if behind < MIN_BEHIND:
            return None
        name = _tool_name(new.raw_tools[tool]) if tool < len(new.tools) else _tool_name(old.raw_tools[tool])
        parts = (old.raw_tools, new.raw_tools)  # the whole lists, because an order concerns all tools
        return PrefixChange("tool", tool, name, token, None, behind, False, *parts)
    if message is None or message >= len(new.messages) or message >= len(old.messages):
        return None  # one continues the other, or is cut off earlier
    behind = _shared_behind(new.messages, old.messages, message)
    here, there = new.raw_messages[message], old.raw_messages[message]
    new_text, old_text = new.layout.chat.texts[message], old.layout.chat.texts[message]
    texts = (new_text, old_text) if new_text is not None and old_text is not None else None
    characters = common_prefix(*texts) if texts is not None else None
    changed = new.messages[message].size
    role = new.layout.chat.roles[message]
    if role in ("system", "developer") and texts is not None and characters is not None:
        behind += characters if characters >= MIN_BEHIND else 0
        behind += _common_end(*texts)
        changed -= characters
    if behind < MIN_BEHIND or behind < changed:
        return None
    return PrefixChange("message", message, role, token, characters, behind, False, there, here)


def _first_difference(new: Sequence[Part], old: Sequence[Part]) -> int | None:
    if new == old:
        return None
    both = zip(new, old, strict=False)
    return next((i for i, (one, other) in enumerate(both) if one.hash != other.hash), min(len(new), len(old)))


def _shared_behind(new: Sequence[Part], old: Sequence[Part], index: int) -> int:
    theirs = {part.hash for part in old[index:]}
    return sum(part.size for part in new[index:] if part.hash in theirs)


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


def _without(pattern: re.Pattern[str]) -> Callable[[Any], Any]:
    def neutral(part: Any) -> Any:
        text = text_of(part)
        return pattern.sub("", text) if text is not None and len(text) <= MAX_CHARACTERS else None

    return neutral


def _keys_sorted(tools: Any) -> Any:
    return _sorted(tools) if isinstance(tools, list | tuple) else None


def _sorted(value: Any, depth: int = 0) -> Any:
    if depth == MAX_NESTING:
        return value
    if isinstance(value, dict):
        return {name: _sorted(value[name], depth + 1) for name in sorted(value)}
    return [_sorted(item, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def _without_thinking(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("role") != "assistant":
        return None
    return {name: value for name, value in part.items() if name not in ("reasoning", "reasoning_content")}


VOLATILE = (
    Volatile("tools_sorted", sorted_by_name),
    Volatile("tool_keys_sorted", _keys_sorted),
    Volatile("dates", _without(DATES)),
    Volatile("token_counters", _without(COUNTERS)),
    Volatile("working_directory", _without(FOLDERS)),
    Volatile("thinking_history", _without_thinking),
)


def volatile_text(change: PrefixChange) -> str | None:
    """The volatile text that this change consists of; "system_moved" if a system turn came or went."""
    if change.old is None or change.new is None:
        return None
    for volatile in VOLATILE:
        if (volatile.name.startswith("tool") and volatile.name != "token_counters") != (change.what == "tool"):
            continue
        old, new = volatile.neutral(change.old), volatile.neutral(change.new)
        if old is not None and new is not None and canonical(old) == canonical(new):
            return volatile.name
    roles = [part.get("role") for part in (change.old, change.new) if isinstance(part, dict)]
    return "system_moved" if "system" in roles and change.position and roles[0] != roles[1] else None
