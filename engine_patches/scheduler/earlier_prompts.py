"""What an engine learns of its prompts by itself, in any API and template, to know what to keep of the next ones.

vLLM names each whole prefix by a hash, unit by unit, and the hash covers all that makes two prefixes differ: tokens,
cache salt, LoRA, images, embeddings. So no text is kept, and prompts of another salt never match. All of it lives on
the scheduler's one thread; lengths in tokens.
"""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from engine_patches.scheduler.planner import CLOSEST, RUNGS, Grid, TurnEnd, Wish
from engine_patches.scheduler.step_time import StepTime

# Why a request did or did not resume from a state, out of the closed set that the whole product uses.
HIT, COLD, BELOW_UNIT, NOT_WORTH_IT = "hit", "cold", "below_unit", "not_worth_it"
EVICTED, NO_BOUNDARY, HINT_IGNORED = "evicted", "no_boundary", "hint_ignored"
BETWEEN_STATES, NOT_KEPT = "between_states", "not_kept"

MAX_COMPUTED = 65_536  # prefixes, a hash of 32 bytes each
MAX_HASHES = 1 << 18  # 4 million tokens at a unit of 16; some 190 bytes each

# Ends of turns in a row that nobody came back to, after which a head's conversations are taken not to go on. Of the
# ends that are then not worth a state, one in so many is written all the same.
ENDS_TO_JUDGE, PROBE = 8, 8
JUDGED_AFTER_SECONDS = 60.0  # a client that has not come back is taken not to
MAX_HEADS, MAX_ENDS = 4096, 16_384  # of an end: two hashes of 32 bytes, and where they lie

# Prompts in a row of whose ladders nobody took a rung, after which one in `PROBE` leaves one; and the share of the time
# that a prompt takes which its rungs may cost.
PROMPTS_TO_JUDGE, LADDER_SHARE = 128, 0.01

WINDOW = 256  # prompts of one group that count, the latest
ENOUGH = 3  # prompts left at a place, or behind it, where a state would have helped the one who left
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

V = TypeVar("V")


class Latest(OrderedDict[Any, V]):
    """The entries that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


class Outcomes:
    """Why a request hit or missed, by what became of prefixes that were to have a state: the deepest known cause."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._misses: Latest[str] = Latest(MAX_COMPUTED)  # by a prefix's hash: what a miss of it means

    def computed(self, request: Any, position: int, miss: str) -> None:
        """A prefix that is to have a state was computed; a later miss of it means `miss`."""
        self._misses[self._grid.hash_of(request, position + self._grid.drop)] = miss

    def reason_for(self, request: Any, wish: Wish, hit_tokens: int) -> str:
        """Why a request starts with `hit_tokens` from the cache: all that it shares with an earlier prompt is a hit; if
        it got less, the deepest cause above the hit counts; if none is known, nobody had kept a state there."""
        hinted = wish.hinted_positions
        if not wish.is_kept:
            return HIT if hit_tokens else NOT_KEPT
        if getattr(request, "skip_reading_prefix_cache", False):  # prompt logprobs need every token computed
            return HINT_IGNORED
        last = self._grid.resumable(request.num_tokens)
        reachable = self._grid.deliverable(wish.shared, request.num_tokens)
        deepest = max((position for position in hinted if position <= last), default=0)
        for position in range(max(deepest, reachable), hit_tokens, -self._grid.unit):
            miss = self._misses.get(self._grid.hash_of(request, position + self._grid.drop))
            if miss is not None:
                return miss
        if hit_tokens:
            return HIT if hit_tokens >= reachable else BETWEEN_STATES
        if hinted:
            return COLD
        if not wish.hinted:
            return NO_BOUNDARY
        return BELOW_UNIT if request.num_prompt_tokens <= self._grid.unit else HINT_IGNORED


class SeenPrefixes:
    """Hashes of the whole prefixes of earlier prompts, least recently seen first: they show where a prompt leaves them.

    With each prompt its hashes become recent from the deepest to the shallowest. So of two hashes of one prompt the
    deeper one is always forgotten first, and what is known of a prompt is a beginning of it: a binary search finds it.
    """

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def deepest(self, hashes: Sequence[bytes]) -> int:
        """Units of the longest beginning that an earlier prompt had; `hashes` of its prefixes, by units, are kept."""
        seen = self._hashes
        low = bisect.bisect_left(hashes, True, key=lambda prefix: prefix not in seen)
        for prefix in reversed(hashes[low:]):
            seen[prefix] = None
        for prefix in reversed(hashes[:low]):
            seen.move_to_end(prefix)
        for _ in range(len(seen) - self._max_hashes):
            seen.popitem(last=False)
        return low


@dataclass
class TurnHead:
    unresumed: int = 0  # ends in a row that nobody came back to
    passed: int = 0  # ends since then


class End(NamedTuple):
    """The end of a turn: when (seconds, by the clock), of which head, and where in its prompt."""

    at: float
    head: bytes
    turn: TurnEnd


