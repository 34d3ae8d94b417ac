"""Forward passes of an engine, counted from the line its log has for each iteration."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from proxy.bench.client import Answer

_ITERATION = re.compile(
    rb"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, \d+ generation requests, (\d+)"
)
SETTLE_SECONDS = 10.0


class Passes(NamedTuple):
    """Executions of the model."""

    all: int
    with_prompt: int  # those that computed prompt tokens
    tokens: int


class PassCounter:
    """Counts what an engine does between two moments."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0
        self.restart()

    def restart(self) -> None:
        """Begin to count here."""
        self._offset = self._log.stat().st_size

    def after(self, answers: Sequence[Answer]) -> Passes:
        """Passes since `restart`, once the log accounts for every token of `answers`; then restarts.

        Raises `TimeoutError` when the log never does.
        """
        # The last token of an answer is sampled, never computed.
        wanted = sum(answer.prompt_tokens - (answer.cached_tokens or 0) + len(answer.steps) - 1 for answer in answers)
        deadline = time.monotonic() + SETTLE_SECONDS
        while (passes := self._read()).tokens < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._log.name}: {passes.tokens} tokens computed of {wanted}")
            time.sleep(0.005)
        self.restart()
        return passes

    def so_far(self) -> int:
        """Passes since `restart`, as far as the log tells."""
        return self._read().all

    def _read(self) -> Passes:
        with self._log.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        counts = [(int(prompt), int(generated)) for prompt, generated in _ITERATION.findall(text)]
        return Passes(len(counts), sum(prompt > 0 for prompt, _ in counts), sum(map(sum, counts)))
