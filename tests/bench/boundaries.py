"""`python -m tests.bench.boundaries`: CPU time that finding boundaries costs the gateway per request, parsing excluded.

Nothing is rendered for a request, so a head that was never seen costs no more than a known one. Beginnings inside texts
are sought for the choice among several workers only; that is timed apart. What a request leaves behind for explanations
is part of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

from proxy.boundaries.boundary import Found
from proxy.boundaries.divergence import DivergenceLearner
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.template_facts import Opener, TemplateFacts
from proxy.chat.reader import chat_request
from proxy.observability.request_diff import RememberedRequest, RequestMemory

LIMITS = {2_000: 50e-6, 400_000: 2e-3}  # seconds

MEMORY_BYTES = 2**26

TOKENS_PER_BYTE = 0.25

# As a template of the ChatML family has them.
USER = Opener((151644, 872, 198), "<|im_start|>user\n", per_user=True, no_tool=True)

FACTS = TemplateFacts({"user": 3}, {(place, False): USER for place in ("first", "alone", "user")})


class Cost(NamedTuple):
    """CPU seconds for one request, medians."""

    size: int  # bytes of text
    messages: int
    new: float  # nobody began like it
    known: float  # its head was seen, and an engine has told all its positions
    by_texts: float  # the same, with beginnings inside texts
    entries: int  # of the hint


def chat(size: int, messages: int, head: str, last: str) -> dict[str, Any]:
    """A chat of about `size` bytes."""
    each = "The pilot boards two miles off the bar. " * (size // messages // 40 + 1)
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} {each}"[: size // messages]} for i in range(messages)
    ]
    return {
        "model": "m",
        "messages": [{"role": "system", "content": head}, *turns, {"role": "user", "content": last}],
    }


def measure(size: int, messages: int, rounds: int) -> Cost:
    """Cost of one size; medians over `rounds`."""
    positions = PositionCache(MEMORY_BYTES)
    finder, recent = BoundaryFinder(positions, DivergenceLearner(MEMORY_BYTES)), RequestMemory(MEMORY_BYTES)

    def find(body: dict[str, Any], by_texts: bool = False) -> tuple[Found, float]:
        request = chat_request(body)
        began = time.process_time()
        found = finder.find(request, FACTS, b"renderer", size, TOKENS_PER_BYTE, by_texts=by_texts)
        if found.layout is not None:
            recent.add(RememberedRequest(found.layout, size))
        return found, time.process_time() - began

    new = [find(chat(size, messages, f"You, {number}.", "First?"))[1] for number in range(rounds)]
    found, _ = find(chat(size, messages, "You.", "First?"))
    for number, boundary in enumerate(found.boundaries, 1):
        positions.put(boundary.key, 100 * number)
    known = [find(chat(size, messages, "You.", f"{number} more?")) for number in range(rounds)]
    by_texts = [find(chat(size, messages, "You.", f"{number} more?"), by_texts=True)[1] for number in range(rounds)]
    seconds = statistics.median(seconds for _, seconds in known)
    entries = {len(found.entries()) for found, _ in known}
    return Cost(size, messages, statistics.median(new), seconds, statistics.median(by_texts), max(entries))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.boundaries", description="CPU time per request for boundaries"
    )
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="requests per size (200)")
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    costs = [
        measure(size, messages, args.rounds)
        for size, messages in ((2_000, 4), (20_000, 20), (400_000, 40), (400_000, 200))
    ]
    held = all(max(cost.new, cost.known) <= LIMITS.get(cost.size, 1) for cost in costs)
    if args.json:
        print(json.dumps({"held": held, "costs": [cost._asdict() for cost in costs]}))
        return 0 if held else 1
    print("  bytes  messages       new     known   with texts")
    for cost in costs:
        micros = (seconds * 1e6 for seconds in (cost.new, cost.known, cost.by_texts))
        print(f"{cost.size:7}{cost.messages:10}" + "".join(f"{each:7.0f} us" for each in micros))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
