"""Boundaries of a chat: the token positions worth a checkpoint, remembered under canonical keys.

A boundary is found by rendering once, and from then on known for every request that starts alike.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from proxy.canonical import Keys, canonical, chat_keys, digest
from proxy.render import Renderer, RenderFailed
from proxy.sentinel import (
    OPEN_ROLES,
    common_prefix,
    first_user_text,
    last_open_text,
    sentinel_for,
    text_of,
    with_text,
)

Kind = Literal["system", "history", "turn", "explicit", "learned"]
Result = Literal["memo", "local", "render", "none"]

# A new last text of this size is worth a render of its own on an otherwise known prompt, so that the next turn finds
# its end: some thousand tokens, more than the pass that a checkpoint can cost. vLLM's own stop near the prompt's end
# serves shorter ones.
LONG_TEXT_CHARACTERS = 4096


class Boundary(NamedTuple):
    tokens: int  # the prefix is prompt[:tokens]
    kind: Kind
    key: bytes  # names the content before the boundary


@dataclass(frozen=True)
class Found:
    """What is known of one request's prompt."""

    boundaries: tuple[Boundary, ...] = ()  # ascending
    prefixes: tuple[bytes, ...] = ()  # keys of everything this prompt starts with, shortest first
    result: Result = "none"
    failure: str | None = None  # why there are no boundaries: a reason of the closed set
    key: bytes = b""  # of the chat before its last text

    @property
    def positions(self) -> tuple[int, ...]:
        """Distinct token positions, ascending."""
        return tuple(sorted({boundary.tokens for boundary in self.boundaries}))


