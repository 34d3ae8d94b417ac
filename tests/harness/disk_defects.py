"""Disks that are never slower than computing, however busy the machine: vLLM plugins for test engines only."""

from __future__ import annotations

import itertools


def loads_always_pay() -> None:
    """Let everything be loaded that can be."""
    from engine_patches.disk.load_cost import LoadCost

    LoadCost.pays = lambda self, num_bytes, prefill_seconds: True


def every_other_load_pays() -> None:
    """Let one load be declined, the next one made, and so on."""
    from engine_patches.disk.load_cost import LoadCost

    pays = itertools.cycle((False, True))
    LoadCost.pays = lambda self, num_bytes, prefill_seconds: next(pays)
