"""Learning the facts of a chat template from small chats of our own.

Sentinel substitution tells where each chat parts from others like it (`proxy.boundaries.positions`). What stands before
that place in all of them is the opener. The chats differ in everything that could stand near the place: system prompt
(none, empty, ends in a line break), last character of the answer before, tools and their order, ids, text beside a
call, calls side by side and one after another. From chats too alike an opener would take in what they have in common.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.template_facts import GAP, Opener, OpenerPlace, Role, TemplateFacts, Turn

# Token ids of a chat request; None: the template refuses such a chat.
Render = Callable[[Mapping[str, Any]], Awaitable[Sequence[int] | None]]

# These ids as text; None: not known.
Detokenize = Callable[[Sequence[int]], Awaitable[str | None]]

MAX_OPENER = 32  # tokens

# Of a longer opener the first tokens are left out: what stands before them may grow together with them.
LONG_OPENER, EDGE = 8, 2

MIN_CHATS = 2  # to learn an opener from

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

# Texts whose first character could merge with the token before; the empty one lets what follows the text do so.
TEXTS = (RICH, "\nQuartz", "")

MORE_TEXTS = ("the tide", " Quartz", ")Quartz")  # for some of the chats


def _tool(name: str, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, **schema}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


# Written as JSON, no two of them end alike.
LOOK = _tool("look")
ASK = _tool("ask", required=["q"])
NOTE = _tool("note", properties={})


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _calls(*calls: tuple[str, str, str], text: str = "") -> dict[str, Any]:
    """An answer that calls tools: id (nine letters and digits, as Mistral's templates want), name, arguments."""
    made = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def _result(number: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": text}


@dataclass(frozen=True)
class ProbeChat:
    """A chat up to its last text, and what it is rendered for."""

    before: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    answers: str = ""  # id of the call that the last message answers; empty: it is a user's
    more_texts: bool = False
    bare: bool = False  # also without the words that ask for an answer, for the end
    following: bool = False  # also with the next turn, for whether the turn holds
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> Role:
        return "tool" if self.answers else "user"

    @property
    def users(self) -> int:
        """User messages, the last one included."""
        return [message["role"] for message in self.before].count("user") + (not self.answers)

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

    def body(self, text: str, *more: dict[str, Any]) -> dict[str, Any]:
        """The request with this last text, and `more` messages behind it."""
        last = _result(self.answers, text) if self.answers else _user(text)
        body = {**self.fields, "messages": [*self.before, last, *more]}
        return {**body, "tools": list(self.tools)} if self.tools else body

    def next_body(self) -> dict[str, Any]:
        """The request that follows once this one is answered: a question, or the result of the next call."""
        if self.answers:
            return self.body(RICH, _calls(("abcdef012", "ask", '{"q": "8"}')), _result("abcdef012", "Quartz"))
        return self.body(RICH, _answer("Quartz"), _user("Quartz"))


_SIDE_BY_SIDE = _calls(("ghijkl321", "look", '{"q": ")"}'), ("stuvwx654", "ask", '{"q": "x"}'))
_ASIDE = _calls(("zyxwvu987", "look", "{}"), ("mnopqr456", "look", '{"n": [7]}'), text="So.")

# Longer than `GAP`: what stands before the system prompt, or before another result, is no opener of the text behind it.
_LONG = "so it is there, and then it is not; " * 4

_BREAK, _SAY, _EMPTY = _system("Quartz\n\n"), _system(_LONG + "Say )"), _system("")

CHATS = (
    # The only user message.
    ProbeChat((_BREAK,), more_texts=True, bare=True, following=True),
    ProbeChat((), bare=True, following=True),
    ProbeChat((_SAY,)),
    ProbeChat((_EMPTY,)),
    ProbeChat((_SAY,), (LOOK, ASK), bare=True, following=True),
    ProbeChat((), (ASK, NOTE), following=True),
    # A later user message.
    ProbeChat((_BREAK, _user("x"), _answer("Two\n")), more_texts=True, bare=True, following=True),
    ProbeChat((_user("go )"), _answer("é")), bare=True, following=True),
    ProbeChat((_SAY, _user("x"), _answer("done)"), _user("y\n"), _answer("83 jigsaw "))),
    ProbeChat((_SAY, _user("x"), _answer("Well.")), (LOOK, ASK), following=True),
    ProbeChat((_user("go"), _answer("It is\n")), (ASK, NOTE), following=True),
    ProbeChat(
        (
            _SAY,
            _user("go"),
            _calls(("zyxwvu987", "look", '{"q": "it"}')),
            _result("zyxwvu987", "there"),
            _answer("At nine"),
        ),
        (LOOK, ASK),
        bare=True,
    ),
    # A tool's result.
    ProbeChat(
        (_SAY, _user("go"), _calls(("zyxwvu987", "look", '{"q": "it"}'))),
        (LOOK, ASK),
        answers="zyxwvu987",
        more_texts=True,
        bare=True,
        following=True,
    ),
    ProbeChat(
        (_user("x"), _calls(("mnopqr456", "ask", '{"n": 7}'), text="Well")),
        (ASK,),
        answers="mnopqr456",
        bare=True,
        following=True,
    ),
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
        (_BREAK, _user("x"), _SIDE_BY_SIDE, _result("ghijkl321", _LONG + "{}")),
        (LOOK, ASK),
        answers="stuvwx654",
        bare=True,
    ),
    ProbeChat(
        (_SAY, _user("x"), _answer("Hm"), _user("go"), _ASIDE, _result("zyxwvu987", _LONG + "so\n")),
        (LOOK, ASK),
        answers="mnopqr456",
    ),
)

# Chats that end in a reminder.
REMINDED: tuple[tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]], ...] = (
    ((_BREAK, _user("x"), _system("Be brief.\n")), ()),
    ((_SAY, _user("x"), _answer("done)"), _user("go"), _system(RICH)), (LOOK, ASK)),
)

