"""What a server did between two moments, read from outside: CPU time, forward passes, and its own metrics.

Linux keeps CPU time in nanoseconds for each process, threads that have ended included; `/proc/PID/stat` has it only in
ticks of 10 ms. It is read through the process's clock, so the server does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from proxy.bench.harness.client import TimedAnswer
from proxy.bench.harness.servers import Server

POLL_SECONDS = 0.004

QUIET_SECONDS = 0.0003  # of CPU time in one poll; an idle server uses less

SETTLE_SECONDS = 10.0

LOG_SECONDS = 10.0

_ITERATION = re.compile(
    rb"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, \d+ generation requests, (\d+)"
)


class CpuTime:
    """The CPU time of the process `pid` and of its descendants at this moment, a server that is ready."""

    def __init__(self, pid: int) -> None:
        self._pids = family(pid)
        self._clocks = [_clock(process) for process in self._pids]

    def seconds(self) -> float:
        """CPU seconds so far, user and system. Raises `OSError` when one of the processes has ended."""
        return sum(map(time.clock_gettime_ns, self._clocks)) / 1e9

    async def settled(self) -> float:
        """The same once the server has finished what it does after an answer. Raises `TimeoutError` if it never has."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before = self.seconds()
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            now = self.seconds()
            # On a crowded machine a server that waits for a processor looks quiet too.
            if now - before < QUIET_SECONDS and not any(map(_is_runnable, self._pids)):
                return now
            before = now
        raise TimeoutError("the server never came to rest")

    async def reaches(self, seconds: float) -> None:
        """Return once that much has been used since the server started. Raises `TimeoutError` if it never is."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.seconds() < seconds:
            if time.monotonic() > deadline:
                raise TimeoutError("the server does nothing")
            await asyncio.sleep(POLL_SECONDS)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                children[_stat(folder).parent].append(int(folder.name))
    found = [pid]
    for process in found:
        found += children[process]
    return found


class _Stat(NamedTuple):
    state: str  # "R": running, or ready to
    parent: int


def _stat(folder: Path) -> _Stat:
    # The name in brackets may hold anything; state and parent come after its end.
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return _Stat(state, int(parent))


def _is_runnable(pid: int) -> bool:
    """Whether a thread of the process runs or waits for a processor."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if _stat(thread).state == "R":
                return True
    return False


def _clock(pid: int) -> int:
    """The clock id of another process's CPU time, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2


class Passes(NamedTuple):
    """Executions of the model."""

    all: int
    with_prompt: int  # those that computed prompt tokens
    prompt_tokens: int
    tokens: int  # computed, those of prompts and of answers


class PassCounter:
    """Counts an engine's passes by its log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0
        self.restart()

    def restart(self) -> None:
        """Begin to count here."""
        self._offset = self._log.stat().st_size

    def after(self, answers: Sequence[TimedAnswer]) -> Passes:
        """Passes since `restart`, once the log accounts for every token of `answers`; then restarts.

        Raises `TimeoutError` when the log never does.
        """
        # The last token of an answer is sampled, never computed.
        wanted = sum(answer.prompt_tokens - (answer.cached_tokens or 0) + len(answer.steps) - 1 for answer in answers)
        deadline = time.monotonic() + LOG_SECONDS
        while (passes := self.so_far()).tokens < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._log.name}: {passes.tokens} tokens computed of {wanted}")
            time.sleep(0.005)
        self.restart()
        return passes

    def so_far(self) -> Passes:
        """Passes since `restart` that the log names by now."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        counts = [(int(prompt), int(generated)) for prompt, generated in _ITERATION.findall(text)]
        prompts = [prompt for prompt, _ in counts]
        return Passes(len(counts), sum(map(bool, prompts)), sum(prompts), sum(map(sum, counts)))


async def samples_of(client: httpx.AsyncClient, server: Server) -> Mapping[str, float]:
    """By name, and by `name{label="value"}`, summed over all other labels; empty when the server does not answer."""
    found: defaultdict[str, float] = defaultdict(float)
    try:
        response = await client.get(server.url + "/metrics")
    except httpx.HTTPError:
        return found
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name] += sample.value
            for label, value in sample.labels.items():
                found[f'{sample.name}{{{label}="{value}"}}'] += sample.value
    return found
