"""Token ids as the worker spells them, `1,22,333`: compared, counted and hashed as bytes.

Reading the ids of a prompt of 100,000 tokens as Python integers would hold up the event loop for many milliseconds;
comparing two such texts takes microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class TokenIds:
    """The ids of one prompt; immutable."""

    __slots__ = ("_count", "raw")

    def __init__(self, raw: bytes) -> None:
        """`raw` holds decimal ids with a comma between them and nothing else."""
        self.raw = raw
        self._count: int | None = None

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """The tokens with these ids."""
        return cls(",".join(map(str, ids)).encode())

    @classmethod
    def in_answer(cls, answer: bytes, field: str) -> TokenIds | None:
        """The one list of ids named `field` in a JSON answer; None if there is none, or more than one."""
        _, found, rest = answer.partition(b'"%b":' % field.encode())
        ids, closed, rest = rest.partition(b"]")
        ids = ids.lstrip()
        if not found or not closed or not ids.startswith(b"[") or b'"%b":[' % field.encode() in rest:
            return None
        raw = ids[1:].translate(None, b" \r\n\t")
        return cls(raw) if raw and not raw.strip(b"0123456789,") else None

    def __len__(self) -> int:
        if self._count is None:
            self._count = self.raw.count(b",") + 1 if self.raw else 0
        return self._count

    def ids(self) -> list[int]:
        """The ids as integers."""
        return [int(part) for part in self.raw.split(b",")] if self.raw else []

    def common_prefix(self, other: TokenIds) -> int:
        """Length (tokens) of the longest common prefix."""
        left, right = self.raw, other.raw
        end = common_prefix(left, right)
        if not end:
            return 0
        whole = (end == len(left) or left[end] == COMMA) and (end == len(right) or right[end] == COMMA)
        if not whole:  # the last id compared goes on in one of them
            end = left.rfind(b",", 0, end)
            if end < 0:
                return 0
        # The shorter side is counted: what follows is mostly the last text.
        return len(self) - left.count(b",", end) if 2 * end > len(left) else left.count(b",", 0, end) + 1


COMMA = ord(",")


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
