"""Chat templates with the quirks of real ones, on vLLM's own renderer, with two tokenizers.

For each shape of chat and several last texts: an opener leads to where these chats really part or before it, never
behind, and as many tokens stand behind the last message as were learnt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from proxy.boundaries.boundary import encode_opener, resolve
from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer
from proxy.boundaries.template_facts import GAP, Opener, OpenerPlace, TemplateFacts, setting_of
from proxy.chat.chat import CHAT
from proxy.http.client import Upstream
from tests.harness.messages import assistant, system, user
from tests.harness.render_models import markers_in, render_server, write_render_model

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))}

# Before a user's text these have words that differ from chat to chat, so nothing is learnt there.
WITHOUT_OPENER = {"system-in-last-user", "tools-in-first-user"}

# No two begin with the same character, so that what all of them share ends where they do.
TEXTS = ("When is high tide?", "and low tide", "\nOn a line of its own", " spaced", "9 ships wait", "💡 idea", ")x", "")

# Texts that end in what could merge with the template's words behind them.
ENDINGS = ("ends so", "ends so\n", "ends so\n\n", "ends so ", "ends <", "ends\t")

pytestmark = pytest.mark.thorough


class Shape(NamedTuple):
    """Chats that differ in their last text only."""

    before: list[dict[str, Any]]  # messages before the last
    last: Mapping[str, Any] = {"role": "user"}
    body: Mapping[str, Any] = {}  # without messages
    parts: tuple[str, ...] | None = None  # the content is a list: of these texts, and the last one
    # Its places need not be exact: a template may write a name in place of the role, an opener leads to the first part.
    is_excused: bool = False

    def chat(self, text: str) -> dict[str, Any]:
        content: Any = text
        if self.parts is not None:
            content = [{"type": "text", "text": part} for part in (*self.parts, text)]
        return {**self.body, "messages": [*self.before, {**self.last, "content": content}]}

    @property
    def place(self) -> OpenerPlace:
        if self.last["role"] == "tool":
            return "results" if self.before[-1]["role"] == "tool" else "tool"
        return "user" if self.has_user else "alone"

    @property
    def has_user(self) -> bool:
        return any(message["role"] == "user" for message in self.before)


def tool_named(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"port": {"type": "string", "description": "its name"}}}
    return {"type": "function", "function": {"name": name, "description": "Of a port", "parameters": parameters}}


def calls(*numbers: str, name: str = "tide", **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"port": "Ayr"}'}
    made = [{"id": number, "type": "function", "function": function} for number in numbers]
    return {"role": "assistant", "content": "Let me look.", "tool_calls": made, **fields}


def result(number: str, **fields: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, **fields}


def shapes() -> dict[str, Shape]:
    pilot, first, answered = system("You pilot ships. Name the tide."), user("First?"), assistant("One.")
    turns = [pilot, first, answered]
    tools = {"tools": [tool_named("tide"), tool_named("wind")]}
    one, two = "abcdef123", "abcdef124"
    call = calls(one)
    in_loop = [call, result(one, content="{}")]
    found = {
        "plain, one turn": Shape([pilot]),
        "plain, no system": Shape([]),
        "plain, two turns": Shape(turns),
        "user after user": Shape([pilot, first]),
        "tools": Shape([pilot], body=tools),
        "tools, two turns": Shape(turns, body=tools),
        "tool result last": Shape([pilot, first, call], result(one), tools),
        "tool result last, no system": Shape([first, call], result(one), tools),
        "tool results last": Shape([pilot, first, *in_loop, calls(two)], result(two), tools),
        "side by side": Shape([pilot, first, calls(one, two), in_loop[1]], result(two), tools),
        "other tool's result": Shape([pilot, first, calls(one, name="wind")], result(one), tools),
        "null content": Shape([pilot, first, calls(one, content=None)], result(one), tools),
        "thinking in a loop": Shape(
            [pilot, first, calls(one, content="", reasoning_content="A table will do.")], result(one), tools
        ),
        "question after a loop": Shape([pilot, first, *in_loop, answered], body=tools),
        "thinking echoed": Shape([pilot, first, {**answered, "reasoning_content": "They ask for a number."}]),
        "name": Shape([pilot, {**first, "name": "anna"}, answered], {"role": "user", "name": "bert"}, is_excused=True),
        "list content": Shape(turns, parts=()),
        "two parts": Shape(turns, parts=("A document that all of them share.",), is_excused=True),
        "empty strings": Shape([system(""), user(""), assistant("")]),
        "line breaks": Shape([system("\nPilot.\n"), user("\n\n⚓ First?\n"), assistant("\nOne.\n\n")]),
        "100 messages": Shape([pilot, *[first, answered] * 50]),
    }
    for name in ("enable_thinking", "thinking"):
        for value in (True, False):
            body = {"chat_template_kwargs": {name: value}}
            found[f"{name}={value}"] = Shape(turns, body=body)
            found[f"{name}={value}, result"] = Shape([pilot, first, call], result(one), body | tools)
    return found


class Renderer:
    """Renders with one template and counts, as the worker would whose own template it is."""

    def __init__(self, worker: WorkerRenderer, template: str) -> None:
        self._worker, self._fixed = worker, {"model": "m", "chat_template": template}
        self.detokenize = worker.detokenize

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        return await self._worker({**self._fixed, **body}, path)

    async def ids(self, body: Mapping[str, Any]) -> list[int] | None:
        """None if the template refuses such a chat."""
        try:
            return await self(body)
        except RenderFailed:
            return None


class Cell(NamedTuple):
    """What is found of one template and one shape: tokens by which an opener leads to before the place, by place."""

    template: str
    shape: str
    is_excused: bool
    last: Sequence[int | None] = ()  # None: not known
    first: Sequence[int | None] = ()
    ends: Mapping[str, int] = {}  # by text: learnt tokens behind the last message beyond the real ones
    wrong: Sequence[str] = ()
    refused: bool = False


def gap(opener: Opener | None, where: Literal["first", "last"], prompt: Sequence[int], parting: int) -> int | None:
    return None if opener is None else parting - resolve([encode_opener(opener, where)], prompt)[0]


async def cell_of(renderer: Renderer, facts: TemplateFacts, template: str, name: str, shape: Shape) -> Cell:
    texts = (*TEXTS, *ENDINGS) if name == "plain, one turn" else TEXTS
    rendered = {text: await renderer.ids(shape.chat(text)) for text in texts}
    prompts = {text: ids for text, ids in rendered.items() if ids is not None}
    if not prompts:
        return Cell(template, name, shape.is_excused, refused=True)
    tools, wrong = bool(shape.body.get("tools")), []
    prompt, *others = (prompts[text] for text in TEXTS if text in prompts)
    parting = min(common_prefix(prompt, other) for other in others)
    opener = facts.openers.get((shape.place, tools))
    last = [gap(opener, "last", each, parting) for each in (prompt, *others)]
    if opener is not None and opener.text is not None and max(each or 0 for each in last) <= 1 and shape.parts is None:
        # What stands in the last text, too, is counted and skipped.
        said = f"It begins {opener.text} and then {opener.text} again."
        if (ids := await renderer.ids(shape.chat(said))) is not None:
            (position,) = resolve([encode_opener(opener, skip=said.count(opener.text))], ids)
            wrong += [f"opener said in the text: leads to {position}"] if position > parting else []
    first = []
    if shape.has_user:
        head = [message for message in shape.before if message["role"] == "system"]
        asking = next(message for message in shape.before if message["role"] == "user")
        chats = [[*head, {**asking, "content": text}] for text in ("and low tide", "\nOn a line", ")x")]
        starts = [await renderer.ids({**shape.body, "messages": messages}) for messages in chats]
        if partings := [common_prefix(prompt, start) for start in starts if start is not None]:
            first.append(gap(facts.openers.get(("first", tools)), "first", prompt, min(partings)))
    role, ends = shape.last["role"], {}
    if (end := facts.ends.get(role)) is not None:
        for text, ids in prompts.items():
            bare = await renderer.ids({**shape.chat(text), "add_generation_prompt": False})
            if bare is not None:
                ends[text] = end - (len(ids) - common_prefix(ids, bare))
        following = [*shape.chat(TEXTS[0])["messages"], assistant("At nine."), user("And then?")]
        kept = await renderer.ids({**shape.body, "messages": following})
        system_first = any(message["role"] == "system" for message in shape.before)
        holds = facts.turn_holds(role, later=shape.place == "user", system=system_first, tools=tools)
        if kept and role == "user" and holds and common_prefix(prompt, kept) < len(prompt) - end - 1:
            wrong.append("the turn is said to hold, and the next one keeps less")
    return Cell(template, name, shape.is_excused, last, first, ends, wrong)


@pytest.fixture(scope="module", params=["special", "plain"])
def cells(request, model, tmp_path_factory) -> Iterator[list[Cell]]:
    """Every quirk template with every shape of chat, by markers as special tokens and as plain text."""

    async def found(url: str) -> list[Cell]:
        upstream = Upstream(connect_timeout=5.0, max_header_bytes=65536)
        worker, checked = WorkerRenderer(upstream, url, timeout=60.0), []
        for name, template in TEMPLATES.items():
            renderer, learner = Renderer(worker, template), FactsLearner()
            await learner.learn_common(renderer, b"r", "m")
            for kind, shape in shapes().items():
                facts = learner.facts(b"r", setting_of(shape.body)) or TemplateFacts()
                checked.append(await cell_of(renderer, facts, name, kind, shape))
        await upstream.aclose()
        return checked

    markers = markers_in(TEMPLATES.values()) if request.param == "special" else []
    folder = write_render_model(tmp_path_factory.mktemp(request.param), model / "config.json", markers)
    with render_server(folder) as url:
        yield asyncio.run(found(url))


def test_nothing_learnt_is_wrong_and_no_opener_leads_behind_its_place(cells):
    assert not [cell for cell in cells if cell.wrong]
    assert not [cell for cell in cells if any(each is not None and each < 0 for each in (*cell.last, *cell.first))]


def test_the_tokens_behind_the_last_message_are_known_but_where_the_template_refuses_to_say(cells):
    # Where a text ends in what merges, what is learnt may be a token early.
    assert not [cell for cell in cells for text, more in cell.ends.items() if more < 0 or (more and text in TEXTS)]
    assert TEMPLATES.keys() - {cell.template for cell in cells if cell.ends} == {"strict-roles"}


def test_openers_lead_to_where_chats_part_in_nearly_all_shapes_and_only_what_is_listed_is_not_known(cells):
    assert {cell.template for cell in cells if None in (*cell.last, *cell.first)} == WITHOUT_OPENER
    usual = [cell for cell in cells if cell.template not in WITHOUT_OPENER and not cell.is_excused]
    last = [each for cell in usual for each in cell.last]
    assert max(last) <= GAP and last.count(0) > 0.9 * len(last)  # an id stands before the results of one template
    assert {each for cell in usual for each in cell.first} <= {0, 1}
    assert sum(cell.refused for cell in cells) < len(cells) / 10
