"""A fast renderer that is trusted only where it was proved equal to the worker, and while a running sample says so.

Each kind of chat (roles, tools, settings) is proved by itself: harmony, Python renderers, Mistral's tokenizer mode and
whatever else renders otherwise never pass. A difference after the proof switches the fast renderer off for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_64_digest

from proxy.chat import CHAT, listed
from proxy.local_render import LocalRender, NotLocal
from proxy.render import Renderer, RenderFailed
from proxy.tokens import Tokens

logger = logging.getLogger("seamark.render")

PROOFS = 8  # equal renders of one kind before it is trusted
SAMPLE = 64  # of the trusted ones, every so many is rendered by the worker too, after the fact
MAX_KINDS = 1000

Kind = bytes


class ProvedRenderer:
    """Renders locally where that is proved, through the worker elsewhere."""

    def __init__(self, worker: Renderer, local: LocalRender) -> None:
        self._worker = worker
        self._local = local
        self._proofs: dict[Kind, int] = {}
        self._differs: set[Kind] = set()
        self._rendered = 0
        self._samples: set[asyncio.Task[None]] = set()
        self.off = False

    def is_cheap(self, body: Mapping[str, Any]) -> bool:
        """Whether such a chat is rendered without the worker."""
        return not self.off and self._proofs.get(kind_of(body), 0) >= PROOFS

    def forget(self) -> None:
        """The worker has restarted, perhaps with another template: everything is to be proved again."""
        self._proofs.clear()
        self._differs.clear()
        self.off = False

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> Tokens:
        kind = kind_of(body)
        if self.off or path != CHAT or kind in self._differs or len(self._proofs) + len(self._differs) > MAX_KINDS:
            return await self._worker(body, path)
        try:
            mine = await asyncio.to_thread(self._local.tokens, body)
        except NotLocal:
            return await self._worker(body, path)
        except Exception as error:
            logger.error("the local renderer failed (%s): it is off, the worker renders", type(error).__name__)
            self.off = True
            return await self._worker(body, path)
        if self._proofs.get(kind, 0) < PROOFS:
            theirs = await self._worker(body, path)
            if mine.raw == theirs.raw:
                self._proofs[kind] = self._proofs.get(kind, 0) + 1
            else:
                logger.warning(
                    "a kind of chat (%s) does not render here as at the worker: it renders those", kind.hex()
                )
                self._differs.add(kind)
            return theirs
        self._rendered += 1
        if self._rendered % SAMPLE == 0:
            task = asyncio.create_task(self._check(body, mine))
            self._samples.add(task)
            task.add_done_callback(self._samples.discard)
        return mine

    async def _check(self, body: Mapping[str, Any], mine: Tokens) -> None:
        try:
            theirs = await self._worker(body, CHAT)
        except RenderFailed:
            return  # nothing to compare with
        if mine.raw != theirs.raw and not self.off:
            self.off = True
            logger.error("a chat rendered here differs from the worker's render: the local renderer is off")


def kind_of(body: Mapping[str, Any]) -> Kind:
    """A hash of what could make a chat render in a way of its own: roles, names of fields and settings."""
    names = {"model " + str(body.get("model"))}
    if isinstance(kwargs := body.get("chat_template_kwargs"), Mapping):
        names |= {f"setting {name}" for name in kwargs}
    # vLLM gives a template the fields of a tool that it knows, in an order of its own.
    for tool in listed(body.get("tools")):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        names.add(f"tool {list(tool) if isinstance(tool, Mapping) else ''}")
        names.add(f"function {list(function) if isinstance(function, Mapping) else ''}")
    if body.get("tool_choice") is not None:
        names.add(f"tool_choice {body['tool_choice']}")
    if not body.get("add_generation_prompt", True):
        names.add("no generation prompt")
    for message in body.get("messages") or ():
        if not isinstance(message, Mapping):
            continue
        role = message.get("role")
        names.add(f"role {role}")
        names |= {f"{role} {name}" for name, value in message.items() if name not in ("role", "content") and value}
        if not isinstance(message.get("content"), str):
            names.add(f"{role} {type(message.get('content')).__name__}")
    return xxh3_64_digest("\n".join(sorted(names)).encode(errors="surrogatepass"))
