"""Workers' answers without workers: each is what a test has written down, down to where it breaks off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from proxy.http.client import Answer, Upstream

JSON = (b"content-type", b"application/json")


class Sent(NamedTuple):
    """What a worker was sent."""

    method: str
    url: str
    headers: dict[bytes, bytes]
    body: bytes
    read_timeout: float | None
    fresh: bool  # on a new connection

    @property
    def worker(self) -> str:
        """Its host."""
        return self.url.split("/")[2]

    @property
    def fields(self) -> dict[str, Any]:
        """Of the body."""
        fields: dict[str, Any] = json.loads(self.body)
        return fields


class Said(Answer):
    """An answer; a piece may be what breaks it off."""

    def __init__(
        self, status: int, *pieces: bytes | Exception, headers: Sequence[tuple[bytes, bytes]] = (JSON,)
    ) -> None:
        self.status, self.headers, self.pieces, self.closed = status, tuple(headers), [*pieces], 0

    def header(self, name: str) -> str | None:
        return next((value.decode() for own, value in self.headers if own.decode().lower() == name.lower()), None)

    async def next_chunk(self) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None:
        self.closed += 1


class ScriptedUpstream(Upstream):
    """Says the next thing of its script each time, or what `say` makes of what was sent; an error is raised."""

    def __init__(self, *script: Said | Exception, say: Callable[[Sent], Said | Exception] | None = None) -> None:
        super().__init__(1.0, 65536, "the workers' key")
        self.script, self.sent = [*script], list[Sent]()
        self.say = say or (lambda sent: self.script.pop(0))
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def send(
        self,
        method: str,
        url: str,
        headers: Any = (),
        body: bytes = b"",
        read_timeout: float | None = None,
        fresh: bool = False,
    ) -> Said:
        self.sent.append(Sent(method, url, dict(headers), body, read_timeout, fresh))
        await self.may_answer.wait()
        said = self.say(self.sent[-1])
        if isinstance(said, Exception):
            raise said
        return said
