"""`python -m tests.bench.restart`: what a killed worker has left to hit, by what kept its states, and first tokens.

20 chats of two turns, one at a time. A worker answers the first turns and is killed; another one answers the second
turns with what is left: nothing, a checkpoint directory, vLLM's own file tier, or a directory on a disk that is slower
than computing. First tokens are shares of those of a worker that caches nothing, rounds of that of a new worker without
a directory, which answers each prompt right before or after. Exit status 1 if an answer is another one than computed in
full, or a killed worker hits less than 0.99 of one that was not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from proxy.bench.harness.servers import Server, Servers, generated_model, narrator
from tests.harness.restarts import (
    KEEP_ALL,
    Round,
    ask,
    ask_in_turn,
    counted,
    kill,
    plugin,
    rounds_of,
    start,
    stock_tier,
    uncached,
    written,
)

COLD, ALIVE, WITHOUT = "caches nothing", "was not killed", "killed, nothing kept"

CHECKPOINTS, STOCK = "killed, --checkpoint-dir", "killed, vLLM's own file tier"

SLOW = "killed, --checkpoint-dir on a slow disk"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restart", description="what a killed worker hits")
    parser.parse_args(argv)
    say = narrator()
    model = generated_model(say)
    first, second = rounds_of(AutoTokenizer.from_pretrained(model))
    rounds: dict[str, Round] = {}
    with tempfile.TemporaryDirectory(prefix="seamark-restart-") as name, Servers(Path(name)) as fleet:
        states, stock = Path(name, "states"), stock_tier(Path(name, "stock"))

        def show(label: str, server: Server) -> None:
            plain = start(fleet, model, "plain")
            found, beside = ask_in_turn([server, plain], second)
            rounds[label] = found
            declined = counted(server).get("seamark_loads_declined_total", 0)
            for each in (server, plain):
                kill(each)
            cold, wrong = found.first_token_over(rounds[COLD]), found.differing(rounds[COLD])
            without = found.seconds / beside.seconds
            row = f"{label:<40} {found.hits:>6,} {cold:>9.2f} {without:>9.2f} {declined:>9.0f} {wrong:>6}"
            print(row, flush=True)

        def leave_states(folder: str, pattern: str, states: Path | None, *flags: str) -> None:
            worker = start(fleet, model, "first", states, *flags)
            ask(worker, first)
            written(Path(name, folder), pattern)
            kill(worker)

        print(f"{'of the second turns':<40} tokens    first   round /   loads", flush=True)
        print(f"{'':<40}    hit   / cold   nothing  declined  wrong", flush=True)
        show(COLD, uncached(fleet, model))
        show(WITHOUT, start(fleet, model, "second"))
        alive = start(fleet, model, "alive")
        ask(alive, first)
        show(ALIVE, alive)
        leave_states("stock", "*.bin", None, *stock)
        show(STOCK, start(fleet, model, "second", None, *stock))
        leave_states("states", "*.state", states, *KEEP_ALL)
        show(CHECKPOINTS, start(fleet, model, "second", states, *KEEP_ALL))
        show(SLOW, start(fleet, model, "second", states, *KEEP_ALL, **plugin(Path(name), "slow_reads")))
    kept = rounds[CHECKPOINTS].hits >= 0.99 * rounds[ALIVE].hits
    return 0 if kept and not any(each.differing(rounds[COLD]) for each in rounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
