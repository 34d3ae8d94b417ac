"""The trial of hints beside drafts, for a worker that has no gateway: a child process that asks the worker's own port.

The trial is the gateway's (`proxy/commands/draft_trial.py`), which this package does not import. The child ends by
itself, with the trial or with its parent. It has no pipe to anybody but the log, so that nothing waits for it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from engine_patches import settings

MODULE = "proxy.commands.draft_trial"

# Each begins a flag of vLLM that configures drafts.
DRAFT_FLAGS = ("speculative-config", "sc", "spec-method", "spec-model", "spec-tokens")

# Servers that listen elsewhere, or that only a client with their certificate's authority can ask: a gateway's to try.
NOT_OURS = ("headless", "uds", "ssl-keyfile", "ssl-certfile")

KEY_FLAG, KEY_VARIABLE = "api-key", "VLLM_API_KEY"

# Kept, so that nothing warns of a child that still runs.
_started: list[subprocess.Popen[bytes]] = []

EVERYWHERE = ("", "0.0.0.0", "::", "[::]")  # noqa: S104  # nothing is bound here


def flags_of(given: Sequence[str], config: Mapping[str, Any] = {}) -> dict[str, str]:
    """Flags of vLLM, without the dashes before them, and what is given with each; those of a `--config` file, too."""
    found = {str(name).replace("_", "-"): str(value) for name, value in config.items()}
    for number, argument in enumerate(given):
        if argument[:1] == "-":
            name, equals, value = argument.partition("=")
            following = "".join(given[number + 1 : number + 2])
            found[name.partition(".")[0].lstrip("-").replace("_", "-")] = value if equals else following
    return found


def drafts(given: Sequence[str], config: Mapping[str, Any] = {}) -> bool:
    """Whether these flags have vLLM draft."""
    return not flags_of(given, config).keys().isdisjoint(DRAFT_FLAGS)


def command(given: Sequence[str], config: Mapping[str, Any], port: str) -> list[str] | None:
    """What starts the trial of a worker with these flags; None if there is nothing to try, or not from here."""
    flags = flags_of(given, config)
    off = os.environ.get(settings.MODE_VARIABLE, settings.FULL).strip() != settings.FULL
    if off or settings.drafts() != settings.AUTO or not drafts(given, config) or not flags.keys().isdisjoint(NOT_OURS):
        return None
    if importlib.util.find_spec("proxy") is None or importlib.util.find_spec("aiohttp") is None:
        return None  # only the plugin is installed here
    host = flags.get("host", "").strip("[]")
    host = settings.LOOPBACK if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    return [sys.executable, "-m", MODULE, "--worker", f"http://{host}:{port}", "--parent", str(os.getpid())]


def start(given: Sequence[str], config: Mapping[str, Any], port: str) -> None:
    """Start it, if there is something to try. Nothing of it can keep the worker from starting."""
    words = command(given, config, port)
    if words is None:
        return
    environment = dict(os.environ)
    if key := flags_of(given, config).get(KEY_FLAG):
        environment[KEY_VARIABLE] = key
    try:
        _started.append(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    except OSError as error:
        print(f"seamark worker: hints beside drafts stay on trial until a gateway tries them: {error}", file=sys.stderr)
