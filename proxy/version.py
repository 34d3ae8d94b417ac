"""Which Seamark this is. The console script says it, too, and may import next to nothing for that."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "vllm-seamark"
ROOT = Path(__file__).parents[1]


@cache
def version() -> str:
    """Of the source that this file lies in, while in development with the commit; else of what is installed.

    The commit is the last one in git's log of what was checked out. A bare copy is "unknown".
    """
    with suppress(OSError, ValueError):
        source = (ROOT / "pyproject.toml").read_text()
        (found,) = re.findall(rf'^name = "{DISTRIBUTION}"\nversion = "(.+)"$', source, re.M)
        with suppress(OSError, ValueError, IndexError):
            if (git := ROOT / ".git").is_file():  # of a worktree, or a submodule
                git = ROOT / git.read_text().partition(":")[2].strip()
            *_, last = (git / "logs/HEAD").read_text(errors="replace").splitlines()
            found += f"+g{last.split()[1][:9]}" if ".dev" in found else ""
        return str(found)
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(DISTRIBUTION)
    return "unknown"
