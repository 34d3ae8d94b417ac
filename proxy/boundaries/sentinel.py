"""Where the shared part of a chat ends, by sentinel substitution.

Replace a text by a sentinel, render both, compare token ids: the common prefix is what any other text in that place
would share. Comparing with the real prompt keeps this right even if a template lets the content decide how earlier
turns render. Rendering fewer messages instead would not do: many templates render a shorter list differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.chat.chat import last_text_part

# Plain words whose first characters do not agree.
SENTINELS = ("Quartz", "83 jigsaw")

# Texts that could merge with the token before them, if a template leaves nothing in between. The empty text is one of
# them: what follows the text then follows that token.
MERGING = ("", "the tide", "\nQuartz", " Quartz", ")Quartz")


def with_text(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A copy of a `message` that has a text, with that text replaced; its shape, other parts and fields stay."""
    content = message["content"]
    target = last_text_part(content)
    if target is None:
        return {**message, "content": text}
    return {**message, "content": [{**target, "text": text} if part is target else part for part in content]}
