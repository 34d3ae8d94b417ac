"""Shapes of chats, and what is learnt of a chat template for each, on vLLM's own renderer.

For each shape and nine last texts: an opener leads to where these chats really part or before it, never behind, and as
many tokens stand behind the last message as were learnt. Classes in which an opener cannot know the place are counted
apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer
from proxy.boundaries.resolve import encode_opener, resolve
from proxy.boundaries.template_facts import GAP, Opener, OpenerPlace, TemplateFacts, setting_of
from proxy.boundaries.token_ids import TokenIds, common_prefix
from proxy.chat.chat import CHAT
from proxy.http.client import Upstream

NEW_CHATS = ("and low tide", "\nOn a line", ")x")

# Last texts: no two begin with the same character, so that what all of them share ends where they do.
TEXTS = (
    "When is high tide?",
    "and low tide",
    "\nOn a line of its own",
    " spaced",
    "9 ships wait",
    "éclair",
    "💡 idea",
    ")x",
    "",
)

# Texts that end in what could merge with the template's words behind them.
ENDINGS = ("ends so", "ends so\n", "ends so\n\n", "ends so ", "ends <", "ends\t")

ANSWER = {"role": "assistant", "content": "At nine."}

SYSTEM = "You pilot ships into the harbour. Answer briefly, and name the tide."

TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Tide table of a port",
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string", "description": "its name"}, "hour": {"type": "integer"}},
            "required": ["port"],
        },
    },
}

OTHER_TOOL = {**TOOL, "function": {**TOOL["function"], "name": "wind"}}

Verdict = Literal["exact", "1 before", "2..24 before", "far before", "behind", "not known", "not found"]

# Parts of the names of shapes that have no exact position: a template may write the name in place of the role, and an
# opener leads to a message's first part.
EXCUSED = ("name", "two parts")


class Cell(NamedTuple):
    """One template with one tokenizer and one shape."""

    template: str
    tokenizer: str
    shape: str
    last: Mapping[Verdict, int] = {}  # by where `last:` leads, a prompt each
    first: Mapping[Verdict, int] = {}  # by where `first:` leads
    ends: Mapping[str, int] = {}  # "right", "early", "wrong", "not known"
    wrong: tuple[str, ...] = ()  # what must not be
    refused: bool = False  # the template does not take such a chat

    @property
    def is_excused(self) -> bool:
        """Whether its places need not be exact; behind them none may lead."""
        return any(part in self.shape for part in EXCUSED)


class Family(NamedTuple):
    """Chats that differ in their last text only."""

    shape: str
    body: dict[str, Any]  # without messages
    before: list[dict[str, Any]]  # messages before the last
    last: dict[str, Any]  # with content None where the text goes
    parts: tuple[str, ...] | None = None  # the content is a list: of these texts, and the last one
    texts: tuple[str, ...] = TEXTS
    prefill: str | None = None  # the answer's beginning, which the model is to continue

    def chat(self, text: str) -> dict[str, Any]:
        """The request with this last text."""
        content: Any = text
        if self.parts is not None:
            content = [{"type": "text", "text": part} for part in (*self.parts, text)]
        messages = [*self.before, {**self.last, "content": content}]
        if self.prefill is None:
            return {**self.body, "messages": messages}
        prefill = {"role": "assistant", "content": self.prefill}
        way = {"continue_final_message": True, "add_generation_prompt": False}
        return {**self.body, **way, "messages": [*messages, prefill]}

    def next_turn(self, text: str) -> dict[str, Any]:
        """The request that follows once the chat with this last text is answered."""
        messages = [*self.chat(text)["messages"], ANSWER, {"role": "user", "content": "And then?"}]
        return {**self.body, "messages": messages}

    @property
    def place(self) -> OpenerPlace:
        """Of the last text."""
        if self.last["role"] == "tool":
            return "results" if self.before[-1]["role"] == "tool" else "tool"
        return "user" if any(message["role"] == "user" for message in self.before) else "alone"


def families() -> list[Family]:
    """Every shape of the product's list."""
    system = {"role": "system", "content": SYSTEM}
    asked = {"role": "user", "content": None}
    first = {"role": "user", "content": "First?"}
    answered = {"role": "assistant", "content": "One."}
    tools = {"tools": [TOOL, OTHER_TOOL]}

    def calls(*numbers: str, name: str = "tide") -> dict[str, Any]:
        function = {"name": name, "arguments": '{"port": "Ayr"}'}
        made = [{"id": number, "type": "function", "function": function} for number in numbers]
        return {"role": "assistant", "content": "Let me look.", "tool_calls": made}

    def result(number: str, text: str | None = None) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": number, "content": text}

    call, last_result = calls("abcdef123"), result("abcdef123")
    in_loop = [call, result("abcdef123", "{}")]
    long_loop = [
        message
        for number in range(4)
        for message in (calls(f"abcdef12{number}"), result(f"abcdef12{number}", "it is high"))
    ]
    thought = {"role": "assistant", "content": "One.", "reasoning_content": "They ask for a number."}
    many = [{"role": ("user", "assistant")[i % 2], "content": f"Word {i}, said plainly."} for i in range(198)]
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    emoji = [{"role": "user", "content": "⚓🚢 é"}, {"role": "assistant", "content": "🌊"}]
    lines = [{"role": "user", "content": "\n\nFirst?\n"}, {"role": "assistant", "content": "\nOne.\n\n"}]
    thinking = {"role": "assistant", "content": "", "reasoning_content": "A table will do."}
    by_setting = [
        family
        for name in ("enable_thinking", "thinking")
        for value in (True, False)
        for family in (
            Family(f"{name}={value}", {"chat_template_kwargs": {name: value}}, [system, first, answered], asked),
            Family(
                f"{name}={value}, tool result last",
                {"chat_template_kwargs": {name: value}, **tools},
                [system, first, call],
                last_result,
            ),
        )
    ]
    return [
        Family("plain, one turn", {}, [system], asked),
        Family("plain, no system", {}, [], asked),
        Family("plain, two turns", {}, [system, first, answered], asked),
        Family("user after user", {}, [system, first], asked),
        Family("tools", tools, [system], asked),
        Family("tools, no system", tools, [], asked),
        Family("tools, two turns", tools, [system, first, answered], asked),
        Family("tool result last", tools, [system, first, call], last_result),
        Family("tool result last, no system", tools, [first, call], last_result),
        Family("tool results last", tools, [system, first, *in_loop, call], last_result),
        Family(
            "tool results side by side",
            tools,
            [system, first, calls("abcdef123", "abcdef124"), in_loop[1]],
            result("abcdef124"),
        ),
        Family(
            "other tool's result last", tools, [system, first, calls("ghijkl987", name="wind")], result("ghijkl987")
        ),
        Family("tool result, null content", tools, [system, first, {**call, "content": None}], last_result),
        Family("tool loop, thinking echoed", tools, [system, first, {**call, **thinking}], last_result),
        Family("long tool loop", tools, [system, first, *long_loop, calls("abcdef129")], result("abcdef129")),
        Family("question after a tool loop", tools, [system, first, *in_loop, answered], asked),
        Family("thinking echoed", {}, [system, first, thought], asked),
        Family("name", {}, [system, {**first, "name": "anna"}, answered], {**asked, "name": "bert"}),
        Family("list content", {}, [system, first, answered], asked, parts=()),
        Family("two parts", {}, [system, first, answered], asked, parts=("A document that all of them share.",)),
        Family("empty strings", {}, [system, *empty], asked),
        Family("empty system", {}, [{"role": "system", "content": ""}], asked),
        Family("emoji", {}, [system, *emoji], asked),
        Family("line breaks", {}, [{"role": "system", "content": f"\n{SYSTEM}\n"}, *lines], asked),
        Family("200 messages", {}, [system, *many], asked, texts=TEXTS[:3]),
        Family("text ends", {}, [system], asked, texts=ENDINGS),
        Family("prefill", {}, [system, first, answered], asked, prefill="Sure, the"),
        *by_setting,
    ]


