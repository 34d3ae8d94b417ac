"""`seamark bench agents`: hits in the request shapes of two coding agents, with the default rewrite rules and without.

Claude Code: /v1/messages (or, behind a converter, /v1/chat/completions); a billing header with a nonce at the head of
the system prompt, `cache_control` on the last system block and on the newest message, reminders inside user turns.
OpenCode: /v1/chat/completions; one system prompt with an environment block, tool calls and tool messages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.servers import MODEL_NAME
from proxy.boundaries.token_ids import common_prefix
from proxy.commands.parser import Parser

TURNS = 20

EPHEMERAL = {"type": "ephemeral"}

WORDS = ["file", "test", "line", "change", "read", "write", "branch", "commit", "import", "value", "module", "fix"]

FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


class Efficiency(NamedTuple):
    """One agent's hits, in tokens."""

    delivered: int
    oracle: int  # what could be hit: the longest prefix shared with any earlier request, in whole match units

    @property
    def share(self) -> float:
        """Hit efficiency."""
        return self.delivered / self.oracle if self.oracle else 1.0


def claude_code(draw: random.Random, converted: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of each request; `converted` to chats by a proxy that knows nothing of the header."""
    rules, environment = prose(draw, 500), f"Working directory: /work/seamark\nToday is 2026-11-21\n{prose(draw, 40)}"
    tools = [_tool(draw, name) for name in ("Bash", "Edit", "Glob", "Grep", "Read", "Write")]
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        header = f"x-anthropic-billing-header: cc_version=2.0.1; cch={draw.getrandbits(32):08x};\n"
        if turn % 5 == 0:
            reminder = f"<system-reminder>{prose(draw, 20)}</system-reminder>"
            texts = [{"type": "text", "text": reminder}, {"type": "text", "text": prose(draw, 15)}]
            messages.append({"role": "user", "content": texts})
        else:
            use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {"path": prose(draw, 2)}}
            messages.append({"role": "assistant", "content": [{"type": "text", "text": prose(draw, 8)}, use]})
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": prose(draw, 50)}
            messages.append({"role": "user", "content": [result]})
        if turn % 5 == 4:
            yield_after = {"role": "assistant", "content": [{"type": "text", "text": prose(draw, 12)}]}
        else:
            yield_after = None
        system = [
            {"type": "text", "text": header},
            {"type": "text", "text": rules},
            {"type": "text", "text": environment, "cache_control": EPHEMERAL},
        ]
        last = messages[-1]
        newest = {**last, "content": [*last["content"][:-1], {**last["content"][-1], "cache_control": EPHEMERAL}]}
        body = {"model": MODEL_NAME, "max_tokens": 1, "system": system, "tools": tools}
        body["messages"] = [*messages[:-1], newest]
        yield ("/v1/chat/completions", as_chat(body)) if converted else ("/v1/messages", body)
        if yield_after is not None:
            messages.append(yield_after)


def opencode(draw: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of each request."""
    system = f"{prose(draw, 500)}\n<env>\n  Working directory: /work/seamark\n  Today's date: Sat Nov 21 2026\n</env>"
    tools = [as_chat_tool(_tool(draw, name)) for name in ("bash", "edit", "glob", "grep", "list", "read", "todowrite")]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for turn in range(TURNS):
        if turn % 5 == 0:
            messages.append({"role": "user", "content": prose(draw, 15)})
        else:
            function = {"name": "read", "arguments": f'{{"filePath": "{prose(draw, 2)}"}}'}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": prose(draw, 5), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": prose(draw, 50)})
        yield (
            "/v1/chat/completions",
            {"model": MODEL_NAME, "max_tokens": 1, "messages": list(messages), "tools": tools},
        )
        if turn % 5 == 4:
            messages.append({"role": "assistant", "content": prose(draw, 12)})


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request to /v1/messages as a converting proxy sends it on: header and all."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": block["text"]} for block in body["system"]]}
    ]
    for message in body["messages"]:
        texts, calls = [], []
        for block in message["content"]:
            if block["type"] == "text":
                texts.append({"type": "text", "text": block["text"]})
            elif block["type"] == "tool_use":
                function = {"name": block["name"], "arguments": str(block["input"]).replace("'", '"')}
                calls.append({"id": block["id"], "type": "function", "function": function})
            else:
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]})
        if texts or calls:
            messages.append({"role": message["role"], "content": texts, **({"tool_calls": calls} if calls else {})})
    tools = [as_chat_tool(tool) for tool in body["tools"]]
    return {"model": body["model"], "max_tokens": 1, "messages": messages, "tools": tools}


