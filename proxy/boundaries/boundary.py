"""Which boundaries go into the hint: a state costs memory and a piece of a pass, so those that pay most go first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from proxy.boundaries.candidates import Kind, PromptLayout
from proxy.boundaries.token_ids import TokenIds

Result = Literal["memo", "local", "render", "none"]

# How likely a later request starts with exactly this prefix. The next turn of a conversation nearly always comes; a
# client's own mark and a prefix that was already shared are evidence; a branch at the last text is rare.
LIKELY = {"turn": 1.0, "system": 1.0, "learned": 1.0, "explicit": 0.9, "history": 0.5}


# The engine takes no more in one hint.
MAX_POSITIONS = 16


class Boundary(NamedTuple):
    tokens: int  # the prefix is prompt[:tokens]
    kind: Kind
    key: bytes  # names the tokens before the boundary


class Found(NamedTuple):
    """The boundaries of one request's prompt, and what else is known of it."""

    boundaries: tuple[Boundary, ...] = ()  # ascending
    prefixes: tuple[bytes, ...] = ()  # keys of all that is known of this prompt's beginnings, shortest first
    result: Result = "none"
    failure: str | None = None  # why there are no boundaries: a reason of the closed set
    key: bytes = b""  # of the chat before its last text
    layout: PromptLayout | None = None
    tokens: TokenIds | None = None  # the prompt, if it was rendered
    renders: int = 0  # asked for this request
    turn_key: bytes | None = None  # names the tokens up to the end of the last turn

    @property
    def positions(self) -> tuple[int, ...]:
        """Distinct token positions, ascending."""
        return tuple(sorted({boundary.tokens for boundary in self.boundaries}))


def worth_sending(boundaries: Sequence[Boundary], match_unit: int, most: int) -> tuple[int, ...]:
    """Token positions in at most `most` match units, ascending: those that save the most tokens go first."""
    units = {boundary.tokens // match_unit for boundary in boundaries} - {0}
    kept = units if len(units) <= most else _dearest(boundaries, match_unit, most)
    # Two in one unit are one state, which costs nothing more.
    chosen = sorted({boundary.tokens for boundary in boundaries if boundary.tokens // match_unit in kept})
    return tuple(chosen[-MAX_POSITIONS:])


def _dearest(boundaries: Sequence[Boundary], match_unit: int, most: int) -> set[int]:
    """The match units whose states save the most."""
    kept: set[int] = set()

    def gain(boundary: Boundary) -> float:
        """Expected tokens saved beyond what the deepest kept one before it would."""
        own = boundary.tokens // match_unit
        below = max((unit for unit in kept if unit <= own), default=0)
        return (own - below) * LIKELY[boundary.kind]

    while len(kept) < most:
        best = max(boundaries, key=gain, default=None)
        if best is None or gain(best) <= 0:
            break
        kept.add(best.tokens // match_unit)
    return kept
