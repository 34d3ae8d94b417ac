"""vLLM's own API process before an engine that needs no time: its renderer, answers at once, streams at a pace.

An ASGI middleware on vLLM's render server. A chat is parsed and rendered as the real server does it, in the same
process, so that it costs that process what it costs it before a real engine. A request with the header `x-instant:
CACHED` (tokens) is not rendered: its prompt is the one that was rendered last with the header `x-instant-ours`, and so
much of it is said to come from the cache. What is asked of the routes beneath without that header is counted.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from engine_patches.reporting.events_api import EventsEndpoint, feeds
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.hints import FIELD, resolve
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from proxy.chat.chat import CHAT, MESSAGES, RESPONSES
from proxy.commands.render_server import free_port
from tests.harness.fake_engine import engine_info
from tests.harness.recording_worker import respond
from tests.harness.threaded_server import whole_body

CACHED, OURS = b"x-instant", b"x-instant-ours"

ASKED = "/instant/asked"  # how often others asked, by path

# Fields of a stream's body that only this worker knows.
STEP_FIELD, FRAMES_FIELD = "instant_step_ms", "instant_frames"

MAX_LEN = 400_000  # tokens

TEXT = "The harbour pilot checks the tide tables before noon."

QUIET = ("/health", "/metrics", "/version", "/v1/models", "/seamark/outcomes", "/seamark/metrics", ASKED)

PROJECT = Path(__file__).parents[2] / "pyproject.toml"

_STREAMED = re.compile(rb'"stream": ?true')

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]


class InstantEngine:
    """The middleware."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._asked: Counter[str] = Counter()
        self._prepared: list[int] = []  # token ids

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], dict(scope["headers"])
        if path not in QUIET and OURS not in headers:
            self._asked[path] += 1
        if path == ASKED:
            await respond(send, json.dumps(self._asked).encode())
        elif path.endswith("/render") and OURS in headers:
            await self._app(scope, receive, self._prepares(send))
        elif path == "/metrics":
            version = tomllib.loads(PROJECT.read_text())["project"]["version"]
            await self._app(scope, receive, _with_line(send, engine_info(version).encode()))
        elif path in (CHAT, MESSAGES, RESPONSES) and scope["method"] == "POST":
            await self._generate(scope, await whole_body(receive), headers, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Any, body: bytes, headers: dict[bytes, bytes], send: Any) -> None:
        if CACHED in headers:
            ids, cached = self._prepared, int(headers[CACHED])
        else:
            ids, cached = await _rendered(scope["app"], body), 0
        hint = json.loads(body)["vllm_xargs"][FIELD] if FIELD.encode() in body else []
        positions = resolve(hint, ids, len(ids), lambda reason: None)
        name = f"chatcmpl-{headers.get(b'x-request-id', b'').decode()}-00000000"
        feeds.main.add_outcome(AdmittedRequest(name, "hit" if cached else "cold", cached, cached, positions))
        feeds.main.wake_readers()
        if _STREAMED.search(body):
            await _stream(send, json.loads(body), len(ids), cached)
        else:
            await respond(send, json.dumps(ANSWERS[scope["path"]](len(ids), cached)).encode())

    def _prepares(self, send: Any) -> Any:
        """`send`, remembering the token ids in a render's answer."""
        parts: list[bytes] = []

        async def sending(message: Message) -> None:
            parts.append(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._prepared = json.loads(b"".join(parts)).get("token_ids") or []
            await send(message)

        return sending


async def _rendered(app: Any, body: bytes) -> list[int]:
    """The token ids of a chat, by the way that vLLM's own handler takes."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate(json.loads(body))
    ids: list[int] = (await app.state.serving_render.render_chat_request(request)).token_ids
    return ids


async def _stream(send: Any, body: Any, prompt: int, cached: int) -> None:
    """A chat's stream; from one frame to the next passes the pace, and whatever the event loop is late."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    frame = _event({"choices": [{"index": 0, "delta": {"content": " tide"}, "finish_reason": None}]})
    for _ in range(body.get(FRAMES_FIELD, 1)):
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        await asyncio.sleep(body.get(STEP_FIELD, 0) / 1000)
    end = _event({"choices": [], "usage": _chat(prompt, cached)["usage"]})
    await send({"type": "http.response.body", "body": end + b"data: [DONE]\n\n"})


def _event(data: Any) -> bytes:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": MODEL_NAME, **data}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _chat(prompt: int, cached: int) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + 1, "completion_tokens": 1}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000, "model": MODEL_NAME}
    return {**whole, "choices": [choice], "usage": usage}


def _message(prompt: int, cached: int) -> dict[str, Any]:
    usage = {"input_tokens": prompt - cached, "output_tokens": 1}
    usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    whole = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "model": MODEL_NAME}
    return {**whole, "content": [{"type": "text", "text": TEXT}], "stop_reason": "end_turn", "usage": usage}


def _response(prompt: int, cached: int) -> dict[str, Any]:
    part = {"type": "output_text", "text": TEXT, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": prompt, "output_tokens": 1, "total_tokens": prompt + 1}
    usage["input_tokens_details"] = {"cached_tokens": cached}
    whole = {"id": "resp_1", "object": "response", "created_at": 1700000000, "model": MODEL_NAME}
    return {**whole, "status": "completed", "output": [message], "usage": usage}


ANSWERS = {CHAT: _chat, MESSAGES: _message, RESPONSES: _response}


def _with_line(send: Any, line: bytes) -> Any:
    """Send a response with one more line in its body."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [pair for pair in message["headers"] if pair[0] != b"content-length"]
        elif not message.get("more_body"):
            message["body"] = message.get("body", b"") + line
        await send(message)

    return sending


def instant_worker(servers: Servers, model: Path, flags: Iterable[str] = ()) -> Server:
    """Start one for the tokenizer and chat template in `model`, in a process of its own that ends with `servers`."""
    port = free_port()
    command = [sys.executable, "-m", "proxy.commands.render_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enable-scale-out", "--served-model-name", MODEL_NAME]
    command += ["--max-model-len", str(MAX_LEN), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    for middleware in (InstantEngine, EventsEndpoint):  # the last is the outermost
        command += ["--middleware", f"{middleware.__module__}.{middleware.__name__}"]
    command += ["--disable-access-log-for-endpoints", "/seamark/outcomes", *flags]
    settings = {"SEAMARK_ENGINE": "0", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    return servers.start("instant-worker", port, command, settings)
