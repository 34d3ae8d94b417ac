"""What makes prompts differ that users could want stripped or moved: recognised and counted, never changed here.

Each volatile text is a way to look at a changed part as if it had not changed. Where that explains a miss, the miss is
counted under the text's name with the tokens that would have been saved; a rewrite rule needs such a count first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from proxy.canonical import canonical
from proxy.recent import Change
from proxy.sentinel import text_of


class Volatile(NamedTuple):
    """One of them."""

    name: str
    neutral: Callable[[Any], Any]  # a part (the list of tools, a message) with what is volatile taken out


DATES = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:Z|[+-]\d{2}:?\d{2})?)?|\b\d{1,2}:\d{2}(?::\d{2})?\b"
    r"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{1,2},? \d{4}"
    r"|\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{4}"
)
COUNTERS = re.compile(
    r"<total_tokens>[^<]{0,40}</total_tokens>|(?<![\d,])\d[\d,]{0,15} tokens (?:left|remaining|used)\b"
)
FOLDERS = re.compile(r"(?im)^[^\n]{0,200}\b(?:working directory|cwd|current directory)\b.*$")
# A changed part is looked at with several patterns, on the event loop: longer ones are not.
MAX_CHARACTERS = 200_000
MAX_NESTING = 50


def _without(pattern: re.Pattern[str]) -> Callable[[Any], Any]:
    def neutral(part: Any) -> Any:
        text = text_of(part)
        return pattern.sub("", text) if text is not None and len(text) <= MAX_CHARACTERS else None

    return neutral


def sorted_by_name(tools: Any) -> Any:
    """The tools in the order of their names; None where they are no list of tools."""
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        return None
    return sorted(tools, key=tool_name)


def tool_name(tool: Any) -> str:
    """The name a tool has in any of the APIs."""
    function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
    return str(function.get("name"))


def _keys_sorted(tools: Any) -> Any:
    return _sorted(tools) if isinstance(tools, list | tuple) else None


def _sorted(value: Any, depth: int = 0) -> Any:
    if depth == MAX_NESTING:
        return value
    if isinstance(value, dict):
        return {name: _sorted(value[name], depth + 1) for name in sorted(value)}
    return [_sorted(item, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def _without_thinking(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("role") != "assistant":
        return None
    return {name: value for name, value in part.items() if name not in ("reasoning", "reasoning_content")}


VOLATILE = (
    Volatile("tools_sorted", sorted_by_name),
    Volatile("tool_keys_sorted", _keys_sorted),
    Volatile("dates", _without(DATES)),
    Volatile("token_counters", _without(COUNTERS)),
    Volatile("working_directory", _without(FOLDERS)),
    Volatile("thinking_history", _without_thinking),
)


def explains(change: Change) -> str | None:
    """Name of the volatile text that is all of this change; "system_moved" for a system turn that came or went."""
    if change.old is None or change.new is None:
        return None
    for volatile in VOLATILE:
        if (volatile.name.startswith("tool") and volatile.name != "token_counters") != (change.what == "tool"):
            continue
        old, new = volatile.neutral(change.old), volatile.neutral(change.new)
        if old is not None and new is not None and canonical(old) == canonical(new):
            return volatile.name
    roles = [part.get("role") for part in (change.old, change.new) if isinstance(part, dict)]
    return "system_moved" if "system" in roles and change.index and roles[0] != roles[1] else None
