"""A chat's answer as a message: what is read of it, and what of its head stays."""

from __future__ import annotations

import json

from proxy.http.client import Answer
from proxy.pipeline.message_answer import MessageAnswer


class Chats(Answer):
    """What a worker sends of the chat API."""

    def __init__(self, kind: str | None, *pieces: bytes) -> None:
        self.status, self.pieces, self.closed = 201, [*pieces], 0
        self.headers = ((b"Content-Length", b"7"), (b"x-mine", b"1"))
        self._kind = kind

    def header(self, name: str) -> str | None:
        return {"content-type": self._kind, "content-length": "7", "x-mine": "1"}.get(name.lower())

    async def next_chunk(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def read(self) -> bytes:
        whole, self.pieces = b"".join(self.pieces), []
        return whole

    def close(self) -> None:
        self.closed += 1


async def chunks(answer: Answer) -> list[bytes]:
    return [chunk async for chunk in answer.chunks()]


async def test_events_come_as_they_are_complete():
    first = {"id": "c", "model": "m", "choices": [{"delta": {"content": "Ebb."}, "finish_reason": None}]}
    last = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    events = [f"data: {json.dumps(each)}\n\n".encode() for each in (first, last)] + [b"data: [DONE]\n\n"]
    chats = Chats("text/event-stream; charset=utf-8", events[0][:9], events[0][9:], *events[1:])
    answer = MessageAnswer(chats)
    begun = await answer.next_chunk()
    assert begun.count(b"event: ") == 3 and b"message_start" in begun and b"text_delta" in begun
    assert len(chats.pieces) == 2  # nothing was made of half an event, so the next one was read
    rest = b"".join(await chunks(answer))
    assert b"message_delta" in rest and rest.endswith(b'data: {"type": "message_stop"}\n\n')
    assert await answer.next_chunk() == b""
