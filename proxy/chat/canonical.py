"""Canonical keys: 128-bit hashes of everything that can move a boundary, chained message by message.

Two requests that render alike get one key. Keys are for remembering only; what is forwarded never passes through here.
A wrong match costs a hit, not an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

# Fields beside the messages that a chat template or vLLM's renderer can see, and the salt that parts the caches. The
# renderers of Kimi K3 and Cohere alone see `tool_choice` and `response_format`: there a prediction may be too long.
_OF_TEMPLATE = ("model", "tools", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs")
_OF_TOKENS = ("add_special_tokens", "mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens")
HEAD_FIELDS = (*_OF_TEMPLATE, *_OF_TOKENS, "truncation_side", "cache_salt")

_UNSET: tuple[Any, ...] = (None, [], {})  # a field that is one of these might as well not be there

# Characters of tool calls' arguments that are compared as JSON, in one request. No limit of a body's values counts what
# they hold; those behind are compared as they are written.
MAX_ARGUMENTS = 32_768

# What clients write on content for a cache, and no template reads.
MARKS = ("cache_control", "prompt_cache_breakpoint")
_NO_FIELDS = frozenset(("content", *MARKS))
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_fast = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Keys(msgspec.Struct, frozen=True):
    """Keys of one chat, a value per message."""

    head: bytes
    messages: Sequence[Any] = ()
    before: list[bytes] = []  # everything before the message's last text, its own shape included
    after: list[bytes] = []  # everything up to the end of the message
    left: list[int] = []  # of `MAX_ARGUMENTS`, behind the message

    def of(self, begins: Sequence[Any]) -> Keys:
        """Those of the messages that the chat `begins` with; none if these are others."""
        end = len(begins)
        if end > len(self.messages) or not all(map(is_, begins, self.messages)):
            return NO_KEYS
        return Keys(self.head, begins, self.before[:end], self.after[:end], self.left[:end])


NO_KEYS = Keys(b"")


def digest(kind: str, *parts: bytes) -> bytes:
    """A key of its own kind from other keys and canonical bytes."""
    return xxh3_128_digest(b"\0".join((kind.encode(), *parts)))


def canonical(value: Any) -> bytes:
    """One spelling for JSON values that differ only in white space and escapes. Key order is kept: templates see it."""
    try:
        return _encode_fast(value)
    except UnicodeEncodeError:  # half of a surrogate pair
        return _encode(value).encode(errors="surrogatepass")


def chat_keys(body: Mapping[str, Any], messages: Sequence[Any], renderer: bytes, earlier: Keys = NO_KEYS) -> Keys:
    """Keys of a chat request; `renderer` identifies the tokenizer and template that will read it.

    The very messages of which there are `earlier` ones are not hashed again.
    """
    head = xxh3_128_digest(renderer + canonical(head_of(body)))
    same = [*map(is_, messages, earlier.messages), False].index(False) if earlier.head == head else 0
    keys = Keys(head, messages, earlier.before[:same], earlier.after[:same], earlier.left[:same])
    key, left = (keys.after[-1], keys.left[-1]) if same else (head, MAX_ARGUMENTS)
    for message in messages[same:]:
        shape, text = _parts(message, left)
        left -= len(shape)
        chained = xxh3_128(key + shape + b"\0")  # the shape ends here, whatever the text begins with
        keys.before.append(chained.digest())
        chained.update(text)
        chained.update(b"\0")  # after an empty text is not before it
        key = chained.digest()
        keys.after.append(key)
        keys.left.append(left)
    return keys


def head_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Everything beside the messages that is seen, without defaults that are spelled out."""
    adds_special = "messages" not in body  # by default: a template writes its own
    return {
        name: value
        for name in HEAD_FIELDS
        if name in body and (value := body[name]) not in _UNSET and value is not adds_special
    }


def own_hash(message: Any) -> int:
    """64-bit hash of a message alone, whatever stands before it."""
    shape, text = _parts(message)
    return xxh3_64_intdigest(text, xxh3_64_intdigest(shape))


def _parts(message: Any, most: int = MAX_ARGUMENTS) -> tuple[bytes, bytes]:
    """A message as its shape (everything but its last text, marked so that "" is not no text) and that last text."""
    if not isinstance(message, dict):
        return b"?", canonical(message)
    content = message.get("content")
    if type(content) is str and len(message) == 2 and type(role := message.get("role")) is str:
        return b"\x02" + role.encode(errors="surrogatepass"), content.encode(errors="surrogatepass")
    if isinstance(content, list):
        content, text = _listed(content)
    else:
        content, text = (None, content) if isinstance(content, str) else (content, None)
    rest = other_fields(message)
    if "tool_calls" in rest:
        rest["tool_calls"] = _calls(rest["tool_calls"], most)
    role = rest.pop("role", None)
    # One text alone, however it is written, is one and the same message.
    head = role.encode(errors="surrogatepass") if isinstance(role, str) else canonical(role)
    shape = head + (canonical([content, rest]) if content is not None or rest else b"")
    return (b"\x01" + shape, b"") if text is None else (b"\x02" + shape, text.encode(errors="surrogatepass"))


def _listed(content: list[Any]) -> tuple[Any, str | None]:
    """The parts of a list content without its last text (None if that text is all there is), and the text."""
    parts = [without_marks(part) for part in content]
    texts = [i for i, part in enumerate(parts) if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts:
        return parts, None
    last = texts[-1]
    text = parts[last]["text"]
    if len(parts) == 1 and parts[last].keys() == {"type", "text"}:
        return None, text
    parts[last] = {**parts[last], "text": None}
    return parts, text


def other_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """All of a message but its content and marks. Templates read fields by name, and vLLM drops those that are null."""
    return {
        name: message[name] for name in sorted(message) if name not in _NO_FIELDS and message[name] not in (None, [])
    }


def without_marks(part: Any) -> Any:
    """A content part without what clients write on it for a cache."""
    if not isinstance(part, dict) or not any(name in part for name in MARKS):
        return part
    return {name: value for name, value in part.items() if name not in MARKS}


def _calls(calls: Any, left: int) -> Any:
    """Tool calls with their arguments parsed, as vLLM hands them to a template: `left` characters at most."""
    if not isinstance(calls, list):
        return calls
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            if len(arguments) <= left:
                call = {**call, "function": {**function, "arguments": _decoded(arguments)}}
            left -= len(arguments)
        read.append(call)
    return read


def _decoded(arguments: str) -> Any:
    """What the arguments are as JSON; if they are none, as they were written."""
    try:
        return _decode(arguments)
    except (ValueError, RecursionError):
        return arguments
