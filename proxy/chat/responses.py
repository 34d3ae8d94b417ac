"""A request to /v1/responses as a chat, the way vLLM turns it into one, and what a stored response adds to the next."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from cachetools import FIFOCache

from proxy.chat.chat import RESPONSES, Chat, Mark, listed, marked
from proxy.http.json_body import memory_of

CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
TEXT_PARTS = ("input_text", "output_text", "text")
MAX_RESPONSES = 65_536  # whose worker is remembered; some 200 bytes each
NAME_BYTES = 16
MAX_ID_CHARACTERS = 256  # of a response; vLLM's have some 30, those of a gateway with keys 69

# What vLLM shows a template of a tool that takes free text.
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def responses_request(body: Mapping[str, Any], previous: Sequence[Any] | None = None) -> Chat | None:
    """The chat in a request to /v1/responses, or None; `previous`: the messages of the response it continues."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else listed(given)
    messages: list[Any] = []
    if isinstance(instructions := body.get("instructions"), str) and instructions:
        messages.append({"role": "system", "content": instructions})
    # Instructions do not carry over from one response to the next.
    messages += [message for message in previous or () if message.get("role") != "system"]
    # As in vLLM, an item never joins a message that stood before the input, and stored messages stay as they are.
    made: list[dict[str, Any]] = []
    marks: list[Mark] = []
    for item in items:
        _add(made, marks, item)
    marks = [mark._replace(message=mark.message + len(messages)) for mark in marks]
    messages += made
    if not items or not messages:
        return None
    chat: dict[str, Any] = {"model": body.get("model"), "messages": messages}
    tools = [made for tool in listed(body.get("tools")) if isinstance(tool, dict) for made in _tools(tool)]
    if tools:
        chat["tools"] = tools
    given_kwargs = body.get("chat_template_kwargs")
    kwargs = given_kwargs if isinstance(given_kwargs, dict) else {}
    effort = body["reasoning"].get("effort") if isinstance(body.get("reasoning"), dict) else None
    if effort is not None:
        chat["reasoning_effort"] = effort
        kwargs = {"enable_thinking": effort != "none", **kwargs}
    if kwargs:
        chat["chat_template_kwargs"] = kwargs
    if body.get("cache_salt") is not None:
        chat["cache_salt"] = body["cache_salt"]
    if _continues(items[-1]):
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if previous is not None:  # the worker renders no stored history: only the chat can be rendered
        return Chat(chat, messages, tuple(marks))
    return Chat(chat, messages, tuple(marks), RESPONSES, body)


