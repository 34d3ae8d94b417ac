"""Rendering inside the gateway: a model's own tokenizer and chat template, read from its folder.

Text between two special tokens is tokenised by itself and remembered, so that a conversation which grows costs its new
part, and the variants of a chat cost next to nothing. Whether all this equals what the worker does is for
`proxy.boundaries.local_renderer` to find out; what is known to render otherwise is not even tried.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from sys import getsizeof
from typing import Any

from xxhash import xxh3_64_digest

from proxy.boundaries.renderer import Renderer, RenderFailed
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.canonical import HEAD_FIELDS
from proxy.chat.chat import CHAT, listed
from proxy.errors import SettingsError

# Fields beside the messages that are understood here; a chat with any other that a renderer reads goes to the worker.
UNDERSTOOD = frozenset({"model", "tools", "tool_choice", "chat_template_kwargs", "cache_salt"})

ROLES = frozenset({"system", "user", "assistant", "tool"})

ENTRY_BYTES = 300


class NotLocal(Exception):
    """Such a chat is for the worker to render."""


class LocalRender:
    """One model's tokenizer and template. Safe to call from several threads."""

    def __init__(self, folder: Path, size: int) -> None:
        """`size` in bytes, of remembered text and tokens. Raises `SettingsError` for a folder that is no model's."""
        try:
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise SettingsError(f"tokenizer: {error.name} is not installed here (pip install {error.name})") from None
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text())
            file = folder / "chat_template.jinja"
            template = file.read_text() if file.is_file() else config["chat_template"]
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(template)
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise SettingsError(f"tokenizer: {folder} has no usable tokenizer and template ({error})") from None
        except Exception as error:  # the tokenizer's own errors have no class of their own
            raise SettingsError(f"tokenizer: {folder} has no usable tokenizer ({type(error).__name__})") from None
        self._words = {name: _word(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        special = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if not (token.lstrip or token.rstrip or token.single_word)
        }
        self._special = {text: str(number).encode() for text, number in special.items()}
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(longest_first) + ")") if special else None
        self._size = size
        self._held = 0
        self._remembered: OrderedDict[str, bytes] = OrderedDict()
        self._running: dict[str, Future[bytes]] = {}  # texts that a thread is tokenising
        self._spelled = [str(number).encode() for number in range(max(self._tokenizer.get_vocab().values()) + 1)]
        self._lock = threading.Lock()

    def tokens(self, body: Mapping[str, Any]) -> TokenIds:
        """The prompt of a chat request. Raises `NotLocal`."""
        unknown = [name for name in HEAD_FIELDS if name not in UNDERSTOOD and body.get(name) is not None]
        if unknown or body.get("continue_final_message") or body.get("tool_choice") not in (None, "auto", "none"):
            raise NotLocal
        kwargs = body.get("chat_template_kwargs") or {}
        try:
            text = self._template.render(
                **{
                    **self._words,
                    "messages": [_message(message, index) for index, message in enumerate(body["messages"])],
                    "tools": body.get("tools") or None,
                    "add_generation_prompt": body.get("add_generation_prompt", True),
                    **kwargs,
                }
            )
        except NotLocal:
            raise
        except Exception:
            raise NotLocal from None  # the worker words its own refusal
        parts = self._split.split(text) if self._split is not None else [text]
        spelled = [self._special.get(part) or self._part(part) for part in parts if part]
        return TokenIds(b",".join(part for part in spelled if part), local=True)

    def _part(self, text: str) -> bytes:
        """Its ids, spelled; tokenised once, however many threads want it at the same time."""
        with self._lock:
            if (known := self._remembered.get(text)) is not None:
                self._remembered.move_to_end(text)
                return known
            if (running := self._running.get(text)) is None:
                mine = self._running[text] = Future()
        if running is not None:
            return running.result()
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            spelled = b",".join(map(self._spelled.__getitem__, ids))
        except BaseException as error:
            with self._lock:
                del self._running[text]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._running[text]
            self._remembered[text] = spelled
            self._held += getsizeof(text) + len(spelled) + ENTRY_BYTES
            while self._held > self._size and self._remembered:
                oldest, its_ids = self._remembered.popitem(last=False)
                self._held -= getsizeof(oldest) + len(its_ids) + ENTRY_BYTES
        mine.set_result(spelled)
        return spelled


def _message(message: Any, index: int) -> dict[str, Any]:
    """A message as vLLM hands it to a template, for the forms that are simple."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise NotLocal
    if message["role"] == "system" and index:  # vLLM may move it to the front
        raise NotLocal
    content = message.get("content")
    if not isinstance(content, str | None):
        raise NotLocal
    made = {name: value for name, value in message.items() if value is not None}
    made["content"] = content or ""
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
    return made


def _call(call: Any) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _word(value: Any) -> str:
    return value.get("content", "") if isinstance(value, dict) else value or ""


logger = logging.getLogger("seamark.render")

PROOFS = 8  # equal renders of one kind before it is trusted

SAMPLE = 64  # of the trusted ones, every so many is rendered by the worker too, after the fact

MAX_KINDS = 1000

Kind = bytes


class VerifiedRenderer:
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

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> TokenIds:
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

    async def _check(self, body: Mapping[str, Any], mine: TokenIds) -> None:
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
