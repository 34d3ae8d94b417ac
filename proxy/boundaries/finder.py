"""Boundaries of a chat: where a beginning of its prompt ends that others may share, as entries of a hint.

Nothing is rendered or tokenised for that, and nothing is waited for: the entries come from facts of the template
(`template_facts`) and from positions that an engine has told of this very head. What is not known yet means fewer
entries.
"""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter

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
        if chat.marks:
            search.at_marks()
        if not layout.alone:
            search.at_earlier_questions()
        if by_texts and self._learner is not None:
            search.inside_texts(self._learner)
        return search.found(renderer_id)


class _Search:
    def __init__(
        self, layout: PromptLayout, facts: TemplateFacts | None, positions: PositionCache, size: int, rate: float
    ) -> None:
        self._layout, self._chat, self._positions = layout, layout.chat, positions
        self._facts = facts if not self._chat.is_bare else None
        self._tools = bool(self._chat.body.get("tools"))
        is_moved = not layout.alone and self._head_moves()
        self._moved = layout.first if is_moved else -1  # nothing up to this message stays in its place
        lengths = [len(text) if text is not None else 0 for text in reversed(self._chat.texts)]
        self._behind = [*accumulate(lengths, initial=0)][::-1]  # characters from message i on
        self._size, self._rate = size, rate
        self._boundaries: list[Boundary] = []
        # Beginnings that end inside a message: content parts and characters before their end, and their key.
        self._inside: dict[int, list[tuple[int, int, bytes]]] = {}
        self._unplaced: list[Place] = []
        self._end: int | None = None  # tokens behind the last message, if that ends a turn

    def between_messages(self) -> None:
        """The ends of the system prompt, of what precedes the last text, and of turns."""
        layout, chat, facts = self._layout, self._chat, self._facts
        if chat.is_bare:
            return
        system_key = layout.system_key
        if not layout.alone and (layout.first or self._tools):
            self._add("system", system_key, self._first_opener(), layout.first)
        kind: Kind = "system" if layout.alone and (layout.last or self._tools) else "history"
        self._add(kind, layout.key, self._opener_of(layout.last), layout.last)
        # What nothing tells is to be rendered once.
        place = Place(layout.key, layout.last) if self._moved >= 0 else Place(system_key, layout.first)
        if facts is not None and _is_one_text(chat, place.message):
            for each in self._boundaries:
                if each.key == place.key and not each.entry:
                    self._unplaced.append(place)
        if (loop := layout.end_before_loop) is not None:
            self._add("turn", layout.keys.after[loop], None, loop + 1)
        roles, end = chat.roles, None
        if layout.turn_key is None:
            return
        if facts is not None:
            role = roles[-1] if isinstance(roles[-1], str) else ""  # a client may write anything
            system = roles[0] == "system"
            if not facts.turn_holds(role, later=len(roles) > 1 + system, system=system, tools=self._tools):
                if not layout.alone and (entry := self._before_what_moves(facts)) is not None:
                    self._add("turn", layout.keys.after[layout.last - 1], entry, layout.last)
                return
            # A prompt's last token is always computed, so nothing is found behind it.
            if (behind := facts.ends.get(role)) is not None:
                self._end = max(behind, 1)
                end = -self._end
        self._add("turn", layout.turn_key, end, len(roles))

    def at_marks(self) -> None:
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
                key = layout.openers[following] if is_open else layout.keys.after[mark.message]
                self._add("explicit", key, self._opener_of(following) if is_open else None, following)

    def at_earlier_questions(self) -> None:
        layout, roles = self._layout, self._chat.roles
        if self._chat.is_bare or roles[layout.last] != "user":
            return
        left = EARLIER_QUESTIONS
        for index in range(layout.last - 1, layout.first, -1):
            if roles[index] == "user" and left:
                left -= 1
                if (entry := self._opener_of(index)) is not None:
                    self._add("history", layout.openers[index], entry, index)

    def inside_texts(self, learner: DivergenceLearner) -> None:
        """Beginnings of texts after which recent requests diverged."""
        for index, cut in learner.shared_texts(self._layout):
            key = self._layout.cut_key(index, cut.key)
            behind = self._behind[index] - len(cut.text)
            self._inside.setdefault(index, []).append((_last_text_at(self._layout.chat, index), len(cut.text), key))
            self._boundaries.append(Boundary("learned", key, None, self._positions.get(key), self._estimate(behind)))

    def found(self, renderer_id: bytes) -> Found:
        layout = self._layout
        self._boundaries.sort(key=attrgetter("estimate"))  # one measure for all
        result: LookupResult = "none"
        for boundary in self._boundaries:
            entry = boundary.entry
            if isinstance(entry, str) or (entry is not None and entry <= 0):
                result = "learnt"
            elif entry is not None and result == "none":
                result = "head"
        failure = None
        if result == "none" and not self._chat.is_bare:
            failure = "no_facts" if self._facts is None else "no_boundary"
        end = self._end if self._facts is not None and self._facts.is_own else None  # else good for a hint only
        prefixes: list[bytes] = []
        for index, key in enumerate(layout.keys.after):
            if index > self._moved and index in layout.openers:
                prefixes.append(layout.openers[index])
            if index in self._inside:
                prefixes += [inside for _, _, inside in sorted(self._inside[index])]
            prefixes.append(key)
        made = tuple(self._boundaries), tuple(prefixes), result, failure
        return Found(*made, layout, renderer_id, end, tuple(self._unplaced), layout.turn_key)

    def _add(self, kind: Kind, key: bytes, entry: Entry | None, message: int) -> None:
        """A boundary before what message `message` says."""
        if message <= self._moved:
            return
        for boundary in self._boundaries:
            if boundary.key == key:
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

    def _head_moves(self) -> bool:
        """Whether the template writes tools and system prompt into the last user message, so that they have moved.

        What was told of this head in a shorter chat is not true here then.
        """
        layout, facts = self._layout, self._facts
        if facts is None or not (layout.first or self._tools) or ("first", self._tools) in facts.openers:
            return False
        return not facts.turn_holds("user", later=False, system=bool(layout.first), tools=self._tools)

    def _first_opener(self) -> str | None:
        first = self._layout.first
        if self._facts is None or self._chat.roles[first] != "user":
            return None
        opener = self._facts.openers.get(("first", self._tools))
        if opener is None or self._texts_hold(opener, 0, first):
            return None
        return encode_opener(opener, "first")

    def _opener_of(self, index: int) -> str | None:
        """Behind the opener of message `index`, counted from the prompt's end."""
        roles = self._chat.roles
        if self._facts is None:
            return None
        place: OpenerPlace = "alone" if self._layout.alone else "user"
        if is_result := roles[index] != "user":
            place = "results" if index and roles[index - 1] in RESULT_ROLES else "tool"
        if (opener := self._facts.openers.get((place, self._tools))) is None:
            return None
        later = 0
        if index < self._layout.last:
            behind = [role for role in roles[index + 1 :] if role in OPEN_ROLES]
            later = behind.count("user")
            is_told = opener.no_tool or (opener.per_user and later == len(behind) and not self._tools)
            if is_result or not is_told:
                return None  # how often it stands behind this place is not known
        return encode_opener(opener, "last", later + self._texts_hold(opener, index, len(roles)))

    def _before_what_moves(self, facts: TemplateFacts) -> str | None:
        """Where the next turn parts from a chat whose last question has the tools or the system prompt in it."""
        layout, end = self._layout, len(self._chat.messages)
        opener = facts.openers.get(("next", self._tools))
        if opener is None or layout.last != end - 1:
            return None
        moves = self._texts_hold(opener, 0, layout.first) if self._moved >= 0 else 0
        return encode_opener(opener, "last", moves + self._texts_hold(opener, layout.last, end))

    def _texts_hold(self, opener: Opener, start: int, end: int) -> int:
        """How often the opener's own text occurs in messages [start, end), in their calls and thinking as well.

        A text that holds a template's markers is tokenised as if these were the template's.
        """
        if not (wanted := opener.text):
            return 0
        count, rest = 0, [*self._chat.messages[start:end]]
        while rest:
            value = rest.pop()
            if isinstance(value, dict):
                rest += value.values()
            elif isinstance(value, list | tuple):
                rest += value
            elif isinstance(value, str):
                found = value.count(wanted)
                if "\n" in wanted and "\\n" in value:  # arguments are JSON, and some templates write what it says
                    found = max(found, value.replace("\\n", "\n").count(wanted))
                count += found
        return count


def _last_text_at(chat: Chat, index: int) -> int:
    """Number of content parts before the text of message `index`."""
    content = chat.messages[index]["content"]
    last = last_text_part(content)
    return next((number for number, part in enumerate(listed(content)) if part is last), 0)


def _is_one_text(chat: Chat, index: int) -> bool:
    if chat.texts[index] is None:
        return False
    content = chat.messages[index]["content"]
    return not isinstance(content, list) or len(content) == 1


def _ends_message(chat: Chat, mark: Mark) -> bool:
    """Whether nothing of its message stands behind the mark."""
    if mark.characters is not None:
        return False
    return mark.part is None or mark.part == len(chat.messages[mark.message]["content"]) - 1