def as_chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of the messages API in the words of chats."""
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def prose(draw: random.Random, words: int) -> str:
    """So many random words."""
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."


def _tool(draw: random.Random, name: str) -> dict[str, Any]:
    properties = {word: {"type": "string", "description": prose(draw, 6)} for word in draw.sample(WORDS, 2)}
    schema = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    return {"name": name, "description": prose(draw, 30), "input_schema": schema}


def shapes() -> dict[str, Iterator[tuple[str, dict[str, Any]]]]:
    """Fresh requests of every agent by name."""
    return {
        "Claude Code, /v1/messages": claude_code(random.Random(1), converted=False),
        "Claude Code, converted to chats": claude_code(random.Random(2), converted=True),
        "OpenCode, chats": opencode(random.Random(3)),
    }


async def efficiency(
    gateway: str, worker: str, requests: Iterator[tuple[str, dict[str, Any]]], match_unit: int
) -> Efficiency:
    """Send the requests one after the other; what came of what could have.

    Prompts are what the engine computes: where the gateway rewrites, the oracle counts the rewritten ones.
    """
    delivered = oracle = 0
    before: list[list[int]] = []
    async with httpx.AsyncClient(timeout=300) as client:
        for path, body in requests:
            body = {**body, "cache_salt": f"agents {id(requests)}"}
            answer = await client.post(gateway + path, json=body)
            if answer.status_code != 200:
                raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
            delivered += int(answer.headers["x-seamark-cached"])
            tokens = await _tokens(client, worker, path, stripped(body))
            shared = max((common_prefix(tokens, other) for other in before), default=0)
            oracle += min(shared, len(tokens) - 1) // match_unit * match_unit
            before.append(tokens)
    return Efficiency(delivered, oracle)


def stripped(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without the header's nonce: what could be shared were it not for that."""
    messages = [
        {**message, "content": [{**part, "text": ""} if _is_header(part) else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in body["messages"]
    ]
    return {**body, "messages": messages}


def _is_header(part: Mapping[str, Any]) -> bool:
    return str(part.get("text", "")).startswith("x-anthropic-billing-header")


async def _tokens(client: httpx.AsyncClient, worker: str, path: str, body: Mapping[str, Any]) -> list[int]:
    answer = await client.post(worker + path + "/render", json=body)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["token_ids"]
    return tokens


def main(argv: list[str]) -> int:
    import tempfile
    from pathlib import Path

    from proxy.bench.harness.servers import Servers, generated_model

    parser = Parser(prog="seamark bench agents", description="hit efficiency by agents' requests")
    parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="seamark-agents-") as name, Servers(Path(name)) as servers:
        engine = servers.engine("seamark", generated_model(print), flags=FLAGS)
        gateways = {
            "default rules": servers.gateway(engine),
            "no rules": servers.gateway(engine, flags=("--rewrite", "")),
        }
        engine.wait_until_ready()
        lowest = 1.0
        for rules, gateway in gateways.items():
            gateway.wait_until_ready("/ready", seconds=60)
            for agent, requests in shapes().items():
                result = asyncio.run(efficiency(gateway.url, engine.url, requests, 16))
                print(f"{agent:<34}{rules:<16}{result.share:7.1%}  {result.delivered} of {result.oracle}", flush=True)
                lowest = min(lowest, result.share) if rules == "default rules" else lowest
    return 0 if lowest >= 0.95 else 1
