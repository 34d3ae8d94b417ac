"""What changed since a recent request: the message, tool or setting where a request differs from the one most like it.

Recent requests are remembered with hashes of their parts, bounded in bytes. A request that continues another one in
full has not changed, and neither has one that shares more with a third. A change in text of a known kind (a date, an
order of tools) has a cure, which is named. Looking for a change takes milliseconds where nothing is shared, so it is
done in steps (`proxy.idle_work`).
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from proxy.boundaries.layout import PromptLayout
from proxy.chat.canonical import HEAD_FIELDS, canonical, own_hash
from proxy.chat.chat import MESSAGES, listed
from proxy.chat.rewrites import sorted_by_name
from proxy.idle_work import Steps
from proxy.observability.cures import CHANGE_TEXT, TOOLS_BEHIND
from proxy.observability.volatile_text import Difference, Kind, common_end, common_start, differences, says_today

MAX_REQUESTS = 64

# Beginnings of earlier requests that are known by their keys, when their texts are gone; some 100 bytes each.
MAX_BEGINNINGS = 32_768

ENTRY_BYTES = 2000  # of a request beside its texts

MESSAGE_BYTES = 500  # of a message beside its text

# A change of the prefix has this much shared content behind it (bytes), and more than what changed; otherwise the
# request is simply another one.
MIN_BEHIND = 128

# A template renders a history otherwise if this many tokens of the prompt before are missing: the words that ask for an
# answer, and less than a match unit, are no sign of it.
MIN_MISSING_TOKENS = 64

EXCERPT_CHARACTERS = 80

MAX_ROLE_CHARACTERS = 64

# Of the texts that are searched for what differs in them for one request, newest first; they are on the event loop.
MAX_CHARACTERS = 400_000

MAX_PAIRS = 6  # of such texts

# Bytes of text that are hashed or compared in one step, and what a message, or two requests side by side, count as.
STEP_BYTES, PART_WORK, PAIR_WORK = 32_768, 1024, 4096

# Two longer texts (characters) that have nothing in common at so many places, nor their ends, are different texts.
MIN_PROBED, PROBES, PROBE, PROBE_REACH = 512, 8, 32, 2048

MAX_NESTING = 50

CLOSED_ROLES = ("system", "developer")  # what the application writes, the same for many requests

# The salt comes last: it is named only if nothing else differs.
SETTINGS = (*(name for name in HEAD_FIELDS if name not in ("tools", "cache_salt")), "cache_salt")

What = Literal["tool", "message", "setting"]

Kinds = tuple[Kind, ...] | None  # of text that changes; None: any

CLOCK_KINDS: tuple[Kind, ...] = ("dates", "times")

HEAD_KINDS: tuple[Kind, ...] = (*CLOCK_KINDS, "uuid")


class Part(NamedTuple):
    """A tool or a message of a request."""

    hash: int  # of it alone
    size: int  # bytes, roughly


class PrefixChange(NamedTuple):
    """Where a request first differs from the nearest recent one; sizes in bytes, roughly."""

    what: What
    position: int | None  # of the message or tool
    role: str | None  # of the message; the name of a tool or a setting
    characters: int | None  # into the message's text
    behind: int  # that both have behind it, and that is computed again
    salt: bool = False  # the cache salt is all that differs
    old: Any = None  # the recent request's part, and this one's: for excerpts
    new: Any = None
    kind: str | None = None  # of text that is known to change, a key of `CHANGE_TEXT`
    length: int | None = None  # characters that differ
    saves: int = 0  # of `behind`, what would be shared if text of known kinds did not change
    tools: int = 0  # tools that both have, which a template may render behind the change, or before it
    fresh: int = 0  # of this request, what the other one does not have
    total: int = 0  # the request
    missing: int | None = None  # tokens that it cost, if that is known

    def lost(self, prompt: int, shared: int) -> int:
        """Tokens that it cost a prompt of `prompt` tokens, `shared` of which some request before began with."""
        if self.missing is not None:
            return self.missing
        if not self.total:
            return 0
        return max(0, prompt - shared - -(-self.fresh * prompt // self.total))

    def would_save(self, prompt: int, shared: int) -> int:
        """Tokens of those that `CHANGE_TEXT`'s cure would save; 0 if it is of no known kind."""
        if self.kind is None:
            return 0
        if self.missing is not None:
            return self.missing
        if not self.total or not self.behind + self.tools:
            return 0
        saved = self.saves
        if self.saves >= self.behind and self.tools_are_behind(prompt, shared):
            saved += self.tools
        return min(self.lost(prompt, shared), saved * prompt // self.total)

    def tools_are_behind(self, prompt: int, shared: int) -> bool:
        """Whether the template renders the tools behind the system prompt that changed."""
        if self.tools < MIN_BEHIND or not prompt:
            return False
        return shared * self.total < ((self.characters or 0) + self.tools // 2) * prompt

    def cure(self, prompt: int = 0, shared: int = 0) -> str | None:
        """What to do about it, None if it is of no known kind. Lengths in tokens, as for `lost`."""
        known = CHANGE_TEXT.get(self.kind or "")
        if known is None:
            return None
        return f"{known.cure} {TOOLS_BEHIND}" if self.tools_are_behind(prompt, shared) else known.cure

    def as_json(self, excerpts: bool, prompt: int = 0, shared: int = 0) -> dict[str, Any]:
        """For a page; prompt text only with `excerpts`. Lengths in tokens, as for `lost`; 0 if not known."""
        # A client may write anything as a role; only text is shown.
        role = self.role[:MAX_ROLE_CHARACTERS] if isinstance(self.role, str) else None
        shown: dict[str, Any] = {"what": self.what, "index": self.position, "role": role}
        shown["token"] = shared if prompt else None
        shown |= {"characters": self.characters, "length": self.length, "behind": self.behind}
        known = CHANGE_TEXT.get(self.kind or "")
        shown |= {"kind": self.kind, "text": known.short if known is not None else None}
        shown["cure"] = self.cure(prompt, shared)
        shown["lost"] = self.lost(prompt, shared) if prompt else None
        if excerpts:
            shown["before"], shown["now"] = (_excerpt(part, self.characters) for part in (self.old, self.new))
        return shown


class Continued(NamedTuple):
    """The request that another one continues in full."""

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
        self.known = 0  # messages at its beginning that an earlier request began with
        self.continued: Continued | None = None
        # From `prepare` on:
        self.tools: tuple[Part, ...] = ()
        self.messages: tuple[Part, ...] = ()
        self._is_prepared = False

    def prepare(self) -> Steps[None]:
        """Hash its tools and messages. Nothing is compared before."""
        if self._is_prepared:
            return
        tools = yield from _hashed(Part(xxh3_64_intdigest(raw := canonical(tool)), len(raw)) for tool in self.raw_tools)
        messages = yield from _hashed(Part(own_hash(message), _size(message)) for message in self.raw_messages)
        self.tools, self.messages, self._is_prepared = tools, messages, True

    @cached_property
    def settings(self) -> dict[str, int]:
        """Hash by head field."""
        body = self.layout.chat.head
        names = [name for name in HEAD_FIELDS if name != "tools" and body.get(name) is not None]
        return {name: xxh3_64_intdigest(canonical(body[name])) for name in names}

    @property
    def raw_tools(self) -> Sequence[Any]:
        return listed(self.layout.chat.body.get("tools"))

    @property
    def raw_messages(self) -> Sequence[Any]:
        return self.layout.chat.messages

    @cached_property
    def total(self) -> int:
        """Bytes of all tools and messages."""
        return _bytes(self.tools) + _bytes(self.messages)

    @property
    def known_bytes(self) -> int:
        """Bytes of the tools and the `known` messages."""
        return _bytes(self.tools) + _bytes(self.messages[: self.known]) if self.known else 0


class RequestMemory:
    """The last few dozen requests; one that continues another takes its place."""

    def __init__(self, size: int, now: Callable[[], float] = time.time) -> None:
        """`size` in bytes; 0 keeps nothing, and no change is ever named. `now`: seconds since the epoch, for dates."""
        self._size = size
        self._now = now
        self.held = 0
        self._added = 0
        # By owner and the key after their last message.
        self._requests: OrderedDict[tuple[str | None, bytes], RememberedRequest] = OrderedDict()
        # Keys of all beginnings of requests, those that are not remembered any more included.
        self._beginnings: OrderedDict[int, None] = OrderedDict()

    def add(self, request: RememberedRequest) -> None:
        """Remember it as the newest."""
        if not self._size:
            return
        keys = request.layout.keys.after
        self._added += 1
        request.number = self._added
        request.known = self._note_beginnings(request.owner, keys)
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

    def _note_beginnings(self, owner: str | None, keys: Sequence[bytes]) -> int:
        """How many messages at the beginning of a chat an earlier one had; from now on this one is an earlier one."""
        seed = xxh3_64_intdigest((owner or "").encode(errors="surrogatepass"))
        names = [int.from_bytes(key[:8]) ^ seed for key in keys]
        known = next((number for number in range(len(names), 0, -1) if names[number - 1] in self._beginnings), 0)
        if known:
            self._beginnings.move_to_end(names[known - 1])
        self._beginnings |= dict.fromkeys(names[known:])
        while len(self._beginnings) > MAX_BEGINNINGS:
            self._beginnings.popitem(last=False)
        return known

    def seek_change(self, request: RememberedRequest) -> Steps[PrefixChange | None]:
        """Where `request` differs from the nearest of those before it; None if it differs from none in the middle.

        A request that shares nothing behind its first difference is another request, not a changed one. A request that
        continues one in full has not changed, whatever the others are. If it shares a longer beginning with a third
        one, a change is not what it lost by.
        """
        if request.continued is not None:
            return None
        yield from request.prepare()
        pairs: list[_Pair] = []
        work = 0
        for other in list(self._earlier(request)):  # new ones come between two steps
            yield from other.prepare()
            pairs.append(pair := _Pair(request, other))
            if (work := work + PAIR_WORK + pair.compared) > STEP_BYTES:
                work = 0
                yield
        longest = max(request.known_bytes, max((pair.beginning for pair in pairs), default=0))
        nearest = [pair for pair in pairs if pair.beginning + MIN_BEHIND > longest]
        texts = _Texts(self._now())
        changes: list[PrefixChange] = []
        for number, pair in enumerate(sorted(nearest, key=lambda pair: -pair.likeness), 1):
            if (change := (yield from pair.change(texts))) is not None:
                changes.append(change)
            if not number * PAIR_WORK % STEP_BYTES:
                yield
        return max(changes, key=lambda change: change.behind, default=None)

    def rendered_otherwise(self, request: RememberedRequest, shared: int) -> Steps[PrefixChange | None]:
        """What a template renders otherwise although the client sent it again as it was; None if nothing.

        `shared`: tokens of its prompt that, as the engine says, an earlier one began with. Only a request that
        continues another one in full can lose by that.
        """
        before = request.continued
        if before is None or before.prompt - shared < MIN_MISSING_TOKENS:
            return None
        yield from request.prepare()
        chat = request.layout.chat
        roles, added = chat.roles, range(before.messages, len(chat.messages))
        if chat.path == MESSAGES and any(roles[index] == "system" for index in added):
            kind, index = "system_merged", 0
        elif any(roles[index] == "user" for index in added):
            # Templates drop the thinking of a loop once it is over, that is behind the user message that began it.
            start = next((i for i in range(before.messages - 1, -1, -1) if roles[i] == "user"), 0)
            thought = next((i for i in range(start, before.messages) if _has_thinking(chat.messages[i])), None)
            if thought is None:
                return None
            kind, index = "thinking_history", thought
        else:
            return None
        # An engine that has forgotten the request before knows of nothing that both begin with.
        parts = request.messages[: before.messages]
        begins = _bytes(parts[:index]) if index else parts[0].size
        if 2 * shared * (_bytes(request.tools) + _bytes(parts)) < begins * before.prompt:
            return None
        missing = before.prompt - shared
        return PrefixChange("message", index, _text(roles[index]), None, 0, kind=kind, missing=missing)

    def _earlier(self, request: RememberedRequest) -> Iterator[RememberedRequest]:
        """Those that came before it, newest first. A client does not even learn that another's request is alike."""
        for other in reversed(self._requests.values()):
            if other.number < request.number and other.owner == request.owner:
                yield other


class _Texts:
    """Pairs of texts and where they differ, each pair once, within a number of characters and pairs."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._left = MAX_CHARACTERS
        self._known: dict[tuple[int, int, Kinds], list[Difference]] = {}

    def differences(self, new: str, old: str, pair: tuple[int, int], only: Kinds = None) -> Steps[list[Difference]]:
        """None are told if there is no room for them, or one is of a kind not in `only`; `pair` names the texts."""
        if (known := self._known.get((*pair, only))) is not None:
            return known
        if not self.has_room(len(new) + len(old)):
            return []
        self._left -= len(new) + len(old)
        known = self._known[*pair, only] = yield from differences(new, old, self._now, only)
        return known

    def has_room(self, characters: int) -> bool:
        """Whether another pair of so many characters is looked at."""
        return characters <= self._left and len(self._known) < MAX_PAIRS

    def same_but_for_keys(self, new: RememberedRequest, old: RememberedRequest) -> Steps[bool]:
        """Whether the tools of both differ in the order of their keys only; False if there is no room to find out."""
        if [part.size for part in new.tools] != [part.size for part in old.tools]:
            return False
        for number, (one, other) in enumerate(zip(new.tools, old.tools, strict=True)):
            if one.hash == other.hash:
                continue
            if not self.has_room(one.size + other.size):
                return False
            self._left -= one.size + other.size
            if canonical(_sorted(new.raw_tools[number])) != canonical(_sorted(old.raw_tools[number])):
                return False
            yield
        return True


class _Pair:
    """A request beside an earlier one."""

    def __init__(self, new: RememberedRequest, old: RememberedRequest) -> None:
        self._new = new
        self._old = old
        self._setting: str | None = None  # the first that differs
        if new.settings != old.settings:
            self._setting = next(n for n in SETTINGS if new.settings.get(n) != old.settings.get(n))
        self._tool = _first_difference(new.tools, old.tools)
        self._message = _first_difference(new.messages, old.messages)
        self._characters: int | None = None  # that the texts of the first messages that differ begin with together
        self._ends = 0  # ... and end with
        self.compared = 0  # characters
        self.beginning = 0  # bytes of tools and messages that both prompts begin with
        if self._setting is None:
            self.beginning = _bytes(new.tools[: self._tool])
        if self._setting is None and self._tool is None:
            self.beginning += _bytes(new.messages[: self._message])
            self._compare_texts()
            self.beginning += self._characters or 0

    @property
    def likeness(self) -> int:
        """Bytes by which pairs are ranked, before they are looked at more closely."""
        return self.beginning + self._ends

    def _compare_texts(self) -> None:
        new, old, index = self._new, self._old, self._message
        if index is None or index >= len(new.messages) or index >= len(old.messages):
            return  # one continues the other, or is cut off earlier
        texts = whole_text(new.raw_messages[index]), whole_text(old.raw_messages[index])
        if texts[0] is not None and texts[1] is not None and _role(new, index) == _role(old, index):
            start = self._characters = common_start(texts[0], 0, texts[1], 0)
            self._ends = common_end(texts[0], start, len(texts[0]), texts[1], start, len(texts[1]))
            self.compared = self._characters + self._ends

    def change(self, texts: _Texts) -> Steps[PrefixChange | None]:
        """Where the request differs, if it is a changed one and not just another one."""
        if self._setting is not None:
            return self._changed_setting(self._setting)
        if self._tool is not None:
            return (yield from self._changed_tool(self._tool, texts))
        index = self._message
        if index is None or index >= len(self._new.messages) or index >= len(self._old.messages):
            return None
        return (yield from self._changed_message(index, texts))

    def _changed_setting(self, name: str) -> PrefixChange | None:
        new = self._new
        whole = _bytes(new.messages[: self._message]) + _bytes(new.tools)
        is_salt = name == "cache_salt"
        same_cache = is_salt or new.settings.get("cache_salt") == self._old.settings.get("cache_salt")
        if name == "model" or not same_cache or self._tool is not None or whole < MIN_BEHIND:
            return None
        fresh = new.total - whole
        return PrefixChange("setting", None, name, None, whole, is_salt, fresh=fresh, total=new.total)

    def _changed_tool(self, index: int, texts: _Texts) -> Steps[PrefixChange | None]:
        new, old = self._new, self._old
        here, there = list(new.raw_tools), list(old.raw_tools)
        behind = _shared_behind(new.tools, old.tools, index) + _bytes(new.messages[: self._message])
        kind: str | None = None
        if sorted(new.tools) == sorted(old.tools) and sorted_by_name(here) is not None:
            kind = "tools_sorted"
        elif (yield from texts.same_but_for_keys(new, old)):
            kind = "tool_keys_sorted"
        characters = length = None
        name = _tool_name(here[index]) if index < len(here) else _tool_name(there[index])
        is_one = index < min(len(here), len(there)) and name == _tool_name(there[index])
        if kind is None and is_one and texts.has_room(new.tools[index].size + old.tools[index].size):
            one, other = (_as_text(tools[index]) for tools in (here, there))
            if places := (yield from texts.differences(one, other, (new.tools[index].hash, old.tools[index].hash))):
                characters, length, kind = places[0].at, places[0].length, places[0].kind
                behind += sum(place.alike for place in places)
        if behind < MIN_BEHIND:
            return None
        return PrefixChange(
            "tool",
            index,
            name,
            characters,
            behind,
            old=there,  # the whole lists, because an order concerns all tools
            new=here,
            kind=kind,
            length=length,
            saves=behind if kind is not None else 0,
            fresh=max(0, new.total - self.beginning - behind),
            total=new.total,
        )

    def _changed_message(self, index: int, texts: _Texts) -> Steps[PrefixChange | None]:
        new, old = self._new, self._old
        here, there, role = new.raw_messages[index], old.raw_messages[index], _role(new, index)
        places = yield from self._places(index, texts)
        kind: str | None = places[0].kind if places else None
        if self._characters is None:
            kind = _kind_of_messages(here, there, index)
        alike = sum(place.alike for place in places)
        later = _shared_behind(new.messages, old.messages, index)
        behind, tools = alike + later, _bytes(new.tools) if role in CLOSED_ROLES and index == 0 else 0
        if behind + tools < MIN_BEHIND:
            return None  # nothing is lost by it
        if index == new.layout.last and not places:
            return None
        begins = self._characters or 0
        evidence = behind + (begins if role in CLOSED_ROLES and begins >= MIN_BEHIND else 0)
        changed = new.messages[index].size - begins - alike
        if evidence < MIN_BEHIND or (evidence < changed and (kind is None or behind < MIN_BEHIND)):
            return None
        following = _first_difference(new.messages[index + 1 :], old.messages[index + 1 :])
        saves = _saved(places, _bytes(new.messages[index + 1 :][:following])) if places else behind
        return PrefixChange(
            "message",
            index,
            _text(role),
            places[0].at if places else self._characters,
            behind,
            old=there,
            new=here,
            kind=kind,
            length=places[0].length if places else None,
            saves=saves if kind is not None else 0,
            tools=tools,
            fresh=max(0, new.total - self.beginning - behind),
            total=new.total,
        )

    def _places(self, index: int, texts: _Texts) -> Steps[list[Difference]]:
        """Where the texts of message `index` differ; none if they cannot be those of a changed request."""
        new, old = self._new, self._old
        one, other = whole_text(new.raw_messages[index]), whole_text(old.raw_messages[index])
        if self._characters is None or one is None or other is None:
            return []
        kinds: Kinds = None
        if index == new.layout.last:
            # The request's own text: another question, unless all that differs is the time it is asked.
            if not self._is_at_head and not says_today(one, self._characters):
                return []
            kinds = HEAD_KINDS if self._is_at_head else CLOCK_KINDS
        if max(self._characters, self._ends) < MIN_BEHIND and not _resemble(one, other):
            return []
        return (yield from texts.differences(one, other, (new.messages[index].hash, old.messages[index].hash), kinds))

    @property
    def _is_at_head(self) -> bool:
        return self.beginning < MIN_BEHIND


def _hashed(parts: Iterable[Part]) -> Steps[tuple[Part, ...]]:
    """The same parts, so many in a step as have some text in all."""
    found, work = [], 0
    for part in parts:
        found.append(part)
        if (work := work + PART_WORK + part.size) > STEP_BYTES:
            work = 0
            yield
    yield
    return tuple(found)


def _resemble(new: str, old: str) -> bool:
    """Whether two texts may be versions of one; they differ near both ends."""
    if min(len(new), len(old)) < MIN_PROBED:
        return True
    for number in range(1, PROBES + 1):
        here, there = (number * (len(text) - PROBE) // (PROBES + 1) for text in (new, old))
        if old.find(new[here : here + PROBE], max(0, there - PROBE_REACH), there + PROBE_REACH) >= 0:
            return True
    return False


def _role(request: RememberedRequest, index: int) -> Any:
    return request.layout.chat.roles[index]


def _saved(places: Sequence[Difference], following: int) -> int:
    """Bytes behind a change that would be shared if text of known kinds did not change; `following` behind the text."""
    saved = 0
    for place in places:
        if place.kind is None:
            return saved
        saved += place.alike
    return saved + following


def _kind_of_messages(new: Any, old: Any, position: int) -> str | None:
    """The kind of a change that is not one of a text."""
    roles = [part.get("role") if isinstance(part, dict) else None for part in (new, old)]
    if roles == ["assistant", "assistant"]:
        return "thinking_history" if _without_thinking(new) == _without_thinking(old) else None
    return "system_moved" if "system" in roles and position and roles[0] != roles[1] else None


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


def whole_text(message: Any) -> str | None:
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
    size = 20 + len(whole_text(message) or "")
    for name in THINKING:
        if isinstance(message.get(name), str):
            size += len(message[name])
    for call in listed(message.get("tool_calls")):
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        size += 20 + (len(arguments) if isinstance(arguments, str) else 0)
    return size


def _tool_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _as_text(part: Any) -> str:
    return json.dumps(part, ensure_ascii=False)


def _excerpt(part: Any, characters: int | None) -> str:
    text = whole_text(part)
    if text is None:
        text = _as_text(part)
    start = max(0, (characters or 0) - EXCERPT_CHARACTERS // 2)
    return text[start : start + EXCERPT_CHARACTERS]


def _sorted(value: Any, depth: int = 0) -> Any:
    if depth == MAX_NESTING:
        return value
    if isinstance(value, dict):
        return {name: _sorted(value[name], depth + 1) for name in sorted(value)}
    return [_sorted(item, depth + 1) for item in value] if isinstance(value, list | tuple) else value


THINKING = ("reasoning", "reasoning_content")


def _without_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in THINKING}


def _has_thinking(message: Any) -> bool:
    return isinstance(message, dict) and any(isinstance(message.get(name), str) and message[name] for name in THINKING)
