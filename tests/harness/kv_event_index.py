"""What a router knows of one worker's cache that has nothing but its KV events: an index as llm-d's.

It names blocks by their tokens, in blocks of a length of its own, and follows a worker's hashes only to find the parent
of a block and what is removed. It knows no cache groups: what one of them announces, each of them may take back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Key = int  # of a block: its tokens, and all before it


class KvEventIndex:
    """The blocks that a worker is believed to hold. Lengths in tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: set[Key] = set()
        self.surprises: list[str] = []  # events that an index cannot follow
        self._keys: dict[Any, list[Key]] = {}  # by the worker's hash
        self._stored: set[tuple[Any, Any]] = set()  # hashes and the groups that named them

    def apply(self, event: Mapping[str, Any]) -> None:
        """An event as it travels, decoded."""
        kind = event["type"]
        if kind == "BlockStored":
            self._store(event)
        elif kind == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                named = block_hash, event.get("group_idx")
                if named not in self._stored:
                    self.surprises.append("an unknown block is removed")
                self._stored.discard(named)
                self.held.difference_update(self._keys.pop(block_hash, ()))
        elif kind == "AllBlocksCleared":
            if self.held:
                self.surprises.append("blocks were not removed before AllBlocksCleared")
            self.held.clear()
            self._keys.clear()
            self._stored.clear()

    def promised(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Tokens of a prompt that the worker is believed to hold."""
        for number, key in enumerate(self.keys(tokens, salt)):
            if key not in self.held:
                return number * self.size
        return len(tokens) // self.size * self.size

    def keys(self, tokens: Sequence[int], salt: str | None = None) -> Iterator[Key]:
        """Of the whole blocks of a prompt."""
        key = 0
        for start in range(0, len(tokens) - self.size + 1, self.size):
            extra = (salt,) if salt and not start else None
            key = hash((key, tuple(tokens[start : start + self.size]), extra))
            yield key

    def _store(self, event: Mapping[str, Any]) -> None:
        hashes, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
        if not hashes or len(tokens) != len(hashes) * event["block_size"] or event["block_size"] % self.size:
            self.surprises.append("hashes and tokens of an event do not go together")
            return
        if parent is not None and parent not in self._keys:
            self.surprises.append("the parent of a block was never stored")
            return
        key = self._keys[parent][-1] if parent is not None else 0
        extra_keys = event.get("extra_keys") or [None] * len(hashes)
        for number, block_hash in enumerate(hashes):
            self._stored.add((block_hash, event.get("group_idx")))
            self._keys[block_hash] = keys = []
            first = number * event["block_size"]
            for start in range(first, first + event["block_size"], self.size):
                extra = tuple(extra_keys[number]) if extra_keys[number] and start == first else None
                key = hash((key, tuple(tokens[start : start + self.size]), extra))
                keys.append(key)
            self.held.update(keys)
