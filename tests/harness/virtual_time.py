"""An event loop on which waiting takes no time: for tests of how long something waits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """When nothing is ready, its clock goes on to the next timer at once. For coroutines without input and output."""

    _now = 0.0
    asked = 0  # of servers outside: while they have not answered, the clock stands

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if (
            not self.asked
            and not self._ready
            and (waiting := [timer.when() for timer in self._scheduled if not timer.cancelled()])
        ):
            self._now = max(self._now, min(waiting))
        super()._run_once()


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, run on such a loop."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **named))

    return run
