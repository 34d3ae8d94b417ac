"""The audit of vLLM's scheduler as it is: no connector, no adapters, no drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.harness.audit import Core, Scene, random_traffic


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: arguments of `Core`."""
    for seed in wanted["seeds"]:
        core = Core(model, **options)
        yield Scene(f"seed {seed}", [core], partial(random_traffic, core, seed, wanted["chats"]))
