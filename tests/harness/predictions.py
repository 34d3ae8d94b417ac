"""What a gateway predicted of an answer and what its engine found, for tests on a machine of any speed.

The gateway reads a worker's events beside the requests, so it may learn of a change a little after the next request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import httpx

from tests.harness.waiting import wait_for

Ask = Callable[[int, str], httpx.Response]  # with the seed of a system prompt, and a question


def is_as_predicted(answer: httpx.Response, *, hit: bool) -> bool:
    """Whether what was predicted is what came, and whether that is a hit as told."""
    predicted, cached = (answer.headers[f"x-seamark-{name}"] for name in ("predicted", "cached"))
    return predicted == cached and (cached != "0") is hit


def wait_for_predicted_hits(ask: Ask, seeds: Iterable[int]) -> None:
    """Ask with each system prompt until the gateway knows that its worker holds it.

    No two questions begin alike: what they shared would be found as well.
    """
    numbers = itertools.count(1)
    for seed in seeds:
        wait_for(lambda seed=seed: is_as_predicted(ask(seed, f"{next(numbers)} ships?"), hit=True))  # type: ignore[misc]


def is_known_as_gone(ask: Ask, seeds: Iterable[int]) -> bool:
    """Whether the gateway comes to know that all is gone: each prompt is asked with once, for that brings it back."""
    return any(is_as_predicted(ask(seed, "And now?"), hit=False) for seed in seeds)