# Chats that show whether another setting moves anything, and what it does to the ends.
FEW_CHATS = tuple(
    replace(chat, more_texts=False, following=False, bare=True)
    for chat in CHATS
    if chat.more_texts or (chat.following and chat.turn.system)
)


class ProbedTemplate:
    """One chat as rendered. Prompts are texts with a character for each token id, since texts are searched fast."""

    def __init__(
        self, chat: ProbeChat, prompts: Sequence[str], few: int, bare: str | None, following: str | None
    ) -> None:
        """`few` of the prompts, the first ones, are of texts that all chats are rendered with."""
        self.chat = chat
        self.prompts = prompts
        self.prompt = prompts[0]
        self.start = _parting(prompts)  # tokens before the last text
        self.merges = _parting(prompts[:few]) - self.start  # how much earlier the other texts part
        self.end = len(self.prompt) - common_prefix(self.prompt, bare) if bare is not None else None
        self.kept = common_prefix(self.prompt, following) if following is not None else None


def _parting(prompts: Sequence[str]) -> int:
    return min((common_prefix(prompts[0], other) for other in prompts[1:]), default=len(prompts[0]))


async def probe(render: Render, chat: ProbeChat, fields: Mapping[str, Any]) -> ProbedTemplate | None:
    """The chat rendered with each of its texts; None if the template refuses such chats."""
    chat = replace(chat, fields=fields)
    texts = (*TEXTS, *MORE_TEXTS) if chat.more_texts else TEXTS

    async def prompt(body: Mapping[str, Any]) -> str | None:
        ids = await render(body)
        return "".join(map(chr, ids)) if ids else None

    first = await prompt(chat.body(texts[0]))
    if first is None:
        return None
    others = [await prompt(chat.body(text)) for text in texts[1:]]
    bare = await prompt({**chat.body(texts[0]), "add_generation_prompt": False}) if chat.bare else None
    following = await prompt(chat.next_body()) if chat.following else None
    few = 1 + sum(other is not None for other in others[: len(TEXTS) - 1])
    prompts = [first, *(other for other in others if other is not None)]
    return ProbedTemplate(chat, prompts, few, bare, following) if few > 1 else None


