"""A worker's answer of the chat API to a request that came to /v1/messages."""

from __future__ import annotations

from proxy.chat.through_chat import MessageStream, error_of, message_of
from proxy.errors import WorkerFailed
from proxy.http.client import Answer

STREAM = "text/event-stream"

OWN = ("content-length", "content-encoding", "content-type")  # headers that say something else of a message


class MessageAnswer(Answer):
    """As if the worker had answered with a message, event by event or whole; whatever else it said is an error."""

    __slots__ = ("_answer", "_is_over", "_stream")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        is_stream = (answer.header("content-type") or "").startswith(STREAM) and not answer.is_encoded
        self._stream = MessageStream() if is_stream else None
        self._is_over = False
        self.status = answer.status
        kept = (header for header in answer.headers if header[0].decode("latin-1").lower() not in OWN)
        self.headers = (*kept, (b"content-type", STREAM.encode() if is_stream else b"application/json"))

    def header(self, name: str) -> str | None:
        named = (value for own, value in self.headers if own.decode("latin-1").lower() == name.lower())
        return value.decode("latin-1") if (value := next(named, None)) is not None else None

    async def next_chunk(self) -> bytes:
        if self._stream is None:
            self._is_over, is_read = True, self._is_over
            return b"" if is_read else await self.read()
        while piece := await self._answer.next_chunk():
            if made := self._stream.events(piece):
                return made
        return b""

    async def read(self) -> bytes:
        """Raises `Broken`, and `WorkerFailed` for what is neither a chat nor an error."""
        answer = await self._answer.read()
        if self.status >= 400:
            return error_of(answer, self.status)
        try:
            return message_of(answer)
        except ValueError as error:
            raise WorkerFailed(str(error)) from None

    def close(self) -> None:
        self._answer.close()
