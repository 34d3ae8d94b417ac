"""Asking a worker which tokens a chat becomes. The worker is the reference: it renders what it is going to compute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
from prometheus_client import Counter
from xxhash import xxh3_128_digest

from proxy.chat.canonical import canonical
from proxy.chat.chat import CHAT
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import loads

# Rendered once for each boot: the tokens stand for tokenizer and template, so that a position learnt from one template
# is never used with another. The second probe serves templates without a system role.
PROBES: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "system", "content": "Seamark 1"},
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "again"},
    ],
    [{"role": "user", "content": "probe"}],
)

# Templates are mended mostly in how they write tools. A position before the change is told again and again behind it.
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Seamark 1",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}

# The fields of a chat that `/tokenize` reads; it refuses no others.
_OF_CHAT = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens")
TOKENIZE_FIELDS = (*_OF_CHAT, "chat_template", "chat_template_kwargs", "mm_processor_kwargs")

# Not needed for rendering, and apt to make a render fail or stream.
DROPPED_FIELDS = ("stream", "stream_options", "vllm_xargs", "n", "logprobs", "top_logprobs", "prompt_logprobs")

_Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class _Rendered(msgspec.Struct):
    token_ids: _Ids


class _Tokenized(msgspec.Struct):
    tokens: _Ids


# By the field that holds the ids. A route that takes several prompts answers with a list.
_DECODERS = {
    "token_ids": msgspec.json.Decoder(_Rendered | list[_Rendered]).decode,
    "tokens": msgspec.json.Decoder(_Tokenized).decode,
}


class RenderFailed(Exception):
    """The worker could not or would not render. The message holds no prompt text; `answer`, the worker's own, might."""

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


class Renderer(Protocol):
    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        """`body` as it would be sent to `path`. Raise `RenderFailed` if there are none."""


@dataclass(eq=False)
class WorkerRenderer:
    """Renders through one worker: by its render routes, or by `/tokenize` if those are switched off."""

    _upstream: Upstream
    _url: str
    timeout: float  # seconds for one render
    asked: Counter | None = None  # counts them
    _has_render_route: bool = True
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        if self.asked is not None:
            self.asked.inc()
        if self._has_render_route:
            wanted = {name: value for name, value in body.items() if name not in DROPPED_FIELDS}
            status, answer = await self._post(path + "/render", wanted)
            if status not in (403, 404, 405, 501):  # the last of vLLM's frontend in Rust
                return _ids_in(status, answer, "token_ids")
        if path != CHAT:
            raise RenderFailed(f"no route renders {path}")
        status, answer = await self._post("/tokenize", {name: body[name] for name in TOKENIZE_FIELDS if name in body})
        ids = _ids_in(status, answer, "tokens")
        self._has_render_route = False  # the refusal was of the route: this request itself is fine
        return ids

    async def detokenize(self, model: Any, ids: Sequence[int]) -> str | None:
        """The text of these ids, special tokens included; None if the worker has no route for that."""
        try:
            status, answer = await self._post("/detokenize", {"model": model, "tokens": list(ids)})
            text = loads(answer)["prompt"] if status == 200 else None
        except (RenderFailed, ValueError, KeyError, TypeError):
            return None
        # A part of a character has no text.
        return text if isinstance(text, str) and "\ufffd" not in text else None

    def forget_routes(self) -> None:
        """The worker has restarted, perhaps with other routes."""
        self._has_render_route = True

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with self._writing:  # the variants of a long chat one by one, so that others get their turn in between
            raw = json.dumps(body).encode()
            await asyncio.sleep(0)
        try:
            return await self._upstream.fetch("POST", self._url + path, raw, timeout=self.timeout)
        except (Unreachable, Broken) as error:
            raise RenderFailed(f"{path}: {type(error).__name__}") from error


def _ids_in(status: int, answer: bytes, field: str) -> list[int]:
    if status != 200:
        raise RenderFailed(f"status {status}", answer)
    try:
        (prompt,) = prompts if isinstance(prompts := _DECODERS[field](answer), list) else (prompts,)
    except (ValueError, RecursionError):
        raise RenderFailed(f"an answer without {field}") from None
    ids: list[int] = getattr(prompt, field)
    return ids


async def identify_renderer(renderer: Renderer, model: Any) -> bytes | None:
    """A hash of what the first probe that renders becomes, and that with a tool; None if none renders.

    None, too, if the worker does not answer: by what it rendered so far it would seem to be another one than its like.
    """

    async def rendered(**body: Any) -> list[int]:
        try:
            return await renderer({"model": model, **body})
        except RenderFailed as error:
            if error.__cause__ is not None:
                raise
            return []  # the worker's own refusal

    with suppress(RenderFailed):
        for messages in PROBES:
            if ids := await rendered(messages=messages):
                with_tool = await rendered(messages=messages, tools=[PROBE_TOOL])
                return xxh3_128_digest(canonical([ids, with_tool]))
    return None
