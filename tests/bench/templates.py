"""`python -m tests.bench.templates DIR`: the boundaries of every chat template in a folder, on vLLM's own renderer.

For each shape of chat: positions lie within one token of where generated chats really part, equal beginnings have equal
keys, and the end of a turn is a prefix of the next turn's tokens. Cells that cannot hold are listed with their reason.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxy.boundaries.measure import TemplateFacts

from proxy.boundaries.boundary import Found
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer
from proxy.boundaries.token_ids import common_prefix
from proxy.chat.reader import chat_request
from proxy.http.client import Upstream
from tests.harness.render_models import markers_in, render_server, write_render_model

MEMORY_BYTES = 10_000_000

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


class Cell(NamedTuple):
    """One template with one tokenizer and one shape."""

    template: str
    tokenizer: str
    shape: str
    wrong: tuple[str, ...]  # what does not hold
    excused: tuple[str, ...]  # what cannot, with the reason
    refused: bool = False  # the template does not take such a chat
    renders: int = 0


class Excuse(NamedTuple):
    """Why something cannot hold for a template, as a part of its name and of a shape; "" fits all."""

    template: str
    shape: str
    what: str  # "system", "history" or "turn"
    reason: str


EXCUSES = (Excuse("mistral-nemo", "", "turn", "system prompt and tools stand in the last user message: nothing stays"),)


class Family(NamedTuple):
    """Chats that differ in their last text only."""

    shape: str
    body: dict[str, Any]  # without messages
    before: list[dict[str, Any]]  # messages before the last
    last: dict[str, Any]  # with content None where the text goes
    listed: bool = False  # the content is a list of parts

    def chat(self, text: str) -> dict[str, Any]:
        """The request with this last text."""
        content = [{"type": "text", "text": text}] if self.listed else text
        return {**self.body, "messages": [*self.before, {**self.last, "content": content}]}

    def next_turn(self, text: str) -> dict[str, Any]:
        """The request that follows once the chat with this last text is answered."""
        messages = [*self.chat(text)["messages"], ANSWER, {"role": "user", "content": "And then?"}]
        return {**self.body, "messages": messages}


def families() -> list[Family]:
    """Every shape of the product's list."""
    system = {"role": "system", "content": SYSTEM}
    asked = {"role": "user", "content": None}
    first = {"role": "user", "content": "First?"}
    answered = {"role": "assistant", "content": "One."}
    tools = {"tools": [TOOL, OTHER_TOOL]}
    call = {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "abcdef123", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Ayr"}'}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": None}
    thought = {"role": "assistant", "content": "One.", "reasoning_content": "They ask for a number."}
    many = [{"role": ("user", "assistant")[i % 2], "content": f"Word {i}, said plainly."} for i in range(198)]
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    emoji = [{"role": "user", "content": "⚓🚢 é"}, {"role": "assistant", "content": "🌊"}]
    lines = [{"role": "user", "content": "\n\nFirst?\n"}, {"role": "assistant", "content": "\nOne.\n\n"}]
    thinking = {"role": "assistant", "content": "", "reasoning_content": "A table will do."}
    return [
        Family("plain, one turn", {}, [system], asked),
        Family("plain, no system", {}, [], asked),
        Family("plain, two turns", {}, [system, first, answered], asked),
        Family("tools", tools, [system], asked),
        Family("tools, two turns", tools, [system, first, answered], asked),
        Family("tool result last", tools, [system, first, call], result),
        Family("tool results last", tools, [system, first, call, {**result, "content": "{}"}, call], result),
        Family("tool result, null content", tools, [system, first, {**call, "content": None}], result),
        Family("tool loop, thinking echoed", tools, [system, first, {**call, **thinking}], result),
        Family(
            "question after a tool loop", tools, [system, first, call, {**result, "content": "{}"}, answered], asked
        ),
        Family("thinking echoed", {}, [system, first, thought], asked),
        Family("thinking not echoed", {}, [system, first, answered], asked),
        Family("name", {}, [system, {**first, "name": "anna"}, answered], {**asked, "name": "bert"}),
        Family("list content", {}, [system, first, answered], asked, listed=True),
        Family("empty strings", {}, [system, *empty], asked),
        Family("empty system", {}, [{"role": "system", "content": ""}], asked),
        Family("emoji", {}, [system, *emoji], asked),
        Family("line breaks", {}, [{"role": "system", "content": f"\n{SYSTEM}\n"}, *lines], asked),
        Family("200 messages", {}, [system, *many], asked),
    ]