def _add(messages: list[dict[str, Any]], marks: list[Mark], item: Any) -> None:
    """Append one input item; calls, reasoning and text of one assistant turn come together in one message."""
    if not isinstance(item, dict):
        return
    kind = item.get("type", "message")
    before = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") or ""
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        function = {"name": _name(item), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if before is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            before.setdefault("tool_calls", []).append(call)
    elif kind in CALL_OUTPUTS:
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        texts = _texts((*listed(item.get("content")), *listed(item.get("summary"))))
        if before is not None and "reasoning" not in before:
            before["reasoning"] = texts[0] if texts else ""
        else:
            messages.append({"role": "assistant", "reasoning": texts[0] if texts else ""})
    elif item.get("role") == "assistant":
        content = item.get("content")
        text = content if isinstance(content, str) else next(iter(_texts(listed(content))), None)
        if before is not None and "content" not in before:
            before["content"] = text
        elif text is not None:
            messages.append({"role": "assistant", "content": text})
    elif "role" in item:
        content = item.get("content")
        if isinstance(content, list):
            marks += [Mark(len(messages), part) for part, block in enumerate(content) if marked(block)]
            content = [_part(part) for part in content]
        messages.append({"role": item["role"], "content": content})


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") in TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    if part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return part


def _texts(parts: Sequence[Any]) -> list[Any]:
    return [part.get("text") for part in parts if isinstance(part, dict)]


def _name(item: Mapping[str, Any]) -> Any:
    space = item.get("namespace")
    return f"{space}__{item.get('name')}" if isinstance(space, str) and space else item.get("name")


def _tools(tool: Mapping[str, Any], space: Any = None) -> list[dict[str, Any]]:
    """The functions that vLLM shows a template for one tool: several for a namespace, none for a tool of vLLM's own."""
    if tool.get("type") == "namespace":
        inner = [each for each in listed(tool.get("tools")) if isinstance(each, dict)]
        return [function for each in inner for function in _tools(each, tool.get("name"))]
    name = _name({"name": tool.get("name"), "namespace": space})
    if tool.get("type") == "custom":
        made = {"name": name, "description": tool.get("description"), "parameters": CUSTOM_PARAMETERS}
        return [{"type": "function", "function": made}]
    if tool.get("type") != "function":
        return []
    return [{"type": "function", "function": {**{k: v for k, v in tool.items() if k != "type"}, "name": name}}]


def _continues(item: Any) -> bool:
    if not isinstance(item, dict) or item.get("type", "message") not in ("message", "reasoning"):
        return False
    return item.get("status") in ("in_progress", "incomplete")


class StoredResponses:
    """What is known of the responses that workers store, by their ids and by whose they are: the names of API keys.

    The chat behind each is prompt text, in memory only and bounded in bytes. Its worker is remembered for longer.
    """

    def __init__(self, size: int, most: int = MAX_RESPONSES) -> None:
        """`size` of the chats in bytes, 0 to keep none; of `most` responses the worker is known."""
        # Messages by name; measured once, when they are put.
        self._chats: FIFOCache[bytes, list[dict[str, Any]]] = FIFOCache(
            size, getsizeof=lambda messages: memory_of(messages, 0, sys.maxsize).size
        )
        self._boots: OrderedDict[bytes, str] = OrderedDict()  # of their workers, oldest first
        self._most = most
        self.on_kept: Callable[[bytes, str], None] | None = None  # other gateways learn of it there

    @property
    def held(self) -> int:
        return int(self._chats.currsize)

    def put(self, chat: Chat | None, answer: Any, boot: str, owner: str | None = None) -> None:
        """Remember the response `answer` (parsed) of the worker booted as `boot`; `chat`: what it ends, if it has."""
        response_id = answer.get("id") if isinstance(answer, dict) else None
        name = self.keep(response_id, boot, owner)
        if name is None or chat is None or not self._chats.maxsize:
            return
        messages = list(chat.messages)
        for item in listed(answer.get("output")):
            if isinstance(item, dict) and item.get("type") == "message":  # vLLM carries over the texts only
                messages += [{"role": "assistant", "content": text} for text in _texts(listed(item.get("content")))]
        with suppress(ValueError):  # larger than all that may be kept
            self._chats[name] = messages

    def keep(self, response_id: Any, boot: str, owner: str | None) -> bytes | None:
        """The worker booted as `boot` stores that response of `owner`. Returns its name, None if the id is unsound."""
        name = _stored_name(response_id, owner)
        if name is not None and self._boots.get(name) != boot:
            self.keep_remote(name, boot)
            if self.on_kept is not None:
                self.on_kept(name, boot)
        return name

    def keep_remote(self, name: bytes, boot: str) -> None:
        """Another gateway says that the worker booted as `boot` stores the response of this name."""
        self._boots[name] = boot
        if len(self._boots) > self._most:
            self._boots.popitem(last=False)

    def chat(self, response_id: Any, owner: str | None = None) -> list[dict[str, Any]] | None:
        """The messages up to the end of that response, None if `owner` has none such, or it is unknown."""
        name = _stored_name(response_id, owner)
        return self._chats.get(name) if name is not None else None

    def boot(self, response_id: Any, owner: str | None = None) -> str | None:
        """The worker that stores that response of `owner`: another one would not know it. None if that is unknown."""
        name = _stored_name(response_id, owner)
        return self._boots.get(name) if name is not None else None


def _stored_name(response_id: Any, owner: str | None) -> bytes | None:
    """A hash of both, which nobody can steer: one key's response has no name under which another could find it."""
    if not isinstance(response_id, str) or len(response_id) > MAX_ID_CHARACTERS:
        return None
    whose = blake2b((owner or "").encode(errors="surrogatepass")).digest()
    return blake2b(response_id.encode(errors="surrogatepass"), digest_size=NAME_BYTES, key=whose).digest()
