"""Which Seamark is installed. The console script says it, too, and may import next to nothing for that."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "vllm-seamark"


def version() -> str:
    """Version of the installed distribution, "unknown" when run from a bare copy."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
