"""The audit of vLLM's scheduler as it is: no connector, no adapters, no drafts.

Run as `python -m tests.harness.scheduler_audit MODEL '{"seeds": [1], "chats": 9, "cores": [{}]}'`, since patching is
per process. Prints JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.harness import audit
from tests.harness.audit import Core, Scene, random_traffic


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: arguments of `Core`."""
    for seed in wanted["seeds"]:
        core = Core(model, **options)
        yield Scene(f"seed {seed}", [core], partial(random_traffic, core, seed, wanted["chats"]))


def main(model: str, argument: str) -> None:
    audit.run(model, argument, scenes)


if __name__ == "__main__":
    main(*sys.argv[1:3])
