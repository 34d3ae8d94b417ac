"""Ports for servers that Seamark starts itself."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
