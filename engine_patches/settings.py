"""The plugin's settings, from the environment: the engine's processes share nothing else."""

from __future__ import annotations

import logging
import os

MODE_VARIABLE = "SEAMARK_ENGINE"

FULL, REFERENCE, OFF = "1", "reference", "0"

DEFAULT_SHARE = 0.5  # of all cache blocks

logger = logging.getLogger("vllm.seamark")

FAN_OUT = "SEAMARK_FAN_OUT"  # 0: no request waits for another one's prefix

STATE_SHARE = "SEAMARK_STATE_SHARE"  # part of the cache's blocks that states may hold, 0..1

CHUNK_ENDS = "SEAMARK_CHUNK_ENDS"  # 1: states only at the ends of a kernel's chunks; 0: on any match unit

DRAFTS = "SEAMARK_DRAFTS"  # 1: hints are used beside speculative decoding, too


def drafts() -> bool:
    """Whether hints are used beside speculative decoding."""
    return _switch(DRAFTS, False)


def fan_out() -> bool:
    """Whether requests may wait for a prefix that another one computes."""
    return _switch(FAN_OUT, True)


def chunk_ends(default: bool) -> bool:
    """Whether states are placed only at the ends of the kernel's chunks."""
    return _switch(CHUNK_ENDS, default)


def state_share() -> float:
    """Part of the cache's blocks that states may hold."""
    value = os.environ.get(STATE_SHARE, "").strip()
    try:
        share = float(value) if value else DEFAULT_SHARE
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        logger.error("seamark: %s=%r is not a number in (0, 1]; %s is used", STATE_SHARE, value, DEFAULT_SHARE)
        return DEFAULT_SHARE
    return share


def _switch(name: str, default: bool) -> bool:
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        logger.error("seamark: %s=%r is neither 0 nor 1; %d is used", name, value, default)
    return {"0": False, "1": True}.get(value, default)
