"""`python -m tests.bench.second_sight TRACE...`: what states at expected junctions gain, and what they cost.

Prompts of a trace in Mooncake's format, in their order, before one engine's rules for states: what a hint names, where
a prompt leaves an earlier one, and, if asked for, where later ones are expected to. The room for states is one LRU in
which states that served nobody yet go first; attention is taken to be there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_patches.scheduler.checkpoints import MIN_SHARED
from engine_patches.scheduler.expected_junctions import ExpectedJunctions
from engine_patches.scheduler.step_time import ASSUMED_TOKENS_PER_PASS
from tests.bench.traces.formats import BLOCK, BadTrace, TraceRequest, read

STATES = 488  # that a worker of `tests.bench.traces` has room for

SALT = b""

HEAD = f"{'trace':<32}{'expected':>9}{'prompt tokens':>15}{'hits':>7}{'written':>9}{'expected':>10}{'unused':>8}"


@dataclass(frozen=True)
class Outcome:
    """Of one trace; lengths in tokens."""

    trace: str
    expected: bool  # states at expected junctions, too
    prompt: int
    hits: int
    written: int  # states
    written_expected: int
    unused_expected: int  # that served nobody

    @property
    def row(self) -> str:
        """In the table."""
        share, word = self.hits / self.prompt, "yes" if self.expected else "no"
        counts = f"{self.written:>9}{self.written_expected:>10}{self.unused_expected:>8}"
        return f"{self.trace:<32}{word:>9}{self.prompt:>15}{share:>7.1%}{counts}"


class States:
    """The room for states: those that served nobody yet go first, then the least recently used."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: OrderedDict[Hashable, bool] = OrderedDict()  # whether it was expected
        self._used: OrderedDict[Hashable, bool] = OrderedDict()
        self.written = self.written_expected = 0

    def __contains__(self, name: Hashable) -> bool:
        return name in self._new or name in self._used

    @property
    def unused_expected(self) -> int:
        """Expected ones that served nobody."""
        return self.written_expected - sum(self._used.values()) - self._gone_used

    _gone_used = 0

    def write(self, name: Hashable, *, expected: bool = False) -> None:
        """Keep a state."""
        if name in self:
            return
        self.written += 1
        self.written_expected += expected
        self._new[name] = expected
        if len(self._new) + len(self._used) > self._most:
            if len(self._new) > 1:
                self._new.popitem(last=False)
            else:
                self._gone_used += self._used.popitem(last=False)[1]

    def use(self, name: Hashable) -> bool:
        """A prompt resumes from a state; whether that one was expected."""
        expected = self._new.pop(name) if name in self._new else self._used.pop(name)
        self._used[name] = expected
        return expected


def prompts_of(path: Path) -> Iterator[TraceRequest]:
    """In the order of their arrival."""
    return iter(sorted(read(path, "mooncake").requests, key=lambda request: request.arrival))


def replay(path: Path, room: int, *, expected: bool) -> Outcome:
    """One trace. Raises `BadTrace`."""
    states, learner = States(room), ExpectedJunctions()
    seen: set[int] = set()
    prompt = hits = 0
    for request in prompts_of(path):
        prompt += request.prompt
        blocks = request.blocks
        shared = next((at for at in range(len(blocks), 0, -1) if blocks[at - 1] in seen), 0) * BLOCK
        own = [(place.tokens, place.name) for place in request.path if place.kind != "learned"]
        at_blocks = [(at * BLOCK, ("block", name)) for at, name in enumerate(blocks, 1)]
        there = [place for place in (*own, *at_blocks) if place[0] < request.prompt and place[1] in states]
        resumed, name = max(there, default=(0, None))
        was_expected = name is not None and states.use(name)
        hits += resumed
        for place in request.boundaries:
            if place.kind != "learned" and place.tokens > resumed:
                states.write(place.name)
        if shared >= MIN_SHARED and resumed < shared < request.prompt:
            states.write(("block", blocks[shared // BLOCK - 1]))
        if expected:
            for place in learner.places(SALT, shared, request.prompt):
                if place // BLOCK <= len(blocks):
                    states.write(("block", blocks[place // BLOCK - 1]), expected=True)
        junction = blocks[shared // BLOCK - 1].to_bytes(16) if shared >= MIN_SHARED else None
        without = max((tokens for tokens, _ in own if tokens < resumed), default=0) if was_expected else resumed
        learner.add(SALT, junction, shared, request.prompt, without, ASSUMED_TOKENS_PER_PASS)
        seen.update(blocks)
    return Outcome(path.name, expected, prompt, hits, states.written, states.written_expected, states.unused_expected)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.second_sight", description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, nargs="+", help="in Mooncake's format")
    parser.add_argument("--states", type=int, default=STATES, metavar="N", help=f"that there is room for ({STATES})")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    try:
        outcomes = [replay(path, args.states, expected=expected) for path in args.trace for expected in (False, True)]
    except BadTrace as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(list(map(asdict, outcomes))) if args.json else "\n".join([HEAD, *(each.row for each in outcomes)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
