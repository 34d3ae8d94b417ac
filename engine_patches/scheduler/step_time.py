"""How long the engine's passes over prompts take: a floor, and seconds for each token and each state, learnt online.

A pass over one token costs almost as much as one over hundreds: the weights have to be read, and on a GPU its kernels
to be launched, either way. What a cache saves is tokens; what it may cost is passes, and states written in them.
`StepTime` is the exchange rate between the three. It is learnt from passes with prompts: on a GPU one that generates is
a replay of one graph, and has another floor.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW, HALF_LIFE = 256, 64  # passes remembered, and how many later ones halve the weight of one
ENOUGH = 8  # passes that have to be seen before the rate is believed

# The rate is computed again when one in so many of the remembered passes is new: that takes up to half a millisecond.
RENEWAL = 16

# Until measured: tokens that cost as much as an empty pass, and what a state costs in passes. One report of a DGX Spark
# with Nemotron-3-Super: 58 tokens in 0.42 s, 7,234 in 3.85 s. A state: measured on a CPU.
ASSUMED_TOKENS_PER_PASS, ASSUMED_STATE_PASSES = 800.0, 0.3

# No pass is taken to be worth more tokens: where short prompts take as long as shorter ones, long ones may not.
MOST_TOKENS_PER_PASS = 16_384.0

# Relative deviation of a pass from which on it counts less, and how often the weights are found anew.
SCATTER, ROUNDS = 0.1, 4

# How much it counts, beside passes that scatter by a few percent, that a floor should be that of passes which generate,
# and a state cost nothing: it decides what prompts leave open, as where all have one length.
PRIOR_FLOOR, PRIOR_STATE = 0.03, 0.3


class PassTimes(NamedTuple):
    """Seconds of a pass with a prompt: for itself, each token in it, and each state that it writes; and of a decode."""

    floor: float = 0.0  # over hardly any tokens
    token: float = 0.0
    state: float = 0.0
    decode: float = 0.0  # a pass that only generates


UNKNOWN = PassTimes()


class StepTime:
    """Learns from finished passes. All times in seconds."""

    def __init__(self) -> None:
        self._passes: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)  # tokens, states, seconds
        self._generating: deque[float] = deque(maxlen=HALF_LIFE)  # seconds of passes without a prompt
        self._pace = UNKNOWN
        self._new = 0  # passes since the pace was computed

    def step_took(self, num_tokens: int, seconds: float, prefill: bool = True, states: int = 0) -> None:
        """A pass took `seconds`. `prefill`: over a prompt, too. `states`: most of one request, as all write at once."""
        if num_tokens > 0 and seconds > 0:
            if prefill:
                self._passes.append((num_tokens, states, seconds))
                self._new += 1
            else:
                self._generating.append(seconds)

    @property
    def pace(self) -> PassTimes:
        """What is known; all 0 while nothing is."""
        if self._new * RENEWAL >= len(self._passes) >= ENOUGH:
            self._new = 0
            self._pace = _fitted(list(self._passes), list(self._generating))
        return self._pace

    @property
    def known(self) -> bool:
        return self.pace is not UNKNOWN

    def tokens_worth(self, passes: float = 0.0, states: float = 0.0, decodes: float = 0.0) -> float:
        """Tokens that take as long as so many passes, states written in them, and `decodes`, which only generate."""
        if not self.known:
            return ASSUMED_TOKENS_PER_PASS * (passes + ASSUMED_STATE_PASSES * states + decodes)
        floor, token, state, decode = self.pace
        return (floor * passes + state * states + decode * decodes) / token

    def seconds(self, num_tokens: int, num_passes: int = 0) -> float:
        """Time that so many tokens and passes take; 0 while unknown."""
        return self.pace.floor * num_passes + self.pace.token * num_tokens


def _fitted(passes: list[tuple[float, float, float]], generating: list[float]) -> PassTimes:
    """The pace by which `passes` (tokens, states, seconds; the latest last) deviate least, relative to their time.

    Least squares, weighted again and again (Huber's weights): a stalled pass hardly counts. `generating`: of others.
    """
    import numpy as np  # a command's process may have none

    tokens, states, seconds = np.array(passes).T
    usual = float(np.median(seconds))
    expected = np.median(seconds / (ASSUMED_TOKENS_PER_PASS + tokens)) * (ASSUMED_TOKENS_PER_PASS + tokens)
    age = 0.5 ** (np.arange(len(passes))[::-1] / HALF_LIFE)
    # Thousands of tokens, so that all three columns are of one size.
    columns = np.column_stack([np.ones_like(tokens), tokens / 1000, states])
    decode = float(np.median(generating)) if generating else 0.0
    per_thousand = 0.0 if generating else ASSUMED_TOKENS_PER_PASS / 1000
    prior = np.array([[PRIOR_FLOOR, -PRIOR_FLOOR * per_thousand, 0], [0, 0, PRIOR_STATE]]) / usual
    aim = [PRIOR_FLOOR * min(decode, usual) / usual, 0]
    for _ in range(ROUNDS):
        deviation = np.maximum(np.abs(seconds / expected - 1), SCATTER)
        weights = np.sqrt(age * SCATTER / deviation) / expected
        rows = np.vstack([columns * weights[:, None], prior])
        found = np.linalg.lstsq(rows, np.append(seconds * weights, aim), rcond=None)[0]
        floor, token, state = found.clip(0).tolist()  # a report has room for no number of numpy's
        expected = np.maximum(columns @ [floor, token, state], usual / 20)
    least = (floor or usual) / MOST_TOKENS_PER_PASS
    return PassTimes(floor, max(token / 1000, least), state, decode or floor)
