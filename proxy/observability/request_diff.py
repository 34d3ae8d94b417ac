"""What changed since a recent request: the tool, message or setting where a request leaves the one most like it.

Recent requests are remembered with hashes of their parts, bounded in bytes. A request that continues another one has
not changed. What a change cost is what the other request has as well, but for what any earlier prompt began with. The
search takes a millisecond where nothing is shared, so it is done in steps (`proxy.idle_work`).
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.layout import PromptLayout
from proxy.chat.canonical import HEAD_FIELDS, canonical, head_of, own_hash
from proxy.chat.chat import MESSAGES, listed
from proxy.idle_work import CpuBudget, Steps
from proxy.observability.volatile_text import TextKind, alike, kind_of, says_today

MAX_REQUESTS = 64
ENTRY_BYTES = 2000  # of a request beside its texts
MESSAGE_BYTES = 500  # of a message beside its text

# A change has this much shared content behind it (bytes), and more is shared than changed; otherwise the request is
# simply another one. The same in tokens, of what it cost.
MIN_BEHIND, MIN_LOST = 128, 32

# A template renders a history otherwise if this many tokens of the prompt before are missing: the words that ask for an
# answer, and less than a match unit, are no sign of it.
MIN_MISSING = 64

# Of one core, for all searches, and CPU seconds that are saved up for many at once: a search can take more than all
# else that is done for a request.
SEEK_SHARE, SEEK_SAVED = 0.05, 0.03

EXCERPT_CHARACTERS = 80
MAX_ROLE_CHARACTERS = 64
MAX_TOOL_BYTES = 32_768  # nobody looks into a longer one
CLOSED_ROLES = ("system", "developer")  # what the application writes, the same for many requests

# The salt comes last: it is named only if no other setting differs.
SETTINGS = (*(name for name in HEAD_FIELDS if name not in ("tools", "cache_salt")), "cache_salt")

THINKING = ("reasoning", "reasoning_content")

What = Literal["tool", "message", "setting"]

# What may differ in the text in which a request asks, and it is the same question: what tells the time. At the head of
# a prompt, an id as well.
CLOCK_KINDS: tuple[TextKind, ...] = ("dates", "times")

HEAD_KINDS: tuple[TextKind, ...] = (*CLOCK_KINDS, "uuid")

# What people read of a change, by its kind (the label `text` of `seamark_would_save_tokens_total`): what changed, and
# what to do about it. No cure is applied by itself: each one changes what the model reads.
CHANGE_TEXT: dict[str, tuple[str, str]] = {
    "dates": ("a date", "Move the date behind the rules: to the end of the system prompt, or into a message."),
    "times": ("a time of day", "Move the time behind the rules, into the last user message, or write the date alone."),
    "uuid": ("an id", "Leave the id out of the prompt, or move it behind the rules, into a user message."),
    "number": ("a number", "Move the number behind the rules, into the last user message."),
    "token_counters": (
        "a counter of tokens",
        "Leave the counter out, or append it as a message of its own at the end.",
    ),
    "path": ("a path", "Move the path behind the rules, or use one path for all sessions."),
    "working_directory": (
        "the working directory",
        "Move the working directory behind the rules, into the first user message, or run all sessions under one path.",
    ),
    "git_status": (
        "a git status",
        "Move the git status behind the rules, into a user message; "
        "in Claude Code set `includeGitInstructions` to false.",
    ),
    "tools_sorted": (
        "the order of the tools",
        "List the tools in one order, or switch on the rewrite rule `tools_sorted` (setting rewrite).",
    ),
    "tool_keys_sorted": (
        "the order of keys in a tool",
        "Write the keys of each tool in one order, such as json.dumps(sort_keys=True).",
    ),
    "thinking_history": (
        "thinking in the history",
        "Send earlier thinking back as it came, and have the template keep it: "
        '`chat_template_kwargs: {"truncate_history_thinking": false}` for Nemotron-3.',
    ),
    "system_moved": (
        "a system message in the history",
        "Leave system messages where they were sent first, and append new ones.",
    ),
    "system_merged": (
        "reminders merged into the system prompt",
        "Serve the model with a chat template that takes system messages in the middle: vLLM merges them into the "
        "system prompt for one that does not.",
    ),
}


class ContentPart(NamedTuple):
    hash: int  # of it alone
    size: int  # bytes, roughly


class PrefixChange(NamedTuple):
    """Where a request first differs from the recent one that is most like it."""

    what: What
    position: int | None  # of the tool or message
    role: str | None  # of the message; the name of the tool or setting
    characters: int | None  # into the message's text, or the tool's JSON
    kind: str | None  # of text that is known to change, a key of `CHANGE_TEXT`
    token: int  # of the prompt; all before it is shared with an earlier one
    lost: int  # tokens behind it that the recent request has as well
    old: Any = None  # the recent request's part, and this one's: for excerpts
    new: Any = None

    @property
    def is_salt(self) -> bool:
        return self.what == "setting" and self.role == "cache_salt"

    def as_json(self, excerpts: bool) -> dict[str, Any]:
        """For a page; prompt text only with `excerpts`."""
        shown: dict[str, Any] = {"what": self.what, "index": self.position}
        shown["role"] = self.role[:MAX_ROLE_CHARACTERS] if self.role is not None else None
        shown |= {"token": self.token, "characters": self.characters, "lost": self.lost, "kind": self.kind}
        shown["text"], shown["cure"] = CHANGE_TEXT[self.kind] if self.kind is not None else (None, None)
        if excerpts:
            shown["before"], shown["now"] = (_excerpt(part, self.characters) for part in (self.old, self.new))
        return shown


class Continued(NamedTuple):
    messages: int
    prompt: int  # tokens, 0 if its worker has not reported them


class RememberedRequest:
    """One request as remembered; what is compared is computed when a comparison is wanted."""

    def __init__(self, layout: PromptLayout, size: int, owner: str | None = None) -> None:
        """`size` in bytes, of the parsed request it keeps alive; `owner` is the API key it came with."""
        self.owner = owner
        self.layout = layout
        held = size * (2 if layout.chat.native is not None else 1)  # converted, and as it came
        self.size = ENTRY_BYTES + held + MESSAGE_BYTES * len(layout.chat.messages)
        self.prompt = 0  # tokens; set it when the worker has reported them
        self.number = 0  # in order of arrival
        self.continued: Continued | None = None
        self.tools = listed(layout.chat.body.get("tools"))
        self.messages = layout.chat.messages
        self._values = (*self.tools, *self.messages)
        self.parts: tuple[ContentPart, ...] = ()  # of these, from `prepare` on

    def prepare(self) -> Steps[None]:
        """Hash its tools and messages. Nothing is compared before."""
        if self.parts:
            return
        parts = []
        for tool in self.tools:
            parts.append(ContentPart(xxh3_64_intdigest(raw := canonical(tool)), len(raw)))
            yield
        for message in self.messages:
            parts.append(ContentPart(own_hash(message), _size(message)))
            yield
        self.parts = tuple(parts)

    @cached_property
    def settings(self) -> dict[str, int]:
        head = head_of(self.layout.chat.head)
        return {name: xxh3_64_intdigest(canonical(head[name])) for name in SETTINGS if name in head}

    def part(self, index: int) -> Any:
        """The tool or message; None behind the last one."""
        return self._values[index] if index < len(self._values) else None

    def role(self, index: int) -> str | None:
        """The name of the tool, or the role of the message; None if there is none, or no text."""
        part, name = self.part(index), "role"
        if index < len(self.tools):
            part, name = part.get("function") if isinstance(part, dict) else None, "name"
        role = part.get(name) if isinstance(part, dict) else None
        return role if isinstance(role, str) else None

    def text(self, index: int) -> str | None:
        """The tool as JSON, or the text of the message; None if there is none, or too much."""
        if index >= len(self.tools):
            return _whole_text(self.part(index))
        return _json(self.tools[index]) if self.parts[index].size <= MAX_TOOL_BYTES else None


class RequestMemory:
    """The last few dozen requests; one that continues another takes its place."""

    def __init__(self, size: int, now: Callable[[], float] = time.time) -> None:
        """`size` in bytes; 0 keeps nothing, and no change is ever named. `now`: seconds since the epoch, for dates."""
        self._size = size
        self._now = now
        self.seeking = CpuBudget(SEEK_SHARE, SEEK_SAVED)  # without time left, it is for the caller not to seek
        self.held = 0
        self._added = 0
        # By owner and the key after their last message.
        self._requests: OrderedDict[tuple[str | None, bytes], RememberedRequest] = OrderedDict()

    def add(self, request: RememberedRequest) -> None:
        if not self._size:
            return
        keys = request.layout.keys.after
        self._added += 1
        request.number = self._added
        for index, key in enumerate(keys):
            if (gone := self._requests.pop((request.owner, key), None)) is not None:
                self.held -= gone.size
                request.continued = Continued(index + 1, gone.prompt)
        if request.size > self._size:
            return
        self._requests[request.owner, keys[-1]] = request
        self.held += request.size
        while len(self._requests) > MAX_REQUESTS or self.held > self._size:
            _, oldest = self._requests.popitem(last=False)
            self.held -= oldest.size

    def seek_change(self, request: RememberedRequest, prompt: int, shared: int) -> Steps[PrefixChange | None]:
        """Where `request` differs from the one before it that is most like it; None if it is not like any.

        Nor if that cost nothing: `prompt` are its tokens, with `shared` of which some request before began. If it
        shares a longer beginning with a third one, a change is not what it lost by.
        """
        if request.continued is not None:
            return None
        yield from request.prepare()
        pairs = []
        # Newest first; new ones come between two steps. A client does not even learn that another's request is alike.
        others = [each for each in reversed(self._requests.values()) if each.number < request.number]
        for other in [each for each in others if each.owner == request.owner]:
            if not other.parts:
                yield from other.prepare()
            pairs.append(_Likeness(request, other))
            yield
        longest = max((pair.beginning for pair in pairs), default=0)
        changed: list[_Likeness] = []
        for pair in pairs:
            if pair.beginning + MIN_BEHIND > longest:
                if pair.is_change:
                    changed.append(pair)
                    if pair.is_all_but_equal:
                        break
                yield
        nearest = max(changed, key=lambda pair: pair.behind, default=None)
        return (yield from nearest.change(prompt, shared, self._now())) if nearest is not None else None

    def rendered_otherwise(self, request: RememberedRequest, shared: int) -> Steps[PrefixChange | None]:
        """What a template renders otherwise although the client sent it again as it was; None if nothing.

        `shared`: tokens of its prompt that, as the engine says, an earlier one began with. Only a request that
        continues another one in full can lose by that.
        """
        before = request.continued
        if before is None or before.prompt - shared < MIN_MISSING:
            return None
        yield from request.prepare()
        roles, kind, index = request.layout.chat.roles, "system_merged", 0
        added = roles[before.messages :]
        if request.layout.chat.path != MESSAGES or "system" not in added:
            # Templates drop the thinking of a loop once it is over, that is behind the user message that began it.
            start = next((i for i in range(before.messages - 1, -1, -1) if roles[i] == "user"), 0)
            thoughts = (i for i in range(start, before.messages) if _has_thinking(request.messages[i]))
            kind, index = "thinking_history", next(thoughts, -1) if "user" in added else -1
        if index < 0:
            return None
        # An engine that has forgotten the request before knows of nothing that both begin with.
        tools = len(request.tools)
        had = _bytes(request.parts[: tools + before.messages])
        if 2 * shared * had < _bytes(request.parts[tools : tools + max(index, 1)]) * before.prompt:
            return None
        return PrefixChange("message", index, request.role(tools + index), None, kind, shared, before.prompt - shared)


class _Likeness:
    """A request beside an earlier one; sizes in bytes, roughly."""

    def __init__(self, new: RememberedRequest, old: RememberedRequest) -> None:
        self._new = new
        self._old = old
        differing = (name for name in SETTINGS if new.settings.get(name) != old.settings.get(name))
        self._setting = next(differing, None) if new.settings != old.settings else None  # the first that differs
        self._index = index = common_prefix(new.parts, old.parts)  # of the first parts that differ
        self._is_tool = index < max(len(new.tools), len(old.tools))
        self._position = index if self._is_tool else index - len(new.tools)
        # Whether it differs first in the text in which it asks: as other questions do.
        self._asks = not self._is_tool and self._position == new.layout.last
        texts = self._texts  # of these parts; not kept, as there are many pairs
        self._is_comparable = texts is not None
        self._at = common_prefix(*texts) if texts is not None else 0  # characters
        self._both_begin = _bytes(new.parts[:index]) + self._at  # but for settings
        self.beginning = self._both_begin if self._setting is None else 0  # that both prompts begin with
        self._is_at_head = self.beginning < MIN_BEHIND

    @property
    def _texts(self) -> tuple[str, str] | None:
        """The texts of the parts that differ, if these are versions of one tool, or messages of one role."""
        new, old, index = self._new, self._old, self._index
        if index >= min(len(new.parts), len(old.parts)) or (index < len(new.tools)) != (index < len(old.tools)):
            return None
        if new.role(index) != old.role(index):
            return None
        one, other = new.text(index), old.text(index)
        return (one, other) if one is not None and other is not None else None

    @cached_property
    def behind(self) -> int:
        """What both have behind their first difference."""
        if self._setting is not None:
            return self._both_begin
        return self._alike + _bytes([part for part in self._new.parts[self._index :] if part.hash in self._theirs])

    @property
    def is_all_but_equal(self) -> bool:
        """Whether no other request can be much more like the new one."""
        return self.behind * 8 >= (_bytes(self._new.parts) - self.beginning) * 7

    @cached_property
    def _alike(self) -> int:
        return alike(*texts, self._at) if (texts := self._texts) is not None else 0

    @cached_property
    def _theirs(self) -> set[int]:
        return {part.hash for part in self._old.parts[self._index :]}

    @property
    def is_change(self) -> bool:
        """Whether it is a changed request and not simply another one, as far as sizes tell."""
        new, old, index = self._new, self._old, self._index
        if self._setting is not None:
            salts = new.settings.get("cache_salt"), old.settings.get("cache_salt")
            is_same_cache = self._setting == "cache_salt" or (self._setting != "model" and salts[0] == salts[1])
            return is_same_cache and self.behind >= MIN_BEHIND
        if index == len(new.parts):
            return False
        if self._asks and ((texts := self._texts) is None or not (self._is_at_head or says_today(texts[0], self._at))):
            return False
        if self._is_tool:
            return self.behind >= MIN_BEHIND
        changed = 0 if new.parts[index].hash in self._theirs else new.parts[index].size - self._at - self._alike
        rendered_behind = evidence = self.behind
        if new.role(index) in CLOSED_ROLES:
            evidence += self._at
            rendered_behind += 0 if self._position else self._both_begin - self._at  # the tools, by some templates
        return rendered_behind >= MIN_BEHIND and evidence >= max(MIN_BEHIND, changed)

    def change(self, prompt: int, shared: int, now: float) -> Steps[PrefixChange | None]:
        """What changed, and what it cost; None if that is nothing, or the question is another one."""
        new, old, index = self._new, self._old, self._index
        lost = round(prompt * (self.beginning + self.behind) / _bytes(new.parts)) - shared
        if lost < MIN_LOST:
            return None
        if self._setting is not None:
            return PrefixChange("setting", None, self._setting, None, None, shared, lost)
        kind = yield from self._kind(now)
        if self._asks and kind not in (HEAD_KINDS if self._is_at_head else CLOCK_KINDS):
            return None
        what: What = "tool" if self._is_tool else "message"
        role = (old if self._is_tool and index >= len(new.tools) else new).role(index)
        at = self._at if self._is_comparable else None
        return PrefixChange(what, self._position, role, at, kind, shared, lost, old.part(index), new.part(index))

    def _kind(self, now: float) -> Steps[str | None]:
        new, old = self._new, self._old
        one, other = new.part(self._index), old.part(self._index)
        if self._is_tool:
            if sorted(new.parts[: len(new.tools)]) == sorted(old.parts[: len(old.tools)]):
                return "tools_sorted"
            if self._is_comparable and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
                return "tool_keys_sorted"
        else:
            roles = new.role(self._index), old.role(self._index)
            if roles == ("assistant", "assistant"):
                said = [{name: part[name] for name in part if name not in THINKING} for part in (one, other)]
                if said[0] == said[1]:
                    return "thinking_history"
            if self._position and "system" in roles and roles[0] != roles[1]:
                return "system_moved"
        return (yield from kind_of(*texts, self._at, now)) if (texts := self._texts) is not None else None


def _bytes(parts: Sequence[ContentPart]) -> int:
    return sum(part.size for part in parts)


def _whole_text(message: Any) -> str | None:
    """All text of a message, its parts one behind the other; None if it has none."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in listed(content) if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if texts else None


def _size(message: Any) -> int:
    """Bytes of a message, roughly: its texts, thinking and calls."""
    if not isinstance(message, dict):
        return 20
    texts = _whole_text(message), *(message.get(name) for name in THINKING)
    calls = canonical(message["tool_calls"]) if message.get("tool_calls") else b""
    return 20 + sum(len(text) for text in texts if isinstance(text, str)) + len(calls)


def _json(part: Any) -> str:
    return canonical(part).decode(errors="surrogatepass")


def _excerpt(part: Any, characters: int | None) -> str | None:
    if part is None:
        return None
    text = _json(part) if (found := _whole_text(part)) is None else found
    start = max(0, (characters or 0) - EXCERPT_CHARACTERS // 2)
    return text[start : start + EXCERPT_CHARACTERS]


def _has_thinking(message: Any) -> bool:
    return isinstance(message, dict) and any(isinstance(message.get(name), str) and message[name] for name in THINKING)
