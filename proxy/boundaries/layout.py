"""A chat with the keys of its beginnings, and the places in it where a shared beginning may end."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from xxhash import xxh3_128_digest

from proxy.chat.canonical import NO_KEYS, Keys, canonical, chat_keys, digest, other_fields, without_marks
from proxy.chat.chat import Chat, Mark

# Roles of what tools answered, and all whose text a client writes for each request.
RESULT_ROLES = ("tool", "function")

OPEN_ROLES = ("user", *RESULT_ROLES)
REMINDER_ROLES = ("system", "developer")


class PromptLayout(msgspec.Struct, frozen=True):
    """A chat with its keys, and with its first and last message that others may differ in."""

    chat: Chat
    keys: Keys
    openers: Mapping[int, bytes]  # of user and tool messages, by index: keys up to where their content begins
    first: int  # index of the first user or tool message
    last: int  # index of the last one
    alone: bool  # nothing was said before the last text
    system_key: bytes  # up to the first user text: tools and system prompt
    key: bytes  # up to the last user or tool text
    turn_key: bytes | None  # of the whole chat; None if no turn ends with it

    @property
    def end_before_loop(self) -> int | None:
        """Index of the last message before the tool loop that the chat ends in; None if it ends in none.

        That is the last user message, with the reminders that agents put behind it as system messages. A template may
        drop the loop's thinking in the next turn: then the end of that message is what stays.
        """
        roles = self.chat.roles
        if roles[self.last] == "user":
            return None
        user = next((i for i in range(self.last - 1, -1, -1) if roles[i] == "user"), self.last)
        return next((i for i in range(user, self.last) if roles[i + 1] not in REMINDER_ROLES), None)

    def cut_key(self, index: int, head: bytes) -> bytes:
        """Key of a beginning of the text of message `index`; `head` is the hash of that beginning."""
        return digest("cut", self.keys.before[index], head)

    def part_key(self, mark: Mark) -> bytes:
        """Key up to the end of a content part that a client marked."""
        message = self.chat.messages[mark.message]
        parts = message["content"][: (mark.part or 0) + 1]
        before = self.keys.after[mark.message - 1] if mark.message else self.keys.head
        return digest("part", before, canonical([other_fields(message), [without_marks(part) for part in parts]]))


def layout_of(chat: Chat, renderer_id: bytes) -> PromptLayout | None:
    """The layout of a chat; None if it has no message that others may differ in."""
    roles = chat.roles
    opened = [index for index, role in enumerate(roles) if role in OPEN_ROLES]
    if not opened:
        return None
    # No template writes an opener before a prompt without messages: it shares nothing with a chat.
    renderer = b"bare" + renderer_id if chat.is_bare else renderer_id
    keys = chat_keys(chat.head, chat.messages, renderer, chat.continues)
    chat.continues = NO_KEYS  # else it would keep all before it
    openers = {}
    for index in opened:
        before = keys.after[index - 1] if index else keys.head
        openers[index] = xxh3_128_digest(b"opener\0%b\0%b" % (before, roles[index].encode()))
    first, last, body = opened[0], opened[-1], chat.body
    asks = body.get("add_generation_prompt", True) and not body.get("continue_final_message")
    turn_key = keys.after[-1] if asks and roles[-1] != "assistant" else None
    return PromptLayout(chat, keys, openers, first, last, first == last, openers[first], openers[last], turn_key)
