"""A request's plan: where states can lie in its prompt, what it wishes to have kept, and which states that comes to.

Pure functions of the grid, the request's hint, and what was seen of earlier prompts. States of a hint are wanted for
whoever shares them, a learned one since the prompt leaves an earlier one there. Others serve the same prompt again, its
next turn, or who shares what nobody has named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine_patches.scheduler.hints import turn_end

# A hit below this share of a pass is not felt, and its state takes as much room as any other. Nor is it felt if a state
# costs no more.
WORTH_OF_A_PASS = 0.05

MIN_SHARED = 128  # tokens of two prompts before the engine by itself keeps a state where they part

# A hinted position at most this many tokens before the prompt's tail also serves the next turn: it is the end of the
# turn, before the words that ask for an answer.
TURN_REACH = 64

# So many steps of the alignment apart, two states are too near each other. So many match units behind a turn's state
# are the template's words.
NEAR = 2

# Kinds of targets. A learned one is where the prompt leaves an earlier prompt of this engine, an expected one where a
# later prompt is likely to leave this one. A spare one is where vLLM alone would have left a state of a chunk. A rung
# is one of a ladder: whoever shares all but the last q tokens of a prompt finds all but the last 2 q, and some.
HINTED, LEARNED, EXPECTED, TAIL = "hinted", "learned", "expected", "tail"
EDGE, JUNCTION, SPARE, RUNG = "edge", "junction", "spare", "rung"

# How far (tokens) a ladder's rungs lie before the last place at which a prompt can be resumed. If not all of them pay,
# or find room, these come first. No two states of a ladder are nearer to each other than `CLOSEST`.
RUNGS, CLOSEST = (128, 512, 2048, 64, 256, 1024, 0), 64

FEW_RUNGS = 3  # of one prompt, if they have to put something out


@dataclass(frozen=True)
class Grid:
    """The rounding rules of an engine, each written once. Lengths and positions in tokens from a prompt's start."""

    unit: int  # a prefix is found on multiples of it: vLLM's match unit
    alignment: int  # states lie on multiples of it, itself a multiple of the unit
    # Both are 0 without a draft head; `engine_patches.speculation` says what they are beside one.
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
        """The deepest state at which a prompt of so many tokens resumes whose hashes match up to `matched`; or 0."""
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


class TurnEnd(NamedTuple):
    """The last turn of a prompt, in tokens."""

    start: int  # where what its conversation shares with others ends; 0: it shares nothing
    end: int


@dataclass(frozen=True)
class Wish:
    """What a request's hint, and prompts before it, say of it at first sight. Positions and lengths in tokens."""

    hinted_positions: tuple[int, ...] = ()  # usable positions of its hint, ascending
    hinted: bool = False  # it came with a hint, usable or not
    resolved: tuple[int, ...] = ()  # what each entry of its hint names, in the hint's order, exact; 0: not there
    turn_end: int = 0  # usable position that its hint counts from the prompt's end; 0: none
    shared: int = 0  # its hashes match those of a prompt seen before up to here, whole match units
    learned: int = 0  # the position that follows from `shared`; 0: none, or a hinted one serves
    expected: tuple[int, ...] = ()  # where later prompts are likely to leave it, ascending
    goes_on_from: TurnEnd | None = None  # the last turn of an earlier prompt that it contains
    worthless_turn: int = 0  # the end of its turn, if nobody is going to come back to it
    left_to_vllm: bool = False  # no state of it is kept, and vLLM caches it as it does alone
    trial: bool = False  # hints beside drafts are tried by it: its states are kept, whatever a hit would be worth
    pin: bool | None = None  # its prompt is to be pinned, or released; None: neither
    is_kept: bool = True  # if not, nothing of it may be found, or learnt: see `not_kept`
    is_low: bool = False  # what it leaves goes before all else

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of which a state is wanted because others share them, ascending."""
        hinted = self.hinted_positions
        return tuple(sorted((*hinted, self.learned))) if self.learned else hinted


@dataclass(slots=True)
class RequestState:
    """How far a request has come, on vLLM's `Request` as `request.seamark`. Positions and lengths in tokens."""

    wish: Wish = Wish()
    begun: bool = False  # it was admitted before
    prompt_tokens: int = 0  # of its prompt as it came, if only its beginning is computed here; 0: all of it is
    loaded: int = 0  # tokens that another worker has computed, and that are loaded
    resumed_at: int = 0  # its state was found there when it was admitted
    on_rung: bool = False  # of a ladder, which does not last
    chunk_start: int = 0  # where its running chunk begins
    last_edge: int = 0  # the last block's edge before which a draft head's rows were kept
    drafts_from: int = 0  # the token from which a draft head's rows in its window are no zeros
    window: str = ""  # what its hit found of a draft head's window; "": there is none, or no hit
    heals: int = 0  # the hit that it was given up for that window; 0: none
    draft_steps: int = 0  # in which its drafts were verified
    accepted: int = 0  # drafts that were right
    states: set[int] = field(default_factory=set)  # positions of its states, to which keys of its rows have to lead
    reported_to: int = 0  # its states up to here are in the events
    not_held: bool = False  # counted as a follower for which waiting did not pay
    gave_up_on: str | None = None  # id of the leader it has waited for long enough
    upstream_junction: int = 0  # the shared prefix that vLLM itself found
    own_junction: int = -1  # what `end_chunk` last wrote over it


