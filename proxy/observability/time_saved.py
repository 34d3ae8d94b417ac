"""Seconds of prefill that reuse saved, less those that the gateway spent for it.

Beside that stands what vLLM alone would have found of it at most: at its default it enters a prompt at ends of whole
cache blocks, and only where a request happened to stop. Where requests stopped is not known here, so it is a bound.

Tokens that are reused before their worker's engine has learnt its pace wait here, and count once the pace is known.
"""

from __future__ import annotations

from collections import Counter

from proxy.fleet.worker_metrics import StepTimes


class TimeSaved:
    """One per gateway."""

    def __init__(self) -> None:
        self.saved = 0.0  # seconds
        self.spent = 0.0  # seconds
        self.vllm_alone = 0.0  # seconds, of those saved: what vLLM alone would have found at most
        self._is_known = False
        self._waiting: Counter[tuple[str, str]] = Counter()  # tokens by worker and model
        self._waiting_alone: Counter[tuple[str, str]] = Counter()  # of these, the tokens in whole cache blocks

    @property
    def net(self) -> float | None:
        """Seconds saved less seconds spent; None while no worker's pace is known."""
        return self.saved - self.spent if self._is_known else None

    @property
    def waiting(self) -> int:
        """Reused tokens whose time is not known yet."""
        return self._waiting.total()

    def reused(self, worker: str, model: str, tokens: int, block_size: int = 1) -> None:
        """So many tokens of a prompt came from the cache of `worker`, whose blocks have `block_size` tokens."""
        if tokens:
            self._waiting[worker, model] += tokens
            self._waiting_alone[worker, model] += tokens // max(block_size, 1) * block_size

    def forget(self, worker: str) -> None:
        """The worker is gone, and its pace was never known."""
        for name, model in [each for each in self._waiting if each[0] == worker]:
            del self._waiting[name, model], self._waiting_alone[name, model]

    def settle(self, worker: str, step_times: StepTimes) -> dict[str, float]:
        """Count the tokens that wait for this worker's pace. Returns the seconds by model; none while it is unknown."""
        if not step_times.known:
            return {}
        self._is_known = True
        models = [model for name, model in self._waiting if name == worker]
        seconds = {model: step_times.seconds(self._waiting.pop((worker, model))) for model in models}
        self.saved += sum(seconds.values())
        self.vllm_alone += sum(step_times.seconds(self._waiting_alone.pop((worker, model))) for model in models)
        return seconds
