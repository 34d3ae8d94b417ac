"""Chat templates rendered without vLLM: as its chat route does it, for plain chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from tests.harness.render_models import MARKERS


class TemplateRenderer:
    """One tokenizer and template, as a worker renders them. Fails when it is told to."""

    def __init__(self, tokenizer: Tokenizer, template: str, special: bool = True) -> None:
        """`special`: what looks like a marker in the template is a token of its own in `tokenizer`, a copy for this."""
        self._tokenizer = tokenizer
        if special:
            tokenizer.add_special_tokens([AddedToken(marker) for marker in sorted(set(MARKERS.findall(template)))])
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)
        self.down = False

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> TokenIds:
        await asyncio.sleep(0)
        if self.down:
            raise RenderFailed("Unreachable")
        return TokenIds.of(self.render(body))

    async def detokenize(self, model: Any, ids: Sequence[int]) -> str | None:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def render(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt. Raises `RenderFailed` if the template refuses the chat."""
        try:
            text = self._template.render(
                messages=[_message(message) for message in body["messages"]],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                bos_token="<s>",
                eos_token="</s>",
                reasoning_effort=body.get("reasoning_effort"),
                **(body.get("chat_template_kwargs") or {}),
            )
        except TemplateError as error:
            raise RenderFailed("status 400", str(error).encode()) from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of calls as an object, as vLLM hands them to a template."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)
