"""Which states of a request are wanted, from the grid, its hint, and what was seen of earlier prompts: pure functions.

Those of a hint are wanted for whoever shares them, a learned one since the prompt leaves an earlier one there. Others
serve the same prompt again, its next turn, or who shares what nobody has named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.hints import turn_end
from engine_patches.scheduler.request_state import TurnEnd, Wish

# A hit below this share of a pass is not felt, and its state takes as much room as any other. Nor is it felt if a state
# costs no more.
WORTH_OF_A_PASS = 0.05

# Tokens that two prompts have to share before the engine by itself keeps a state where they part.
MIN_SHARED = 128

# A hinted position at most this many tokens before the prompt's tail also serves the next turn: it is the end of the
# turn, before the words that ask for an answer.
TURN_REACH = 64

# So many steps of the alignment apart, two states are too near each other. So many match units behind a turn's state
# are the template's words, and a hint so few behind a shared prefix means its end.
NEAR = 2

# Kinds of targets. A learned one is where the prompt leaves an earlier prompt of this engine, an expected one where a
# later prompt is likely to leave this one. A spare one is where vLLM alone would have left a state of a chunk.
HINTED, LEARNED, EXPECTED, TAIL = "hinted", "learned", "expected", "tail"
EDGE, JUNCTION, SPARE = "edge", "junction", "spare"


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
    ) -> Wish:
        """What a request wishes whose hint was `resolved`; `ignore` is called for each entry that is too short.

        `shared`: its hashes match an earlier prompt's up to here; `places`: later ones are likely to leave it there.
        """
        hinted = self.usable_positions(resolved, ignore)
        return Wish(
            hinted_positions=hinted,
            resolved=resolved,
            turn_end=self.grid.usable(turn_end(hint, resolved)),
            shared=shared,
            learned=self._learned_position(resolved, hinted, shared, prompt_tokens),
            expected=tuple(self.grid.deliverable(place, prompt_tokens) for place in places),
        )

    def usable_positions(self, resolved: Sequence[int], ignore: Callable[[str], None]) -> tuple[int, ...]:
        """Positions, ascending, at which states are kept for a resolved hint.

        `ignore` is called with `below_unit` for each that is too short. Several entries of one position become one, and
        none of them counts as dropped.
        """
        positions = [self.grid.usable(position) for position in resolved if position]
        for _ in range(positions.count(0)):
            ignore("below_unit")
        return tuple(sorted({*positions} - {0}))

    def is_worth_learning(self, shared: int) -> bool:
        """Whether a state is kept where a prompt leaves an earlier one, of which it shares so much."""
        return shared >= max(MIN_SHARED, self.grid.alignment)

    def _learned_position(self, resolved: Sequence[int], hinted: Sequence[int], shared: int, prompt_tokens: int) -> int:
        """Where a prompt leaves those before it, if that is worth a state and none of its hint serves."""
        unit = self.grid.unit
        position = self.grid.deliverable(shared, prompt_tokens)
        shared = min(shared, (prompt_tokens - 1) // unit * unit)  # the same prompt again can use no more
        hinted_there = any(shared <= entry < shared + NEAR * unit for entry in resolved)
        return 0 if hinted_there or position in hinted or not self.is_worth_learning(shared) else position

    def targets(self, wish: Wish, request: Any, prompt_tokens: int = 0) -> list[CheckpointTarget]:
        """Where the states of a vLLM `Request` are kept, ascending. `prompt_tokens`: of its prompt before a cut.

        Beside what it wishes, the prompt's tail, if no such position is near it. The end of a turn says nothing of what
        others share: if no position lies clearly before the tail, the last whole block before them all is kept too,
        where vLLM itself stops; so is the one before a learned position. An expected one is kept unless another state
        is as good.
        Without a position of either kind the tail is kept only in prompts longer than a block; then, too, the junction,
        the end of a prefix that vLLM has seen shared (Marconi, arXiv 2411.19379).
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

        `positions`: of the states that are kept; `resumable`: how far the prompt can be; `felt`: tokens that a hit has
        to spare. vLLM alone ends its chunks at such edges, and finds states there: whoever is the first to leave the
        prompt behind one shall find no less.
        """
        size = self.block_size
        edge = self.grid.floor(min(end, resumable) // size * size)
        saved = edge - max((position for position in positions if position <= edge), default=0)
        return edge if edge > start and saved > 0 and saved >= felt else 0

    def last_turn(self, wish: Wish, request: Any) -> TurnEnd | None:
        """The turn that a request ends with, if it has a state at its end."""
        targets = [target for target in self.targets(wish, request) if target.kind != EXPECTED]
        if not targets:
            return None
        end = targets[-1].position
        heads = [position for position in wish.positions if position < end - TURN_REACH]
        if heads and self.ends_a_turn(wish, targets[-1]):
            return TurnEnd(heads[0], end)
        return TurnEnd(0, end) if wish.positions == (end,) == (wish.turn_end,) else None

    def ends_a_turn(self, wish: Wish, target: CheckpointTarget, resumed_at: int = 0) -> bool:
        """Whether a state serves one conversation, rather than whoever shares its prefix, as far as is known."""
        if target.kind == LEARNED:
            # Just behind a state: more likely the template's own words after a turn than what others share.
            return resumed_at > 0 and target.position - resumed_at <= NEAR * self.grid.unit
        hinted = wish.hinted_positions
        return target.kind in (TAIL, EDGE, EXPECTED, SPARE) or (len(hinted) > 1 and target.position == hinted[-1])

    def is_passed_by(self, wish: Wish, target: CheckpointTarget) -> bool:
        """Whether the state at a prompt's own end serves its client better than one at a target.

        So it is behind what others share, once the prompt has gone on from an earlier turn. A sibling that goes on
        from the same one shows that more is shared, and is not told so again.
        """
        before = wish.goes_on_from
        if before is None or wish.pin or wish.trial:
            return False
        return before.start < target.position < wish.turn_end

    def saved(self, target: CheckpointTarget, resumed_at: int) -> int:
        """Tokens that a hit at a target spares.

        Of a learned one that is what it adds to the state that the request itself resumed from: the next turn of a
        conversation also repeats the first words of the template's answer, a few tokens behind the last turn's state.
        """
        return target.position - (resumed_at if target.kind == LEARNED else 0)
