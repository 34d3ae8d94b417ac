"""What is known of a chat template once and for all, so that no request has to be rendered to find its boundaries.

Ends, openers and broken turns are learnt from small chats of our own (`proxy.boundaries.template_probe`) for one
tokenizer, template and `Setting`, and are good for one boot of a worker. A fact held in every chat it was learnt from,
or it is not there: an opener leads to the position where other texts part from this one, or to at most `GAP` tokens
before it, never behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from proxy.chat.canonical import canonical, digest, head_of

GAP = 24  # tokens that may stand between an opener and its text: an id, or the name of a tool

# Before which text: the first user text of a chat that has more behind it; the only text; a later user text that is the
# chat's last one; a tool's result that is the last text; the same behind another tool's result. `next`: before what a
# template writes into a later user message that is the last one, and moves once that is answered.
OpenerPlace = Literal["first", "alone", "user", "tool", "results", "next"]

# Of the message to answer; `system`: a reminder that an agent puts behind a user's or a tool's message.
Role = Literal["user", "tool", "system"]

# Fields beside the messages that a template may read, and that are one of a few values.
SCALAR_FIELDS = ("reasoning_effort", "add_special_tokens")
_OF_SETTING = (*SCALAR_FIELDS, "chat_template_kwargs", "chat_template")

MAX_SCALAR = 64  # characters of a value; a longer one is text, not a setting


class Opener(NamedTuple):
    """The token ids that a template writes right before a text, the same ones in every chat."""

    ids: tuple[int, ...]
    text: str | None = None  # the same as text, to count it in texts; None: the worker does not say
    # It occurs once for each user message and nowhere else in chats without tool results, so `k` later user messages
    # are skipped as `last-k:`.
    per_user: bool = False
    no_tool: bool = False  # tool results and calls hold none either, so the same is true of every chat


class Setting(NamedTuple):
    """What moves a template's words beside the messages and tools. Two requests with one `key` share their facts."""

    key: bytes
    fields: Mapping[str, Any]  # of the request, to render chats of our own with
    template: bool = False  # the request brings its own chat template
    size: int = 0  # bytes of `fields`

    @property
    def is_default(self) -> bool:
        return not self.fields


DEFAULT = Setting(b"", {})


def setting_of(body: Mapping[str, Any]) -> Setting:
    """The setting of a chat request: numbers, flags and short words, and a `chat_template`.

    Lists and objects, such as `documents`, stand in the head; neither openers nor ends depend on them, and each would
    be a setting of its own, never seen again.
    """
    if body.keys().isdisjoint(_OF_SETTING):
        return DEFAULT
    body = head_of(body)
    fields = _scalars(body, SCALAR_FIELDS)
    given = body.get("chat_template_kwargs")
    if isinstance(given, Mapping) and (kwargs := _scalars(given, sorted(map(str, given)))):
        fields["chat_template_kwargs"] = kwargs
    template = body.get("chat_template")
    if isinstance(template, str):
        fields["chat_template"] = template
    if not fields:
        return DEFAULT
    spelled = canonical(fields)
    return Setting(digest("setting", spelled), fields, isinstance(template, str), len(spelled))


def _scalars(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    values = ((name, given.get(name)) for name in names)
    return {
        name: value
        for name, value in values
        if (len(value) <= MAX_SCALAR if isinstance(value, str) else isinstance(value, (bool, int, float)))
    }


class Turn(NamedTuple):
    """A kind of chat that ends with a message to answer."""

    role: str  # of the last message
    later: bool  # turns stand before it
    system: bool  # the chat begins with a system prompt
    tools: bool


@dataclass(frozen=True)
class TemplateFacts:
    """Of one template, tokenizer and setting. What is missing is not known, or not the same in every chat."""

    # Tokens behind the last message if an answer is asked for, by its role; 0: nothing asks.
    ends: Mapping[str, int] = field(default_factory=dict)
    # By place, and whether tools are there.
    openers: Mapping[tuple[OpenerPlace, bool], Opener] = field(default_factory=dict)
    broken: frozenset[Turn] = frozenset()  # turns that the template renders anew once they are answered
    # Learnt with this very setting. Else the openers are the default setting's and the ends the longest that this
    # template is known for: good for an entry, not for reckoning where a turn ended.
    is_own: bool = True

    def turn_holds(self, role: str, *, later: bool, system: bool, tools: bool) -> bool:
        """Whether a turn, described as in `Turn`, stays as it is once the conversation goes on."""
        return Turn(role, later, system, tools) not in self.broken