class TurnValue:
    """Which heads' conversations go on: the end of a turn that nobody comes back to is not worth a state.

    A head is the first position that a prompt shares with others, such as the end of its system prompt; chats without
    one have one head in common. The end of a turn is remembered whether or not its state was written, so a later prompt
    that contains it shows that conversations of this head go on. What is not known to be worthless is written.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heads: Latest[TurnHead] = Latest(MAX_HEADS)
        self._ends: OrderedDict[bytes, End] = OrderedDict()  # oldest first; not judged yet
        self._judged: Latest[End] = Latest(MAX_ENDS)  # nobody has come back so far

    def came_back(self, prefixes: Iterable[bytes]) -> TurnEnd | None:
        """The last turn that a prompt with these prefixes goes on from; heads of all that it contains go on."""
        turn = None
        for prefix in prefixes:
            if (end := self._ends.pop(prefix, None) or self._judged.pop(prefix, None)) is not None:
                turn = end.turn
                if (known := self._heads.get(end.head)) is not None:
                    known.unresumed = known.passed = 0
        return turn

    def worth_a_state(self, head: bytes, end: bytes, turn: TurnEnd, cost: float = 0.0) -> bool:
        """Whether the state at the `end` of a turn is worth writing, which costs as much as so many tokens.

        It saves the turn's tokens to a client who comes back: after n in a row who did not, about one in n.
        """
        now = self._clock()
        self._judge(now)
        known = self._heads[head] = self._heads.get(head) or TurnHead()
        self._ends[end] = End(now, head, turn)
        self._ends.move_to_end(end)
        tokens = turn.end - turn.start
        if known.unresumed < ENDS_TO_JUDGE or known.unresumed * cost < tokens:
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


class LadderUse:
    """How many rungs a prompt leaves: as many as cost little of its time, as long as some prompts are found by one."""

    def __init__(self) -> None:
        self._unused = 0  # prompts in a row since the last that used a rung, or lacked one

    def rungs(self, tokens: int, step_time: StepTime) -> int:
        """How many of a prompt's rungs pay, of which so many tokens are computed."""
        if self._unused >= PROMPTS_TO_JUDGE and self._unused % PROBE:
            return 0
        cost = step_time.tokens_worth(states=1) if step_time.known else 0.0
        affordable = LADDER_SHARE * (tokens + step_time.tokens_worth(passes=1))
        return len(RUNGS) if not cost else int(min(affordable / cost, len(RUNGS)))

    def admitted(self, tokens: int, lacking: int, *, is_used: bool) -> None:
        """A prompt computes so many tokens, `lacking` of which earlier ones have; `is_used`: it goes on from a rung."""
        if is_used or lacking >= CLOSEST:
            self._unused = 0
        elif tokens >= CLOSEST:
            self._unused += 1


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
    """Where prompts that are seen for the first time will be left by later ones: a state there has the second one hit.

    Where two prompts part (a junction: Marconi, arXiv 2411.19379) is known only once the second one is there, so a
    state at that place serves the third. But who sends many documents or examples often cuts them to one length, and
    then they part at one number of tokens. Such a place gets a state in every new prompt as long as these states would
    lately have served one in four, and have saved more than all of them cost. States at places chosen otherwise were
    tried on replayed chats (Mooncake's): they put out more than they bring.
    """

    def __init__(self) -> None:
        self._groups: Latest[_Group] = Latest(MAX_GROUPS)
        self._parted: Latest[None] = Latest(MAX_PARTED)
        self.written: Latest[None] = Latest(MAX_WRITTEN)  # keys of states at expected places

    def places(self, group: bytes, shared: int, length: int) -> tuple[int, ...]:
        """Where a state of a prompt pays that is new behind `shared`, ascending."""
        known = self._groups.get(group)
        return tuple(place for place in known.expected if shared < place < length) if known is not None else ()

    def add(self, group: bytes, junction: bytes | None, shared: int, length: int, resumed: int, cost: float) -> None:
        """A prompt has begun, and leaves earlier ones at `junction`, the hash of what it shares; None: it shares none.

        It goes on from `resumed`, without what stands at an expected place. A state costs as much as `cost` tokens.
        """
        known = self._groups[group] = self._groups.get(group) or _Group()
        is_first = junction is not None and junction not in self._parted
        if junction is not None:
            self._parted[junction] = None
        known.prompts.append(SeenPrompt(shared, length, resumed, is_first))
        known.unweighed += 1
        if known.unweighed >= RENEWAL or (is_first and resumed < shared and len(known.expected) < MOST_EXPECTED):
            known.unweighed = 0
            known.expected = best_places(known.prompts, cost * MARGIN)


def best_places(prompts: Iterable[SeenPrompt], cost: float) -> tuple[int, ...]:
    """The places, ascending, at which a state of each of these prompts would have saved most, above its `cost`."""
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
        pairs = zip(resumed, left, strict=True)
        resumed = [max(before, best) if best <= prompt.shared else before for before, prompt in pairs]
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
