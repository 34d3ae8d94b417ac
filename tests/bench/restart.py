"""`python -m tests.bench.restart`: what a killed worker has left to hit, by what kept its states, and first tokens.

20 chats of two turns, one at a time. A worker answers the first turns and is killed; another one answers the second
turns with what is left: nothing, a checkpoint directory, vLLM's own file tier, or a directory on a disk that is slower
than computing. Times are shares of those of a worker that caches nothing, and of one that has no directory. Exit status
1 if an answer is another one than computed in full, or a killed worker hits less than 0.99 of one that was not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

from proxy.bench.harness.servers import Servers, generated_model, narrator
from tests.harness.restarts import (
    KEEP_ALL,
    Round,
    ask,
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


def measured(folder: Path) -> tuple[Mapping[str, Round], float]:
    """The second round by what was left of the first, and the loads that a slow disk was spared."""
    say = narrator()
    model = generated_model(say)
    first, second = rounds_of(AutoTokenizer.from_pretrained(model))
    rounds: dict[str, Round] = {}
    with Servers(folder) as fleet:

        def asked(name: str, states: Path | None, *flags: str, keeps: str = "", **environment: str) -> float:
            """Answer the second round; after the first one and a kill if files that match `keeps` are to be left."""
            say(name)
            if keeps:
                worker = start(fleet, model, "first", states, *flags, **environment)
                ask(worker, first)
                written(folder, keeps)
                kill(worker)
            worker = start(fleet, model, "second", states, *flags, **environment)
            if name == ALIVE:
                ask(worker, first)
            rounds[name] = ask(worker, second)
            declined = counted(worker)["seamark_loads_declined_total"]
            kill(worker)
            return declined

        say(COLD)
        worker = uncached(fleet, model)
        rounds[COLD] = ask(worker, second)
        kill(worker)
        asked(ALIVE, None)
        asked(WITHOUT, None)
        asked(STOCK, None, *stock_tier(folder / "stock"), keeps="*.bin")
        asked(CHECKPOINTS, folder / "states", *KEEP_ALL, keeps="*.state")
        declined = asked(SLOW, folder / "states", *KEEP_ALL, **plugin(folder, "slow_reads"))
    return rounds, declined


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m tests.bench.restart", description="what a killed worker hits").parse_args(
        argv
    )
    with tempfile.TemporaryDirectory(prefix="seamark-restart-") as name:
        rounds, declined = measured(Path(name))
    print(f"{'worker':<40} tokens hit  first token / cold  round / nothing kept  wrong")
    for label, each in rounds.items():
        cold, without = each.first_token_over(rounds[COLD]), each.seconds / rounds[WITHOUT].seconds
        wrong = each.differing(rounds[COLD])
        print(f"{label:<40} {each.hits:>6,} of {each.tokens:,} {cold:>10.2f} {without:>20.2f} {wrong:>12}")
    print(f"loads declined on the slow disk: {declined:.0f} of {len(rounds[SLOW].answers)}")
    kept = rounds[CHECKPOINTS].hits >= 0.99 * rounds[ALIVE].hits
    return 0 if kept and not any(each.differing(rounds[COLD]) for each in rounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
