"""`seamark bench`: what Seamark gains and costs beside vLLM alone, on real engines or on a stack that runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

# Each is a module of this package with `main(argv) -> exit status`.
BENCHMARKS = {
    "mine": "what your own stack finds in its cache: any OpenAI-compatible URL, alone or against another",
    "replay": "recorded traffic (seamark serve --trace) sent again, with made-up text that shares as much",
    "demo": "the README's stories on Seamark and on vLLM alone, answers compared with a reference engine's",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHMARKS:
        asked = bool(argv) and argv[0] in ("-h", "--help")
        lines = [f"  seamark bench {name:<7} {measures}" for name, measures in BENCHMARKS.items()]
        note = "`demo` starts real engines: run it in vLLM's environment. `seamark bench NAME --help` lists the flags."
        print("usage: seamark bench NAME ...", "", *lines, "", note, sep="\n", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    from proxy.bench.harness.servers import NotStarted  # the list above is for those, too, who lack what this needs

    benchmark: Callable[[list[str]], int]
    benchmark = importlib.import_module(f"proxy.bench.{argv[0]}").main
    try:
        return benchmark(argv[1:])
    except NotStarted as error:
        print(f"seamark bench: {error}", file=sys.stderr)
        return 1
