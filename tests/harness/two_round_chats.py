"""Chats of two turns on five system prompts, and the prompts that engines get of them, hinted as the gateway does."""

from __future__ import annotations

import random
from typing import Any

from proxy.bench.harness.client import prose

Chat = list[dict[str, str]]


def two_round_chats(count: int = 20, seed: int = 11) -> tuple[list[Chat], list[Chat]]:
    """The first turns, and the second ones."""
    draw = random.Random(seed)
    systems = [prose(words, seed + number) for number, words in enumerate((20, 70, 150, 400, 700))]
    first: list[Chat] = []
    second: list[Chat] = []
    for number in range(count):
        user = f"{draw.choice('ABCDEFGH')}{number}: {prose(draw.choice((4, 15, 60, 200)), seed + number)}"
        chat = [{"role": "system", "content": systems[number % 5]}, {"role": "user", "content": user}]
        first.append(chat)
        said = prose(draw.randint(3, 80), seed + 500 + number)
        more = f"{number} again: {prose(draw.choice((4, 15, 60)), seed + 900 + number)}"
        second.append([*chat, {"role": "assistant", "content": said}, {"role": "user", "content": more}])
    return first, second


def prompts_of(tokenizer: Any, chats: list[Chat]) -> list[tuple[list[int], list[int]]]:
    """Their tokens and hints: behind the system prompt, and so many tokens before the end."""

    def ids(chat: Chat, ask: bool = True) -> list[int]:
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=ask, return_dict=False))

    prompts = []
    for chat in chats:
        whole, turn = ids(chat), ids(chat, ask=False)
        other = ids([chat[0], {"role": "user", "content": "@@@"}])
        head = next(n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
        prompts.append((whole, [head, len(turn) - len(whole)]))
    return prompts
