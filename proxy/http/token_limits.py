"""Limits in tokens of an API key: what it may use in a minute and in a day, and what it has used, here and elsewhere.

A request holds an estimate of its tokens from before it asks for a worker until it is known what it took.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.errors import KeyBusy
from proxy.http import asgi

MINUTE, DAY = 60, 86_400  # seconds; both begin when they do in UTC

LIMIT, REMAINING, RESET = (b"x-ratelimit-%b-tokens" % name for name in (b"limit", b"remaining", b"reset"))

# By a key's `count`, what a token counts: of a prompt, a cached one as a part of that, of an answer.
COUNTED: Mapping[str, tuple[int, float, int]] = {
    "total": (1, 1.0, 1),
    "prompt": (1, 1.0, 0),
    "computed": (1, 0.0, 0),
    "output": (0, 1.0, 1),
}

_TOTALS = struct.Struct("<IQQ")  # the minute's number, the tokens in it, and those in its day


@dataclass(eq=False)
class Window:
    """The minute, or the day, that is running; tokens."""

    per: str
    seconds: int
    limit: int = 0  # 0: none
    number: int = -1  # of those since the epoch
    own: int = 0  # used, and held by requests under way: at this gateway
    others: int = 0  # at all others, as far as is known

    @property
    def left(self) -> int:
        return max(0, self.limit - self.own - self.others)

    @property
    def seconds_left(self) -> int:
        return (self.number + 1) * self.seconds - int(time.time())


class TokenLimits:
    """One key's. It stays the same object when the file is read again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.minute, self.day = self._windows = Window("minute", MINUTE), Window("day", DAY)
        self._of_prompt, self.cached_weight, self._of_output = COUNTED["total"]
        self.is_used = False  # since the gateway started

    def set(self, per_minute: int, per_day: int, count: str, cached_weight: float | None) -> None:
        """What the keys file says of them now."""
        self.minute.limit, self.day.limit = per_minute, per_day
        self._of_prompt, weight, self._of_output = COUNTED[count]
        self.cached_weight = weight if cached_weight is None else cached_weight

    def counted(self, prompt: int, cached: int, output: int) -> int:
        """What so many tokens count, `cached` ones being among those of the prompt."""
        of_prompt = prompt - (1 - self.cached_weight) * min(cached, prompt)
        return round(self._of_prompt * of_prompt + self._of_output * output)

    def now(self) -> list[Window]:
        """The windows that have a limit, as they are now."""
        for window in self._windows:
            number = int(time.time()) // window.seconds
            if not number <= window.number <= number + 1:  # none begins once more since the clock is set right
                window.number, window.own, window.others = number, 0, 0
        return [window for window in self._windows if window.limit]

    def totals(self) -> tuple[int, bytes]:
        """The day's number, and what is used here in it and in its minute, for other gateways."""
        self.now()
        return self.day.number, _TOTALS.pack(self.minute.number, max(0, self.minute.own), max(0, self.day.own))

    def hear(self, day: int, totals: Iterable[bytes]) -> None:
        """Take in what each other gateway has used in that day."""
        self.now()
        told = [_TOTALS.unpack(each) for each in totals if len(each) == _TOTALS.size]
        if day == self.day.number:
            self.minute.others = sum(tokens for minute, tokens, _ in told if minute == self.minute.number)
            self.day.others = sum(tokens for _, _, tokens in told)


class Charge:
    """What one request counts at its key: nothing, then its estimate, then what it took."""

    def __init__(self, limits: TokenLimits) -> None:
        self.limits = limits
        self.estimate = 0, 0, 0  # tokens of the prompt, cached ones among them, of the answer
        self.goes_on = False  # whether its client is there or not, and no answer tells to the end what it took
        self.streamed: int | None = None  # events of a stream that went to the client; None: it is no stream
        self.refused_by: Window | None = None
        self.held: list[tuple[Window, int, int]] | None = None  # of which window, and tokens; None: not asked yet

    def hold(self, prompt: int, cached: int, output: int) -> None:
        """Raises `KeyBusy` if less is left. What takes more than a whole window may have all of one."""
        self.estimate = prompt, cached, output
        tokens = max(1, self.limits.counted(*self.estimate))  # with nothing left, nothing is let in
        wanted = [(window, window.number, min(tokens, window.limit)) for window in self.limits.now()]
        if short := [window for window, _, held in wanted if window.left < held]:
            self.refused_by = window = short[-1]  # the day if both do, since that is to be waited for
            error = KeyBusy(
                f"This API key has {window.left:,} of {window.limit:,} tokens a {window.per} left (tokens_per_"
                f"{window.per} in the keys file), and this request may take {tokens:,}: ask for fewer, or wait."
            )
            error.type, error.retry_after = "tokens", window.seconds_left  # as OpenAI's servers say it
            raise error
        for window, _, held in wanted:
            window.own += held
        self.held, self.limits.is_used = wanted, True

    def settle(self, prompt: int, cached: int, output: int) -> None:
        """It took so many tokens. Does nothing the second time.

        In a window that has begun meanwhile, only what goes beyond the estimate counts.
        """
        tokens, wanted = self.limits.counted(prompt, cached, output), self.held or ()
        self.held = []
        self.limits.now()
        for window, number, held in wanted:
            window.own += tokens - held if window.number == number else max(0, tokens - held)

    def on(self, headers: asgi.HeaderList) -> asgi.HeaderList:
        """An answer's headers, with those of the window that has least left, or that refused the request."""
        shown = min(reversed(self.limits.now()), key=lambda window: window.left, default=None)
        if (window := self.refused_by or shown) is None:
            return headers
        own = (LIMIT, b"%d" % window.limit), (REMAINING, b"%d" % window.left), (RESET, b"%ds" % window.seconds_left)
        return [*(each for each in headers if each[0] not in (LIMIT, REMAINING, RESET)), *own]
