"""A request's body, from its first byte to JSON, within the memory that bodies may take. It travels on as bytes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from proxy.chat.chat import HINTED
from proxy.errors import BadRequest, TooComplex, UnreadableCoding
from proxy.http import asgi
from proxy.http.body_memory import BodyHold, BodyMemory
from proxy.http.form_body import is_form, read_form, refuse_urlencoded
from proxy.http.json_body import as_utf8, memory_of, parse_object
from proxy.idle_work import IdleWork
from proxy.pipeline.exchange import Exchange
from proxy.settings import Settings

# Parsing a larger body takes a millisecond and more. Many that arrive together take turns with everything else.
LARGE_BYTES = 2**16

TURNS = 4  # of the event loop: enough for a page, or for a piece of a stream from worker to client

# How a JSON object begins, in any of its encodings; audio and images do not.
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff|[\s\0])*\{")


class BodyReader:
    """One per gateway."""

    def __init__(self, settings: Settings, idle: IdleWork) -> None:
        self._settings = settings
        self._idle = idle
        self._pace = asgi.Pace(settings.client_timeout, settings.min_body_rate)
        self._turns = asyncio.Lock()
        self.memory = BodyMemory(settings.max_bodies_bytes)

    async def receive(self, scope: asgi.Scope, receive: asgi.Receive, held: BodyHold) -> bytes:
        """All of it; raises as `asgi.read_body`."""
        return await asgi.read_body(scope, receive, self._settings.max_body_bytes, self._pace, held)

    async def parse(self, exchange: Exchange, held: BodyHold) -> Any:
        """Parse it if it is JSON. Returns the name that it gives the request, if any.

        Raises `BadRequest`, `UnreadableCoding`, `Overloaded` or `KeyBusy`.
        """
        head, body, settings = exchange.head, exchange.body, self._settings
        if body.raw and (coded := asgi.codings(head.headers)):
            text = f"The body is compressed ({', '.join(coded)}), which vLLM does not read. Send it as it is."
            raise UnreadableCoding(text)
        hinted = head.endpoint in HINTED
        if not hinted:
            if is_form(head.headers):
                body.form_model = await self._idle.finish(read_form(head.headers, body.raw))
                return None
            if body.raw.strip():
                refuse_urlencoded(head.headers)
            if not body.raw.strip() if head.is_json else _OBJECT.match(body.raw) is None:
                return None
        if len(body.raw) > LARGE_BYTES:
            await self.turn()
        try:
            raw = as_utf8(body.raw)
            parsed = parse_object(raw, *settings.json_limits)
        except BadRequest as error:
            # The worker judges it, unless the worker might read what is refused here.
            if hinted or isinstance(error, TooComplex) or (head.key is not None and head.is_json):
                raise
            return None
        body.raw = raw
        body.memory = memory_of(parsed, len(raw), settings.max_boundary_values)
        held.take(body.memory.size)
        name = parsed.get("request_id")
        body.take(parsed, head, settings.ask_usage)
        return name

    async def turn(self) -> None:
        """Wait until the event loop has turned to all others since the last large body."""
        async with self._turns:
            for _ in range(TURNS):
                await asyncio.sleep(0)
