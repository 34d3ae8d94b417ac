"""How many clients fit into this process's descriptors: each has a connection of its own, and one to a worker."""

from __future__ import annotations

import contextlib
import resource
import sys

# For what is no client's: listeners, files, Redis, the gateway's own requests, its pages, connections that are refused.
RESERVED = 64

# Connections beyond the limit that are read, so that health checks pass and a refusal says why; part of the reserve.
SPARE = 24


def raise_limit() -> None:
    """Allow as many descriptors as the system lets this process have (`ulimit -Hn`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems forbid what they call their limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections(wanted: int) -> int:
    """Clients' connections at once: `wanted`, 0 for any number, or fewer if there are not enough descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = sys.maxsize
    fitting = max(1, (limit - RESERVED) // 2)
    return min(wanted, fitting) if wanted else fitting