class TemplateRenderer:
    """Renders with one template and counts, as the worker would whose own template it is."""

    def __init__(self, renderer: WorkerRenderer, template: str) -> None:
        self._renderer = renderer
        self._fixed = {"model": "m", "chat_template": template}

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> TokenIds:
        return await self._renderer({**self._fixed, **body}, path)

    async def detokenize(self, model: Any, ids: Sequence[int]) -> str | None:
        return await self._renderer.detokenize(model, ids)

    async def ids(self, body: Mapping[str, Any]) -> list[int] | None:
        """None if the template refuses such a chat."""
        try:
            return (await self(body)).ids()
        except RenderFailed:
            return None


async def check_cell(
    renderer: TemplateRenderer, facts: TemplateFacts, name: str, tokenizer: str, family: Family
) -> Cell:
    """One shape, with each of its last texts."""
    prompts = {text: ids for text in family.texts if (ids := await renderer.ids(family.chat(text))) is not None}
    if not prompts:
        return Cell(name, tokenizer, family.shape, refused=True)
    tools = bool(family.body.get("tools"))
    wrong: list[str] = []
    last: Counter[Verdict] = Counter()
    if family.texts[0] in TEXTS:
        parting = min(common_prefix(prompts[family.texts[0]], other) for other in prompts.values())
        opener = facts.opener(family.place, tools)
        last.update(verdict(opener, "last", prompt, parting) for prompt in prompts.values())
        if opener is not None and opener.text is not None and opener.exact and family.parts is None:
            wrong += await _said_in_text(renderer, family, opener, parting)
    first: Counter[Verdict] = Counter()
    if any(message["role"] == "user" for message in family.before):
        prompt = prompts[family.texts[0]]
        starts = [
            await renderer.ids({**family.body, "messages": [*_head(family), _asking(family, text)]})
            for text in NEW_CHATS
        ]
        if partings := [common_prefix(prompt, start) for start in starts if start is not None]:
            first[verdict(facts.opener("first", tools), "first", prompt, min(partings))] += 1
    for words, verdicts in (("last", last), ("first", first)):
        if verdicts["behind"]:
            wrong.append(f"{words}: leads behind the place in {verdicts['behind']} prompts")
    ends, wrong_ends = await _check_ends(renderer, facts, family, prompts)
    return Cell(name, tokenizer, family.shape, last, first, ends, (*wrong, *wrong_ends))


