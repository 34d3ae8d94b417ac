"""Where states can lie in a prompt, and who can resume from them: the rounding rules of an engine, each written once.

Beside a draft head only who shares the `ahead` tokens behind a state, too, finds it: the head reads them. vLLM 0.32
sees to that by matching `drop` tokens past the state and cutting them off again (both are one unit); from 0.33 on a
unit's hash covers the next token itself (`ahead` is 1, `drop` 0). Without such a head both are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Grid:
    """All lengths and positions in tokens from a prompt's start."""

    unit: int  # a prefix is found on multiples of it: vLLM's match unit
    alignment: int  # states lie on multiples of it, itself a multiple of the unit
    drop: int = 0  # past a state, up to which attention keys have to reach
    ahead: int = 0  # past a state, up to which a prefix has to be shared

    def floor(self, tokens: int) -> int:
        """The last position up to `tokens` at which a state can lie; 0 if there is none."""
        return max(tokens, 0) // self.alignment * self.alignment

    def usable(self, boundary: int) -> int:
        """Where a state lies that all can resume from who share exactly `boundary` tokens; 0 if nowhere."""
        return self.floor(boundary - self.ahead)

    def resumable(self, tokens: int) -> int:
        """How far a prompt of so many tokens can be resumed, wherever states lie: its last token is always computed."""
        return max(tokens - max(self.ahead, 1), 0)

    def deliverable(self, matched: int, tokens: int) -> int:
        """The deepest state that a prompt of so many tokens can resume from, of one whose hashes match up to `matched`.

        `matched` are whole units; 0 if there is no such state.
        """
        return self.floor(min(matched - self.drop, self.resumable(tokens)))

    def shared(self, matched: int) -> int:
        """Tokens that two prompts share whose hashes match up to `matched`, whole units: a hash may cover more."""
        return matched + self.ahead - self.drop if matched else 0

    def drop_in(self, manager: Any) -> int:
        """`drop` in the cache group of a vLLM attention manager: only where a draft head has its rows."""
        return self.drop if getattr(manager, "use_eagle", True) else 0

    def hash_of(self, request: Any, tokens: int) -> bytes:
        """vLLM's hash of a request's first `tokens` tokens, at least one unit; a part of a unit does not count."""
        found: bytes = request.block_hashes[tokens // self.unit - 1]
        return found
