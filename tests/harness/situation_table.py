"""What the scheduler has to do in each situation: `tests/data/situations.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parents[1] / "data/situations.yaml").read_text())


def differences(audited: dict[str, Any]) -> list[str]:
    """What the audit of situations finds wrong, and what differs from the table, a line each."""
    shown = audited["played"]
    names = [name for name in {**EXPECTED, **shown} if shown.get(name) != EXPECTED.get(name)]
    return [*audited["errors"], *(f"{name}: {shown.get(name)}, expected {EXPECTED.get(name)}" for name in names)]
