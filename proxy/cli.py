"""The console script. Each half is imported only by its own commands, so either works where the other is missing."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple


class Command(NamedTuple):
    module: str  # has main(argv) -> exit status
    summary: str


COMMANDS = {
    "serve": Command("proxy.commands.serve", "the gateway"),
    "key": Command("proxy.commands.key", "a new API key for the gateway, and its entry in the keys file"),
    "worker": Command("engine_patches.commands.worker", "a vLLM server with the patches and the flags they need"),
    "model": Command("engine_patches.commands.model", "write a small random hybrid model"),
    "boundary": Command("proxy.commands.boundary", "where the shared part of a chat request ends, as JSON"),
    "doctor": Command("proxy.commands.doctor", "whether a worker's patches are live, and what to change"),
    "gpu-check": Command(
        "engine_patches.gpu_check.command", "whether this machine's GPU answers exactly from the cache"
    ),
    "bench": Command("proxy.bench.menu", "stories against real engines, measured side by side"),
}


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    command = COMMANDS[arguments[0]]
    return importlib.import_module(command.module).main(arguments[1:])


FIRST_HIT = """\
First hit, with a vLLM of your own (0.31 to 0.33):
  pip install --no-deps /path/to/seamark                 into vLLM's environment, and there:
  seamark worker --model MODEL --port 8000 -- ...        vLLM with the plugin, its own flags after --
  pip install /path/to/seamark                           into an environment of the gateway's own, and there:
  seamark serve --worker http://127.0.0.1:8000           the gateway; base_url is http://127.0.0.1:8080/v1
  seamark doctor --worker http://127.0.0.1:8000          what is missing, and what to change

Beside a vLLM that runs already, changing nothing: what does it lose?
  seamark serve --worker http://127.0.0.1:8000 --shadow
  seamark doctor --worker http://127.0.0.1:8000 --gateway http://127.0.0.1:8080

Without a GPU, to try it: `make demo` in the source; or ./set-up.sh there makes a .venv with vLLM's CPU build, and then
  .venv/bin/seamark model --out DIR; .venv/bin/seamark worker --model DIR --port 8000

Every setting of `seamark serve` is a flag, a variable SEAMARK_<NAME>, or a line of a TOML file (--config).
The gateway's pages: /ui, /metrics, /seamark/status, /seamark/requests/{x-request-id} (why a request hit or missed).
Two answers with one system prompt: x-seamark-cached of the second says how many of its tokens were not computed."""


def usage() -> str:
    """One line per command, and the ways to a first hit."""
    width = max(map(len, COMMANDS))
    lines = [f"  seamark {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: seamark COMMAND ...      seamark COMMAND --help tells its flags", "", *lines, "", FIRST_HIT]
    )


if __name__ == "__main__":
    sys.exit(main())