class PositionMemory:
    """Token position by key, the least recently used forgotten first."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._positions: OrderedDict[bytes, int] = OrderedDict()

    def get(self, key: bytes) -> int | None:
        """The position (tokens), None if unknown."""
        if key in self._positions:
            self._positions.move_to_end(key)
        return self._positions.get(key)

    def put(self, key: bytes, tokens: int) -> None:
        """Remember a position (tokens)."""
        self._positions[key] = tokens
        self._positions.move_to_end(key)
        if len(self._positions) > self._entries:
            self._positions.popitem(last=False)

    def __len__(self) -> int:
        return len(self._positions)


class _Chat(NamedTuple):
    """A chat request taken apart."""

    body: Mapping[str, Any]
    messages: Sequence[Any]
    keys: Keys
    first: int | None  # first user text; the system boundary is its start
    last: int  # last user or tool text; the history boundary is its start
    system_key: bytes
    history_key: bytes
    turn_key: bytes | None  # None where no turn ends: the answer continues a message


class BoundaryFinder:
    """Finds boundaries through a renderer, and remembers them. One per gateway."""

    def __init__(self, memory: PositionMemory) -> None:
        self._memory = memory
        self._pending: dict[bytes, asyncio.Future[None]] = {}

    async def find(self, body: Mapping[str, Any], renderer: Renderer, renderer_id: bytes) -> Found:
        """Boundaries of a chat request. Never raises for what a client or a template does: `failure` says why not.

        `renderer_id` stands for tokenizer and template; positions of one do not serve another.
        """
        chat = _take_apart(body, renderer_id)
        if chat is None:
            return Found(failure="no_boundary")
        known = self._known(chat)
        if known is not None and not self._deserves_render(chat):
            return known
        if known is None and (pending := self._pending.get(chat.history_key)) is not None:
            # Someone is rendering this very prefix: a cold fan-out costs one set of renders.
            await asyncio.wait((pending,))
            if (known := self._known(chat)) is not None:
                return known
        done = asyncio.get_running_loop().create_future()
        self._pending[chat.history_key] = done
        try:
            return await self._render(chat, renderer)
        except RenderFailed:
            return Found(prefixes=_prefixes(chat), failure="render_failed", key=chat.history_key)
        finally:
            if self._pending.get(chat.history_key) is done:
                del self._pending[chat.history_key]
            done.set_result(None)

    def _known(self, chat: _Chat) -> Found | None:
        history = self._memory.get(chat.history_key)
        if history is None:
            return None
        system = self._memory.get(chat.system_key)
        turn = self._memory.get(chat.turn_key) if chat.turn_key is not None else None
        return _found(chat, system, history, turn, "memo")

    def _deserves_render(self, chat: _Chat) -> bool:
        if chat.turn_key is None or self._memory.get(chat.turn_key) is not None:
            return False
        return len(text_of(chat.messages[chat.last]) or "") >= LONG_TEXT_CHARACTERS

    async def _render(self, chat: _Chat, renderer: Renderer) -> Found:
        messages, body = list(chat.messages), chat.body

        def replaced(index: int, upto: int | None = None) -> dict[str, Any]:
            text = text_of(messages[index]) or ""
            changed = [*messages[:index], with_text(messages[index], sentinel_for(text)), *messages[index + 1 :]]
            return {**body, "messages": changed[:upto]}

        wanted = {"prompt": dict(body), "history": replaced(chat.last)}
        if chat.first is not None and chat.first != chat.last and self._memory.get(chat.system_key) is None:
            wanted["system"] = replaced(chat.first, upto=chat.first + 1)
        if chat.turn_key is not None:
            wanted["turn"] = {**body, "add_generation_prompt": False}
        rendered = dict(zip(wanted, await _gather(renderer, wanted.values()), strict=True))
        prompt = rendered["prompt"]
        if isinstance(prompt, RenderFailed):
            raise prompt

        def shared(name: str) -> int | None:
            # A template that refuses the variant (role order, say) costs that boundary only.
            tokens = rendered.get(name)
            return None if tokens is None or isinstance(tokens, RenderFailed) else common_prefix(prompt, tokens)

        history, turn = shared("history"), shared("turn")
        system = history if chat.first == chat.last else (shared("system") or self._memory.get(chat.system_key))
        if turn is not None and history is not None and turn < history:
            turn = None
        for key, tokens in ((chat.system_key, system), (chat.history_key, history), (chat.turn_key, turn)):
            if key is not None and tokens is not None:
                self._memory.put(key, tokens)
        return _found(chat, system, history, turn, "render")


async def _gather(renderer: Renderer, bodies: Any) -> list[Sequence[int] | RenderFailed]:
    async def one(body: Mapping[str, Any]) -> Sequence[int] | RenderFailed:
        try:
            return await renderer(body)
        except RenderFailed as error:
            return error

    return await asyncio.gather(*(one(body) for body in bodies))


def _take_apart(body: Mapping[str, Any], renderer_id: bytes) -> _Chat | None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    last = last_open_text(messages)
    if last is None:
        return None
    first = first_user_text(messages)
    keys = chat_keys(body, messages, renderer_id)
    generates = body.get("add_generation_prompt", True) and not body.get("continue_final_message")
    ends_open = isinstance(messages[-1], Mapping) and messages[-1].get("role") in OPEN_ROLES
    return _Chat(
        body,
        messages,
        keys,
        first,
        last,
        system_key=_key_before(keys, messages, first) if first is not None else digest("system", keys.head),
        history_key=digest("history", _key_before(keys, messages, last), canonical(messages[last + 1 :])),
        turn_key=keys.after[-1] if generates and ends_open else None,
    )


def _key_before(keys: Keys, messages: Sequence[Any], index: int) -> bytes:
    """Key of everything before the text of message `index`: the messages before it, and its own shape."""
    before = keys.after[index - 1] if index else keys.head
    return digest("before", before, canonical(with_text(messages[index], "")))


def _prefixes(chat: _Chat) -> tuple[bytes, ...]:
    return (chat.system_key, *chat.keys.after[: chat.last], chat.history_key, *chat.keys.after[chat.last :])


def _found(chat: _Chat, system: int | None, history: int | None, turn: int | None, result: Result) -> Found:
    candidates: tuple[tuple[int | None, Kind, bytes | None], ...] = (
        (system, "system", chat.system_key),
        (history, "history", chat.history_key),
        (turn, "turn", chat.turn_key),
    )
    boundaries = []
    for tokens, kind, key in candidates:
        if tokens and key is not None:
            boundaries.append(Boundary(tokens, kind, key))
    boundaries.sort(key=lambda boundary: boundary.tokens)
    failure = None if boundaries else "no_boundary"
    return Found(tuple(boundaries), _prefixes(chat), result if boundaries else "none", failure, chat.history_key)
