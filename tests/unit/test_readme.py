"""The README names what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.cli import COMMANDS
from proxy.settings import Settings

README = (Path(__file__).parents[2] / "README.md").read_text()

# Set by outcome.reason itself, or carried through from the search for a boundary.
REASONS = set(
    re.findall(r'"(\w+)"', (Path(__file__).parents[2] / "proxy" / "observability" / "reasons.py").read_text())
) & {
    "cold",
    "evicted",
    "other_worker",
    "worker_restarted",
    "below_unit",
    "prefix_changed",
    "salt",
}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_described_with_its_default(name):
    row = next(line for line in README.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1])
    default = Settings.model_fields[name].get_default()
    if isinstance(default, float):
        default = f"{default:g}"
    elif isinstance(default, tuple):
        default = ",".join(default)
    assert name == "worker" or re.search(rf"\b{re.escape(str(default).lower())}\b", row)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_described(name):
    assert f"`seamark {name} " in README


@pytest.mark.parametrize("reason", sorted(REASONS | {"unpatched", "no_boundary", "render_failed"}))
def test_every_reason_is_described(reason):
    assert f"| `{reason}` |" in README
