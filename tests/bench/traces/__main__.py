"""A trace put on the simulated fleet, what each way to choose workers reaches on it, and the command that shows it."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from proxy.boundaries.boundary import MAX_ENTRIES
from proxy.commands.parser import Parser
from tests.bench.traces import formats
from tests.bench.traces.formats import BadTrace, Place, Trace, TraceRequest
from tests.bench.traces.policies import POLICIES
from tests.bench.traces.simulated_fleet import PROFILES, Execution, Fleet, Profile

WARM_UP = 0.25  # of the simulated time: requests that arrive in it are not counted


class Outcome(NamedTuple):
    """What one policy reached, counted after the warm-up; times in seconds."""

    hits: float  # tokens found in the cache, of those that an endless common cache would give
    of_all: float  # and of all that were sent
    p50: float  # seconds to the first token
    p99: float
    per_second: float  # requests that were answered
    imbalance: float  # the largest share of requests at a worker, times workers


@dataclass(frozen=True)
class Replay:
    """How a trace is put on a fleet."""

    trace: Trace
    profile: Profile
    seconds: float  # of simulated time
    load: float  # of what the workers could do if they shared one endless cache
    users: int  # by worker, for a trace with pauses
    seed: int

    def run(self, policy_name: str, workers: int) -> Outcome:
        """One policy; the same with the same seed."""
        fleet = Fleet(workers, self.profile, POLICIES[policy_name](workers, self.seed), hint_of)
        if self.trace.is_timed:
            self._send_by_time(fleet, workers)
            fleet.run(2 * self.seconds)  # what arrived late is to be answered, too
        else:
            self._send_by_users(fleet, self.users * workers)
            fleet.run(self.seconds)
        return self._outcome(workers, fleet)

    def _outcome(self, workers: int, fleet: Fleet) -> Outcome:
        warm = WARM_UP * self.seconds
        counted = [done for done in fleet.executions if done.arrived >= warm]
        if len(counted) < 2:
            raise BadTrace(f"{self.trace.name}: hardly any request is answered in that time. Give more --seconds.")
        waits = sorted(done.first - done.arrived for done in counted)
        hits = sum(done.hit for done in counted)
        ((_, most),) = Counter(done.worker for done in counted).most_common(1)
        return Outcome(
            hits=hits / max(1, sum(done.request.shareable for done in counted)),
            of_all=hits / sum(done.request.prompt for done in counted),
            p50=statistics.median(waits),
            p99=waits[min(len(waits) - 1, int(0.99 * len(waits)))],
            per_second=len(counted) / (max(done.end for done in counted) - warm),
            imbalance=most * workers / len(counted),
        )

    @property
    def rate(self) -> float:
        """Requests a second and worker, for a trace with arrivals."""
        requests = self.trace.requests
        return self.load * len(requests) / sum(map(self.profile.work_seconds, requests))

    def _send_by_time(self, fleet: Fleet, workers: int) -> None:
        """As the trace says, stretched to the load; where it takes more than the trace has, by copies of its users."""
        drawn = random.Random(self.seed)  # a simulation
        rate, span, common = self.rate * workers, self.trace.span, self.trace.common()
        copies = max(1, round(rate * span / len(self.trace.requests)))
        stretch = copies * len(self.trace.requests) / span / rate
        for copy in range(copies):
            shift = drawn.random() * span if copy else 0.0
            for session in self.trace.sessions:
                begin = (session[0].arrival + shift) % span - session[0].arrival
                for request in session:
                    time_sent = (begin + request.arrival + drawn.random()) * stretch
                    if time_sent < self.seconds:
                        fleet.send(request.copied(copy, common), time_sent)

    def _send_by_users(self, fleet: Fleet, users: int) -> None:
        """So many users at once, each with one session after the other, who think as long as the trace says."""
        drawn = random.Random(self.seed)  # a simulation
        common = self.trace.common()
        order = list(range(len(self.trace.sessions)))
        drawn.shuffle(order)
        begun = 0
        at: dict[int, tuple[int, int]] = {}  # by session: its place in the trace, and which copy of it

        def begin(now: float, *, somewhere: bool) -> None:
            nonlocal begun
            session, copy = order[begun % len(order)], begun // len(order)
            begun += 1
            requests = self.trace.sessions[session]
            first = requests[drawn.randrange(len(requests)) if somewhere else 0].copied(copy, common)
            at[first.session] = (session, copy)
            fleet.send(first, now)

        def ended(execution: Execution, now: float) -> None:
            session, copy = at[execution.request.session]
            requests, following = self.trace.sessions[session], execution.request.turn + 1
            if following < len(requests):
                request = requests[following].copied(copy, common)
                fleet.send(request, now + min(60.0, max(0.2, request.pause)))  # nobody thinks for longer
            else:
                del at[execution.request.session]
                begin(now + drawn.random() * 5, somewhere=False)

        fleet.on_end = ended
        for _ in range(users):
            begin(drawn.random() * min(60.0, self.seconds / 8), somewhere=True)


def hint_of(request: TraceRequest) -> tuple[Place, ...]:
    """Where a gateway asks for states: all boundaries, as many as an engine takes."""
    return request.boundaries[-MAX_ENTRIES:]


PROG = "python -m tests.bench.traces"

DRAWN: dict[str, Callable[[int], Trace]] = {
    "conversations": lambda seed: formats.synthetic(3000, seed),
    "agents": lambda seed: formats.of_mooncake(
        "drawn agents", list(enumerate(formats.records(formats.REQUESTS, seed), 1))
    ),
}

COLUMNS = ("workers", "policy", *Outcome._fields)

WORDS = """
hits: tokens found in the cache, of those that one endless cache, common to all workers, would give
of_all: of all tokens of prompts
p50, p99: seconds to the first token; per_second: requests answered
imbalance: largest share of requests at a worker x workers (1 is even). Others are simulated as they are published"""


def profile_from(name: str) -> Profile:
    """One of `PROFILES`, or that of a JSON file by the names of `Profile`; what it leaves out is as in the default."""
    if name in PROFILES:
        return PROFILES[name]
    try:
        profile = Profile(**json.loads(Path(name).read_text()))
        if all(float(value) > 0 for value in vars(profile).values()):
            return profile
    except (OSError, ValueError, TypeError):
        pass
    fields = ", ".join(Profile.__dataclass_fields__)
    raise ValueError(f"one of {', '.join(PROFILES)}, or a file with a JSON object of positive numbers, of {fields}")


def _arguments(argv: Sequence[str]) -> tuple[Any, Profile]:
    parser = Parser(prog=PROG, description="a trace replayed on a simulated fleet, policy by policy")
    add = parser.add_argument
    add("trace", type=Path, nargs="?", metavar="FILE", help=".jsonl or .jsonl.gz; left out: one that is drawn")
    add("--drawn", choices=DRAWN, default="conversations", help="like Mooncake's, or Dynamo's agents (conversations)")
    add("--workers", type=int, action="append", metavar="N", help="repeat for several (4)")
    add("--policy", choices=POLICIES, action="append", help="repeat for several (all)")
    add("--profile", default="datacentre", metavar="NAME|FILE", help=f"a worker: {', '.join(PROFILES)}, or a JSON file")
    add("--seconds", type=float, default=900.0, metavar="S", help="of simulated time, a quarter to warm up (900)")
    add("--load", type=float, default=0.65, metavar="X", help="of what the workers could do with all hits (0.65)")
    add("--users", type=int, default=20, metavar="N", help="by worker, for a trace with pauses (20)")
    add("--seed", type=int, default=1, metavar="N", help="the same seed gives the same table (1)")
    args = parser.parse_args(argv)
    args.workers = list(dict.fromkeys(args.workers or [4]))
    args.policy = list(dict.fromkeys(args.policy or POLICIES))
    for name in ("seconds", "load", "users"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}: more than 0")
    if min(args.workers) < 1:
        parser.error("--workers: at least 1")
    try:
        return args, profile_from(args.profile)
    except ValueError as error:
        parser.error(f"--profile {args.profile}: {error}")


def main(argv: list[str]) -> int:
    args, profile = _arguments(argv)
    try:
        trace = formats.read(args.trace) if args.trace else DRAWN[args.drawn](args.seed)
        replay = Replay(trace, profile, args.seconds, args.load, args.users, args.seed)
        print(_described(replay), "".join(f"{name:>12}" for name in COLUMNS), sep="\n", flush=True)
        for workers, policy in itertools.product(args.workers, args.policy):
            figures = "".join(f"{figure:>12.3f}" for figure in replay.run(policy, workers))
            print(f"{workers:>12}{policy:>12}{figures}", flush=True)
    except BadTrace as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    print(WORDS)
    return 0


def _described(replay: Replay) -> str:
    trace, requests = replay.trace, replay.trace.requests
    tokens = sum(request.prompt for request in requests)
    shareable = sum(request.shareable for request in requests) / tokens
    how = f"{replay.rate:.2f} requests/s a worker" if trace.is_timed else f"{replay.users} users a worker"
    return (
        f"{trace.name}: {len(requests)} requests in {len(trace.sessions)} sessions, {tokens // len(requests)} tokens a "
        f"prompt, {shareable:.0%} shareable; {how}, {replay.seconds:g} simulated seconds\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
