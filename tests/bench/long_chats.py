"""Long conversations of coding agents as request bodies: each repeats all messages of the one before and adds a few.

All share tools and system prompt; every message behind them is of one conversation alone. They are put together from
texts made once, as thousands of them are wanted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

from proxy.bench.harness.prompts import QUESTIONS, prose
from tests.bench.agent_turns import TOOL_NAMES, port
from tests.harness.mock_worker import CHARACTERS_PER_TOKEN, MODEL

TOOLS, SYSTEM_WORDS = 24, 2_000  # some 50 kB together, as coding agents have

TEXTS, TEXT_BYTES = 64, 2_000  # results of tools, and about how long each is

CALLS = 3  # in one answer, each with its result

QUESTION_EVERY = 7  # answers


def conversation(number: int, sizes: range, streamed: bool = False) -> Iterator[bytes]:
    """The bodies of one conversation: as many as `sizes`, of about so many tokens each, which is 4 bytes."""
    start, end = _head(), _end(streamed)
    messages = _messages(number)
    made = [next(messages)]
    size = len(start) + len(made[0]) + len(end)
    for tokens in sizes:
        while size < tokens * CHARACTERS_PER_TOKEN:
            made.append(next(messages))
            size += len(made[-1]) + 1
        yield b"%b%b%b" % (start, b",".join(made), end)


def _messages(number: int) -> Iterator[bytes]:
    """The messages behind the system prompt, in groups that belong together."""
    draw = random.Random(number)
    for step in count():
        name = f"{number}-{step}"
        if step % QUESTION_EVERY == 0:
            said = [{"role": "assistant", "content": f"{name}: {prose(20, step % 50)}"}] if step else []
            made = [*said, {"role": "user", "content": f"{name}: {draw.choice(QUESTIONS)}"}]
        else:
            calls = [f"call_{name}_{each}" for each in range(CALLS)]
            made = [{"role": "assistant", "content": f"{name}: I look.", "tool_calls": [_call(each) for each in calls]}]
            made += [
                {"role": "tool", "tool_call_id": each, "content": f"{each}\n{draw.choice(_texts())}"} for each in calls
            ]
        yield b",".join(map(_encoded, made))


def _call(name: str) -> dict[str, Any]:
    function = {"name": "read", "arguments": json.dumps({"path": f"src/{name}.py", "limit": 200})}
    return {"id": name, "type": "function", "function": function}


@cache
def _texts() -> tuple[str, ...]:
    """Results look like code, markup and logs, as those of real tools; one in four has characters beyond Latin-1."""
    return tuple(_text(seed) for seed in range(TEXTS))


def _text(seed: int) -> str:
    draw = random.Random(seed)
    arrow = "\u2192" if seed % 4 == 0 else ":"
    lines: list[str] = []
    while sum(map(len, lines)) < TEXT_BYTES:
        name = f"{draw.choice(TOOL_NAMES)}_{draw.randrange(1000)}"
        lines += [
            f'{len(lines) + 1:6}{arrow}def {name}(tide: int, *, port: str = "{draw.choice("abcdef")}") -> dict:',
            f"        return {{'{name}': [tide], 'html': '<a href=\"{port(draw)}\">{name}</a>'}}",
            f"        # {prose(12, draw.randrange(10**6))}",
        ]
    return "\n".join(lines)


@cache
def _head() -> bytes:
    """Up to the messages behind the system prompt."""
    system = _encoded({"role": "system", "content": prose(SYSTEM_WORDS, 1)})
    return b'{"model":"%b","max_tokens":64,"tools":%b,"messages":[%b,' % (MODEL.encode(), _encoded(_tools()), system)


def _end(streamed: bool) -> bytes:
    return b'],"stream":true,"stream_options":{"include_usage":true}}' if streamed else b"]}"


def _tools() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"{TOOL_NAMES[seed % len(TOOL_NAMES)]}_{seed}",
                "description": prose(200, seed),
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "description": prose(15, seed + 50)} for name in ("path", "text")
                    },
                    "required": ["path"],
                },
            },
        }
        for seed in range(TOOLS)
    ]


def _encoded(value: Any) -> bytes:
    """As OpenAI's SDKs write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
