"""Workers' answers without workers: pieces of a body, or what breaks off between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from proxy.http.client import Upstream


class ScriptedUpstream(Upstream):
    """What workers say, and how many of their answers were closed; `send` is whose test it is."""

    def __init__(self, pieces: Sequence[bytes | Exception], status: int = 200) -> None:
        super().__init__(1.0, 65536)
        self.pieces, self.status = pieces, status
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.failure: Exception | None = None  # instead of an answer
        self.closed = 0

    def answer(self) -> Any:
        """The next answer. Raises `failure`."""
        if self.failure is not None:
            raise self.failure

        async def chunks() -> AsyncIterator[bytes]:
            for piece in self.pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield piece

        def close() -> None:
            self.closed += 1

        return SimpleNamespace(status=self.status, headers=self.headers, chunks=chunks, close=close)
