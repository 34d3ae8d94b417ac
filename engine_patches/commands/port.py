"""The port of a worker: vLLM says that one is taken, and names neither the port nor what holds it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_PORT = "8000"  # vLLM's


def port_of(given: Sequence[str], config: Mapping[str, Any] = {}) -> str:
    """The port in flags of vLLM, or else in the file of its `--config`; the last of several counts, as in vLLM."""
    port = str(config.get("port", DEFAULT_PORT))
    for number, argument in enumerate(given):
        name, equals, value = argument.partition("=")
        if name == "--port":
            port = value if equals else "".join(given[number + 1 : number + 2])
    return port


def why_taken(port: str) -> str:
    """Why nothing can listen at a port that is in use, in one sentence."""
    psutil: Any = importlib.import_module("psutil")  # vLLM brings it
    holder = "another process"
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and str(each.laddr.port) == port and each.pid:
                holder = f"process {each.pid} ({psutil.Process(each.pid).name()})"
    except psutil.Error:
        pass
    return f"port {port} is held by {holder}; --port N takes another"
