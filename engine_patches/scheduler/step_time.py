"""How long the engine's forward passes take: a floor for any pass, and seconds for each token in it, learnt online.

A pass over one token costs almost as much as one over hundreds, because the weights have to be read either way. What a
cache saves is tokens; what it may cost is passes. `StepTime` is the exchange rate between the two.
"""

from __future__ import annotations

import statistics
from collections import deque

# Steps remembered of each sort: enough for a median, few enough to follow a change of load within seconds.
WINDOW = 64

# Steps of each sort that have to be seen before the rate is believed.
ENOUGH = 4

# New steps after which a known rate is computed again: medians are not free, and steps come by the hundred.
RENEWAL = 16

# A step of at least this many tokens shows the cost of a token; a shorter one shows noise.
LONG_STEP = 48

# Until measured: tokens that cost as much as an empty pass. One report of a DGX Spark with Nemotron-3-Super: 58 tokens
# in 0.42 s, 7,234 in 3.85 s.
ASSUMED_TOKENS_PER_PASS = 800.0


class StepTime:
    """Learns from finished steps. All times in seconds."""

    def __init__(self) -> None:
        self._short: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._long: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._rate = (0.0, 0.0)
        self._new_steps = 0  # since the rate was computed

    def step_took(self, num_tokens: int, seconds: float, prefill: bool = True) -> None:
        """A pass over `num_tokens` tokens took `seconds`; `prefill` says whether some of them were a prompt's."""
        is_long = num_tokens >= LONG_STEP
        if num_tokens > 0 and seconds > 0 and (prefill or not is_long):  # a long step of decodes shows neither
            (self._long if is_long else self._short).append((num_tokens, seconds))
            self._new_steps += 1

    def _learnt(self) -> tuple[float, float]:
        """(floor, seconds per token), (0, 0) while unknown. Medians: a stalled step must not count."""
        if self._new_steps >= RENEWAL or (self._new_steps and self._rate[1] == 0):
            self._new_steps = 0
            self._rate = (0.0, 0.0)
            if len(self._short) >= ENOUGH and len(self._long) >= ENOUGH:
                floor = statistics.median(seconds for _, seconds in self._short)
                usual = statistics.median(tokens for tokens, _ in self._short)
                slopes = [(seconds - floor) / (tokens - usual) for tokens, seconds in self._long]
                per_token = max(statistics.median(slopes), 0.0)
                self._rate = (max(floor - usual * per_token, 0.0), per_token)
        return self._rate

    @property
    def known(self) -> bool:
        """Whether enough steps were seen."""
        return self._learnt()[1] > 0

    @property
    def floor_seconds(self) -> float:
        """Seconds of a pass over hardly any tokens, 0 while unknown."""
        return self._learnt()[0]

    @property
    def token_seconds(self) -> float:
        """Seconds that each token adds to a pass, 0 while unknown."""
        return self._learnt()[1]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that cost as much time as one more pass."""
        floor, per_token = self._learnt()
        return floor / per_token if per_token > 0 else ASSUMED_TOKENS_PER_PASS

    def seconds(self, num_tokens: int, num_passes: int = 0) -> float:
        """Time that so many tokens and passes take; 0 while unknown."""
        floor, per_token = self._learnt()
        return floor * num_passes + per_token * num_tokens
