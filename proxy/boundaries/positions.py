"""Positions by content key: how many tokens that beginning of a prompt has. An engine has told each, or rendered it.

What no fact of the template tells is rendered beside the requests, once for each head: some templates put the tools or
the system prompt into a user message, and a client may mark a place inside a text. Replace the text behind the place by
others and compare token ids: what all have in common is what any text in that place would share. Rendering fewer
messages instead would not do: many templates render a shorter list differently.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from proxy.boundaries.boundary import Found, Place
from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.layout import REMINDER_ROLES, PromptLayout
from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.chat.canonical import canonical
from proxy.chat.chat import last_text_part

logger = logging.getLogger("seamark.head_positions")

# Size of an entry: a key of 16 bytes and a number as Python objects, their place in the table. Measured, rounded up.
ENTRY_BYTES = 250

# Plain words whose first characters do not agree, and texts that could merge with the token before them if a template
# leaves nothing in between. The empty text is one of them: what follows the text then follows that token.
TEXTS = ("", "Quartz", "83 jigsaw", "the tide", "\nQuartz", " Quartz", ")Quartz")

MAX_KNOWN = 4096  # heads that were seen once, and heads that were tried: a key each
MAX_WAITING = 16
MAX_WAITING_OF_KEY = 4  # that came with one API key
HEAD_SECONDS = 30.0  # that all renders of one head may take
REST = 9.0  # seconds for each second of rendering

# A longer head is not rendered for this: it would hold up the worker's API server, which streams to everybody.
MAX_CHARACTERS = 100_000  # of its texts
MAX_BYTES = 1_000_000  # of all of it as JSON: tools, images and other fields


class PositionCache:
    """Tokens by content key, bounded in bytes, the least recently used forgotten first. No estimate ever gets here."""

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self._entries = max(1, size // ENTRY_BYTES)
        self._positions: OrderedDict[bytes, int] = OrderedDict()
        # Called with each position that this gateway learns itself; on a request's path, so it may only take note.
        self.on_put: Callable[[bytes, int], None] | None = None

    def __len__(self) -> int:
        return len(self._positions)

    def get(self, key: bytes) -> int:
        """The tokens up to that place, 0 if unknown."""
        tokens = self._positions.get(key, 0)
        if tokens:
            self._positions.move_to_end(key)
        return tokens

    def put(self, key: bytes, tokens: int) -> None:
        """An engine has told a position (more than 0)."""
        if self._positions.get(key) == tokens:
            self._positions.move_to_end(key)
            return
        self._keep(key, tokens)
        if self.on_put is not None:
            self.on_put(key, tokens)

    def put_remote(self, key: bytes, tokens: int) -> None:
        """Another gateway was told a position; one that is known here stands."""
        if key not in self._positions:
            self._keep(key, tokens)

    def _keep(self, key: bytes, tokens: int) -> None:
        self._positions[key] = tokens
        self._positions.move_to_end(key)
        if len(self._positions) > self._entries:
            self._positions.popitem(last=False)


class _AskedHead(NamedTuple):
    key: bytes  # of the place
    bodies: list[dict[str, Any]]  # to render
    renderer: Renderer
    owner: str | None


class HeadPositions:
    """Rendered positions: the second request with a head starts that, a later one has it, none waits."""

    def __init__(self, positions: PositionCache) -> None:
        self._positions = positions
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # by key: whether it was tried
        self._waiting: deque[_AskedHead] = deque()
        self._worker: asyncio.Task[None] | None = None

    def learn(self, found: Found, renderer: Renderer, owner: str | None = None) -> None:
        """Take note of the places of an API key's request whose position nothing tells; render those seen before."""
        if not found.unplaced or found.layout is None:
            return
        for place in found.unplaced:
            tried = self._seen.get(place.key)
            if tried is None:
                self._seen[place.key] = False
                if len(self._seen) > MAX_KNOWN:
                    self._seen.popitem(last=False)
            elif not tried and self._has_room(owner):
                self._seen[place.key] = True
                if bodies := _bodies(found.layout, place):
                    self._waiting.append(_AskedHead(place.key, bodies, renderer, owner))
        if self._waiting and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())

    def _has_room(self, owner: str | None) -> bool:
        if owner is not None and sum(head.owner == owner for head in self._waiting) >= MAX_WAITING_OF_KEY:
            return False
        return len(self._waiting) < MAX_WAITING

    async def _work(self) -> None:
        while self._waiting:
            head = self._waiting.popleft()
            began = time.monotonic()
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    prompt, *others = [await head.renderer(body) for body in head.bodies]
                if tokens := min(common_prefix(prompt, other) for other in others):
                    self._positions.put(head.key, tokens)
            except (RenderFailed, TimeoutError):
                pass  # it is not tried again
            except Exception as error:  # the kind alone: the message might hold prompt text
                logger.error("position of a head: %s", type(error).__name__)
            await asyncio.sleep((time.monotonic() - began) * REST)


def _bodies(layout: PromptLayout, place: Place) -> list[dict[str, Any]]:
    """The chat up to the place, with each of `TEXTS` behind it and nothing else of its request; none if it is long."""
    chat = layout.chat
    if sum(len(text or "") for text in chat.texts[: place.message + 1]) > MAX_CHARACTERS:
        return []
    without = ("messages", "continue_final_message", "add_generation_prompt")
    head = {name: value for name, value in chat.body.items() if name not in without}
    *before, message = chat.messages[: place.message + 1]
    content = message["content"]
    target = last_text_part(content)
    contents: list[Any]
    if place.part is not None:
        contents = [[*content[: place.part + 1], {"type": "text", "text": text}] for text in TEXTS]
    elif target is None:
        contents = [place.kept + text for text in TEXTS]
    else:  # its shape and other parts stay
        contents = [
            [{**target, "text": place.kept + text} if part is target else part for part in content] for text in TEXTS
        ]
    # Templates want a question to answer.
    behind = [{"role": "user", "content": "Quartz"}] if chat.roles[place.message] in REMINDER_ROLES else []
    bodies = [{**head, "messages": [*before, {**message, "content": each}, *behind]} for each in contents]
    return bodies if len(canonical(bodies[0])) <= MAX_BYTES else []
