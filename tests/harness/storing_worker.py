"""A recording worker that stores responses, as vLLM does with `VLLM_ENABLE_RESPONSES_API_STORE=1`.

It stores each under the request's `request_id`, or under a name of its own, and knows none of another worker's. It also
deletes them, as other engines do.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.harness.recording_worker import Recorded, RecordingWorker, gzipping, respond
from tests.harness.threaded_server import whole_body

RESPONSES = "/v1/responses"


@dataclass
class StoringWorker(RecordingWorker):
    """State of the fake; change it between requests."""

    names: bool = True  # whether a request may name its response
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)  # responses by their ids
    asked_for: list[str] = field(default_factory=list)  # ids, stored here or not
    opened: threading.Event = field(default_factory=threading.Event)  # while set, streams stop behind their first event

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(RESPONSES):
            await super().__call__(scope, receive, send)
            return
        raw, method, path = await whole_body(receive), scope["method"], scope["path"]
        self.requests.append(Recorded(method, path, list(scope["headers"]), raw, scope["client"]))
        if self.gzips and b"gzip" in dict(scope["headers"]).get(b"accept-encoding", b""):
            send = gzipping(send)
        body = json.loads(raw) if raw and path == RESPONSES else {}
        response_id = body.get("previous_response_id") if path == RESPONSES else path.split("/")[3]
        if response_id is not None:
            self.asked_for.append(response_id)
            while self.hold.is_set():
                await asyncio.sleep(0.01)
            if response_id not in self.stored:
                error = {"message": f"Response with id '{response_id}' not found.", "code": 404, "param": "response_id"}
                await respond(send, json.dumps({"error": error}).encode(), status=404)
                return
        if path == RESPONSES:
            await self._create(body, send)
            return
        response = self.stored[response_id]
        if method == "DELETE":
            del self.stored[response_id]
            response = {"id": response_id, "object": "response", "deleted": True}
        elif path.endswith("/cancel"):
            response["status"] = "cancelled"
        await respond(send, json.dumps(response).encode())

    async def _create(self, body: dict[str, Any], send: Any) -> None:
        own = f"resp_{os.urandom(8).hex()}"
        response = {
            "id": body.get("request_id", own) if self.names else own,
            "object": "response",
            "model": body["model"],
            "status": "in_progress",
            "output": [],
            "usage": None,
        }
        if body.get("background"):
            self.stored[response["id"]] = response
        text = {"type": "output_text", "text": f"Number {len(self.stored)}."}
        usage = {"input_tokens": 300, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 160}}
        end = {"status": "completed", "output": [{"type": "message", "content": [text]}], "usage": usage}
        if not body.get("stream"):
            self.stored[response["id"]] = response = response | end
            await respond(send, json.dumps(response).encode())
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _event("response.created", response), "more_body": True})
        while self.opened.is_set():
            await asyncio.sleep(0.01)
        self.stored[response["id"]] = response = response | end
        await send({"type": "http.response.body", "body": _event("response.completed", response)})


def _event(name: str, response: dict[str, Any]) -> bytes:
    data = json.dumps({"response": response, "type": name})
    return f"event: {name}\ndata: {data}\n\n".encode()
