"""`python -m tests.bench.agent_turns`: renders that a coding agent's growing conversation costs, and its added latency.

Each conversation begins with 4 kB and grows by a tool call and 2 kB of result a turn. Every turn goes to the worker
directly and through the gateway, in turn the one or the other first. The worker is vLLM's own API process before an
engine that answers at once: what remains is the gateway's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import open_client
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.bench.harness.ratios import Spread, spread
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from tests.harness.fake_engine import MATCH_UNIT
from tests.harness.instant_worker import ASKED, CACHED, OURS, instant_worker
from tests.harness.load import Client, connect, request

TURNS = 200

TURN_BYTES = 2_000

SYSTEM_WORDS = 220

QUESTION_EVERY = 7  # turns; the others answer a tool call

WINDOW = 10  # turns around a size that are put together

SIZES = {4_000: 4e-3, 40_000: None, 400_000: 20e-3}  # bytes of text -> seconds that may be added (p50), None: any

SETTLE_SECONDS = 1.0  # after the last turn, for what the gateway does beside the path

TOKENIZING = ("/tokenize", "/detokenize")

TEMPLATES = Path(__file__).parents[1] / "templates"

TOOL_NAMES = ("bash", "edit", "glob", "grep", "read", "write")

WORDS = (
    "renders: asked of the worker for the first turn and for all later ones, those beside the path included;\n"
    "tokenisations too. added: milliseconds to the whole answer, through the gateway less directly, the same turn\n"
    "right before or after; median and quartiles of the turns around a size. one render: what the worker takes for\n"
    "one of the whole chat."
)


@dataclass(frozen=True)
class Shape:
    """One way to send a conversation."""

    name: str
    path: str
    template: str = ""  # a file of tests/templates; empty: the generated model's own
    settings: Mapping[str, Any] | None = None  # chat_template_kwargs
    thinks: bool = False  # the agent sends the model's thinking back


SHAPES = (
    Shape("chats", CHAT),
    Shape("messages", MESSAGES),
    Shape("responses", RESPONSES),
    Shape("chats, thinking dropped", CHAT, "thinking-dropped.jinja", thinks=True),
    Shape("chats, thinking off", CHAT, "head-by-settings.jinja", {"enable_thinking": False}),
)


class Turn(NamedTuple):
    """One turn, both ways; seconds."""

    size: int  # bytes of the conversation's text
    direct: float
    through: float
    render: float  # of the whole chat, asked by the benchmark itself

    @property
    def added(self) -> float:
        """What the gateway takes."""
        return self.through - self.direct


class Row(NamedTuple):
    """The turns of a conversation around one size."""

    shape: str
    size: int  # bytes
    added: Spread  # seconds
    direct: float  # seconds, median
    render: float  # seconds, median
    limit: float | None  # of the median added, seconds

    @property
    def held(self) -> bool:
        """Whether it is as quick as it has to be."""
        return self.limit is None or self.added.median <= self.limit


class Result(NamedTuple):
    """One shape's conversation."""

    shape: str
    turns: int
    at_start: int  # renders while the gateway started
    first: int  # renders for the first turn
    later: int  # renders for all others
    rows: tuple[Row, ...]

    @property
    def held(self) -> bool:
        """Whether no turn was rendered and each size is quick enough."""
        return not self.first and not self.later and all(row.held for row in self.rows)


class Step(NamedTuple):
    """What one turn adds to a conversation: a question, or a call and its result."""

    question: str | None
    name: str
    argument: str
    said: str
    result: str


def steps(turns: int, seed: int) -> list[Step]:
    """The turns of one conversation. Results look like code, markup and logs, as those of real tools."""
    draw = random.Random(seed)
    found = []
    for number in range(turns):
        question = QUESTIONS[number % len(QUESTIONS)] if number % QUESTION_EVERY == 0 else None
        lines: list[str] = []
        while sum(map(len, lines)) < TURN_BYTES - 200:
            name = f"{draw.choice(TOOL_NAMES)}_{draw.randrange(1000)}"
            lines += [
                f'{len(lines) + 1:4}  def {name}(tide: int, *, port: str = "{draw.choice("abcdef")}") -> dict:',
                f"        return {{'{name}': [tide], 'html': '<a href=\"{port(draw)}\">{name}</a>'}}",
                f"        # {prose(12, draw.randrange(10**6))}",
                "",
            ]
        argument = f"src/{draw.choice(TOOL_NAMES)}_{number}.py"
        text = "\n".join(lines)[: TURN_BYTES - 200]
        found.append(Step(question, draw.choice(TOOL_NAMES), argument, prose(20, draw.randrange(10**6)), text))
    return found


