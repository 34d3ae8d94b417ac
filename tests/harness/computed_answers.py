"""Answers that follow from a request alone, in every API: each worker gives the same, and no two requests get it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES


class Computed(NamedTuple):
    """How long they are, and how they end."""

    words: int = 8  # events of a stream
    ending: str | None = "stop"  # of a choice

    def whole(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An answer that is no stream."""
        name, salt = _name(body), body.get("cache_salt", "")
        text = f"{salt} {name} " * self.words
        about = {"id": f"answer-{name}", "model": "m"}
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

    def events(self, body: Mapping[str, Any]) -> list[bytes]:
        """The stream of a chat."""
        name, salt = _name(body), body.get("cache_salt", "")
        choices: list[dict[str, Any]] = [
            {"index": 0, "delta": {"content": f"{salt} {name} {number}"}, "finish_reason": None}
            for number in range(self.words)
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": self.ending})
        frames = [json.dumps({"id": f"answer-{name}", "choices": [each]}) for each in choices]
        return [f"data: {frame}\n\n".encode() for frame in (*frames, "[DONE]")]


def _name(body: Mapping[str, Any]) -> str:
    """Of a request, whatever the gateway tells the engine beside it."""
    asked = {name: value for name, value in body.items() if name != "vllm_xargs"}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
