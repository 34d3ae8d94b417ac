"""A worker's answer of the chat API to a request that came to /v1/messages."""

from __future__ import annotations

from proxy.chat.through_chat import MessageStream, message_of
from proxy.http.client import Answer

LENGTH = "content-length"


class MessageAnswer(Answer):
    """As if the worker had answered with a message, event by event or whole."""

    __slots__ = ("_answer", "_is_over", "_stream")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        kind = answer.header("content-type") or ""
        self._stream = MessageStream() if kind.startswith("text/event-stream") else None
        self._is_over = False
        self.status = answer.status
        self.headers = tuple(header for header in answer.headers if header[0].decode("latin-1").lower() != LENGTH)

    def header(self, name: str) -> str | None:
        return None if name.lower() == LENGTH else self._answer.header(name)

    async def next_chunk(self) -> bytes:
        if self._stream is None:
            self._is_over, is_read = True, self._is_over
            return b"" if is_read else await self.read()
        while piece := await self._answer.next_chunk():
            if made := self._stream.events(piece):
                return made
        return b""

    async def read(self) -> bytes:
        return message_of(await self._answer.read())

    def close(self) -> None:
        self._answer.close()
