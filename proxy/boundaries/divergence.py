"""Learned boundaries: long text shared *inside* messages, found where recent requests actually diverged.

Documents, few-shot blocks, a system prompt whose last line changes: the first request of a kind is remembered, the
second diverges from it and so shows where the shared text ends, the third finds a checkpoint there.

Texts are kept in memory for this, bounded in bytes, and nowhere else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

from proxy.boundaries.layout import PromptLayout

# Shorter shared beginnings are not worth a state of their own: some hundred tokens.
MIN_CHARACTERS = 512
MAX_TEXTS = 8  # recent texts in one place
MAX_CUTS = 4  # places inside them
PLACE_BYTES = 600  # of an entry beside its texts

# How far back the last line break is looked for: a line that changed once will change again, perhaps earlier in it.
LINE_CHARACTERS = 240


class SharedText(NamedTuple):
    """A beginning of a text that several requests share."""

    text: str
    key: bytes


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    texts: OrderedDict[bytes, str] = field(default_factory=OrderedDict)  # by the key after them
    cuts: list[SharedText] = field(default_factory=list)  # that several of them share, most recently used last
    size: int = PLACE_BYTES


@dataclass(eq=False, repr=False)
class DivergenceLearner:
    """Recent texts by what stands before them; the least recently used place is forgotten first."""

    _size: int  # bytes; 0 keeps nothing and learns nothing
    held: int = 0
    _nodes: OrderedDict[bytes, _Node] = field(default_factory=OrderedDict)

    def shared_texts(self, layout: PromptLayout) -> list[tuple[int, SharedText]]:
        """Beginnings shared before, each with its message's index; learns from where this chat diverges."""
        if not self._size:
            return []
        found: list[tuple[int, SharedText]] = []
        keys = layout.keys
        for index in range(layout.last + 1):
            text = layout.chat.texts[index]
            if text is None or len(text) < MIN_CHARACTERS:
                continue
            before, after = keys.before[index], keys.after[index]
            if (node := self._nodes.get(before)) is None:
                node = self._nodes[before] = _Node()
                self.held += node.size
            else:
                self._nodes.move_to_end(before)
                if after not in node.texts:
                    self._diverged(node, text)
            self._keep(node, after, text)
            found += [(index, cut) for cut in node.cuts if len(cut.text) < len(text) and text.startswith(cut.text)]
        while self.held > self._size and self._nodes:
            _, oldest = self._nodes.popitem(last=False)
            self.held -= oldest.size
        return found

    def _diverged(self, node: _Node, text: str) -> None:
        """A new text: where it leaves the recent one it is most alike is a place worth remembering."""
        shared = max((common_prefix(text, other) for other in node.texts.values()), default=0)
        line = text.rfind("\n", max(0, shared - LINE_CHARACTERS), shared) + 1
        for length in (line, shared):
            if length < MIN_CHARACTERS or length >= len(text):
                continue
            head = text[:length]
            cut = SharedText(head, xxh3_128_digest(head.encode(errors="surrogatepass")))
            if cut in node.cuts:
                node.cuts.remove(cut)
            else:
                self._grow(node, getsizeof(head))
            node.cuts.append(cut)
            if len(node.cuts) > MAX_CUTS:
                self._grow(node, -getsizeof(node.cuts.pop(0).text))

    def _keep(self, node: _Node, key: bytes, text: str) -> None:
        if key in node.texts:
            node.texts.move_to_end(key)
            return
        node.texts[key] = text
        self._grow(node, getsizeof(text))
        if len(node.texts) > MAX_TEXTS:
            _, oldest = node.texts.popitem(last=False)
            self._grow(node, -getsizeof(oldest))

    def _grow(self, node: _Node, size: int) -> None:
        node.size += size
        self.held += size


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the longest common prefix of two lists or texts, by halving."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit  # left[:low] agrees, left[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
