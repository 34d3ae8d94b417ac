"""`python -m engine_patches worker|model|patches|gpu-check`: the engine half's commands, without the gateway."""

from __future__ import annotations

import sys


def print_patches(argv: list[str]) -> int:
    """Print the ledger, a paragraph for each patch."""
    from engine_patches.patches import PATCHES

    for patch in PATCHES:
        print(f"{patch.name} ({patch.role.value})\n  target    {patch.target}\n  why       {patch.why}")
        print(f"  upstream  {patch.upstream}\n  until     {patch.until}\n")
    return 0


def main(argv: list[str]) -> int:
    from engine_patches.commands import model, worker
    from engine_patches.gpu_check import command

    commands = {
        "worker": worker.main,
        "model": model.main,
        "patches": print_patches,
        "gpu-check": command.main,
    }
    if not argv or argv[0] not in commands:
        print(f"usage: python -m engine_patches {{{','.join(commands)}}} ...", file=sys.stderr)
        return 2
    return commands[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
