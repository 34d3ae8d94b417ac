"""Rendering inside the gateway: a model's own tokenizer and chat template, read from its folder.

Text between two special tokens is tokenised by itself and remembered, so that a conversation which grows costs its new
part, and the variants of a chat cost next to nothing. Whether all this equals what the worker does is for
`proxy.proved` to find out; what is known to render otherwise is not even tried.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from sys import getsizeof
from typing import Any

from proxy.canonical import HEAD_FIELDS
from proxy.errors import SettingsError
from proxy.tokens import Tokens

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

    def tokens(self, body: Mapping[str, Any]) -> Tokens:
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
        return Tokens(b",".join(part for part in spelled if part), local=True)

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
                oldest, ids = self._remembered.popitem(last=False)
                self._held -= getsizeof(oldest) + len(ids) + ENTRY_BYTES
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
