"""Positions of one head, for what no fact of the template tells: rendered beside the requests, once for each head.

Some templates put the tools or the system prompt into a user message, and a client may mark a place inside a text. The
place is found by sentinel substitution (`sentinel`). The request that asked for it does not wait: the second one with
this head starts the renders, a later one has the position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.boundaries.boundary import Found, Place
from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.layout import REMINDER_ROLES, PromptLayout
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.boundaries.sentinel import MERGING, SENTINELS, with_text
from proxy.chat.canonical import canonical
from proxy.chat.chat import text_of

logger = logging.getLogger("seamark.head_positions")

# Heads that were seen once, and heads that were tried: a key each.
MAX_KNOWN = 4096

MAX_WAITING = 16

MAX_WAITING_OF_KEY = 4  # that came with one API key

# Seconds that all renders of one head may take.
HEAD_SECONDS = 30.0

# A longer head is not rendered for this: it would hold up the worker's API server, which streams to everybody.
MAX_CHARACTERS = 100_000  # of its texts

MAX_BYTES = 1_000_000  # of all of it as JSON: tools, images and other fields

# Seconds of rest for each second of rendering.
REST = 9.0


class _AskedHead(NamedTuple):
    """A chat up to a place in its last message; nothing else of its request is kept alive."""

    body: Mapping[str, Any]  # without messages
    messages: list[Any]
    place: Place
    is_closed: bool  # the last message is the application's

    @property
    def is_short(self) -> bool:
        texts = sum(len(text_of(message) or "") for message in self.messages)
        return texts <= MAX_CHARACTERS and len(canonical(self.variant(""))) <= MAX_BYTES

    def variant(self, text: str) -> dict[str, Any]:
        """The chat up to the place, with `text` behind it."""
        place, messages = self.place, list(self.messages)
        message: Mapping[str, Any] = messages[-1]
        if place.part is not None:
            parts = [*message["content"][: place.part + 1], {"type": "text", "text": text}]
            messages[-1] = {**message, "content": parts}
        else:
            messages[-1] = with_text(message, place.kept + text)
        if self.is_closed:
            messages.append({"role": "user", "content": SENTINELS[0]})  # templates want one to answer
        return {**self.body, "messages": messages}


class HeadPositions:
    """One per gateway. Use inside a running event loop."""

    def __init__(self, positions: PositionCache) -> None:
        self._positions = positions
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # by key: whether it was tried
        self._waiting: deque[tuple[_AskedHead, Renderer, str | None]] = deque()  # and whose
        self._worker: asyncio.Task[None] | None = None

    def learn(self, found: Found, renderer: Renderer, owner: str | None = None) -> None:
        """Take note of the places of a request whose position nothing tells; those seen before are rendered.

        `owner` is the API key it came with.
        """
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
                head = _head(found.layout, place)
                if head.is_short:
                    self._waiting.append((head, renderer, owner))
        if self._waiting and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())

    def _has_room(self, owner: str | None) -> bool:
        if owner is not None and sum(each == owner for _, _, each in self._waiting) >= MAX_WAITING_OF_KEY:
            return False
        return len(self._waiting) < MAX_WAITING

    async def _work(self) -> None:
        while self._waiting:
            head, renderer, _ = self._waiting.popleft()
            began = time.monotonic()
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    tokens = await self._measured(head, renderer)
            except (RenderFailed, TimeoutError):
                tokens = 0
            except Exception as error:  # the kind alone: the message might hold prompt text
                logger.error("position of a head: %s", type(error).__name__)
                tokens = 0
            if tokens:
                self._positions.put(head.place.key, tokens)
            await asyncio.sleep((time.monotonic() - began) * REST)

    async def _measured(self, head: _AskedHead, renderer: Renderer) -> int:
        """Tokens up to the place that no text behind it changes; 0 for nothing."""
        prompt = await renderer(head.variant(SENTINELS[0]))
        others = [await renderer(head.variant(text)) for text in (*SENTINELS[1:], *MERGING)]
        return min(common_prefix(prompt, other) for other in others)


def _head(layout: PromptLayout, place: Place) -> _AskedHead:
    without = ("messages", "continue_final_message", "add_generation_prompt")
    body = {name: value for name, value in layout.chat.body.items() if name not in without}
    messages = list(layout.chat.messages[: place.message + 1])
    return _AskedHead(body, messages, place, layout.chat.roles[place.message] in REMINDER_ROLES)
