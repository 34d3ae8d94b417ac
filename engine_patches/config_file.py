"""The file of vLLM's `--config`: its flags, a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_config(path: Path) -> dict[str, Any]:
    """The flags in a file of vLLM's `--config`, by name. Raises `ValueError` with the reason if it cannot be read."""
    import yaml  # vLLM brings it

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict):
        raise ValueError("it has no lines `flag: value`")
    return {str(name): value for name, value in content.items()}
