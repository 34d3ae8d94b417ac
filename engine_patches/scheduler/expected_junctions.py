"""Where prompts that are seen for the first time will be left by later ones: a state there makes the second one hit.

Where two prompts part (a junction: Marconi, arXiv 2411.19379) is known only once the second one is there, so a state
at that place serves the third. But who sends many documents or examples often cuts them to one length, and then they
part at one number of tokens. So the places are counted at which new prompts were left by the first one that shared
them. Such a place gets a state in every new prompt as long as these states would lately have served one in four, and
have saved more than all of them cost. Nothing is kept of what is in the prompts.

States at places chosen otherwise (ends of passes, parts of a prompt) were tried on replayed chats (Mooncake's): with a
worker's room they put out more than they bring, and even with endless room one in hundreds served anybody.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

# Prompts of one group that count, the latest.
WINDOW = 256

# Prompts that have to have been left at a place, or behind it, where a state would have helped the one who left.
ENOUGH = 3

# What states are expected to save has to be so many times their cost: they take room, too. And they have to serve so
# large a share of the prompts that they are written in.
MARGIN, SERVED = 2.0, 0.25

# Whoever leaves a prompt at most this share behind a place leaves it there: documents of one length have not quite the
# same number of tokens.
NEAR = 1 / 16

MOST_EXPECTED = 2  # states of one prompt

# Places that are weighed, those where prompts parted last; and prompts after which they are weighed anew.
MOST_PLACES, RENEWAL = 16, 16

MAX_GROUPS = 64

MAX_PARTED = 16_384  # places, each a hash of 32 bytes: only the first to leave a prompt there counts

MAX_WRITTEN = 16_384  # states, a key of 36 bytes each


class SeenPrompt(NamedTuple):
    """One prompt; tokens. A state in it would be new behind `shared`, up to `length`."""

    shared: int  # with an earlier prompt
    length: int
    resumed: int  # it would have gone on from there without a state at an expected place
    is_first: bool  # it was the first to leave an earlier prompt where it did


class _Group:
    """Prompts that may share their beginnings."""

    def __init__(self) -> None:
        self.prompts: deque[SeenPrompt] = deque(maxlen=WINDOW)
        self.expected: tuple[int, ...] = ()
        self.unweighed = 0  # prompts since `expected` was found


class ExpectedJunctions:
    """Learns where new prompts are going to be left. One per scheduler; lengths in tokens."""

    def __init__(self) -> None:
        self._groups: OrderedDict[bytes, _Group] = OrderedDict()
        self._parted: OrderedDict[bytes, None] = OrderedDict()
        self._written: OrderedDict[bytes, None] = OrderedDict()

    def places(self, group: bytes, shared: int, length: int) -> tuple[int, ...]:
        """Where a state of a prompt pays that is new behind `shared`, ascending."""
        known = self._groups.get(group)
        return tuple(place for place in known.expected if shared < place < length) if known is not None else ()

    def written(self, key: bytes) -> None:
        """A state at an expected place was registered under `key`."""
        _remember(self._written, key, MAX_WRITTEN)

    def is_expected(self, key: bytes) -> bool:
        """Whether the state under `key` was written because its place was expected."""
        return key in self._written

    def add(self, group: bytes, junction: bytes | None, shared: int, length: int, resumed: int, cost: float) -> None:
        """A prompt has begun, and leaves earlier ones at `junction`, the hash of what it shares; None: it shares none.

        It goes on from `resumed`, without what stands at an expected place. A state costs as much as `cost` tokens.
        """
        known = self._groups.setdefault(group, _Group())
        self._groups.move_to_end(group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        is_first = junction is not None and junction not in self._parted
        if junction is not None:
            _remember(self._parted, junction, MAX_PARTED)
        known.prompts.append(SeenPrompt(shared, length, resumed, is_first))
        known.unweighed += 1
        if known.unweighed >= RENEWAL or (is_first and resumed < shared and len(known.expected) < MOST_EXPECTED):
            known.unweighed = 0
            known.expected = best_places(known.prompts, cost * MARGIN)


def best_places(prompts: Iterable[SeenPrompt], cost: float) -> tuple[int, ...]:
    """The places, ascending, at which a state of each of these prompts would have saved most, above its `cost`.

    A state at a place serves the first prompt that leaves another there. Each place is judged by what it adds to those
    found before it.
    """
    prompts = list(prompts)
    left = [prompt for prompt in prompts if prompt.is_first and prompt.resumed < prompt.shared]
    places = list(dict.fromkeys(prompt.shared for prompt in reversed(left)))[:MOST_PLACES]
    resumed = [prompt.resumed for prompt in left]
    found: list[int] = []
    while places and len(found) < MOST_EXPECTED:
        saved, best = max((_saved(place, prompts, left, resumed, cost), place) for place in places)
        if saved <= 0:
            break
        found.append(best)
        places.remove(best)
        resumed = [
            max(before, best) if best <= prompt.shared else before for before, prompt in zip(resumed, left, strict=True)
        ]
    return tuple(sorted(found))


def _saved(place: int, prompts: list[SeenPrompt], left: list[SeenPrompt], resumed: list[int], cost: float) -> float:
    """Tokens that states at `place` would have saved, less their cost; 0 if too few prompts were served."""
    behind = place * (1 + NEAR)
    pairs = zip(resumed, left, strict=True)
    gains = [place - before for before, prompt in pairs if before < place <= prompt.shared < behind]
    written = sum(prompt.shared < place < prompt.length for prompt in prompts)
    if len(gains) < max(ENOUGH, SERVED * written):
        return 0.0
    return sum(gains) - cost * written


def _remember(keys: OrderedDict[bytes, None], key: bytes, most: int) -> None:
    keys[key] = None
    keys.move_to_end(key)
    if len(keys) > most:
        keys.popitem(last=False)
