"""The command: its flags, its table and its report."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.commands.parser import Parser
from tests.bench.traces.agentic import REQUESTS, records
from tests.bench.traces.formats import BadTrace, Trace, of_mooncake, read, synthetic
from tests.bench.traces.policies import POLICIES
from tests.bench.traces.replay import Outcome, Replay
from tests.bench.traces.simulated_fleet import PROFILES, Profile

PROG = "python -m tests.bench.traces"

DRAWN: dict[str, Callable[[int], Trace]] = {
    "conversations": lambda seed: synthetic(3000, seed),
    "agents": lambda seed: of_mooncake("drawn agents", list(enumerate(records(REQUESTS, seed), 1))),
}

COLUMNS = ("workers", "policy", *Outcome._fields)

WORDS = """
hits: tokens found in the cache, of those that one endless cache, common to all workers, would give
of_all: of all tokens of prompts
p50, p99: seconds to the first token; per_second: requests answered
imbalance: largest share of requests at a worker x workers (1 is even). Others are simulated as they are published"""


def profile_from(name: str) -> Profile:
    """One of `PROFILES`, or that of a JSON file by the names of `Profile`; what it leaves out is as in the default.

    Raises `ValueError` with the cure.
    """
    if name in PROFILES:
        return PROFILES[name]
    fields = list(Profile.__dataclass_fields__)
    try:
        profile = replace(PROFILES["datacentre"], **json.loads(Path(name).read_text()))
        if all(float(getattr(profile, field)) > 0 for field in fields):
            return profile
    except OSError as error:
        why = f"{error.strerror}; give a JSON file or one of {', '.join(PROFILES)}"
        raise ValueError(f"--profile {name}: {why}") from None
    except (ValueError, TypeError):
        pass
    raise ValueError(f"--profile {name}: needs a JSON object of positive numbers, of {', '.join(fields)}")


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
        parser.error(str(error))


def main(argv: list[str]) -> int:
    args, profile = _arguments(argv)
    try:
        trace = read(args.trace) if args.trace else DRAWN[args.drawn](args.seed)
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
