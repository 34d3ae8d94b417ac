"""`python -m engine_patches worker|model|patches|gpu-check`: the plugin's commands, without the gateway.

An image that holds the plugin alone has them as `seamark`, too (deploy/worker.Dockerfile).
"""

from __future__ import annotations

import sys

from engine_patches.commands import model, patches, worker
from engine_patches.gpu_check import command
from engine_patches.version import DISTRIBUTION, version

COMMANDS = {"worker": worker.main, "model": model.main, "patches": patches.main, "gpu-check": command.main}

GATEWAY = "the gateway's commands are in its image, or: pip install /path/to/seamark in an environment of its own"


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] not in COMMANDS and not given[0].startswith("-"):
        print(f"seamark {given[0]}: only the plugin is here, with {', '.join(COMMANDS)}; {GATEWAY}", file=sys.stderr)
        return 2
    if given == ["--version"]:
        print(f"seamark {version()} ({DISTRIBUTION}, the plugin alone)")
        return 0
    if not given or given[0] not in COMMANDS:
        print(f"usage: python -m engine_patches {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 0 if given in (["-h"], ["--help"]) else 2
    try:
        return COMMANDS[given[0]](given[1:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