def verdict(opener: Opener | None, where: Literal["first", "last"], prompt: Sequence[int], parting: int) -> Verdict:
    """Where the opener leads in a prompt that parts from others like it after `parting` tokens."""
    if opener is None:
        return "not known"
    (position,) = resolve([encode_opener(opener, where)], prompt)
    if not position:
        return "not found"
    gap = parting - position
    if gap < 0:
        return "behind"
    return "exact" if not gap else "1 before" if gap == 1 else "2..24 before" if gap <= GAP else "far before"


async def _said_in_text(renderer: TemplateRenderer, family: Family, opener: Opener, parting: int) -> list[str]:
    """What is wrong if the opener's own text stands in the last text, which is counted and skipped."""
    assert opener.text is not None
    said = f"It begins {opener.text} and then {opener.text} again."
    prompt = await renderer.ids(family.chat(said))
    if prompt is None:
        return []
    (position,) = resolve([encode_opener(opener, skip=said.count(opener.text))], prompt)
    return [f"opener said in the text: leads to {position}, chats part at {parting}"] if position > parting else []


async def _check_ends(
    renderer: TemplateRenderer, facts: TemplateFacts, family: Family, prompts: Mapping[str, list[int]]
) -> tuple[Counter[str], list[str]]:
    """Tokens behind the last message, and whether the turn stays once it is answered."""
    found: Counter[str] = Counter()
    wrong: list[str] = []
    if family.prefill is not None:
        return found, wrong
    role = family.last["role"]
    end = facts.end(role)
    for text in [text for text in prompts if text in ENDINGS or text in TEXTS[:4]]:
        bare = await renderer.ids({**family.chat(text), "add_generation_prompt": False})
        if bare is None:
            continue
        true = len(prompts[text]) - common_prefix(prompts[text], bare)
        # Where a text ends in what merges, the constant may be a token early.
        early = text in ENDINGS and end is not None and end > true
        found["not known" if end is None else "right" if end == true else "early" if early else "wrong"] += 1
        if end is not None and end != true and not early:
            wrong.append(f"{text!r}: {end} tokens behind the last message, really {true}")
    text, prompt = next(iter(prompts.items()))
    if role == "user" and end is not None and (following := await renderer.ids(family.next_turn(text))) is not None:
        later, system = family.place == "user", bool(_head(family))
        holds = facts.turn_holds(role, later=later, system=system, tools=bool(family.body.get("tools")))
        if holds and (kept := common_prefix(prompt, following)) < len(prompt) - end - 1:
            wrong.append(f"{text!r}: the turn is said to hold, the next one keeps {kept} of {len(prompt) - end}")
    return found, wrong


def _asking(family: Family, text: str) -> dict[str, Any]:
    """A new conversation's first message."""
    first = next(message for message in family.before if message["role"] == "user")
    return {**first, "content": text}


def _head(family: Family) -> list[dict[str, Any]]:
    return [message for message in family.before if message["role"] == "system"]


async def check_templates(url: str, templates: Mapping[str, str], tokenizer: str) -> list[Cell]:
    """All shapes of all `templates` (text by name) on the render server at `url`."""
    upstream = Upstream(connect_timeout=5.0, max_header_bytes=65536)
    try:
        worker = WorkerRenderer(upstream, url, timeout=60.0)
        cells = []
        for name, template in templates.items():
            renderer = TemplateRenderer(worker, template)
            learner = FactsLearner()
            await learner.learn_common(renderer, b"r", "m")
            for family in families():
                facts = learner.facts(b"r", setting_of(family.body)) or TemplateFacts()
                cells.append(await check_cell(renderer, facts, name, tokenizer, family))
        return cells
    finally:
        await upstream.aclose()


def total(cells: Sequence[Cell]) -> dict[str, Counter[str]]:
    """Verdicts by class: openers and starts of new chats, of shapes that are not excused, and ends of all."""
    classes: dict[str, Counter[str]] = {"last:": Counter(), "first:": Counter(), "ends": Counter()}
    for cell in cells:
        classes["ends"].update(cell.ends)
        if not cell.is_excused:
            classes["last:"].update(cell.last)
            classes["first:"].update(cell.first)
    return classes
