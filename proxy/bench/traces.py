"""`seamark bench traces`: a trace replayed through Seamark's own routing and others', on a simulated fleet.

It takes no engine: a user sees with it which policy suits their traffic, and how many workers it takes.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from proxy.bench import router_process
from proxy.bench.harness.servers import NotStarted, narrator
from proxy.bench.simulated_fleet import PROFILES, Execution, Fleet, Profile
from proxy.bench.trace_formats import FORMATS, BadTrace, Place, Trace, TraceRequest, read, synthetic
from proxy.bench.trace_policies import POLICIES, Seamark, SeamarkGateways, Simulated
from proxy.boundaries.resolve import MAX_ENTRIES
from proxy.commands.parser import Parser

WARM_UP = 0.25  # of the simulated time: requests that arrive in it are not counted

MOST_PAUSE = 60.0  # seconds that a user who answers thinks at most

STARTS_WITHIN = 60.0  # seconds, for the users of a trace with pauses

SYNTHETIC_SESSIONS = 3000


@dataclass(frozen=True)
class Outcome:
    """What one policy reached, counted after the warm-up; lengths in tokens, times in seconds."""

    policy: str
    workers: int
    requests: int
    hit_efficiency: float  # tokens found in the cache, of those that an endless common cache would give
    first_token_p50: float
    first_token_p99: float
    requests_per_second: float  # that were answered
    imbalance: float  # the largest share of requests at a worker, times workers
    choice_microseconds: float | None  # CPU time of a choice on this machine; None: a simulated policy

    @property
    def row(self) -> str:
        """In the table."""
        choice = f"{self.choice_microseconds:>8.0f}" if self.choice_microseconds is not None else f"{'':>8}"
        return (
            f"{self.workers:>7} {self.policy:<17} {self.hit_efficiency:>8.3f} {self.first_token_p50:>8.2f} "
            f"{self.first_token_p99:>8.2f} {self.requests_per_second:>8.2f} {self.imbalance:>9.2f} {choice}"
        )


HEAD = "workers policy                hits    p50 s    p99 s    req/s imbalance choice us"

WORDS = """
hits: tokens found in the cache, of those that one endless cache, common to all workers, would give
p50 s, p99 s: seconds to the first token; imbalance: largest share of requests at a worker x workers (1 is even)
choice us: CPU time of one choice here, in microseconds, of Seamark's own code; the others are simulated as published,
but sglang-router is its own installed process before workers that answer HTTP, without the time that it takes itself"""


@dataclass(frozen=True)
class Replay:
    """How a trace is put on a fleet."""

    trace: Trace
    profile: Profile
    seconds: float  # of simulated time
    load: float  # of what the workers could do if they shared one endless cache
    users: int  # by worker, for a trace with pauses
    seed: int
    gateways: int = 1  # of Seamark's, which share held states and hear the engines

    def run(self, policy_name: str, workers: int) -> Outcome:
        """One policy. Deterministic, except for the CPU time of choices."""
        policy = POLICIES[policy_name](workers, self.seed)
        if self.gateways > 1 and policy_name == "seamark":
            policy = SeamarkGateways(workers, self.seed, self.gateways)
        fleet = Fleet(workers, self.profile, policy, hint_of)
        if isinstance(policy, Simulated):
            policy.fleet = fleet
        self._send(fleet, workers)
        fleet.run(self.end)
        return self._outcome(policy_name, policy, workers, fleet)

    def run_process(self, command: Sequence[str], workers: int, speed: float) -> tuple[Outcome, list[str]]:
        """sglang-router's process, which `command` starts, at so many simulated seconds a second; and what to add.

        Raises `NotStarted`.
        """
        fleet = router_process.HttpFleet(workers, self.profile, hint_of, speed)
        self._send(fleet, workers)
        played = fleet.play(command, self.end)
        return self._outcome(router_process.NAME, None, workers, fleet), played.remarks

    @property
    def end(self) -> float:
        """Seconds after which nothing is simulated: what arrived late in a timed trace is to be answered, too."""
        return 2 * self.seconds if self.trace.is_timed else self.seconds

    def _send(self, fleet: Fleet, workers: int) -> None:
        if self.trace.is_timed:
            self._send_by_time(fleet, workers)
        else:
            self._send_by_users(fleet, self.users * workers)

    def _outcome(self, name: str, policy: object, workers: int, fleet: Fleet) -> Outcome:
        counted = [done for done in fleet.executions if done.arrived >= WARM_UP * self.seconds]
        if len(counted) < 2:
            raise BadTrace(f"{self.trace.name}: hardly any request is answered in that time. Give more --seconds.")
        waits = sorted(done.first_token_seconds for done in counted)
        shares = [0] * workers
        for done in counted:
            shares[done.worker] += 1
        hits = sum(done.hit for done in counted)
        end = max(done.end for done in counted)
        choices = len(counted) / (1 - WARM_UP)
        return Outcome(
            policy=name,
            workers=workers,
            requests=len(counted),
            hit_efficiency=hits / max(1, sum(done.request.shareable for done in counted)),
            first_token_p50=statistics.median(waits),
            first_token_p99=waits[min(len(waits) - 1, int(0.99 * len(waits)))],
            requests_per_second=len(counted) / (end - WARM_UP * self.seconds),
            imbalance=max(shares) * workers / len(counted),
            choice_microseconds=1e6 * policy.choice_seconds / choices
            if isinstance(policy, Seamark | SeamarkGateways)
            else None,
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
                request: TraceRequest = requests[following].copied(copy, common)
                fleet.send(request, now + min(MOST_PAUSE, max(0.2, request.pause)))
            else:
                del at[execution.request.session]
                begin(now + drawn.random() * 5, somewhere=False)

        fleet.on_end = ended
        for _ in range(users):
            begin(drawn.random() * min(STARTS_WITHIN, self.seconds / 8), somewhere=True)


def hint_of(request: TraceRequest) -> tuple[Place, ...]:
    """Where a gateway asks for states: all boundaries, as many as an engine takes."""
    return request.boundaries[-MAX_ENTRIES:]


def profile_from(path: Path) -> Profile:
    """The profile in a JSON file, by the names of `Profile`; what it leaves out is as in the default.

    Raises `ValueError` with the cure.
    """
    names = list(Profile.__dataclass_fields__)
    try:
        given = json.loads(path.read_text())
        if not isinstance(given, dict):
            raise TypeError
        profile = replace(PROFILES["datacentre"], **given)
        if not all(float(getattr(profile, name)) > 0 for name in names):
            raise ValueError
    except OSError as error:
        raise ValueError(
            f"--profile {path}: {error.strerror}; give a JSON file or one of {', '.join(PROFILES)}"
        ) from None
    except (ValueError, TypeError):
        raise ValueError(f"--profile {path}: needs a JSON object of positive numbers, of {', '.join(names)}") from None
    return profile


def _arguments(argv: Sequence[str]) -> tuple[Any, Profile]:
    parser = Parser(prog="seamark bench traces", description="a trace replayed on a simulated fleet, policy by policy")
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz; left out: conversations drawn at random")
    add("--format", choices=FORMATS, help="of the trace; left out: by its first line")
    add("--workers", type=int, action="append", metavar="N", help="repeat for several (4)")
    add(
        "--policy",
        choices=[*POLICIES, router_process.NAME],
        action="append",
        help=f"repeat for several (all; {router_process.NAME}: the process that is installed here, if there is one)",
    )
    add("--gateways", type=int, default=1, metavar="N", help="of Seamark's, before the same workers (1)")
    add("--profile", default="datacentre", metavar="NAME|FILE", help=f"a worker: {', '.join(PROFILES)}, or a JSON file")
    add(
        "--seconds",
        type=float,
        default=900.0,
        metavar="S",
        help="of simulated time, a quarter to warm up (900)",
    )
    add("--load", type=float, default=0.65, metavar="X", help="of what the workers could do with all hits (0.65)")
    add("--users", type=int, default=20, metavar="N", help="by worker, for a trace with pauses (20)")
    add(
        "--speed",
        type=float,
        default=5.0,
        metavar="X",
        help=f"simulated seconds a second, for {router_process.NAME}'s process (5)",
    )
    add("--seed", type=int, default=1, metavar="N", help="the same seed gives the same table (1)")
    add("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    args.workers = list(dict.fromkeys(args.workers or [4]))
    args.policy = list(dict.fromkeys(args.policy or [*POLICIES, router_process.NAME]))
    for name in ("seconds", "load", "users", "speed"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}: more than 0")
    if min(args.workers) < 1:
        parser.error("--workers: at least 1")
    if args.gateways < 1:
        parser.error("--gateways: at least 1")
    try:
        return args, PROFILES.get(args.profile) or profile_from(Path(args.profile))
    except ValueError as error:
        parser.error(str(error))


def main(argv: list[str]) -> int:
    args, profile = _arguments(argv)
    try:
        trace = read(args.trace, args.format) if args.trace else synthetic(SYNTHETIC_SESSIONS, args.seed)
        replay = Replay(trace, profile, args.seconds, args.load, args.users, args.seed, args.gateways)
        if not args.json:
            print(_described(replay), HEAD, sep="\n", flush=True)
        outcomes = []
        for outcome in _outcomes(replay, args.workers, args.policy, args.speed):
            outcomes.append(outcome)
            if not args.json:
                print(outcome.row, flush=True)
    except BadTrace as error:
        print(f"seamark bench traces: {error}", file=sys.stderr)
        return 1
    if args.json:
        settings = {name: getattr(args, name) for name in ("seconds", "load", "users", "seed", "gateways")}
        report = {"trace": trace.name, **settings, "profile": asdict(profile), "outcomes": list(map(asdict, outcomes))}
        print(json.dumps(report, indent=1))
    else:
        print(WORDS)
    return 0


def _outcomes(replay: Replay, workers: Sequence[int], policies: Sequence[str], speed: float) -> Iterator[Outcome]:
    """Row by row; what has to be said of sglang-router's process goes to stderr."""
    router, command = router_process.NAME, None
    if router in policies:
        say, command = narrator(), router_process.installed()
        if command is None:
            say(f"{router} is not installed here, and has no row (pip install {router})")
    for number in workers:
        for policy in policies:
            if policy != router:
                yield replay.run(policy, number)
            elif command is not None:
                say(f"{router}'s process before {number} workers: at most {replay.end / speed:.0f} s")
                try:
                    outcome, remarks = replay.run_process(command, number, speed)
                except NotStarted as error:
                    say(f"{router} has no row: {' '.join(str(error).split())}")
                    continue
                for remark in remarks:
                    say(remark)
                yield outcome


def _described(replay: Replay) -> str:
    trace, requests = replay.trace, replay.trace.requests
    tokens = sum(request.prompt for request in requests)
    shareable = sum(request.shareable for request in requests) / tokens
    how = f"{replay.rate:.2f} requests/s a worker" if trace.is_timed else f"{replay.users} users a worker"
    return (
        f"{trace.name}: {len(requests)} requests in {len(trace.sessions)} sessions, {tokens // len(requests)} tokens a "
        f"prompt, {shareable:.0%} shareable; {how}, {replay.seconds:g} simulated seconds\n"
    )
