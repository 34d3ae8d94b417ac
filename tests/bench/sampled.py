"""`python -m MODULE ...` with samples of what it spends CPU time on: `python -m tests.bench.sampled FILE MODULE ...`.

SIGUSR1 starts counting, SIGUSR2 ends it and writes to FILE how many samples fell on each stage. The kernel's timer runs
with the process's CPU time, user and system, so that waiting costs nothing; a sample belongs to the innermost frame
that says whose work it is.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

SECONDS = 0.001  # of CPU time between two samples; the kernel may take its own tick instead

SOCKETS, CLIENT_SIDE, WORKER_SIDE = "sockets, event loop", "HTTP to the client", "HTTP to the worker"

JSON, KEYS, ROUTING = "JSON", "chat, keys, boundaries", "index, routing, slot"

ACCOUNTING, PASSING = "accounting, metrics", "passing on"

# Of functions that do little else than call the system.
_CALLS = frozenset({"_writelines", "_is_closed", "run_forever", "sock_sendall"})

# By a part of the file's path; the first that fits. Files that both sides of aiohttp use are not among them.
_FILES = (
    ("proxy/server/", CLIENT_SIDE),
    ("proxy/http/asgi.py", CLIENT_SIDE),
    ("/uvicorn/", CLIENT_SIDE),
    ("/aiohttp/web", CLIENT_SIDE),
    ("proxy/http/client.py", WORKER_SIDE),
    ("/aiohttp/client", WORKER_SIDE),
    ("/aiohttp/connector.py", WORKER_SIDE),
    ("/aiohttp/payload.py", WORKER_SIDE),
    ("proxy/http/json_body.py", JSON),
    ("/json/", JSON),
    ("proxy/chat/", KEYS),
    ("proxy/boundaries/", KEYS),
    ("proxy/pipeline/prompt_reader.py", KEYS),
    ("proxy/routing/", ROUTING),
    ("proxy/fleet/", ROUTING),
    ("proxy/pipeline/dispatch.py", ROUTING),
    ("proxy/pipeline/accounting.py", ACCOUNTING),
    ("proxy/observability/", ACCOUNTING),
    ("/prometheus_client/", ACCOUNTING),
    ("proxy/idle_work.py", ACCOUNTING),
    ("proxy/", PASSING),
    ("tests/bench/bare_proxy.py", PASSING),
    ("/asyncio/", SOCKETS),
)

STAGES = (SOCKETS, CLIENT_SIDE, WORKER_SIDE, JSON, KEYS, ROUTING, ACCOUNTING, PASSING)


def stage_of(files: list[tuple[str, str]]) -> str:
    """The stage of a stack, innermost frame first, each as its file and its function."""
    if files and (
        files[0][1] in _CALLS or (files[0][0].endswith("proxy/server/connection.py") and files[0][1] == "write")
    ):
        return SOCKETS
    for path, _ in files:
        for part, stage in _FILES:
            if part in path:
                return stage
    return SOCKETS


def main() -> None:
    target, module = Path(sys.argv[1]), sys.argv[2]
    counts: Counter[str] = Counter()

    def sampled(number: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        counts[stage_of(stack)] += 1

    def begin(number: int, frame: FrameType | None) -> None:
        counts.clear()
        signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)

    def end(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write_text(json.dumps(counts))

    signal.signal(signal.SIGPROF, sampled)
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