class CheckpointTarget(NamedTuple):
    """A position (tokens from the start of the prompt, where the grid allows a state) whose state is to be kept."""

    position: int
    kind: str


@dataclass(frozen=True)
class Planner:
    """What one engine keeps of which prompt. Positions and lengths in tokens."""

    grid: Grid
    block_size: int  # of a cache block

    def wish(
        self,
        hint: Any,
        resolved: tuple[int, ...],
        prompt_tokens: int,
        shared: int,
        places: Iterable[int],
        ignore: Callable[[str], None],
        **known: Any,
    ) -> Wish:
        """What a request wishes whose hint was `resolved`; `places`: where later prompts are likely to leave it."""
        positions = [self.grid.usable(position) for position in resolved if position]
        for _ in range(positions.count(0)):
            ignore("below_unit")
        hinted = tuple(sorted({*positions} - {0}))  # of several entries of one position none counts as dropped
        end = turn_end(hint, resolved)  # of its own turn, which says nothing of what others share
        return Wish(
            hinted_positions=hinted,
            resolved=resolved,
            turn_end=self.grid.usable(end),
            shared=shared,
            learned=self._learned_position({*resolved} - {end}, hinted, shared, prompt_tokens),
            expected=tuple(self.grid.deliverable(place, prompt_tokens) for place in places),
            **known,
        )

    def is_worth_learning(self, shared: int) -> bool:
        """Whether a state is kept where a prompt leaves an earlier one, of which it shares so much."""
        return shared >= max(MIN_SHARED, self.grid.alignment)

    def _learned_position(self, resolved: Iterable[int], hinted: Sequence[int], shared: int, prompt_tokens: int) -> int:
        """Where a prompt leaves those before it, if that is worth a state and none of its hint serves."""
        unit = self.grid.unit
        position = self.grid.deliverable(shared, prompt_tokens)
        shared = min(shared, (prompt_tokens - 1) // unit * unit)  # the same prompt again can use no more
        hinted_there = any(shared <= entry and self.grid.usable(entry) <= position for entry in resolved)
        return 0 if hinted_there or position in hinted or not self.is_worth_learning(shared) else position

    def targets(self, wish: Wish, request: Any, prompt_tokens: int = 0) -> list[CheckpointTarget]:
        """Where the states of a vLLM `Request` are kept, ascending. `prompt_tokens`: of its prompt before a cut.

        Beside what it wishes, the prompt's tail, if no such position is near it. The end of a turn says nothing of what
        others share: if no position lies clearly before the tail, the last whole block before them all is kept too,
        where vLLM itself stops. Without a position of either kind the tail is kept only in prompts longer than a block;
        then, too, the junction, the end of a prefix that vLLM has seen shared (Marconi, arXiv 2411.19379).
        """
        floor, size, near = self.grid.floor, self.block_size, NEAR * self.grid.alignment
        last = self.grid.resumable(prompt_tokens or request.num_prompt_tokens)
        kinds: dict[int, str] = {}
        tail, edge, known = floor(last), floor(last // size * size), wish.positions
        if edge < min(known, default=last + 1) and not any(position < tail - TURN_REACH for position in known):
            kinds[edge] = EDGE
        near_tail = any(tail - TURN_REACH <= position <= tail for position in known)
        if not near_tail and (wish.hinted_positions or last >= size):
            kinds[tail] = TAIL
        if not known:  # the sender of a hint, and the longest shared beginning, say more than what vLLM infers
            junction = floor(request.shared_prefix_boundary)
            if junction <= last:
                kinds[junction] = JUNCTION
        if wish.learned:
            # The next prompt may leave a little earlier. vLLM alone keeps the whole block before such a place.
            before = floor(wish.learned // size * size)
            if wish.learned - before >= near:
                kinds.setdefault(before, EDGE)
            kinds[wish.learned] = LEARNED
        kinds.update(dict.fromkeys(wish.hinted_positions, HINTED))
        for position in wish.expected:
            if position <= last and not any(position - near < other <= position for other in kinds):
                kinds[position] = EXPECTED
        wanted = sorted(kinds.keys() - {0, wish.worthless_turn})
        return [CheckpointTarget(position, kinds[position]) for position in wanted]

    def spare(self, start: int, end: int, resumable: int, positions: Iterable[int], felt: float) -> int:
        """The last block's edge in a chunk from `start` to `end`, 0 if a state there is of no use.

        `positions`: of the states that are kept; `felt`: tokens that a hit has to spare. vLLM alone ends its chunks at
        such edges, and finds states there: whoever is the first to leave the prompt behind one shall find no less.
        """
        edge = self.grid.floor(min(end, resumable) // self.block_size * self.block_size)
        saved = edge - max((position for position in positions if position <= edge), default=0)
        return edge if edge > start and saved > 0 and saved >= felt else 0

    def ladder(self, tail: int, positions: Iterable[int], felt: float, most: int) -> list[int]:
        """The places of at most so many rungs, the most useful first.

        `tail`: the last place at which the prompt can be resumed; `positions`, `felt`: as of `spare`.
        """
        kept, found, gap = [0, *positions], list[int](), max(felt, CLOSEST)
        for place in (self.grid.floor(tail - distance) for distance in RUNGS):
            if len(found) < most and place - max(at for at in kept if at <= place) >= gap:
                kept.append(place)
                found.append(place)
        return found

    def last_turn(self, wish: Wish, request: Any) -> TurnEnd | None:
        """The turn that a request ends with, if it has a state at its end."""
        targets = [target for target in self.targets(wish, request) if target.kind != EXPECTED]
        end = targets[-1].position if targets else 0
        heads = [position for position in wish.positions if position < end - TURN_REACH]
        if heads and self.ends_a_turn(wish, targets[-1]):
            return TurnEnd(heads[0], end)
        return TurnEnd(0, end) if wish.positions == (end,) == (wish.turn_end,) else None

    def ends_a_turn(self, wish: Wish, target: CheckpointTarget, resumed_at: int = 0) -> bool:
        """Whether a state serves one conversation, rather than whoever shares its prefix, as far as is known."""
        hinted = wish.hinted_positions
        if target.kind == LEARNED:
            # Just behind a state: rather the template's words after a turn than what is shared. Just before the turn's
            # end: an edit as well as a question on a document.
            near = NEAR * self.grid.unit
            return 0 < resumed_at >= target.position - near or 0 < wish.turn_end - target.position <= near
        return target.kind in (TAIL, EDGE, EXPECTED, SPARE, RUNG) or (len(hinted) > 1 and target.position == hinted[-1])

    def is_spare(self, wish: Wish, target: CheckpointTarget) -> bool:
        """Whether the state at a target is written only where it puts out nothing, and is given up at once.

        Once a prompt has gone on from an earlier turn, the one at its own end serves its client better.
        """
        before = None if wish.pin or wish.trial else wish.goes_on_from
        nobody_asked = wish.is_low or target.kind in (SPARE, RUNG)
        return nobody_asked or (before is not None and before.start < target.position < wish.turn_end)

    def saved(self, target: CheckpointTarget, resumed_at: int) -> int:
        """Tokens that a hit at a target spares; of a learned one, what it adds to where the request itself resumed: a
        next turn also repeats the first words of the template's answer, a few tokens behind the last turn's state."""
        return target.position - (resumed_at if target.kind == LEARNED else 0)
