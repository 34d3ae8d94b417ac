"""`python -m engine_patches worker|model|patches|gpu-check`: the plugin's commands, without the gateway."""

from __future__ import annotations

import sys

from engine_patches.commands import model, worker
from engine_patches.gpu_check import command


def print_patches(argv: list[str]) -> int:
    """Print the ledger, a paragraph for each patch."""
    if argv:
        print("usage: python -m engine_patches patches", file=sys.stderr)
        return 0 if argv in (["-h"], ["--help"]) else 2
    from engine_patches.patches import PATCHES

    for patch in PATCHES:
        print(f"{patch.name} ({patch.role.value})\n  target    {patch.target}\n  why       {patch.why}")
        print(f"  upstream  {patch.upstream}\n  until     {patch.until}\n")
    return 0


COMMANDS = {"worker": worker.main, "model": model.main, "patches": print_patches, "gpu-check": command.main}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m engine_patches {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 0 if argv in (["-h"], ["--help"]) else 2
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
