"""The console script. Each half is imported only by its own commands, so either works where the other is missing."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple


class Command(NamedTuple):
    module: str  # has main(argv) -> exit status
    summary: str


COMMANDS = {
    "serve": Command("proxy.serve", "the gateway"),
    "key": Command("proxy.key_command", "a new API key for the gateway, and its entry in the keys file"),
    "worker": Command("engine_patches.worker", "a vLLM server with the patches and the flags they need"),
    "model": Command("engine_patches.model", "write a small random hybrid model"),
    "boundary": Command("proxy.boundary_command", "where the shared part of a chat request ends, as JSON"),
    "doctor": Command("proxy.doctor", "whether a worker's patches are live, and what to change"),
    "gpu-check": Command("engine_patches.gpu_check", "whether this machine's GPU answers exactly from the cache"),
    "bench": Command("proxy.bench", "stories against real engines, measured side by side"),
}


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    command = COMMANDS[arguments[0]]
    return importlib.import_module(command.module).main(arguments[1:])


def usage() -> str:
    """One line per command."""
    width = max(map(len, COMMANDS))
    lines = [f"  seamark {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "usage: seamark COMMAND ...\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
