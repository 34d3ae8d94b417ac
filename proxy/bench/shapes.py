"""What `seamark bench mine` asks: chats that begin like earlier ones, as data.

What a chat shares is not said: `Seen` reads it off the chats, as an ideal cache would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from proxy.bench.harness.client import QUESTIONS, Messages
from proxy.boundaries.divergence import common_prefix

IN_TURN = range(3)  # requests one after the other: one that computes, one that may find, and one behind that


class Wave(NamedTuple):
    """Chats that are sent together, while those `beside` them decode."""

    chats: Sequence[Messages]
    beside: Sequence[Messages] = ()


# Of a new document, what makes a short chat that shares nothing, and how many chats are sent at once.
Waves = Callable[[str, Callable[[], Messages], int], Sequence[Wave]]


class SharingShape(NamedTuple):
    name: str
    told: str  # what it asks
    waves: Waves


def question(number: int) -> str:
    """Another one for each number; the first six part at their first word."""
    return QUESTIONS[number % len(QUESTIONS)] + " Say it again." * (number // len(QUESTIONS))


def message(role: str, content: Any) -> Mapping[str, Any]:
    """`content` None: what the server answers to the messages before it."""
    return {"role": role, "content": content}


def in_system(document: str, asked: int) -> Messages:
    return message("system", document), message("user", question(asked))


def in_user(document: str, asked: int = 0) -> Messages:
    return (message("user", f"{document}\n\n{question(asked)}"),)


def in_part(document: str, asked: int) -> Messages:
    texts = document, f"\n\n{question(asked)}"
    return (message("user", [{"type": "text", "text": text} for text in texts]),)


def talk(document: str, turns: int, answer: str | None = None, agent: str = "") -> Messages:
    """A conversation before its answer `turns` (from 0 on); an agent's name begins its last question."""
    said = [(message("user", question(turn)), message("assistant", answer)) for turn in range(turns)]
    return message("system", document), *sum(said, ()), message("user", agent + question(turns))


def _in_turn(chat: Callable[[str, int], Messages]) -> Waves:
    return lambda document, new, burst: [Wave([chat(document, number)]) for number in IN_TURN]


def _growing(document: str, turns: int) -> Messages:
    return (message("user", document[: len(document) * (turns + 1) // len(IN_TURN)]),)


def _at_once(document: str, first: int, number: int) -> Wave:
    return Wave([in_user(document, asked) for asked in range(first, first + number)])


def _busy(document: str, new: Callable[[], Messages], burst: int) -> Sequence[Wave]:
    return Wave([in_user(document)]), Wave([*[in_user(document)] * burst, new()], beside=[new(), new()])


def _fork(document: str, new: Callable[[], Messages], burst: int) -> Sequence[Wave]:
    agents = (talk(document, 2, agent=f"Agent {name}: ") for name in range(1, burst))
    return *(Wave([talk(document, turn)]) for turn in (0, 1)), Wave([talk(document, 2), *agents])


# What `--quick` asks comes first.
SHAPES = (
    SharingShape("system", "a document in the system message, then other questions", _in_turn(in_system)),
    SharingShape("user", "a document and a question in one user message", _in_turn(in_user)),
    SharingShape("turns", "a conversation, turn by turn", _in_turn(talk)),
    SharingShape("edited", "the same with other answers than the server's", _in_turn(partial(talk, answer="No."))),
    SharingShape("part", "a document as a content part of its own", _in_turn(in_part)),
    SharingShape("repeat", "one request again, word for word", _in_turn(lambda document, turn: in_user(document))),
    SharingShape("busy", "several equal ones at once and a new one, while others decode", _busy),
    SharingShape("cold", "questions at once on a new document", lambda text, new, n: [_at_once(text, 0, n)]),
    SharingShape("warm", "the same on a known one", lambda text, new, n: [_at_once(text, 0, 1), _at_once(text, 1, n)]),
    SharingShape("grows", "a last message that grows", _in_turn(_growing)),
    SharingShape("fork", "a conversation, then sub-agents that start from its whole history", _fork),
)
QUICK = 3  # shapes


def text_of(messages: Messages) -> str:
    """All of it, with what keeps messages apart."""
    contents = ((each["role"], each["content"]) for each in messages)
    parts = ((role, [{"text": each}] if isinstance(each, str) else each) for role, each in contents)
    return "".join(f"\n<{role}>{''.join(part['text'] for part in each)}" for role, each in parts)


class Seen:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._answers: dict[str, str] = {}

    def filled(self, chat: Messages) -> Messages:
        filled: list[Mapping[str, Any]] = []
        for each in chat:
            said = each["content"] if each["content"] is not None else self._answers.get(text_of(filled)) or "Yes."
            filled.append({**each, "content": said})
        return filled

    def shared(self, messages: Messages, answer: str) -> float:
        """The part of a chat that the nearest earlier one begins with; with its answer it is an earlier one now."""
        text = text_of(messages)
        shared = max((common_prefix(text, earlier) for earlier in self._texts), default=0)
        self._answers[text] = answer
        self._texts.append(f"{text}\n<assistant>{answer}")  # an engine has the tokens of answers, too
        return shared / len(text)
