"""Learning the facts of a chat template from small chats of our own.

Sentinel substitution tells where each chat parts from others like it (`proxy.boundaries.positions`). What stands before
that place in all of them is the opener. The chats differ in everything that could stand near the place: system prompt
(none, empty, ends in a line break), last character of the answer before, tools and their order, ids, text beside a
call, calls side by side and one after another. From chats too alike an opener would take in what they have in common.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.template_facts import GAP, Opener, OpenerPlace, Role, TemplateFacts, Turn

# Token ids of a chat request; none: the template refuses such a chat.
Render = Callable[[Mapping[str, Any]], Awaitable[Sequence[int]]]

Detokenize = Callable[[Sequence[int]], Awaitable[str | None]]  # these ids as text; None: not known
MIN_CHATS = 2  # to learn an opener from
MAX_OPENER = 32  # tokens
# Of a longer opener the first tokens are left out: what stands before may grow together with them.
LONG_OPENER, EDGE = 8, 2

# The first text is full of what texts are full of: an opener that is found in it is none.
RICH = (
    'Quartz\n\n# go\n- "a": {"b": [1, 2]}, `c()`: <d>e</d>; 100 %.\n\n\tf = (x) => "user\\n"\n'
    "User: yes\nAssistant: no\n\n"
    "```py\ndef g(): return {\"h\": 'i'}\n```\n.\n) done: [x] <y> {z}\n\n---\n\n"
    '{\n    "type": "function",\n    "function": {\n        "parameters": {\n            "q": {\n'
    '                "type": "string"\n            }\n        }\n    }\n}\n\n'
    '{"q": {"type": "string"}}}}\n\n{"k": ["q"]}}}]\n\n{"k": ["q"]}}}\n\n{"n": "it"}}]\n\n{"n": {}}}}\n\n</z>\n\n'
    "and so on"
)

# Others, whose first character could merge with the token before; the empty one lets what follows the text do so.
TEXTS = ("\nQuartz", "", "the tide", " Quartz", ")Quartz")


def _tool(name: str, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, **schema}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


# Written as JSON, no two of them end alike.
LOOK = _tool("look")
ASK = _tool("ask", required=["q"])
NOTE = _tool("note", properties={})


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


_system, _user, _answer = (partial(_message, role) for role in ("system", "user", "assistant"))


def _calls(*calls: tuple[str, str, str], text: str = "") -> dict[str, Any]:
    """An answer that calls tools: id (nine letters and digits, as Mistral's templates want), name, arguments."""
    made = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def _result(number: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": text}


def _body(*messages: dict[str, Any], tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"messages": list(messages), **({"tools": list(tools)} if tools else {})}


NEXT_QUESTION = (_answer("Quartz"), _user("Quartz"))


class ProbeChat(NamedTuple):
    """A chat up to its last text."""

    before: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    answers: str = ""  # id of the call that the last message answers; empty: it is a user's

    @property
    def role(self) -> Role:
        return "tool" if self.answers else "user"

    @property
    def users(self) -> int:
        """User messages, the last one included."""
        return [message["role"] for message in self.before].count("user") + (not self.answers)

    @property
    def has_results(self) -> bool:
        return bool(self.answers) or any(message["role"] == "tool" for message in self.before)

    @property
    def place(self) -> OpenerPlace:
        if self.answers:
            return "results" if self.before[-1]["role"] == "tool" else "tool"
        return "user" if self.users > 1 else "alone"

    @property
    def turn(self) -> Turn:
        has_system = bool(self.before) and self.before[0]["role"] == "system"
        return Turn(self.role, self.users > (not self.answers), has_system, bool(self.tools))

    @property
    def head(self) -> tuple[Any, ...]:
        """What stands before the first user text: chats with one head begin alike."""
        return [message for message in self.before if message["role"] == "system"], self.tools

    def body(self, text: str) -> dict[str, Any]:
        return _body(*self.before, _result(self.answers, text) if self.answers else _user(text), tools=self.tools)

    @property
    def following(self) -> tuple[dict[str, Any], ...]:
        """What follows once this one is answered: a question, or the result of the next call."""
        if self.answers:
            return _calls(("abcdef012", "ask", '{"q": "8"}')), _result("abcdef012", "Quartz")
        return NEXT_QUESTION


_LOOKS = _calls(("zyxwvu987", "look", '{"q": "it"}'))
_SIDE_BY_SIDE = _calls(("ghijkl321", "look", '{"q": ")"}'), ("stuvwx654", "ask", '{"q": "x"}'))
_ASIDE = _calls(("zyxwvu987", "look", "{}"), ("mnopqr456", "look", '{"n": [7]}'), text="So.")

# Longer than `GAP`: what stands before the system prompt, or before another result, is no opener of the text behind it.
_LONG = "so it is there, and then it is not; " * 4

_BREAK, _SAY, _EMPTY = _system("Quartz\n\n"), _system(_LONG + "Say )"), _system("")

CHATS = (
    # The only user message.
    ProbeChat((_BREAK,)),
    ProbeChat(()),
    ProbeChat((_SAY,)),
    ProbeChat((_EMPTY,)),
    ProbeChat((_SAY,), (LOOK, ASK)),
    ProbeChat((), (ASK, NOTE)),
    # A later user message.
    ProbeChat((_BREAK, _user("x"), _answer("Two\n"))),
    ProbeChat((_user("go )"), _answer("é"))),
    ProbeChat((_SAY, _user("x"), _answer("done)"), _user("y\n"), _answer("83 jigsaw "))),
    ProbeChat((_SAY, _user("x"), _answer("Well.")), (LOOK, ASK)),
    ProbeChat((_user("go"), _answer("It is\n")), (ASK, NOTE)),
    ProbeChat((_SAY, _user("go"), _LOOKS, _result("zyxwvu987", "there"), _answer("At nine")), (LOOK, ASK)),
    # A tool's result.
    ProbeChat((_SAY, _user("go"), _LOOKS), (LOOK, ASK), answers="zyxwvu987"),
    ProbeChat((_user("x"), _calls(("mnopqr456", "ask", '{"n": 7}'), text="Well")), (ASK,), answers="mnopqr456"),
    ProbeChat(
        (
            _BREAK,
            _user("x"),
            _calls(("zyxwvu987", "ask", '{"q": "7"}'), text="See)"),
            _result("zyxwvu987", _LONG + "there"),
            _calls(("mnopqr456", "look", "{}"), text="\n"),
        ),
        (ASK, LOOK),
        answers="mnopqr456",
    ),
    ProbeChat(
        (_BREAK, _user("x"), _SIDE_BY_SIDE, _result("ghijkl321", _LONG + "{}")), (LOOK, ASK), answers="stuvwx654"
    ),
    ProbeChat(
        (_SAY, _user("x"), _answer("Hm"), _user("go"), _ASIDE, _result("zyxwvu987", _LONG + "so\n")),
        (LOOK, ASK),
        answers="mnopqr456",
    ),
)

# Chats that end in a reminder.
REMINDED = (
    _body(_BREAK, _user("x"), _system("Be brief.\n")),
    _body(_SAY, _user("x"), _answer("done)"), _user("go"), _system(RICH), tools=(LOOK, ASK)),
)

# A question and a tool's result: these become the same under two settings that do the same.
SAMPLES = tuple(next(chat for chat in CHATS if chat.place == place).body("Quartz") for place in ("user", "tool"))


class RenderedChat(NamedTuple):
    """One chat as rendered. Prompts are texts with a character for each token id, since texts are searched fast."""

    chat: ProbeChat
    prompts: Sequence[str]  # with `RICH`, and with others of `TEXTS`
    start: int  # tokens before the last text
    end: int | None  # tokens behind the last message, None: not known
    kept: int | None  # tokens that the following request begins with as well

    @property
    def prompt(self) -> str:
        return self.prompts[0]


async def _prompt(render: Render, body: Mapping[str, Any]) -> str:
    return "".join(map(chr, await render(body)))


async def _probe(render: Render, chat: ProbeChat) -> RenderedChat | None:
    """None if the template refuses such chats."""
    if not (prompt := await _prompt(render, chat.body(RICH))):
        return None
    others = [other for text in TEXTS if (other := await _prompt(render, chat.body(text)))]
    if not others:
        return None
    start = min(common_prefix(prompt, other) for other in others)
    return RenderedChat(chat, (prompt, *others), start, *await _turn(render, chat.body(RICH), prompt, chat.following))


async def _turn(
    render: Render, body: Mapping[str, Any], prompt: str, following: Sequence[Mapping[str, Any]]
) -> tuple[int | None, int | None]:
    """The last two of `RenderedChat`."""
    bare = await _prompt(render, {**body, "add_generation_prompt": False})
    grown = await _prompt(render, {**body, "messages": [*body["messages"], *following]})
    end = len(prompt) - common_prefix(prompt, bare) if bare else None
    return end, common_prefix(prompt, grown) if grown else None


async def learn_facts(render: Render, detokenize: Detokenize) -> TemplateFacts | None:
    """The facts of a template; None if it renders none of our chats. What `render` raises is passed on."""
    probed = [each for chat in CHATS if (each := await _probe(render, chat)) is not None]
    if not probed:
        return None
    # Some ten milliseconds, in which requests go on.
    patterns = await asyncio.to_thread(_openers, probed)
    texts = {pattern: await detokenize([*map(ord, pattern)]) for pattern in dict.fromkeys(patterns.values())}
    openers = {
        (place, tools): Opener(tuple(map(ord, pattern)), texts[pattern], *_counts(probed, place, tools, pattern))
        for (place, tools), pattern in patterns.items()
    }
    return TemplateFacts(_ends(probed) | await _reminder_end(render), openers, _broken(probed))


async def _reminder_end(render: Render) -> dict[str, int]:
    """Tokens behind a reminder that ends a chat, if that is one number, and the turn stays once it is answered."""
    ends: set[int] = set()
    for body in REMINDED:
        prompt = await _prompt(render, body)
        end, kept = await _turn(render, body, prompt, NEXT_QUESTION) if prompt else (None, None)
        if end is None or kept is None or kept < len(prompt) - end - 1:
            return {}  # the template refuses such chats, or changes them
        ends.add(end)
    return {"system": ends.pop()} if len(ends) == 1 else {}


def _counts(probed: Sequence[RenderedChat], place: OpenerPlace, tools: bool, pattern: str) -> tuple[bool, bool]:
    """The last two of `Opener`."""
    if place in ("tool", "results"):
        return False, False
    strays = [
        each.chat
        for each in probed
        if (each.chat.role == "user" or tools) and each.prompt.count(pattern) != each.chat.users
    ]
    return all(chat.has_results or bool(chat.tools) != tools for chat in strays), not strays


def _ends(probed: Sequence[RenderedChat]) -> dict[str, int]:
    """Tokens behind the last message, by its role, where that is one number."""
    found: dict[str, set[int]] = {}
    for each in probed:
        if each.end is not None:
            found.setdefault(each.chat.role, set()).add(each.end)
    return {role: ends.pop() for role, ends in found.items() if len(ends) == 1}


def _broken(probed: Sequence[RenderedChat]) -> frozenset[Turn]:
    """Turns of which the next request keeps less than up to their end; one token may merge with what follows."""
    ends = _ends(probed)
    return frozenset(
        each.chat.turn
        for each in probed
        if each.kept is not None and each.kept < len(each.prompt) - ends.get(each.chat.role, 0) - 1
    )


def _openers(probed: Sequence[RenderedChat]) -> dict[tuple[OpenerPlace, bool], str]:
    """Each place's opener. What serves all user texts is preferred: it was seen in most chats."""
    users = [each for each in probed if each.chat.role == "user"]
    broken = _broken(probed)
    found: dict[tuple[OpenerPlace, bool], str] = {}
    for tools in (False, True):
        own = [each for each in users if bool(each.chat.tools) == tools]
        places: tuple[OpenerPlace, ...] = ("alone", "user")
        for place in places:
            same_place = [each for each in users if each.chat.place == place]
            there = [each for each in own if each.chat.place == place]
            # What stands between an opener and a user's text is system prompt or tools, of any length elsewhere.
            if best := _best(map(_common, (users, own, same_place, there)), there, most=1):
                found[place, tools] = best
        patterns = [found[place, tools] for place in places if (place, tools) in found]
        if best := _best(patterns, _at_first_question(own), most=1, find=str.find):
            found["first", tools] = best
        moving = [each for each in own if each.chat.place == "user" and each.chat.turn in broken]
        moving = [each._replace(start=each.kept or 0) for each in moving]
        if best := _best([_common(moving)], moving):
            found["next", tools] = best
    loops = [each for each in probed if each.chat.role == "tool"]
    both = _common(loops)
    first = [each for each in loops if each.chat.place == "tool"]
    if best := _best([both, _common(first)], first):
        found["tool", True] = found["tool", False] = best
        # From the few chats with several results alone an opener would take in what these have in common.
        if best := _best([both, best], [each for each in loops if each.chat.place == "results"]):
            found["results", True] = found["results", False] = best
    return found


def _at_first_question(users: Sequence[RenderedChat]) -> list[RenderedChat]:
    """Chats with a later question; `start` is where a new conversation with the same head would part from each."""
    found = []
    for each in users:
        new = next((new for new in users if new.chat.place == "alone" and new.chat.head == each.chat.head), None)
        if each.chat.place == "user" and new is not None:
            start = min(new.start, *(common_prefix(each.prompt, other) for other in new.prompts))
            found.append(each._replace(start=start))
    return found


def _gap(each: RenderedChat, pattern: str, find: Callable[[str, str], int] = str.rfind) -> int:
    """Tokens between an occurrence of `pattern`, the last one, and the place; -1: it is not there, or too far off."""
    at = find(each.prompt, pattern)
    gap = each.start - at - len(pattern)
    return gap if at >= 0 and 0 <= gap <= GAP else -1


def _best(
    patterns: Iterable[str | None],
    there: Sequence[RenderedChat],
    most: int = GAP,
    find: Callable[[str, str], int] = str.rfind,
) -> str | None:
    """The pattern that leads nearest to the place in the worst of these chats, and to at most `most` tokens before."""
    worst: dict[str, int] = {}
    for pattern in patterns if there else ():
        gaps = [_gap(each, pattern, find) for each in there] if pattern else [-1]
        if pattern and min(gaps) >= 0 and max(gaps) <= most:
            worst.setdefault(pattern, max(gaps))
    return min(worst, key=worst.__getitem__, default=None)  # of equal ones the first


def _common(chats: Sequence[RenderedChat]) -> str | None:
    """What stands before the last text in all chats and leads nearest to it; of equally near ones the longest."""
    if len(chats) < MIN_CHATS:
        return None
    before = min((each.prompt[: each.start] for each in chats), key=len)
    judged: list[tuple[int, int, str]] = []  # gap, length as a negative number, pattern
    for off in range(min(GAP, len(before)) + 1):
        if judged and min(judged)[0] <= off:
            break  # what ends further off leads no nearer
        end = len(before) - off
        for size in range(1, min(MAX_OPENER, end) + 1):
            pattern = before[end - size : end]
            if not all(pattern in each.prompt for each in chats):
                break  # nor are longer ones
            gaps = [_gap(each, pattern) for each in chats]
            if min(gaps) >= 0:
                judged.append((max(gaps), -size, pattern))
    if not judged:
        return None
    pattern = min(judged)[2]
    inner = pattern[EDGE:]
    if len(pattern) > LONG_OPENER and all(_gap(each, inner) == _gap(each, pattern) for each in chats):
        return inner
    return pattern
