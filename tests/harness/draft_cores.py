"""The engine cores in which drafts are audited, and what they owe."""

from __future__ import annotations

from typing import Any

UNIT = 16  # tokens

# Where a draft head keeps its rows.
BESIDE_THE_TARGET = "in the target's attention group"  # vLLM's own heads for multi-token prediction
OWN_GROUP = "in an attention group of its own"
OWN_SHAPE = "in an attention group of its own, of another shape"
OWN_WINDOW = "in a group of its own with a sliding window"
UNKNOWN = "in no group that vLLM recognizes"  # it then takes all groups for the head's
NOWHERE = "no rows"  # n-grams

TIGHT = {"blocks": 60, "running": 4}

PREEMPTING = {"policy": "priority", "blocks": 40, "running": 4, "budget": 90}

# Arguments of `audit.Core` and `draft_audit.DraftWorker`.
CORES: list[dict[str, Any]] = [
    {},
    TIGHT,
    {"budget": 50},
    {"budget": 20},
    {"overlap": True},
    {"overlap": True, **TIGHT},
    {"drop": False},
    {"variable": True},
    {"head": NOWHERE},
    {"drafts": 1},
    {"drafts": 5, "budget": 50},
    {"attention_groups": 2},
    PREEMPTING,
    {"overlap": True, **PREEMPTING},
    {"context_ranks": 2},
    {"context_ranks": 2, "overlap": True, **TIGHT},
    {"index": UNIT},
    {"index": UNIT, "budget": 50},
    {"index": UNIT, "overlap": True, **TIGHT},
    {"index": UNIT, "overlap": True, **PREEMPTING, "blocks": 60},
    {"index": UNIT, "head": NOWHERE, "variable": True},
]

# The shapes that heads of other methods have: eagle3, dflash, dspark.
HEADS: list[dict[str, Any]] = [
    {"head": OWN_GROUP},
    {"head": OWN_GROUP, "overlap": True, **TIGHT},
    {"head": OWN_SHAPE},
    {"head": OWN_SHAPE, "overlap": True, **TIGHT},
    {"head": OWN_SHAPE, "drop": False},
    {"head": OWN_SHAPE, "fills_in": True},
    {"head": OWN_GROUP, "fills_in": True, "overlap": True, **TIGHT},
    {"head": UNKNOWN},
    {"head": UNKNOWN, "overlap": True, **TIGHT},
]

# A head with a window longer than a block, and one with a shorter one.
WINDOWS: list[dict[str, Any]] = [
    {"head": OWN_WINDOW, "window": window, **core}
    for window in (100, 40)
    for core in (
        {},
        TIGHT,
        {"budget": 50, "kv_events": "units"},
        {"budget": 20},
        {"overlap": True, "kv_events": "blocks"},
        {"overlap": True, **TIGHT},
        {"drop": False},
        {"drop": False, "fills_in": True, "overlap": True, **TIGHT},
        {"variable": True},
        {"drafts": 5, "budget": 50},
        PREEMPTING,
        {"overlap": True, **PREEMPTING},
        {"attention_groups": 2, "export": False},
        {"attention_groups": 12, "window_groups": 9, "blocks": 900},
        {"attention_groups": 3, "full_groups": 1, "overlap": True},
    )
]

HEALED = [160, 300]  # tokens that prompts have in common, before whose end the head's rows are evicted

ANSWERS = [138, 150]  # tokens generated before a preemption

FOREIGN_AT_MOST = 8  # of a window, in an audit

SHARED = [160, 163]  # tokens that prompts have in common


def expected_hits(core: dict[str, Any], shared: int, lookahead: int = 0) -> int:
    """Tokens that a sibling finds of `shared` ones. `lookahead`: tokens after a unit that its hash covers."""
    head_reads_on = core.get("drop", True) and core.get("head") != NOWHERE
    ahead = (lookahead or UNIT) if head_reads_on else 0
    return max(shared - ahead, 0) // UNIT * UNIT


def faults(found: dict[str, Any]) -> list[str]:
    """What is wrong with one core's audit, a line each."""
    core = found["core"]
    lines = [f"{core}: {error}" for error in found["errors"]]
    if not found["enabled"]:
        lines.append(f"{core}: hints are refused")
    # A window's last row on vLLM 0.32 is all that may be: its keys do not cover the token behind it.
    if found["foreign_rows"] > FOREIGN_AT_MOST * (core.get("head") == OWN_WINDOW) and core.get("drop", True):
        lines.append(f"{core}: {found['foreign_rows']} rows are made with another request's next token")
    return lines
