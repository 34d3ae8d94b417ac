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
from typing import Any

from proxy.boundaries.boundary import Found, Place
from proxy.boundaries.layout import REMINDER_ROLES, PromptLayout
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.boundaries.sentinel import MERGING, SENTINELS, with_text

logger = logging.getLogger("seamark.head_positions")

# Heads that were seen once, and heads that were tried: a key each.
MAX_KNOWN = 4096

MAX_WAITING = 16

# A longer request is not rendered for this: it would hold up the worker's API server, which streams to everybody.
MAX_CHARACTERS = 100_000

# Seconds of rest for each second of rendering.
REST = 9.0


class HeadPositions:
    """One per gateway. Use inside a running event loop."""

    def __init__(self, positions: PositionCache) -> None:
        self._positions = positions
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # by key: whether it was tried
        self._waiting: deque[tuple[PromptLayout, Place, Renderer]] = deque()
        self._worker: asyncio.Task[None] | None = None

    def learn(self, found: Found, renderer: Renderer) -> None:
        """Take note of the places of a request whose position nothing tells; those seen before are rendered."""
        if not found.unplaced or found.layout is None:
            return
        for place in found.unplaced:
            tried = self._seen.get(place.key)
            if tried is None:
                self._seen[place.key] = False
                if len(self._seen) > MAX_KNOWN:
                    self._seen.popitem(last=False)
            elif not tried and len(self._waiting) < MAX_WAITING:
                self._seen[place.key] = True
                self._waiting.append((found.layout, place, renderer))
        if self._waiting and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            layout, place, renderer = self._waiting.popleft()
            began = time.monotonic()
            try:
                tokens = await self._measured(layout, place, renderer)
            except RenderFailed:
                tokens = 0
            except Exception as error:  # the kind alone: the message might hold prompt text
                logger.error("position of a head: %s", type(error).__name__)
                tokens = 0
            if tokens:
                self._positions.put(place.key, tokens)
            await asyncio.sleep((time.monotonic() - began) * REST)

    async def _measured(self, layout: PromptLayout, place: Place, renderer: Renderer) -> int:
        """Tokens up to the place that no text behind it changes; 0 if that is too long to be rendered, or nothing."""
        if sum(len(text or "") for text in layout.chat.texts[: place.message + 1]) > MAX_CHARACTERS:
            return 0
        prompt = None
        shared = 0
        for text in (*SENTINELS, *MERGING):
            rendered = await renderer(_variant(layout, place, text))
            if prompt is None:
                prompt, shared = rendered, len(rendered)
            else:
                shared = min(shared, prompt.common_prefix(rendered))
        return shared


def _variant(layout: PromptLayout, place: Place, text: str) -> dict[str, Any]:
    """The chat up to the place, with `text` behind it."""
    messages = list(layout.chat.messages[: place.message + 1])
    message: Mapping[str, Any] = messages[-1]
    if place.part is not None:
        parts = [*message["content"][: place.part + 1], {"type": "text", "text": text}]
        messages[-1] = {**message, "content": parts}
    else:
        messages[-1] = with_text(message, place.kept + text)
    if layout.chat.roles[place.message] in REMINDER_ROLES:
        messages.append({"role": "user", "content": SENTINELS[0]})  # templates want one to answer
    body = {**layout.chat.body, "messages": messages}
    body.pop("continue_final_message", None)
    body.pop("add_generation_prompt", None)
    return body
