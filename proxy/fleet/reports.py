"""Where what a worker's engines report is read: its metrics and its events.

The plugin's middleware gives them at the worker's own address. Where there is none (vLLM's frontend in Rust, a `vllm
serve` without the flag), the process that started the engines does, at a port that vLLM's own routes tell: `/metrics`
of a Python frontend in a label, `/kv_event_sources` of every one. Of what they tell, only the port is believed: no
worker sends the gateway to another machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from proxy.config_files import LOOPBACK

SOURCES = "/kv_event_sources"

TOPIC = "seamark"  # how the plugin names itself in vLLM's list of KV event publishers


@dataclass(frozen=True)
class Reports:
    """Where they are read."""

    url: str = ""  # base URL; empty: nowhere
    ranks: tuple[int, ...] = ()  # of the engines behind the worker's one address; empty if there is one
    why_not: str = ""  # if nowhere, and the worker shows that it has the plugin
    looked_at: str = ""  # HOST:PORT beside those of KV events, if nowhere, and it does not show it


NOWHERE = Reports()


@dataclass(frozen=True)
class Told:
    """What a worker's route `SOURCES` tells."""

    at: str = ""  # HOST:PORT of the reports; empty: it names none
    beside: str = ""  # HOST:PORT where they are if KV events are on: the port before that of the events
    ranks: tuple[int, ...] = ()


def read_sources(answer: bytes) -> Told:
    """What an answer of `SOURCES` tells; nothing for what is none."""
    try:
        sources = {int(rank): source for rank, source in json.loads(answer).items() if isinstance(source, Mapping)}
    except (ValueError, AttributeError, RecursionError):
        return Told()
    ours = [source for source in sources.values() if source.get("topic") == TOPIC]
    ranks = tuple(sorted(sources)) if len(sources) > 1 else ()
    if ours:
        return Told(_host_and_port(ours[0]), ranks=ranks)
    theirs = [each for each in map(_host_and_port, sources.values()) if each]
    if not theirs:
        return Told(ranks=ranks)
    host, _, port = min(theirs, key=lambda each: int(each.rpartition(":")[2])).rpartition(":")
    return Told(beside=f"{host}:{int(port) - 1}", ranks=ranks)


def base_url(worker: str, at: str) -> str:
    """The base URL of the reports of a worker that reads them out at `at`, HOST:PORT; `worker`: its own base URL.

    Raises `ValueError` with the reason if they cannot be read from here.
    """
    told_host, _, port = at.rpartition(":")
    host = urlsplit(worker).hostname or ""
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"it names no port: {at[:64]!r}")
    if told_host.strip("[]") in LOOPBACK and host not in LOOPBACK:
        raise ValueError(
            f"they are read on its own machine alone (at {told_host}:{port}); SEAMARK_REPORTS_AT=0.0.0.0:PORT in "
            "vLLM's environment opens them"
        )
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _host_and_port(source: Mapping[str, Any]) -> str:
    """Of an endpoint as `tcp://*:5557`; empty if it has none."""
    endpoint = str(source.get("endpoint") or "")
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"{host}:{port}" if colon and port.isascii() and port.isdecimal() and len(port) <= 5 else ""
