"""Generated pairs of chats that differ only behind a boundary, one family per shape of conversation."""

from __future__ import annotations

from typing import Any, NamedTuple

# Last texts: no two begin with the same character, so that what all of them share ends where they do.
TEXTS = (
    "When is high tide?",
    "and low tide",
    "\nOn a line of its own",
    " spaced",
    "9 ships wait",
    "éclair",
    "💡 idea",
    ")x",
    "",
)
ANSWER = {"role": "assistant", "content": "At nine."}
SYSTEM = "You pilot ships into the harbour. Answer briefly, and name the tide."
TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Tide table of a port",
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string", "description": "its name"}, "hour": {"type": "integer"}},
            "required": ["port"],
        },
    },
}
OTHER_TOOL = {**TOOL, "function": {**TOOL["function"], "name": "wind"}}


class Family(NamedTuple):
    """Chats that differ in their last text only."""

    shape: str
    body: dict[str, Any]  # without messages
    before: list[dict[str, Any]]  # messages before the last
    last: dict[str, Any]  # with content None where the text goes
    listed: bool = False  # the content is a list of parts

    def chat(self, text: str) -> dict[str, Any]:
        """The request with this last text."""
        content = [{"type": "text", "text": text}] if self.listed else text
        return {**self.body, "messages": [*self.before, {**self.last, "content": content}]}

    def next_turn(self, text: str) -> dict[str, Any]:
        """The request that follows once the chat with this last text is answered."""
        messages = [*self.chat(text)["messages"], ANSWER, {"role": "user", "content": "And then?"}]
        return {**self.body, "messages": messages}


def families() -> list[Family]:
    """Every shape of the product's list."""
    system = {"role": "system", "content": SYSTEM}
    asked = {"role": "user", "content": None}
    first = {"role": "user", "content": "First?"}
    answered = {"role": "assistant", "content": "One."}
    tools = {"tools": [TOOL, OTHER_TOOL]}
    call = {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "abcdef123", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Ayr"}'}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": None}
    thought = {"role": "assistant", "content": "One.", "reasoning_content": "They ask for a number."}
    many = [{"role": ("user", "assistant")[i % 2], "content": f"Word {i}, said plainly."} for i in range(198)]
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    emoji = [{"role": "user", "content": "⚓🚢 é"}, {"role": "assistant", "content": "🌊"}]
    lines = [{"role": "user", "content": "\n\nFirst?\n"}, {"role": "assistant", "content": "\nOne.\n\n"}]
    thinking = {"role": "assistant", "content": "", "reasoning_content": "A table will do."}
    return [
        Family("plain, one turn", {}, [system], asked),
        Family("plain, no system", {}, [], asked),
        Family("plain, two turns", {}, [system, first, answered], asked),
        Family("tools", tools, [system], asked),
        Family("tools, two turns", tools, [system, first, answered], asked),
        Family("tool result last", tools, [system, first, call], result),
        Family("tool results last", tools, [system, first, call, {**result, "content": "{}"}, call], result),
        Family("tool result, null content", tools, [system, first, {**call, "content": None}], result),
        Family("tool loop, thinking echoed", tools, [system, first, {**call, **thinking}], result),
        Family(
            "question after a tool loop", tools, [system, first, call, {**result, "content": "{}"}, answered], asked
        ),
        Family("thinking echoed", {}, [system, first, thought], asked),
        Family("thinking not echoed", {}, [system, first, answered], asked),
        Family("name", {}, [system, {**first, "name": "anna"}, answered], {**asked, "name": "bert"}),
        Family("list content", {}, [system, first, answered], asked, listed=True),
        Family("empty strings", {}, [system, *empty], asked),
        Family("empty system", {}, [{"role": "system", "content": ""}], asked),
        Family("emoji", {}, [system, *emoji], asked),
        Family("line breaks", {}, [{"role": "system", "content": f"\n{SYSTEM}\n"}, *lines], asked),
        Family("200 messages", {}, [system, *many], asked),
    ]
