"""What holds a port that cannot be had: usually the gateway that a new one is to replace, or the worker itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx

from proxy.fleet.probe import gateway_id, version_in

ANSWER_SECONDS = 1.0

# In /proc/net/tcp and /proc/net/tcp6.
_LISTENING = "0A"


def holder_of(host: str, port: int) -> str:
    """As words for a sentence: "process 4242 (seamark), a Seamark gateway"; empty if nothing can be told."""
    return ", ".join(filter(None, (_process_at(port), _server_at(host, port))))


def _process_at(port: int) -> str:
    """The process that listens there; empty if that is another user's, or this system does not tell."""
    names: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    names.add(f"socket:[{rest[5]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*") if names else ():
        with suppress(OSError):  # it has ended or is another user's
            if str(link.readlink()) in names:
                process = link.parent.parent
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _server_at(host: str, port: int) -> str:
    """What its answers show it to be; empty if it is none that Seamark knows."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with suppress(httpx.HTTPError, httpx.InvalidURL), httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client:
        if gateway_id(client.get(url + "/health").content) is not None:
            return "a Seamark gateway"
        if version := version_in(client.get(url + "/version").content):
            return f"vLLM {version}"
    return ""