async def check_cell(
    renderer: WorkerRenderer,
    template: str,
    name: str,
    tokenizer: str,
    family: Family,
    excuses: Sequence[Excuse],
    facts: TemplateFacts,
    measured: Sequence[str],
) -> Cell:
    """Everything that must hold for one shape; positions are found for the last texts in `measured`."""
    fixed = {"model": "m", "chat_template": template}

    async def render(body: Mapping[str, Any]) -> list[int] | None:
        try:
            return (await renderer({**fixed, **body})).ids()
        except RenderFailed:
            return None

    prompts = {text: tokens for text in TEXTS if (tokens := await render(family.chat(text))) is not None}
    if not prompts:
        found = await _find(renderer, {**fixed, **family.chat(TEXTS[0])}, facts)
        wrong = (f"positions {found.positions} for a chat that is refused",) if found.positions else ()
        return Cell(name, tokenizer, family.shape, wrong, (), refused=True)
    fresh = [
        common_prefix(prompts[text], other)
        for text in list(prompts)[:1]
        for start in NEW_CHATS
        if (other := await render({**family.body, "messages": [*_head(family), {**_first(family), "content": start}]}))
    ]
    wrong: list[tuple[str, str]] = []
    keys: set[bytes] = set()
    renders = 0
    for text in [text for text in measured if text in prompts]:
        prompt = prompts[text]
        found = await _find(renderer, {**fixed, **family.chat(text)}, facts)
        renders += found.renders
        keys.add(found.key)
        here = min(common_prefix(prompt, other) for other in prompts.values())
        history = next((boundary.tokens for boundary in found.boundaries if boundary.kind == "history"), 0)
        if not here - 1 <= history <= here:
            wrong.append(("history", f"{text!r}: history at {history}, chats part at {here}"))
        starts = [boundary.tokens for boundary in found.boundaries if boundary.kind == "system"]
        if fresh and starts and text == next(iter(prompts)) and not min(fresh) - 1 <= starts[0] <= min(fresh):
            wrong.append(("system", f"{text!r}: system at {starts[0]}, new chats part at {min(fresh)}"))
        if fresh and not starts and min(fresh) > 1:
            wrong.append(("system", f"{text!r}: no system, new chats share {min(fresh)}"))
        turns = [boundary.tokens for boundary in found.boundaries if boundary.kind == "turn"]
        if not turns:
            wrong.append(("turn", f"{text!r}: no turn"))
        following = await render(family.next_turn(text))
        in_loop = family.last["role"] == "tool"
        for turn in turns[:1] if in_loop else turns:  # a loop is rendered again once it is over, only its start stays
            if following is not None and (kept := common_prefix(prompt, following)) < turn:
                wrong.append(("turn", f"{text!r}: turn at {turn}, the next turn keeps {kept} of {len(prompt)}"))
    if len(keys) > 1:
        wrong.append(("history", f"{len(keys)} keys for one beginning"))
    open_, excused = [], []
    for what, text in wrong:
        excuse = next((e for e in excuses if e.template in name and e.shape in family.shape and e.what == what), None)
        if excuse is None:
            open_.append(f"{what}: {text}")
        else:
            excused.append(f"{what}: {excuse.reason}")
    return Cell(name, tokenizer, family.shape, tuple(open_), tuple(dict.fromkeys(excused)), renders=renders)


async def _find(renderer: WorkerRenderer, body: Mapping[str, Any], facts: TemplateFacts) -> Found:
    """Measured, not remembered; only what is known of the template is kept."""
    finder = BoundaryFinder(PositionCache(MEMORY_BYTES), facts=facts)
    return await finder.find(chat_request(body), renderer, hashlib.md5(body["chat_template"].encode()).digest())


def _first(family: Family) -> dict[str, Any]:
    return next(message for message in (*family.before, family.last) if message["role"] == "user")


def _head(family: Family) -> list[dict[str, Any]]:
    return [message for message in family.before if message["role"] == "system"]


async def check_templates(
    url: str, templates: Mapping[str, str], tokenizer: str, excuses: Sequence[Excuse] = EXCUSES
) -> list[Cell]:
    """All shapes of all `templates` (text by name) on the render server at `url`."""
    upstream = Upstream(connect_timeout=5.0)
    try:
        renderer = WorkerRenderer(upstream, url, timeout=60.0)
        facts = TemplateFacts()
        cells = []
        for name, template in templates.items():
            for number, family in enumerate(families()):
                measured = (TEXTS[0], TEXTS[2], TEXTS[number % len(TEXTS)])  # every text has its turn
                texts = tuple(dict.fromkeys(measured))
                cells.append(await check_cell(renderer, template, name, tokenizer, family, excuses, facts, texts))
        return cells
    finally:
        await upstream.aclose()


def report(cells: Sequence[Cell]) -> str:
    """A line per template and tokenizer, and what does not hold."""
    lines = []
    for name in dict.fromkeys((cell.template, cell.tokenizer) for cell in cells):
        own = [cell for cell in cells if (cell.template, cell.tokenizer) == name]
        held = sum(not cell.wrong and not cell.refused and not cell.excused for cell in own)
        counts = f"{held} hold, {sum(bool(c.excused) for c in own)} excused, {sum(c.refused for c in own)} refused"
        lines.append(f"{name[0]:<34}{name[1]:<9}{counts}, {sum(bool(cell.wrong) for cell in own)} WRONG")
        for cell in own:
            lines += [f"    {cell.shape}: {wrong}" for wrong in cell.wrong]
            lines += [f"    {cell.shape}: excused, {reason}" for reason in cell.excused]
            lines += [f"    {cell.shape}: the template takes no such chat"] if cell.refused else []
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.templates", description="positions by a folder of templates"
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="a folder with chat templates, *.jinja")
    parser.add_argument("--only", metavar="NAME", default="", help="templates whose name holds this")
    parser.add_argument("--json", action="store_true", help="print every cell instead of the table")
    args = parser.parse_args(argv)
    paths = [path for path in sorted(args.dir.glob("*.jinja")) if args.only in path.name]
    if not paths:
        parser.error(f"DIR: no {args.only}*.jinja in {args.dir}")
    templates = {path.stem: path.read_text() for path in paths}
    from proxy.bench.harness.servers import generated_model

    config = generated_model(lambda text: print(text, file=sys.stderr)) / "config.json"
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="seamark-templates-") as folder:
        for tokenizer, markers in (("special", markers_in(templates.values())), ("plain", [])):
            model = write_render_model(Path(folder) / tokenizer, config, markers)
            with render_server(model) as url:
                cells += asyncio.run(check_templates(url, templates, tokenizer))
    print(json.dumps([cell._asdict() for cell in cells], indent=1) if args.json else report(cells))
    return int(any(cell.wrong for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
