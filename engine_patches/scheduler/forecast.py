"""When the requests of a scheduler get their first tokens: if followers wait for their leader, and if they do not.

A held follower costs itself a pass, and saves its prefix for everyone: the leader's step is shorter, and so is every
later one. But the room that it leaves goes to those behind it, and they run on before it. What is more depends on how
many follow, how many of them a step has room for, and who else waits. So the next steps are played through both ways,
as vLLM fills them: what runs first, then the line, in order, up to a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Steps played through. What is not done by then goes on in order, at the time that its tokens take.
MAX_STEPS = 16


class ForecastJob(NamedTuple):
    """A request that has yet to give its first token."""

    tokens: int  # to be computed
    shared: int = 0  # of these, the ones it finds in the cache once the leader has come to its state; 0: no follower


class ForecastEngine(NamedTuple):
    """What a step may hold, and what it costs."""

    budget: int  # tokens a step may hold
    chunk: int  # of them, of one request
    alignment: int  # a chunk that does not reach the prompt's end ends on a multiple of it, if there is room for that
    slots: int  # requests that may run
    tokens_per_pass: float  # tokens that take as long as an empty pass


def first_tokens(
    jobs: Sequence[ForecastJob], running: int, leader: int, missing: int, engine: ForecastEngine, hold: bool
) -> float:
    """Play the next steps through: the sum of all times to the first token, in tokens computed meanwhile.

    The first `running` of `jobs` run, the others wait, in this order. `leader` is the place of the one that has
    `missing` tokens to compute before its state is written; `hold` keeps its followers waiting until then.
    """
    left = [job.tokens for job in jobs]
    behind = left[leader] - missing
    runs, waits = list(range(running)), list(range(running, len(jobs)))
    slots = engine.slots
    now = total = 0.0

    def compute(place: int, room: int) -> int:
        taken = min(left[place], room, engine.chunk)
        if taken < left[place]:  # of the room that this leaves, those behind get a little
            taken = taken // engine.alignment * engine.alignment or taken
        left[place] -= taken
        return taken

    for _ in range(MAX_STEPS):
        if not slots or not (runs or waits):
            break
        written = left[leader] <= behind
        room = engine.budget
        for place in runs:
            room -= compute(place, room)
        still = []
        for place in waits:
            if not room or len(runs) >= slots or (hold and not written and jobs[place].shared):
                still.append(place)
                continue
            if written:
                left[place] -= jobs[place].shared
            runs.append(place)
            room -= compute(place, room)
        waits = still
        now += engine.tokens_per_pass + engine.budget - room
        done = sum(not left[place] for place in runs)
        total += now * done
        slots -= done  # they generate on
        runs = [place for place in runs if left[place]]
    for place in runs + waits:
        now += left[place] * (1 + engine.tokens_per_pass / engine.budget)
        total += now
    return total
