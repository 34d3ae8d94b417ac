"""A request to /v1/messages as a chat, the way vLLM turns it into one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proxy.chat.chat import MESSAGES, TOOLS, Chat, Mark, listed, marked

BILLING_HEADER = "x-anthropic-billing-header"
TOOL_CHANGES = ("tool_addition", "tool_removal")


def messages_request(body: Mapping[str, Any]) -> Chat | None:
    """The chat in a request to /v1/messages; None if there is none."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        return None
    reader = _BlockReader()
    reader.system(body.get("system"))
    for message in given:
        reader.message(message)
    tools = [_tool(tool) for tool in _declared_tools(body, given)]
    if any(marked(tool) for tool in listed(body.get("tools"))):
        reader.marks.insert(0, Mark(TOOLS))
    chat = {"model": body.get("model"), "messages": reader.messages}
    if tools:
        chat["tools"] = tools
    if isinstance(output := body.get("output_config"), dict) and output.get("effort"):
        chat["reasoning_effort"] = output["effort"]
    if isinstance(thinking := body.get("thinking"), dict) and thinking.get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    for name in ("chat_template_kwargs", "cache_salt"):
        if body.get(name) is not None:
            chat[name] = body[name]
    return Chat(chat, reader.messages, tuple(reader.marks), MESSAGES, body) if reader.messages else None


class _BlockReader:
    """Collects chat messages, and the places in them that the client marked."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.marks: list[Mark] = []

    def system(self, system: Any) -> None:
        if isinstance(system, str):
            if system:
                self.messages.append({"role": "system", "content": system})
            return
        blocks = [block for block in listed(system) if isinstance(block, dict) and _system_text(block)]
        if not blocks:
            return
        # vLLM joins the blocks into one text, so a mark inside is a place in that text.
        self.messages.append({"role": "system", "content": "".join(block["text"] for block in blocks)})
        ends = 0
        for number, block in enumerate(blocks):
            ends += len(block["text"])
            if marked(block):
                self.marks.append(Mark(0) if number == len(blocks) - 1 else Mark(0, characters=ends))

    def message(self, message: Any) -> None:
        if not isinstance(message, dict):
            return
        role, content = message.get("role"), message.get("content")
        if role == "system":
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(content)
            text = "".join(block["text"] for block in blocks if isinstance(block, dict) and _system_text(block))
            if text:
                self.messages.append({"role": "system", "content": text})
            return
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content})
            return
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        marks: list[int] = []
        for block in listed(content):
            if not isinstance(block, dict):
                continue
            kind = block.get("type")
            if kind == "text" and isinstance(block.get("text"), str) and block["text"]:
                parts.append({"type": "text", "text": block["text"]})
            elif kind == "image" and isinstance(block.get("source"), dict) and block["source"]:
                parts.append({"type": "image_url", "image_url": {"url": _image(block["source"])}})
            elif kind == "thinking" and isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            elif kind == "tool_use":
                function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
                # vLLM puts the time there, by which the same prompt would be another one each second.
                name = block.get("id") or f"call_{len(self.messages):06}{len(calls):03}"
                calls.append({"id": name, "type": "function", "function": function})
            elif kind == "tool_result" and role == "user":
                self._tool_result(block)
                continue
            elif kind == "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
            if marked(block) and parts:
                marks.append(len(parts) - 1)
        made: dict[str, Any] = {"role": role}
        if parts:
            alone = len(parts) == 1 and parts[0]["type"] == "text"
            made["content"] = parts[0]["text"] if alone else parts
        if thoughts:
            made["reasoning"] = "".join(thoughts)
        if calls:
            made["tool_calls"] = calls
        if role == "user" and not parts:
            return
        index = len(self.messages)
        self.messages.append(made)
        self.marks += [Mark(index, None if part == len(parts) - 1 else part) for part in marks]

    def _tool_result(self, block: Mapping[str, Any]) -> None:
        content, text, urls, references = block.get("content"), "", [], []
        if isinstance(content, str):
            text = content
        else:
            items = [item for item in listed(content) if isinstance(item, dict)]
            text = "\n".join(str(item.get("text", "")) for item in items if item.get("type") == "text")
            sources = [i.get("source", {}) for i in items if i.get("type") == "image"]
            urls = [url for source in sources if isinstance(source, dict) and (url := _image(source))]
            named = [i.get("tool_name") or i.get("name") for i in items if i.get("type") == "tool_reference"]
            references = [{"type": "tool_reference", "name": name} for name in named if name]
        if marked(block):
            self.marks.append(Mark(len(self.messages)))
        self.messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text})
        if urls:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            self.messages.append({"role": "user", "content": parts})
        if references:
            found = {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": references}
            self.messages.append(found)


def _system_text(block: Mapping[str, Any]) -> bool:
    text = block.get("text")
    return block.get("type") == "text" and isinstance(text, str) and bool(text) and not text.startswith(BILLING_HEADER)


def _image(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _declared_tools(body: Mapping[str, Any], messages: list[Any]) -> list[dict[str, Any]]:
    """The tools in effect at the end of the conversation: messages may add some, and take some away."""
    tools = [tool for tool in listed(body.get("tools")) if isinstance(tool, dict)]
    blocks = [block for message in messages if isinstance(message, dict) for block in listed(message.get("content"))]
    changes = [
        (block["type"], block["tool"])
        for block in blocks
        if isinstance(block, dict) and block.get("type") in TOOL_CHANGES and isinstance(block.get("tool"), dict)
    ]
    if not changes:
        return tools
    by_name = {str(tool.get("name")): tool for tool in tools}
    removed: dict[str, None] = {}
    for kind, tool in changes:
        definition = tool.get("definition")
        name = str((definition if isinstance(definition, dict) else tool).get("name"))
        removed.pop(name, None)
        if kind == "tool_removal":
            removed[name] = None
        elif isinstance(definition, dict):
            by_name[name] = definition
        elif name in by_name:
            by_name[name] = {**by_name[name], "defer_loading": None}
    return [tool for name, tool in by_name.items() if name not in removed]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("input_schema")
    if isinstance(parameters, dict):
        parameters = {**parameters, "type": parameters.get("type", "object")}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    more = {name: tool.get(name) for name in ("strict", "defer_loading")}
    return {"type": "function", "function": {**function, **more}}
