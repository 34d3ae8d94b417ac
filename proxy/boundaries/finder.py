"""Boundaries of a chat: where a beginning of its prompt ends that others may share, as entries of a hint.

Nothing is rendered or tokenised for that, and nothing is waited for: the entries come from facts of the template
(`template_facts`) and from positions that an engine has told of this very head. What is not known yet means fewer
entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

from xxhash import xxh3_128_digest

from proxy.boundaries.boundary import Boundary, Entry, Found, Kind, LookupResult, Place, encode_opener
from proxy.boundaries.divergence import DivergenceLearner
from proxy.boundaries.layout import OPEN_ROLES, RESULT_ROLES, PromptLayout, layout_of
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.template_facts import Opener, OpenerPlace, TemplateFacts
from proxy.chat.chat import TOOLS, Chat, Mark, last_text_part, listed

MAX_MARKS = 8  # of one request that count; the APIs that have them allow four
MAX_MESSAGES = 20_000  # of a chat in which boundaries are sought; a longer one is forwarded without

# Questions before the last one at which a prompt may part from one that is seen for the first time: clients that put
# documents or examples into user messages change the later ones. In a conversation each was the last one once, and has
# its state already.
EARLIER_QUESTIONS = 2


class BoundaryFinder:
    """Finds boundaries, given the facts of a template."""

    def __init__(self, positions: PositionCache, learner: DivergenceLearner | None = None) -> None:
        """With a `learner`, beginnings inside texts that recent requests shared are known to the choice of a worker."""
        self._positions = positions
        self._learner = learner

    def find(
        self,
        chat: Chat | None,
        facts: TemplateFacts | None,
        renderer_id: bytes,
        size: int = 0,
        tokens_per_byte: float = 0.25,
        *,
        by_texts: bool = False,
    ) -> Found:
        """Boundaries of a chat whose request has `size` bytes. `failure` says why there are none.

        `renderer_id` stands for tokenizer and template, whose `facts` are None if they are not learnt yet. `by_texts`:
        look for shared beginnings inside texts, too; the engine finds these by itself, so that serves only to choose
        among several workers.
        """
        if chat is None or len(chat.messages) > MAX_MESSAGES:
            return Found(failure="no_boundary")
        layout = layout_of(chat, renderer_id)
        if layout is None:
            return Found(failure="no_boundary")
        search = _Search(layout, facts, self._positions, size, tokens_per_byte)
        search.between_messages()
        search.at_marks()
        search.at_earlier_questions()
        if by_texts and self._learner is not None:
            search.inside_texts(self._learner)
        return search.found(renderer_id)


class _Search:
    def __init__(
        self, layout: PromptLayout, facts: TemplateFacts | None, positions: PositionCache, size: int, rate: float
    ) -> None:
        self._layout, self._positions = layout, positions
        self._facts = facts if not layout.chat.is_bare else None
        self._tools = bool(layout.chat.body.get("tools"))
        self._moved = layout.first if self._head_moves() else -1  # nothing up to this message stays in its place
        lengths = [len(text) if text is not None else 0 for text in layout.chat.texts]
        self._behind = [*accumulate(reversed(lengths), initial=0)][::-1]  # characters from message i on
        self._size, self._rate = size, rate
        self._boundaries: list[Boundary] = []
        # Beginnings that end inside a message: content parts and characters before their end, and their key.
        self._inside: dict[int, list[tuple[int, int, bytes]]] = {}
        self._unplaced: list[Place] = []
        self._end: int | None = None  # tokens behind the last message, if that ends a turn

    def between_messages(self) -> None:
        """The ends of the system prompt, of what precedes the last text, and of turns."""
        layout, chat = self._layout, self._layout.chat
        if chat.is_bare:
            return
        system_key = layout.system_key
        if not layout.alone and (layout.first or self._tools):
            self._add("system", system_key, self._first_opener(), layout.first)
        kind: Kind = "system" if layout.alone and (layout.last or self._tools) else "history"
        key = system_key if layout.alone else layout.key
        self._add(kind, key, self._opener_of(layout.last), layout.last)
        # What nothing tells is to be rendered once.
        place = Place(key, layout.last) if self._moved >= 0 else Place(system_key, layout.first)
        if self._facts is not None and _is_one_text(chat, place.message):
            self._unplaced += [place for each in self._boundaries if each.key == place.key and not each.entry]
        if (end := layout.end_before_loop) is not None:
            self._add("turn", layout.keys.after[end], None, end + 1)
        if layout.turn_key is not None and self._turn_holds():
            end = self._facts.end(self._last_role) if self._facts is not None else None
            # A prompt's last token is always computed, so nothing is found behind it.
            self._end = max(end, 1) if end is not None else None
            self._add("turn", layout.turn_key, -self._end if self._end is not None else None, len(chat.messages))
        elif layout.turn_key is not None and not layout.alone and (entry := self._before_what_moves()) is not None:
            self._add("turn", layout.keys.after[layout.last - 1], entry, layout.last)

    def at_marks(self) -> None:
        """The ends of what a client marked for caching."""
        layout, chat = self._layout, self._layout.chat
        for mark in chat.marks[:MAX_MARKS]:
            if mark.message == TOOLS or (mark.message < layout.first and _ends_message(chat, mark)):
                self._add("explicit", layout.system_key, self._first_opener(), layout.first)
            elif mark.characters is not None:
                text = (chat.texts[mark.message] or "")[: mark.characters]
                key = layout.cut_key(mark.message, xxh3_128_digest(text.encode(errors="surrogatepass")))
                self._add_inside("explicit", Place(key, mark.message, kept=text))
            elif not _ends_message(chat, mark):
                self._add_inside("explicit", Place(layout.part_key(mark), mark.message, part=mark.part))
            elif mark.message + 1 < len(chat.messages):
                following = mark.message + 1
                is_open = chat.roles[following] in OPEN_ROLES
                key = layout.opener_key(following) if is_open else layout.keys.after[mark.message]
                self._add("explicit", key, self._opener_of(following) if is_open else None, following)

    def at_earlier_questions(self) -> None:
        """Before the questions that precede the last one."""
        layout, roles = self._layout, self._layout.chat.roles
        if layout.chat.is_bare or roles[layout.last] != "user":
            return
        earlier = (index for index in range(layout.last - 1, layout.first, -1) if roles[index] == "user")
        for index in islice(earlier, EARLIER_QUESTIONS):
            if (entry := self._opener_of(index)) is not None:
                self._add("history", layout.opener_key(index), entry, index)

    def inside_texts(self, learner: DivergenceLearner) -> None:
        """Beginnings of texts after which recent requests diverged."""
        for index, cut in learner.shared_texts(self._layout):
            key = self._layout.cut_key(index, cut.key)
            behind = self._behind[index] - len(cut.text)
            self._inside.setdefault(index, []).append((_last_text_at(self._layout.chat, index), len(cut.text), key))
            self._boundaries.append(Boundary("learned", key, None, self._positions.get(key), self._estimate(behind)))

    def found(self, renderer_id: bytes) -> Found:
        layout = self._layout
        boundaries = tuple(sorted(self._boundaries, key=lambda boundary: boundary.estimate))  # one measure for all
        entries = [boundary.entry for boundary in boundaries if boundary.entry is not None]
        result: LookupResult = "none"
        failure = None
        if entries:
            result = "head" if all(isinstance(entry, int) and entry > 0 for entry in entries) else "learnt"
        elif not layout.chat.is_bare:
            failure = "no_facts" if self._facts is None else "no_boundary"
        end = self._end if self._facts is not None and self._facts.is_own else None  # else good for a hint only
        prefixes, unplaced = tuple(self._prefixes()), tuple(self._unplaced)
        return Found(boundaries, prefixes, result, failure, layout, renderer_id, end, unplaced)

    def _prefixes(self) -> list[bytes]:
        layout, roles = self._layout, self._layout.chat.roles
        keys: list[bytes] = []
        for index, key in enumerate(layout.keys.after):
            if roles[index] in OPEN_ROLES and index > self._moved:
                keys.append(layout.opener_key(index))
            keys += (inside for _, _, inside in sorted(self._inside.get(index, ())))
            keys.append(key)
        return keys

    def _add(self, kind: Kind, key: bytes, entry: Entry | None, message: int) -> None:
        """A boundary before what message `message` says."""
        if message <= self._moved or any(boundary.key == key for boundary in self._boundaries):
            return
        tokens = self._positions.get(key)
        # What else a body holds is no part of the prompt.
        estimate = self._estimate(self._behind[message]) if message or self._tools else 0
        self._boundaries.append(Boundary(kind, key, entry if entry is not None else tokens or None, tokens, estimate))

    def _add_inside(self, kind: Kind, place: Place) -> None:
        """A boundary inside a message, which a position remembered of this head tells, or nothing yet."""
        if place.message < self._moved:
            return
        before = place.part + 1 if place.part is not None else _last_text_at(self._layout.chat, place.message)
        self._inside.setdefault(place.message, []).append((before, len(place.kept), place.key))
        tokens = self._positions.get(place.key)
        estimate = self._estimate(self._behind[place.message] - len(place.kept))
        self._boundaries.append(Boundary(kind, place.key, tokens or None, tokens, estimate))
        if not tokens:
            self._unplaced.append(place)

    def _estimate(self, characters_behind: int) -> int:
        return max(0, round((self._size - characters_behind) * self._rate))

    @property
    def _last_role(self) -> str:
        """A client may write anything as a role."""
        role = self._layout.chat.roles[-1]
        return role if isinstance(role, str) else ""

    def _turn_holds(self) -> bool:
        roles, facts = self._layout.chat.roles, self._facts
        system = roles[0] == "system"
        return facts is None or facts.turn_holds(
            self._last_role, later=len(roles) > 1 + system, system=system, tools=self._tools
        )

    def _head_moves(self) -> bool:
        """Whether the template writes tools and system prompt into the last user message, so that they have moved.

        What was told of this head in a shorter chat is not true here then.
        """
        layout = self._layout
        if self._facts is None or layout.alone or not (layout.first or self._tools):
            return False
        if self._facts.opener("first", tools=self._tools) is not None:
            return False
        return not self._facts.turn_holds("user", later=False, system=bool(layout.first), tools=self._tools)

    def _first_opener(self) -> str | None:
        """Behind the opener of the first user text."""
        layout = self._layout
        if self._facts is None or layout.chat.roles[layout.first] != "user":
            return None
        opener = self._facts.opener("first", tools=self._tools)
        if opener is None or self._texts_hold(opener, 0, layout.first):
            return None
        return encode_opener(opener, "first")

    def _opener_of(self, index: int) -> str | None:
        """Behind the opener of message `index`, counted from the prompt's end."""
        layout, roles = self._layout, self._layout.chat.roles
        if self._facts is None:
            return None
        place: OpenerPlace = "alone" if layout.alone else "user"
        if is_result := roles[index] != "user":
            place = "results" if index and roles[index - 1] in RESULT_ROLES else "tool"
        if (opener := self._facts.opener(place, tools=self._tools)) is None:
            return None
        behind = [role for role in roles[index + 1 :] if role in OPEN_ROLES]
        later = behind.count("user")
        is_told = opener.no_tool or (opener.per_user and later == len(behind) and not self._tools)
        if behind and (is_result or not is_told):
            return None  # how often it stands behind this place is not known
        return encode_opener(opener, "last", later + self._texts_hold(opener, index, len(roles)))

    def _before_what_moves(self) -> str | None:
        """Where the next turn parts from a chat whose last question has the tools or the system prompt in it."""
        layout = self._layout
        opener = self._facts.opener("next", tools=self._tools) if self._facts is not None else None
        if opener is None or layout.last != len(layout.chat.messages) - 1:
            return None
        moves = self._texts_hold(opener, 0, layout.first) if self._moved >= 0 else 0
        return encode_opener(opener, "last", moves + self._texts_hold(opener, layout.last, len(layout.chat.messages)))

    def _texts_hold(self, opener: Opener, start: int, end: int) -> int:
        """How often the opener's own text occurs in the texts of messages [start, end).

        A text that holds a template's markers is tokenised as if these were the template's.
        """
        if not opener.text:
            return 0
        messages = self._layout.chat.messages[start:end]
        return sum(_occurrences(opener.text, text) for message in messages for text in _texts_of(message))


def _last_text_at(chat: Chat, index: int) -> int:
    """Number of content parts before the text of message `index`."""
    content = chat.messages[index]["content"]
    last = last_text_part(content)
    return next((number for number, part in enumerate(listed(content)) if part is last), 0)


def _is_one_text(chat: Chat, index: int) -> bool:
    """Whether the content of message `index` is a text and nothing else."""
    if chat.texts[index] is None:
        return False
    content = chat.messages[index]["content"]
    return not isinstance(content, list) or len(content) == 1


def _texts_of(message: Any) -> Iterator[str]:
    """All texts in a message: a template may write calls and thinking, too."""
    rest = [message]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value


def _occurrences(wanted: str, text: str) -> int:
    """How often a template may write `wanted` for a `text`: arguments are JSON, and some write what it says."""
    found = text.count(wanted)
    if "\n" in wanted and "\\n" in text:
        return max(found, text.replace("\\n", "\n").count(wanted))
    return found


def _ends_message(chat: Chat, mark: Mark) -> bool:
    """Whether nothing of its message stands behind the mark."""
    if mark.characters is not None:
        return False
    return mark.part is None or mark.part == len(chat.messages[mark.message]["content"]) - 1