async def learn_facts(render: Render, detokenize: Detokenize, fields: Mapping[str, Any]) -> TemplateFacts | None:
    """The facts of a template rendered with these `fields` of a request; None if it renders none of our chats.

    What `render` raises is passed on.
    """
    probed = [each for chat in CHATS if (each := await probe(render, chat, fields)) is not None]
    if not probed:
        return None
    # A chat with few texts may hide that one of the others would merge.
    groups: tuple[tuple[OpenerPlace, ...], ...] = (("alone",), ("user",), ("tool", "results"))
    for places in groups:
        there = [each for each in probed if each.chat.place in places]
        merges = max((each.merges for each in there), default=0)
        for each in there:
            if not each.chat.more_texts:
                each.start -= merges
    # Some ten milliseconds, in which requests go on.
    patterns = await asyncio.to_thread(_openers, probed)
    openers: dict[tuple[OpenerPlace, bool], Opener] = {}
    texts: dict[str, str | None] = {}
    for key, (pattern, exact) in patterns.items():
        if pattern not in texts:
            texts[pattern] = await detokenize([ord(character) for character in pattern])
        counted = [each for each in probed if each.chat.role == "user" or key[1]]
        per_user = key[0] not in ("tool", "results") and all(
            each.prompt.count(pattern) == each.chat.users
            for each in counted
            if each.chat.turn.tools == key[1] and not _has_results(each.chat)
        )
        no_tool = per_user and all(each.prompt.count(pattern) == each.chat.users for each in counted)
        openers[key] = Opener(tuple(map(ord, pattern)), texts[pattern], exact, per_user, no_tool)
    ends = _ends(probed) | await _reminder_end(render, fields)
    return TemplateFacts(ends, openers, _broken(probed))


