"""What the scheduler has to do in each situation: `tests/data/situations.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parents[1] / "data/situations.yaml").read_text())


def differences(shown: dict[str, dict[str, Any]]) -> list[str]:
    """What differs from the table, a line each; errors of the audit included."""
    lines = []
    for name in {**EXPECTED, **shown}:
        found = dict(shown.get(name, {}))
        errors = found.pop("errors", [])
        if errors or found != EXPECTED.get(name):
            lines.append(f"{name}: {errors or found}, expected {EXPECTED.get(name)}")
    return lines
