"""What an engine did between two moments, read from outside: forward passes."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from proxy.bench.harness.client import TimedAnswer

LOG_SECONDS = 10.0

_ITERATION = re.compile(
    rb"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, \d+ generation requests, (\d+)"
)


class Passes(NamedTuple):
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
        self._offset = self._log.stat().st_size

    def after(self, answers: Sequence[TimedAnswer]) -> Passes:
        """Passes since `restart`, once the log accounts for all tokens of `answers`, else `TimeoutError`; restarts."""
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
        return Passes(sum(map(bool, prompts)), sum(prompts), sum(map(sum, counts)))
