"""Work in steps, without a loop that turns to others between them."""

from __future__ import annotations

from typing import TypeVar

from proxy.idle_work import Steps

T = TypeVar("T")


def finished(steps: Steps[T]) -> T:
    """The result of `steps` that are done in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value
