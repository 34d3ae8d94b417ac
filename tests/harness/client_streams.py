"""The streams of a worker before which real clients run: one sentence in each API, that no client wants to go on."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from tests.harness.fake_engine import template
from tests.harness.recording_worker import USAGE, Stream

MODEL = "harbour"

FOLDER = Path(__file__).parents[1] / "streams"

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


def _chat(length: int, cached: int) -> list[bytes]:
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    details = {**USAGE["prompt_tokens_details"], "cached_tokens": cached}
    usage = {**USAGE, "prompt_tokens": length, "prompt_tokens_details": details}
    deltas = ({"role": "assistant", "content": ""}, None), ({"content": "At noon."}, None), ({}, "stop")
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}], "usage": None}
        for delta, end in deltas
    ]
    chunks.append({**head, "choices": [], "usage": usage})
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def _recorded(name: str, *counted: tuple[bytes, bytes]) -> list[bytes]:
    text = (FOLDER / f"{name}.sse").read_bytes()
    for old, new in (*_ENDED, *counted):
        text = text.replace(old, new)
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


def _messages(length: int, cached: int) -> list[bytes]:
    computed, hit = b'"input_tokens":%d', b'"cache_read_input_tokens":%d'
    return _recorded("messages", (computed % 16, computed % (length - cached)), (hit % 0, hit % cached))


def _responses(length: int, cached: int) -> list[bytes]:
    """With an id of its own: one that comes twice would be one response."""
    usage = b'"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d'
    new = b"resp_" + uuid.uuid4().hex[:16].encode()
    recorded = _recorded("responses", (usage % (16, 0), usage % (length, cached)))
    return [re.sub(rb"resp_\w+", new, event) for event in recorded]


CLIENT_STREAMS: dict[str, Stream] = {CHAT: _chat, MESSAGES: _messages, RESPONSES: _responses}
