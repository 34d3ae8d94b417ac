"""A worker whose answers follow from the request alone, in every API, and that counts how often it computes one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.harness.recording_worker import USAGE, Recorded, RecordingWorker
from tests.harness.threaded_server import whole_body

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS)

WORDS = 8  # events of a stream


@dataclass
class ComputingWorker(RecordingWorker):
    """State of the fake; change it between requests."""

    ending: str | None = "stop"  # that a choice has
    refuses: bool = False  # its application breaks, which its server answers with 500
    cuts: bool = False  # closes it in the middle of an answer
    words: int = WORDS
    more: list[tuple[bytes, bytes]] = field(default_factory=list)  # headers of its answers
    pause: threading.Event = field(default_factory=threading.Event)  # while set, streams wait in the middle

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await super().__call__(scope, receive, send)
            return
        raw = await whole_body(receive)
        self.requests.append(Recorded(scope["method"], scope["path"], list(scope["headers"]), raw, scope["client"]))
        gone = asyncio.ensure_future(receive())
        try:
            await self._compute(scope["path"], json.loads(raw), send, gone)
        finally:
            gone.cancel()

    async def _compute(self, path: str, body: dict[str, Any], send: Any, gone: asyncio.Future[Any]) -> None:
        if not await self._while(self.hold, gone) or self.refuses:
            return
        body.pop("vllm_xargs", None)
        name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        salt = body.get("cache_salt", "")
        is_stream = bool(body.get("stream"))
        kind = b"text/event-stream; charset=utf-8" if is_stream else b"application/json"
        headers = [(b"content-type", kind), *self.more]
        whole = json.dumps(self._answer(path, name, salt)).encode()
        if not is_stream and not self.cuts:
            headers.append((b"content-length", str(len(whole)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        parts = self._events(name, salt) if is_stream else [whole[:20], whole[20:]]
        for number, part in enumerate(parts):
            if number == len(parts) // 2 and (not await self._while(self.pause, gone) or self.cuts):
                return
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _while(self, event: threading.Event, gone: asyncio.Future[Any]) -> bool:
        """Wait while `event` is set; False if the client leaves meanwhile."""
        while event.is_set():
            if gone.done():
                self.gone.set()
                return False
            await asyncio.sleep(0.002)
        return True

    def _answer(self, path: str, name: str, salt: str) -> dict[str, Any]:
        text = f"{salt} {name} " * self.words
        about = {"id": f"answer-{name}", "model": "m", "usage": USAGE}
        if path == CHAT:
            message = {"role": "assistant", "content": text}
            return {**about, "choices": [{"index": 0, "message": message, "finish_reason": self.ending}]}
        if path == COMPLETIONS:
            return {**about, "choices": [{"index": 0, "text": text, "finish_reason": self.ending}]}
        if path == MESSAGES:
            return {**about, "type": "message", "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}
        if path == RESPONSES:
            return {**about, "object": "response", "status": "completed", "output": [{"type": "message", "text": text}]}
        return {**about, "object": "list", "data": [{"embedding": [0.5], "of": text}]}

    def _events(self, name: str, salt: str) -> list[bytes]:
        """Of a chat."""
        choices: list[list[dict[str, Any]]] = [
            [{"index": 0, "delta": {"content": f"{salt} {name} {number}"}, "finish_reason": None}]
            for number in range(self.words)
        ]
        choices.append([{"index": 0, "delta": {}, "finish_reason": self.ending}])
        frames = [{"id": f"answer-{name}", "choices": each} for each in choices]
        return [*(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames), b"data: [DONE]\n\n"]
