"""What people read of a changed prefix, by its kind: what changed, and what to do about it.

No cure is applied by itself: each one changes what the model reads.
"""

from __future__ import annotations

from typing import NamedTuple


class ChangeText(NamedTuple):
    """What people read of one kind of change."""

    short: str
    cure: str  # one sentence


# By kind of text that is known to change, as in the label `text` of `seamark_would_save_tokens_total`.
CHANGE_TEXT = {
    "dates": ChangeText(
        "a date", "Move the date behind the rules: to the end of the system prompt, or into a message."
    ),
    "times": ChangeText(
        "a time of day",
        "Move the time behind the rules, into the last user message, or write the date alone.",
    ),
    "uuid": ChangeText("an id", "Leave the id out of the prompt, or move it behind the rules, into a user message."),
    "number": ChangeText("a number", "Move the number behind the rules, into the last user message."),
    "token_counters": ChangeText(
        "a counter of tokens", "Leave the counter out, or append it as a message of its own at the end."
    ),
    "path": ChangeText("a path", "Move the path behind the rules, or use one path for all sessions."),
    "working_directory": ChangeText(
        "the working directory",
        "Move the working directory behind the rules, into the first user message, or run all sessions under one path.",
    ),
    "git_status": ChangeText(
        "a git status",
        "Move the git status behind the rules, into a user message; "
        "in Claude Code set `includeGitInstructions` to false.",
    ),
    "tools_sorted": ChangeText(
        "the order of the tools",
        "List the tools in one order, or switch on the rewrite rule `tools_sorted` (setting rewrite).",
    ),
    "tool_keys_sorted": ChangeText(
        "the order of keys in a tool", "Write the keys of each tool in one order, such as json.dumps(sort_keys=True)."
    ),
    "thinking_history": ChangeText(
        "thinking in the history",
        "Send earlier thinking back as it came, and have the template keep it: "
        '`chat_template_kwargs: {"truncate_history_thinking": false}` for Nemotron-3.',
    ),
    "system_moved": ChangeText(
        "a system message in the history", "Leave system messages where they were sent first, and append new ones."
    ),
    "system_merged": ChangeText(
        "reminders merged into the system prompt",
        "Serve the model with a chat template that takes system messages in the middle: vLLM merges them into the "
        "system prompt for one that does not.",
    ),
}
