"""The table of situations: what the scheduler does in each, on the installed vLLM. Read it as the specification.

`hit`: tokens found in the cache; `ends`: where the prompt's chunks end; `written`: positions whose states the step was
asked to write; `keys`: where a later request could enter afterwards. Block 64, match unit 16 tokens.
"""

from __future__ import annotations

from typing import Any

EXPECTED: dict[str, dict[str, Any]] = {
    "a prompt shorter than a block": {"r0": {"hit": 0, "ends": [50], "written": [32, 48], "keys": [32, 48]}},
    "several boundaries over several blocks in one pass": {
        "r0": {"hit": 0, "ends": [250], "written": [32, 64, 128, 192, 240], "keys": [32, 64, 128, 192, 240]}
    },
    "no hint": {"r0": {"hit": 0, "ends": [250], "written": [192, 240], "keys": [192, 240]}},
    "a budget below the prompt": {
        "r0": {"hit": 0, "ends": [96, 192, 250], "written": [32, 64, 128, 240], "keys": [32, 64, 128, 192, 240]}
    },
    "a boundary where a chunk ends": {
        "r0": {"hit": 0, "ends": [96, 192, 250], "written": [64, 96], "keys": [64, 96, 192]}
    },
    "a budget below the match unit": {
        "r0": {"hit": 0, "ends": [10, 16, 26, 32, 42, 48, 58, 64, 70], "written": [32], "keys": [32, 64]}
    },
    "a boundary at and around the prompts end": {
        "r0": {"hit": 0, "ends": [127], "written": [64, 112], "keys": [64, 112]},
        "r1": {"hit": 112, "ends": [128], "written": [], "keys": [64, 112, 128]},
        "r2": {"hit": 128, "ends": [129], "written": [], "keys": [64, 112, 128]},
    },
    "boundaries at and around a block edge": {
        "r0": {"hit": 0, "ends": [100], "written": [48, 64], "keys": [48, 64]},
        "r1": {"hit": 0, "ends": [100], "written": [64], "keys": [64]},
        "r2": {"hit": 0, "ends": [100], "written": [64], "keys": [64]},
    },
    "a warm start inside a block runs past its edge": {
        "a": {"hit": 0, "ends": [50], "written": [48], "keys": [48]},
        "b": {"hit": 48, "ends": [248], "written": [192, 240], "keys": [48, 192, 240]},
        "c": {"hit": 48, "ends": [57], "written": [], "keys": [48]},
    },
    "the same prompt again": {
        "r0": {"hit": 0, "ends": [130], "written": [96, 128], "keys": [96, 128]},
        "r1": {"hit": 128, "ends": [130], "written": [], "keys": [96, 128]},
    },
    "the same prompt twice in one step": {
        "a": {"hit": 32, "ends": [59], "written": [], "keys": [32]},
        "b": {"hit": 32, "ends": [59], "written": [], "keys": [32]},
        "c": {"hit": 32, "ends": [122], "written": [64, 112], "keys": [32, 64, 112]},
        "d": {"hit": 32, "ends": [122], "written": [], "keys": [32, 64, 112]},
    },
    "rows evicted and their state kept": {
        "b": {"hit": 0, "ends": [50], "written": [], "keys": [32]},
        "c": {"hit": 0, "ends": [50], "written": [], "keys": [32]},
    },
    "rows of the second attention group evicted": {
        "b": {"hit": 0, "ends": [50], "written": [], "keys": [32]},
        "c": {"hit": 0, "ends": [50], "written": [], "keys": [32]},
    },
    "one recurrent group evicted": {
        "r1": {"hit": 64, "ends": [120], "written": [96], "keys": [64, 96]},
        "r2": {"hit": 96, "ends": [120], "written": [], "keys": [64, 96]},
    },
    "a conversation moves on": {
        "r0": {"hit": 0, "ends": [130], "written": [96, 112, 128], "keys": [96, 112, 128]},
        "r1": {"hit": 128, "ends": [210], "written": [192], "keys": [96, 112, 128, 192, 208]},
        "r2": {"hit": 192, "ends": [300], "written": [208, 256, 288], "keys": [96, 112, 128, 192, 208, 256, 288]},
    },
    "bad hints": {
        "written": [
            [64, 96],
            [64, 96],
            [64, 96],
            [64, 96],
            [64, 96],
            [64, 96],
            [64, 96],
            [96],
            [64, 96],
            [64, 96],
            [64, 96],
            [64, 96],
        ],
        "ignored": {"below_unit": 1, "malformed": 6, "not_found": 1, "out_of_range": 3},
    },
    "entries of all kinds": {
        "written": [[192, 224], [48, 192, 240], [192, 224], [144, 192, 240], [192, 240], [16, 48, 192, 224, 240]],
        "resolved": [[239], [63], [239], [156], [0, 0], [239, 240, 63, 16, 240]],
        "ignored": {"not_found": 2},
    },
    "a prefix is shared and no hint says so": {
        "r0": {"hit": 0, "ends": [256, 450], "written": [448], "keys": [144, 256, 448]},
        "r1": {"hit": 0, "ends": [256, 450], "written": [144, 448], "keys": [144, 256, 448]},
        "r2": {"hit": 144, "ends": [400, 450], "written": [384, 448], "keys": [144, 384, 448]},
        "r3": {"hit": 0, "ends": [256, 450], "written": [448], "keys": [256, 448]},
        "shared": [0, 144, 144, 0],
    },
    "a hint misses what is shared": {
        "r0": {"hit": 0, "ends": [256, 470], "written": [448, 464], "keys": [144, 256, 448, 464]},
        "r1": {"hit": 0, "ends": [256, 470], "written": [144, 448, 464], "keys": [144, 256, 448, 464]},
        "r2": {"hit": 144, "ends": [400, 470], "written": [384, 448, 464], "keys": [144, 384, 448, 464]},
    },
    "the first to leave a prompt between its states": {
        "r0": {"hit": 0, "ends": [250], "written": [32, 192, 240], "keys": [32, 192, 208, 240]},
        "r1": {"hit": 192, "ends": [230], "written": [208], "keys": [32, 192, 208]},
    },
    "two salts": {
        "r0": {"hit": 0, "ends": [130], "written": [96, 128], "keys": [96, 128]},
        "r1": {"hit": 0, "ends": [130], "written": [96, 128], "keys": [96, 128]},
    },
    "aborted in the middle of its prefix": {
        "a": {"hit": 0, "ends": [64], "written": [], "keys": [64, 128, 192, 240]},
        "b": {"hit": 64, "ends": [128, 192, 250], "written": [240], "keys": [64, 128, 192, 240]},
    },
    "a follower waits for its leader": {
        "a": {"hit": 0, "ends": [64, 128, 192, 220], "written": [], "keys": [64, 128, 192]},
        "b": {"hit": 192, "ends": [220], "written": [], "keys": [64, 128, 192]},
        "c": {"hit": 0, "ends": [8, 20], "written": [], "keys": []},
        "order": ["a", "b", "c"],
    },
    "the leader is aborted": {
        "a": {"hit": 0, "ends": [64, 128], "written": [], "keys": [64, 128, 192]},
        "b": {"hit": 128, "ends": [192, 220], "written": [], "keys": [64, 128, 192]},
        "held": True,
    },
    "a follower has waited long enough": {
        "a": {"hit": 0, "ends": [64, 128, 192, 250], "written": [240], "keys": [64, 128, 192, 240]},
        "b": {"hit": 240, "ends": [260], "written": [256], "keys": [64, 128, 192, 240, 256]},
    },
    "waiting does not pay": {
        "a": {"hit": 0, "ends": [210], "written": [160, 192], "keys": [160, 192]},
        "b": {"hit": 0, "ends": [210], "written": [192], "keys": [160, 192]},
        "c": {"hit": 0, "ends": [210], "written": [192], "keys": [160, 192]},
        "d": {"hit": 0, "ends": [210], "written": [192], "keys": [160, 192]},
    },
    "a cache with no block to spare": {
        "r0": {"hit": 0, "ends": [190], "written": [], "keys": []},
        "r1": {"hit": 0, "ends": [190], "written": [], "keys": []},
        "no_room": True,
        "why": "hint_ignored",
    },
    "preempted in the very step it was planned for": {
        "low": {"hit": 0, "ends": [250], "written": [128, 192, 240, 128, 240], "keys": [448, 512]},
        "high": {"hit": 0, "ends": [150], "written": [128], "keys": []},
        "preempted": True,
    },
    "the next step is planned before the last is known": {
        "a": {"hit": 0, "ends": [96, 190], "written": [64, 128], "keys": [64, 128, 192, 256]},
        "b": {"hit": 0, "ends": [4, 10, 96, 190], "written": [], "keys": [64, 128, 192, 256]},
    },
    "steps over single tokens": {
        "a": {
            "hit": 0,
            "ends": list(range(1, 21)),
            "written": [],
            "keys": [],
        },
        "ignored": 1,
    },
    "a follower is aborted while it waits": {
        "a": {"hit": 0, "ends": [64, 128, 192, 220], "written": [], "keys": [64, 128, 192]},
        "held": ["b"],
        "held afterwards": [],
    },
    "the cache is emptied while a step writes states": {
        "emptied": True,
        "a": {"hit": 0, "ends": [130, 130], "written": [32, 96, 128, 32, 96, 128], "keys": [32, 96, 128]},
    },
    "a connector looks up in its own way": {
        "b": {"hit": 0, "ends": [50], "written": [], "keys": [32]},
        "c": {"hit": 0, "ends": [50], "written": [], "keys": [32]},
    },
    "a backend that cannot be run in segments": {
        "a": {"hit": 0, "ends": [128, 192, 240, 250], "written": [], "keys": [128, 192, 240]}
    },
}


def differences(shown: dict[str, dict[str, Any]]) -> list[str]:
    """What differs from the table, a line each; errors of the audit included."""
    lines = []
    for name in {**EXPECTED, **shown}:
        found = dict(shown.get(name, {}))
        errors = found.pop("errors", [])
        if errors or found != EXPECTED.get(name):
            lines.append(f"{name}: {errors or found}, expected {EXPECTED.get(name)}")
    return lines
