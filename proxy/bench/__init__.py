"""`seamark bench`: what Seamark gains and costs, measured side by side with vLLM alone, on real engines."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from proxy.bench import demo

    benchmarks = {"demo": demo.main}
    if not argv or argv[0] not in benchmarks:
        print(f"usage: seamark bench {{{','.join(benchmarks)}}} ...", file=sys.stderr)
        return 2
    return benchmarks[argv[0]](argv[1:])
