"""A worker before which real clients run: it answers each question with one sentence, and hits as its states allow."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from tests.harness.fake_engine import Admitted, prompt_of, template
from tests.harness.recording_worker import USAGE, RecordingWorker
from tests.harness.threaded_server import serving

MODEL = "harbour"

STREAMS = Path(__file__).parents[1] / "streams"

# Recorded answers stopped at three tokens; a client would ask for the rest of them.
_ENDED = (
    (b'"stop_reason":"max_tokens"', b'"stop_reason":"end_turn"'),
    (b'"incomplete_details":{"reason":"max_output_tokens"}', b'"incomplete_details":null'),
    (b'"status":"incomplete"', b'"status":"completed"'),
    (b"event: response.incomplete", b"event: response.completed"),
    (b'"type":"response.incomplete"', b'"type":"response.completed"'),
)


def flat_template(body: Mapping[str, Any]) -> str:
    """The recording worker's template, with the text parts of a message joined as vLLM joins them."""
    messages = [{**message, "content": _text(message.get("content"))} for message in body["messages"]]
    return template({**body, "messages": messages})


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content or ""


def _chat_events(cached: int) -> list[bytes]:
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    usage = {**USAGE, "prompt_tokens_details": {**USAGE["prompt_tokens_details"], "cached_tokens": cached}}
    deltas = ({"role": "assistant", "content": ""}, None), ({"content": "At noon."}, None), ({}, "stop")
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}], "usage": None}
        for delta, end in deltas
    ]
    chunks.append({**head, "choices": [], "usage": usage})
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def _recorded(name: str) -> list[bytes]:
    text = (STREAMS / f"{name}.sse").read_bytes()
    for stopped, ended in _ENDED:
        text = text.replace(stopped, ended)
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


class ClientWorker(RecordingWorker):
    """Reports as cached what the deepest state that it keeps for a prompt stands for."""

    def _name_of_response(self) -> str:
        """A new one for each response: an id that comes twice would be one response."""
        new = b"resp_" + uuid.uuid4().hex[:16].encode()
        events = [re.sub(rb"resp_\w+", new, event) for event in _recorded("responses")]
        self.streams = {**self.streams, RESPONSES: events}
        return super()._name_of_response()

    def _admit(self, path: str, request_id: str, raw: bytes) -> tuple[str | None, Admitted | None]:
        body = json.loads(raw or b"{}")
        prompt = prompt_of(path, body, self.template) or ""
        self.cached = cached = self.engine.held(prompt, body)
        counted = (
            (b'"input_tokens":16,"input_tokens_details":{"cached_tokens":0', _RESPONSES_USAGE % (len(prompt), cached)),
            (b'"input_tokens":16', b'"input_tokens":%d' % (len(prompt) - cached)),
            (b'"cache_read_input_tokens":0', b'"cache_read_input_tokens":%d' % cached),
        )
        self.streams = {**self.streams, CHAT: _chat_events(cached), MESSAGES: _recorded("messages")}
        for api in (MESSAGES, RESPONSES):
            for old, new in counted:
                self.streams[api] = [event.replace(old, new) for event in self.streams.get(api, ())]
        return super()._admit(path, request_id, raw)


_RESPONSES_USAGE = b'"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d'


@contextmanager
def client_worker() -> Iterator[ClientWorker]:
    """The worker under a real HTTP server, in a thread."""
    worker = ClientWorker(models=(MODEL,), template=flat_template)
    with serving(worker) as worker.url:
        yield worker
