"""Rewrite rules, which change what the model sees: named, switchable, counted, and off unless they remove what no model
reads. Keys are made from what is forwarded, after the rules; nothing here belongs to hashing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.chat.anthropic import BILLING_HEADER
from proxy.chat.chat import MESSAGES, listed
from proxy.http.json_body import Edit, Path

# Names and values on a line of their own, and nothing else: a prompt that only speaks of the header is left alone.
_HEADER = re.compile(rf"{BILLING_HEADER}:(?:[ \t]*[\w-]+=[^;\s]*(?:;|(?=\s|\Z)))*[ \t]*(?:\r?\n|\Z)")


def _billing_header(body: Mapping[str, Any]) -> list[Edit]:
    """`x-anthropic-billing-header: ...` at the head of a system prompt holds a nonce, new on every request."""
    edits: list[Edit] = []
    for index, message in enumerate(listed(body.get("messages"))):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        path: Path = ("messages", index, "content")
        content = message.get("content")
        if isinstance(content, str):
            edits += _without_header(path, content)
        for number, part in enumerate(listed(content)):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                edits += _without_header((*path, number, "text"), part["text"])
    if isinstance(instructions := body.get("instructions"), str):
        edits += _without_header(("instructions",), instructions)
    return edits


def _without_header(path: Path, text: str) -> list[Edit]:
    header = _HEADER.match(text)
    return [Edit(path, text[header.end() :])] if header is not None else []


def _tools_sorted(body: Mapping[str, Any]) -> list[Edit]:
    """Tools in the order of their names, for clients that list them in another order each time."""
    ordered = sorted_by_name(body["tools"]) if "tools" in body else None
    return [Edit(("tools",), ordered)] if ordered and ordered != body["tools"] else []


# What each rule would change in a body, and the endpoint where vLLM does it itself.
RULES = {"billing_header": (_billing_header, MESSAGES), "tools_sorted": (_tools_sorted, None)}


class Rewritten(NamedTuple):
    edits: tuple[Edit, ...]
    applied: tuple[str, ...]  # rules that changed it
    could: tuple[str, ...]  # rules that are off and would have


def rewrite(body: Mapping[str, Any], switched_on: frozenset[str], endpoint: str) -> Rewritten:
    """What the rules make of a request to `endpoint`; `switched_on` holds names out of `RULES`."""
    edits: list[Edit] = []
    applied, could = [], []
    for name, (edits_in, not_at) in RULES.items():
        if endpoint == not_at or not (changes := edits_in(body)):
            continue
        if name in switched_on:
            edits += changes
            applied.append(name)
        else:
            could.append(name)
    return Rewritten(tuple(edits), tuple(applied), tuple(could))


def sorted_by_name(tools: Any) -> Any:
    """The tools in the order of their names; None if they are no list of tools."""
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        return None
    return sorted(tools, key=tool_name)


def tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
    return str(function.get("name"))