def port(draw: random.Random) -> str:
    """An address in a page."""
    return f"https://harbour.example/{draw.randrange(10**4)}?berth={draw.randrange(100)}"


def tools() -> list[dict[str, Any]]:
    """Six tools in the words of chats."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": prose(25, seed),
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string", "description": prose(8, seed + 50)}},
                    "required": ["path"],
                },
            },
        }
        for seed, name in enumerate(TOOL_NAMES)
    ]


def body_of(shape: Shape, made: Sequence[Step]) -> dict[str, Any]:
    """The request after these turns."""
    body: dict[str, Any] = {"model": MODEL_NAME}
    if shape.settings is not None:
        body["chat_template_kwargs"] = shape.settings
    system = prose(SYSTEM_WORDS, 1)
    if shape.path == MESSAGES:
        schemas = [tool["function"] for tool in tools()]
        body |= {"max_tokens": 64, "system": system, "messages": list(_as_messages(made))}
        return body | {"tools": [{**tool, "input_schema": tool["parameters"]} for tool in map(_bare, schemas)]}
    if shape.path == RESPONSES:
        functions = [{"type": "function", **tool["function"]} for tool in tools()]
        return body | {"max_output_tokens": 64, "instructions": system, "input": _as_items(made), "tools": functions}
    messages = [{"role": "system", "content": system}, *_as_chat(made, shape.thinks)]
    return body | {"max_tokens": 64, "messages": messages, "tools": tools()}


def _bare(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "description": function["description"], "parameters": function["parameters"]}


def _as_chat(made: Sequence[Step], thinks: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, step in enumerate(made):
        if step.question is not None:
            if messages:
                messages.append({"role": "assistant", "content": step.said})
            messages.append({"role": "user", "content": f"{step.question} {step.result}"})
            continue
        function = {"name": step.name, "arguments": json.dumps({"path": step.argument})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        asked = {"role": "assistant", "content": step.said, "tool_calls": [call]}
        messages.append(asked | ({"reasoning_content": f"I look into {step.argument}."} if thinks else {}))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": step.result})
    return messages


def _as_messages(made: Sequence[Step]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, step in enumerate(made):
        said = {"type": "text", "text": step.said}
        if step.question is not None:
            if messages:
                messages.append({"role": "assistant", "content": [said]})
            messages.append({"role": "user", "content": [{"type": "text", "text": f"{step.question} {step.result}"}]})
            continue
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": step.name, "input": {"path": step.argument}}
        messages.append({"role": "assistant", "content": [said, use]})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": step.result}
        messages.append({"role": "user", "content": [result]})
    return messages


def _as_items(made: Sequence[Step]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for number, step in enumerate(made):
        if step.question is not None:
            if items:
                items.append({"role": "assistant", "content": step.said})
            items.append({"role": "user", "content": f"{step.question} {step.result}"})
            continue
        arguments = json.dumps({"path": step.argument})
        call = {"type": "function_call", "call_id": f"call_{number}", "name": step.name, "arguments": arguments}
        items += [call, {"type": "function_call_output", "call_id": f"call_{number}", "output": step.result}]
    return items


async def asked(http: httpx.AsyncClient, worker: Server) -> int:
    """Renders, and tokenisations and the like, that the worker has done for others than the benchmark."""
    counts = (await http.get(worker.url + ASKED)).json()
    return sum(count for path, count in counts.items() if path.endswith("/render") or path in TOKENIZING)


class Talk:
    """One conversation at a worker and at the gateway before it."""

    def __init__(self, http: httpx.AsyncClient, worker: Server, gateway: Server) -> None:
        self._http = http
        self._worker = worker
        self._gateway = gateway

    async def asked(self) -> int:
        """Renders, and tokenisations and the like, that the worker did for others than the benchmark."""
        return await asked(self._http, self._worker)

    async def hold(self, shape: Shape, turns: int, before_start: int) -> Result:
        """Send every turn both ways; the worker had been asked so often before the gateway started.

        Raises `RuntimeError` for an error answer.
        """
        at_start = await self.asked() - before_start
        clients = await connect(self._worker.url), await connect(self._gateway.url)
        made, found, before = steps(turns, len(shape.name)), [], 0
        first = 0
        try:
            for number in range(1, turns + 1):
                raw = json.dumps(body_of(shape, made[:number])).encode()
                prompt, seconds = await self._render(shape.path, raw)
                took = await self._turn(clients, shape.path, raw, before, number % 2)
                found.append(Turn(len(raw), *took, seconds))
                before = prompt // MATCH_UNIT * MATCH_UNIT
                if number == 1:
                    first = await self.asked() - before_start - at_start
        finally:
            for client in clients:
                client.close()
        await asyncio.sleep(SETTLE_SECONDS)
        later = await self.asked() - before_start - at_start - first
        return Result(shape.name, turns, at_start, first, later, rows(shape.name, found))

    async def _turn(
        self, clients: tuple[Client, Client], path: str, raw: bytes, cached: int, first: int
    ) -> tuple[float, float]:
        """Seconds directly and through the gateway; `first` goes first."""
        urls, seconds = (self._worker.url, self._gateway.url), [0.0, 0.0]
        for way in (first, 1 - first):
            seconds[way] = (await clients[way].ask(request(urls[way], raw, path, {CACHED.decode(): str(cached)}))).last
        return seconds[0], seconds[1]

    async def _render(self, path: str, raw: bytes) -> tuple[int, float]:
        """Tokens of a prompt, and how many seconds the worker took to render it."""
        headers = {"content-type": "application/json", OURS.decode(): "1"}
        answer = await self._http.post(self._worker.url + path + "/render", content=raw, headers=headers)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}/render: {answer.status_code} {answer.text[:300]}")
        return len(answer.json()["token_ids"]), answer.elapsed.total_seconds()


def rows(shape: str, turns: Sequence[Turn]) -> tuple[Row, ...]:
    """The turns nearest each size that the conversation reached; its very first turn is in none."""
    found = []
    for size, limit in SIZES.items():
        if turns[-1].size < size * 0.9:
            continue
        near = sorted(turns[1:], key=lambda turn: abs(turn.size - size))[:WINDOW]
        added = spread([turn.added for turn in near])
        medians = [statistics.median(values) for values in zip(*[(t.direct, t.render) for t in near], strict=True)]
        found.append(Row(shape, size, added, *medians, limit))
    return tuple(found)


async def measure(shapes: Sequence[Shape], turns: int, say: Callable[[str], None]) -> list[Result]:
    """A worker and a gateway for each template, a conversation for each shape."""
    model, found = generated_model(say), []
    for template in dict.fromkeys(shape.template for shape in shapes):
        with tempfile.TemporaryDirectory(prefix="seamark-turns-") as folder, Servers(Path(folder)) as servers:
            flags = ("--chat-template", str(TEMPLATES / template)) if template else ()
            worker = instant_worker(servers, model, flags)
            worker.wait_until_ready()
            for shape in (shape for shape in shapes if shape.template == template):
                async with open_client() as client:
                    before = await asked(client, worker)
                    gateway = servers.gateway(worker)  # one that knows nothing yet
                    gateway.wait_until_ready("/ready", seconds=60)
                    say(f"{shape.name}: {turns} turns")
                    found.append(await Talk(client, worker, gateway).hold(shape, turns, before))
                gateway.stop()
    return found


def render(results: Sequence[Result]) -> str:
    """A line for each shape and size."""
    head = f"{'conversation':<26}{'renders':>12}{'bytes':>10}{'added ms':>24}{'directly ms':>13}{'one render ms':>15}"
    lines = [head]
    for result in results:
        renders = f"{result.first} + {result.later}"
        for row in result.rows:
            added = f"{1e3 * row.added.median:.1f} ({1e3 * row.added.lower:.1f}..{1e3 * row.added.upper:.1f})"
            figures = f"{row.size:>10}{added:>24}{1e3 * row.direct:>13.1f}{1e3 * row.render:>15.1f}"
            lines.append(f"{row.shape:<26}{renders:>12}{figures}{'' if row.held else '  above'}")
        verdict = "held" if result.held else "NOT HELD"
        lines.append(f"  {verdict}: {result.first + result.later} renders in {result.turns} turns")
    return "\n".join(lines)


def report(results: Sequence[Result]) -> dict[str, Any]:
    """Everything measured, for machines; seconds."""
    return {
        "held": all(result.held for result in results),
        "conversations": [
            {
                **result._asdict(),
                "held": result.held,
                "rows": [{**row._asdict(), "added": row.added._asdict(), "held": row.held} for row in result.rows],
            }
            for result in results
        ],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.agent_turns", description="renders and added latency of growing conversations"
    )
    names = {shape.name: shape for shape in SHAPES}
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=f"of each conversation ({TURNS})")
    parser.add_argument("--shape", action="append", choices=names, help="only this one (repeat); default: all")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.turns < 2:
        parser.error("--turns: at least 2")
    shapes = [names[name] for name in dict.fromkeys(args.shape or names)]
    results = asyncio.run(measure(shapes, args.turns, narrator()))
    print(json.dumps(report(results), indent=1) if args.json else f"{render(results)}\n\n{WORDS}")
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
