"""Generated pairs of requests where one part in the middle changed, and which part it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

WORDS = ["tide", "wind", "ice", "pilot", "harbour", "bar", "channel", "buoy", "light", "draught", "keel", "berth"]


class Changed(NamedTuple):
    """One case."""

    others: list[dict[str, Any]]  # requests before, that have nothing to do with it
    first: dict[str, Any]
    second: dict[str, Any]
    what: str
    index: int  # of the message or tool that differs first
    description: str


def changed_requests(number: int, draw: random.Random) -> Iterator[Changed]:
    """`number` cases: messages edited, dropped or put in; tools edited, dropped or moved; system prompts edited."""
    for case in range(number):
        others = [_request(draw) for _ in range(2)]
        first = _request(draw)
        messages, tools = list(first["messages"]), list(first["tools"])
        kind = ("message", "system", "tool edited", "tool dropped", "tools moved")[case % 5]
        if kind == "message":
            what, index = "message", draw.randrange(1, len(messages) - 4)
            messages[index] = {**messages[index], "content": _prose(draw, 6)}
        elif kind == "system":
            what, index = "message", 0
            text = messages[0]["content"]
            cut = draw.randrange(len(text) // 2)
            messages[0] = {**messages[0], "content": f"{text[:cut]} {case} {text[cut:]}"}
        else:
            what, index = "tool", draw.randrange(len(tools) - 1)
            if kind == "tool edited":
                tools[index] = _tool(draw, f"edited_{case}")
            elif kind == "tool dropped":
                del tools[index]
            else:
                tools[index], tools[index + 1] = tools[index + 1], tools[index]
        more = [{"role": "assistant", "content": _prose(draw, 5)}, {"role": "user", "content": _prose(draw, 5)}]
        second = {"messages": [*messages, *(more if case % 2 else [])], "tools": tools}
        yield Changed(others, first, second, what, index, f"case {case}: {kind} at {index}")


def _request(draw: random.Random) -> dict[str, Any]:
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": _prose(draw, 25)}
        for number in range(2 * draw.randrange(4, 7) + 1)
    ]
    tools = [_tool(draw, f"{draw.choice(WORDS)}_{number}") for number in range(draw.randrange(3, 6))]
    return {"messages": [{"role": "system", "content": _prose(draw, 60)}, *turns], "tools": tools}


def _tool(draw: random.Random, name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {draw.choice(WORDS): {"type": "string"}}}
    function = {"name": name, "description": _prose(draw, 12), "parameters": parameters}
    return {"type": "function", "function": function}


def _prose(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."
