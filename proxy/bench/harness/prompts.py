"""Prompts whose shared part has exactly the wanted number of tokens, by the engine's own count."""

from __future__ import annotations

import random
from collections.abc import Sequence

import httpx

from proxy.bench.harness.client import Messages, tokens_of
from proxy.boundaries.divergence import common_prefix

_SENTENCE = (
    ("The editor", "A harbour pilot", "Each reader", "The archive", "Our team", "The northern station", "A clerk"),
    ("checks", "describes", "records", "compares", "repeats", "returns", "measures", "answers"),
    ("the figures", "every request", "a short report", "the first page", "its own notes", "the tide tables"),
    ("before noon", "without delay", "in plain words", "for the next reader", "twice a week", "with care"),
)

# First words that share no beginning, so that two questions part at their first token.
QUESTIONS = (
    "What changed since the last report, and who has to know about it?",
    "Please list the three risks that matter most this week.",
    "How would you explain the main figure to a newcomer?",
    "Summarise the second section in two sentences.",
    "Give an example from the harbour that fits the rule.",
    "Is there anything in the notes that contradicts the summary?",
)


def prose(words: int, seed: int) -> str:
    """About `words` words of dull English, the same for the same seed."""
    draw = random.Random(seed)
    text: list[str] = []
    while len(text) < words:
        sentence = " ".join(map(draw.choice, _SENTENCE)) + "."
        text += sentence.split()
    return " ".join(text[:words])


async def with_shared_tokens(
    client: httpx.AsyncClient, url: str, shared: int, seed: int, questions: Sequence[str] = QUESTIONS
) -> tuple[Messages, ...]:
    """Chats, any two of which share exactly `shared` tokens; `ValueError` if the tokenizer does not allow that."""

    def chats(system: str) -> tuple[Messages, ...]:
        return tuple(
            [{"role": "system", "content": system}, {"role": "user", "content": question}] for question in questions
        )

    async def shared_of(system: str) -> int:
        first, second = chats(system)[:2]
        return common_prefix(await tokens_of(client, url, first), await tokens_of(client, url, second))

    words = shared * shared // await shared_of(prose(shared, seed))  # close; then to just below, and up token by token
    while (length := await shared_of(prose(words, seed))) > shared:
        words -= max(1, (length - shared) // 4)
    system = prose(words, seed)
    while length < shared:
        system += " so"
        length = await shared_of(system)
    if length != shared:
        raise ValueError(f"no system prompt of {shared} shared tokens, nearest {length}")
    return chats(system)
