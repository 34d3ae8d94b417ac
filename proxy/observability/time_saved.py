"""Seconds of prefill that reuse saved, less those that the gateway spent for it.

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
        self._is_known = False
        self._waiting: Counter[tuple[str, str]] = Counter()  # tokens by worker and model

    @property
    def net(self) -> float | None:
        """Seconds saved less seconds spent; None while no worker's pace is known."""
        return self.saved - self.spent if self._is_known else None

    @property
    def waiting(self) -> int:
        """Reused tokens whose time is not known yet."""
        return self._waiting.total()

    def reused(self, worker: str, model: str, tokens: int) -> None:
        """So many tokens of a prompt came from the cache of `worker`."""
        if tokens:
            self._waiting[worker, model] += tokens

    def forget(self, worker: str) -> None:
        """The worker is gone, and its pace was never known."""
        for name, model in [each for each in self._waiting if each[0] == worker]:
            del self._waiting[name, model]

    def settle(self, worker: str, step_times: StepTimes) -> dict[str, float]:
        """Count the tokens that wait for this worker's pace. Returns the seconds by model; none while it is unknown."""
        if not step_times.known:
            return {}
        self._is_known = True
        models = [model for name, model in self._waiting if name == worker]
        seconds = {model: step_times.seconds(self._waiting.pop((worker, model))) for model in models}
        self.saved += sum(seconds.values())
        return seconds
