"""Which heads' conversations go on: the end of a turn that nobody comes back to is not worth a state.

A head is the first position that a prompt shares with others, such as the end of its system prompt. The end of a turn
is remembered whether or not its state was written, so a later prompt that contains it shows that conversations of this
head go on, whatever was decided before. What is not known to be worthless is written, and what is long enough that one
client in very many makes up for the rest. Chats without a system prompt have one head in common.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_patches.scheduler.request_state import TurnEnd

# Ends of turns in a row that nobody came back to, after which a head's conversations are taken not to go on.
ENOUGH = 8

# Of the ends that are then not worth a state, one in so many is written all the same.
PROBE = 8

# A client that has not come back after so long is taken not to.
JUDGED_AFTER_SECONDS = 60.0

MAX_HEADS = 4096

MAX_ENDS = 16_384  # remembered; two hashes of 32 bytes each, and where they lie


@dataclass
class TurnHead:
    """What is known of one head's conversations."""

    unresumed: int = 0  # ends in a row that nobody came back to
    passed: int = 0  # ends since then


@dataclass(frozen=True)
class End:
    """The end of a turn: when (seconds, by the clock), of which head, and where in its prompt."""

    at: float
    head: bytes
    turn: TurnEnd


class TurnValue:
    """Learns from the ends of turns, each named by the hash of the whole prefix. One per scheduler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heads: OrderedDict[bytes, TurnHead] = OrderedDict()  # least recently seen first
        self._ends: OrderedDict[bytes, End] = OrderedDict()  # oldest first; not judged yet
        self._judged: OrderedDict[bytes, End] = OrderedDict()  # nobody has come back so far

    def came_back(self, prefixes: Iterable[bytes]) -> TurnEnd | None:
        """A prompt has these prefixes, and an earlier prompt had them: where it contains an end, its head goes on.

        The last turn that it contains, shorter prefixes first; None if it goes on from none.
        """
        turn = None
        for prefix in prefixes:
            end = self._ends.pop(prefix, None) or self._judged.pop(prefix, None)
            if end is None:
                continue
            turn = end.turn
            if end.head in self._heads:
                self._heads[end.head] = TurnHead()
        return turn

    def worth_a_state(self, head: bytes, end: bytes, turn: TurnEnd, cost: float = 0.0) -> bool:
        """Whether the state at the `end` of a turn is worth writing, which costs as much as so many tokens.

        The end is remembered. It saves the turn's tokens to a client who comes back. After as many in a row who did
        not, the next one does with a probability of about one in as many.
        """
        now = self._clock()
        self._judge(now)
        known = self._heads.setdefault(head, TurnHead())
        self._heads.move_to_end(head)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)
        self._ends[end] = End(now, head, turn)
        self._ends.move_to_end(end)
        tokens = turn.end - turn.start
        if known.unresumed < ENOUGH or known.unresumed * cost < tokens:
            return True
        known.passed += 1
        return known.passed % PROBE == 0

    def _judge(self, now: float) -> None:
        while self._ends:
            end, oldest = next(iter(self._ends.items()))
            old = now - oldest.at >= JUDGED_AFTER_SECONDS
            if not old and len(self._ends) < MAX_ENDS:
                break
            del self._ends[end]
            if old and oldest.head in self._heads:
                self._heads[oldest.head].unresumed += 1
                self._judged[end] = oldest
        while len(self._judged) > MAX_ENDS:
            self._judged.popitem(last=False)
