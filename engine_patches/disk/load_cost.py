"""What a load from disk takes, learnt from loads: a fixed part, and seconds for each byte. Times in seconds."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

# Loads remembered: enough for a median, few enough to follow a disk that others keep busy.
WINDOW = 32

# Until the engine knows its own: what a prompt token takes on a fast GPU, so that a slow disk is not waited for.
ASSUMED_TOKEN_SECONDS = 1e-4


class LoadCost:
    """Learns from finished loads, and from those that do not finish."""

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._due: dict[int, float] = {}  # job -> when it should be done

    def load_began(self, job: int, num_bytes: int) -> None:
        fixed, per_byte = self._learnt() if self._loads else (0.0, 0.0)
        self._due[job] = time.monotonic() + fixed + per_byte * num_bytes

    def load_ended(self, job: int) -> None:
        """It is done, or failed; nothing happens for other jobs."""
        self._due.pop(job, None)

    def load_took(self, num_bytes: int, seconds: float) -> None:
        """A load of `num_bytes` was done after `seconds`, waiting included."""
        if num_bytes > 0 and seconds > 0:
            self._loads.append((num_bytes, seconds))

    def seconds(self, num_bytes: int) -> float:
        """What a load of so many bytes is going to take; 0 for none, endless until a load was measured."""
        if not num_bytes:
            return 0.0
        if not self._loads:
            return math.inf
        fixed, per_byte = self._learnt()
        # A disk that is late with one load by so much, or hangs, will be as late with another.
        late = max(time.monotonic() - min(self._due.values()), 0.0) if self._due else 0.0
        return fixed + per_byte * num_bytes + late

    def pays(self, num_bytes: int, prefill_seconds: float) -> bool:
        """Whether loading so many bytes takes less time than the prefill that it saves."""
        return self.seconds(num_bytes) < prefill_seconds

    def _learnt(self) -> tuple[float, float]:
        # The slope between small and large loads; where all are of one size, the fixed part cannot be told apart.
        loads = sorted(self._loads)
        half = len(loads) // 2
        small, large = loads[: half or 1], loads[half:]
        small_bytes, large_bytes = (statistics.median(size for size, _ in each) for each in (small, large))
        small_time, large_time = (statistics.median(time for _, time in each) for each in (small, large))
        if large_bytes < 2 * small_bytes:
            return 0.0, statistics.median(time / size for size, time in loads)
        per_byte = max(large_time - small_time, 0.0) / (large_bytes - small_bytes)
        return max(small_time - per_byte * small_bytes, 0.0), per_byte
