"""What the system lets this process have, memory and descriptors, and settings that fit into it.

Each client takes two descriptors: its connection, and one to a worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

from proxy.settings import Settings

# What a container may have: control groups of version 2, then of version 1.
GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

PROCESS = Path("/proc/self/statm")  # pages: of the address space, and resident

# What the program takes from here on: of its resident size, and of its address space, in which the allocator reserves
# 64 MiB for each of five threads.
LOADED_BYTES = 32 * 2**20
RESERVED_BYTES = 5 * 64 * 2**20

# Bounds of what is kept. They get a quarter of what is left, and connections another one. The rest is for copies while
# a body is read and sent, and for what the allocator does not give back.
BOUNDS = ("max_bodies_bytes", "memory_bytes", "text_bytes")
SHARE = 0.25

CONNECTION_BYTES = 2**18  # of a client that sends a large body: what has been read and not been taken yet

# glibc's name for a setting (mallopt(3)), and what it is set to, in bytes.
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 2**20

# For what is no client's: listeners, files, Redis, the gateway's own requests, its pages, connections that are refused.
RESERVED = 64

# Connections beyond the limit that are read, so that health checks pass and a refusal says why; part of the reserve.
SPARE = 24


def give_large_blocks_back() -> None:
    """Let the allocator give blocks of a megabyte and more back to the system as soon as they are freed.

    glibc raises its limit for blocks of their own to the largest one ever freed, up to 32 MiB: from then on large
    bodies lie in its heap between small objects. A limit that was set stays.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def fitted(settings: Settings) -> Settings:
    """The settings, with smaller bounds of memory if this process may have less than they allow."""
    left = room()
    wanted = sum(getattr(settings, name) for name in BOUNDS)
    if left is None or wanted <= left * SHARE:
        return settings
    bounds = {name: max(1, round(getattr(settings, name) * left * SHARE / wanted)) for name in BOUNDS}
    if not settings.text_bytes:
        bounds["text_bytes"] = 0
    bounds["max_body_bytes"] = min(settings.max_body_bytes, bounds["max_bodies_bytes"])
    connections = max(1, round(left * SHARE) // CONNECTION_BYTES)
    bounds["max_connections"] = min(settings.max_connections or connections, connections)
    return settings.model_copy(update=bounds)


def room() -> int | None:
    """Bytes that this process may have beside what it has; None if there is no limit, or no way to know it."""
    try:
        size, resident = (int(pages) * resource.getpagesize() for pages in PROCESS.read_text().split()[:2])
    except (OSError, ValueError):
        return None
    limits = []
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - size - RESERVED_BYTES)
    for path in GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            limits.append(int(path.read_text()) - resident - LOADED_BYTES)
    return max(0, min(limits)) if limits else None


def raise_descriptor_limit() -> None:
    """Have as many descriptors as the system lets this process have (`ulimit -Hn`)."""
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
