"""Prompts whose shared part has exactly the wanted number of tokens, by the engine's own count."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from proxy.bench.harness.client import Messages, tokens_of
from proxy.boundaries.divergence import common_prefix

_SUBJECTS = (
    "The editor",
    "A harbour pilot",
    "Each reader",
    "The archive",
    "Our team",
    "The northern station",
    "A clerk",
)

_VERBS = ("checks", "describes", "records", "compares", "repeats", "returns", "measures", "answers")

_OBJECTS = ("the figures", "every request", "a short report", "the first page", "its own notes", "the tide tables")

_ENDS = ("before noon", "without delay", "in plain words", "for the next reader", "twice a week", "with care")

# First words that share no beginning, so that two questions part at their first token.
QUESTIONS = (
    "What changed since the last report, and who has to know about it?",
    "Please list the three risks that matter most this week.",
    "How would you explain the main figure to a newcomer?",
    "Summarise the second section in two sentences.",
    "Give an example from the harbour that fits the rule.",
    "Is there anything in the notes that contradicts the summary?",
)


class Shared(NamedTuple):
    """Prompts with one system prompt."""

    prompts: tuple[Messages, ...]
    shared: int  # tokens of the longest common prefix of any two


def prose(words: int, seed: int) -> str:
    """About `words` words of dull English, the same for the same seed."""
    draw = random.Random(seed)
    text: list[str] = []
    while len(text) < words:
        sentence = " ".join(map(draw.choice, (_SUBJECTS, _VERBS, _OBJECTS, _ENDS))) + "."
        text += sentence.split()
    return " ".join(text[:words])


async def with_shared_tokens(
    client: httpx.AsyncClient, url: str, shared: int, seed: int, questions: Sequence[str] = QUESTIONS
) -> Shared:
    """Chats of one system prompt and the `questions` that share exactly `shared` tokens.

    Raises `ValueError` if the tokenizer does not allow that length.
    """

    def chats(system: str) -> tuple[Messages, ...]:
        return tuple(
            [{"role": "system", "content": system}, {"role": "user", "content": question}] for question in questions
        )

    async def shared_of(system: str) -> int:
        first, second = chats(system)[:2]
        return common_prefix(await tokens_of(client, url, first), await tokens_of(client, url, second))

    words, filler = shared, ""
    length = await shared_of(prose(words, seed))
    words = words * shared // length  # close; then down to just below, and up in single tokens
    length = await shared_of(prose(words, seed))
    while length > shared:
        words -= max(1, (length - shared) // 4)
        length = await shared_of(prose(words, seed))
    while length < shared:  # one token at a time for the last few
        filler += " so"
        length = await shared_of(prose(words, seed) + filler)
    if length != shared:
        raise ValueError(f"no system prompt of {shared} shared tokens, nearest {length}")
    prompts = chats(prose(words, seed) + filler)
    return Shared(prompts, shared)