async def _reminder_end(render: Render, fields: Mapping[str, Any]) -> dict[Role, int]:
    """Tokens behind a reminder that ends a chat, if that is one number, and the turn stays once it is answered."""
    ends: set[int] = set()
    for messages, tools in REMINDED:
        body = {**fields, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        prompt = await render(body)
        bare = await render({**body, "add_generation_prompt": False}) if prompt else None
        more = [*messages, _answer("Quartz"), _user("Quartz")]
        following = await render({**body, "messages": more}) if bare else None
        if not (prompt and bare and following):
            return {}  # the template refuses such chats, or some of them
        end = len(prompt) - common_prefix(prompt, bare)
        if common_prefix(prompt, following) < len(prompt) - end - 1:
            return {}
        ends.add(end)
    return {"system": ends.pop()} if len(ends) == 1 else {}


def _has_results(chat: ProbeChat) -> bool:
    return bool(chat.answers) or any(message["role"] == "tool" for message in chat.before)


def _ends(probed: Sequence[ProbedTemplate]) -> dict[Role, int]:
    """Tokens behind the last message, by its role, where that is one number."""
    found: dict[Role, set[int]] = {}
    for each in probed:
        if each.end is not None:
            found.setdefault(each.chat.role, set()).add(each.end)
    return {role: next(iter(ends)) for role, ends in found.items() if len(ends) == 1}


def _broken(probed: Sequence[ProbedTemplate]) -> frozenset[Turn]:
    """Turns of which the next request keeps less than up to their end; one token may merge with what follows."""
    ends = _ends(probed)
    return frozenset(
        each.chat.turn
        for each in probed
        if each.kept is not None and each.kept < len(each.prompt) - ends.get(each.chat.role, 0) - 1
    )


def _openers(probed: Sequence[ProbedTemplate]) -> dict[tuple[OpenerPlace, bool], tuple[str, bool]]:
    """Each place's opener, and whether it leads to within a token of the place in all chats.

    What serves all user texts is preferred: it was seen in most chats.
    """
    users = [each for each in probed if each.chat.role == "user"]
    found: dict[tuple[OpenerPlace, bool], tuple[str, bool]] = {}
    for tools in (False, True):
        own = [each for each in users if bool(each.chat.tools) == tools]
        for place in ("alone", "user"):
            there = [each for each in own if each.chat.place == place]
            same_place = [each for each in users if each.chat.place == place]
            best = _best([_common(users), _common(own), _common(same_place), _common(there)], there)
            # What stands between an opener and a user's text is system prompt or tools, of any length elsewhere.
            if best is not None and best[1]:
                found[place, tools] = best
        patterns = [found[place, tools][0] for place in ("alone", "user") if (place, tools) in found]
        if best := _best_first(patterns, own):
            found["first", tools] = best
    loops = [each for each in probed if each.chat.role == "tool"]
    both = _common(loops)
    first = [each for each in loops if each.chat.place == "tool"]
    if best := _best([both, _common(first)], first):
        found["tool", True] = found["tool", False] = best
        # From the few chats with several results alone an opener would take in what these have in common.
        if best := _best([both, best[0]], [each for each in loops if each.chat.place == "results"]):
            found["results", True] = found["results", False] = best
    return found


def _gap(each: ProbedTemplate, pattern: str) -> int | None:
    """Tokens between the last occurrence of `pattern` and the last text; None: it is not there, or too far off."""
    at = each.prompt.rfind(pattern)
    gap = each.start - at - len(pattern)
    return gap if at >= 0 and 0 <= gap <= GAP else None


def _best(patterns: Sequence[str | None], there: Sequence[ProbedTemplate]) -> tuple[str, bool] | None:
    """The pattern that leads nearest to the last text in the worst of these chats, and whether within a token."""
    worst: dict[str, int] = {}
    for pattern in patterns if there else ():
        gaps = [_gap(each, pattern) for each in there] if pattern else [None]
        if pattern and None not in gaps:
            worst.setdefault(pattern, max(gap for gap in gaps if gap is not None))
    if not worst:
        return None
    best = min(worst, key=lambda pattern: worst[pattern])  # of equal ones the first
    return best, worst[best] <= 1


def _best_first(patterns: Sequence[str], users: Sequence[ProbedTemplate]) -> tuple[str, bool] | None:
    """The pattern whose first occurrence leads to where a new conversation with this head would part."""
    alone = [each for each in users if each.chat.place == "alone"]
    worst: dict[str, int] = {}
    for pattern in patterns:
        gaps = []
        for each in users:
            new = next((chat for chat in alone if chat.chat.head == each.chat.head), None)
            if each.chat.place != "user" or new is None:
                continue
            parting = min(new.start, *(common_prefix(each.prompt, other) for other in new.prompts))
            gaps.append(parting - each.prompt.find(pattern) - len(pattern) if pattern in each.prompt else -1)
        if gaps and all(0 <= gap <= 1 for gap in gaps):
            worst[pattern] = max(gaps)
    return (min(worst, key=lambda pattern: worst[pattern]), True) if worst else None


def _common(chats: Sequence[ProbedTemplate]) -> str | None:
    """What stands before the last text in all chats and leads nearest to it; of equally near ones the longest."""
    if len(chats) < MIN_CHATS:
        return None
    before = min((each.prompt[: each.start] for each in chats), key=len)
    best: tuple[int, int, str] | None = None
    for off in range(min(GAP, len(before)) + 1):
        if best is not None and best[0] <= off:
            break  # what ends further off leads no nearer
        end = len(before) - off
        for size in range(1, min(MAX_OPENER, end) + 1):
            pattern = before[end - size : end]
            if not all(pattern in each.prompt for each in chats):
                break  # nor are longer ones
            gaps = [_gap(each, pattern) for each in chats]
            if None not in gaps:
                judged = (max(gap for gap in gaps if gap is not None), -size, pattern)
                best = min(best, judged) if best is not None else judged
    if best is None:
        return None
    pattern, inner = best[2], best[2][EDGE:]
    if len(pattern) > LONG_OPENER and all(_gap(each, inner) == _gap(each, pattern) for each in chats):
        return inner
    return pattern


class FewFacts(NamedTuple):
    """What another setting may change of a template's facts."""

    ends: dict[Role, int]
    openers_hold: bool


async def ends_with(render: Render, facts: TemplateFacts, fields: Mapping[str, Any]) -> FewFacts | None:
    """The ends under another setting, and whether the openers in `facts` hold; None if it renders none of our chats."""
    probed = [each for chat in FEW_CHATS if (each := await probe(render, chat, fields)) is not None]
    if not probed:
        return None

    def holds(each: ProbedTemplate) -> bool:
        opener = facts.opener(each.chat.place, bool(each.chat.tools))
        return opener is None or _gap(each, "".join(map(chr, opener.ids))) is not None

    return FewFacts(_ends(probed) | await _reminder_end(render, fields), all(map(holds, probed)))


async def sample(render: Render, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a question and a tool's result become: equal under two settings that do the same."""
    chats = [chat for chat in CHATS if chat.more_texts and chat.place != "alone"]
    return tuple(await asyncio.gather(*(render(replace(chat, fields=fields).body("Quartz")) for chat in chats)))
