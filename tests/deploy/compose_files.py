"""The compose files of deploy/ as data: which go together, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

BASE = "compose.yaml"

# The sets of files that a user can run together.
EVERY_WAY = (
    (BASE,),
    (BASE, "compose.cpu.yaml"),
    (BASE, "compose.beside.yaml"),
    (BASE, "compose.checkpoints.yaml"),
    (BASE, "compose.two-models.yaml"),
    (BASE, "compose.two-sparks.yaml"),
    (BASE, "compose.one-model-two-sparks.yaml"),
    (BASE, "compose.prefill-decode.yaml"),
)

# What has no default, because it is the user's own network: needed by the overlays for two Sparks.
OF_THE_USER = {"SECOND_SPARK": "192.168.100.11", "FIRST_SPARK": "192.168.100.10", "CONNECTX_INTERFACE": "enp1s0f1np1"}

_LINE = re.compile(r"#?([A-Z][A-Z0-9_]*)=(.*)")


def example() -> dict[str, str]:
    """The variables of .env.example, whether they stand there for use or as a default."""
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    return {match[1]: match[2] for match in map(_LINE.fullmatch, lines) if match}


def read(name: str) -> dict[str, Any]:
    """A compose file, with `!reset` and merge keys resolved."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!reset", lambda loader, node: None)
    return yaml.load((DEPLOY / name).read_text(), Loader)  # noqa: S506 (a SafeLoader that knows one tag more)
