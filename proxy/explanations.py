"""What became of the last requests, by their id: shareable, predicted, delivered, and why anything was missed."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

MAX_REQUESTS = 10_000


@dataclass
class Explanation:
    """One request; lengths in tokens. Filled in as it goes along."""

    request_id: str
    endpoint: str
    owner: str | None = None  # name of the API key it came with; not told
    began: float = field(default_factory=time.time)  # seconds since the epoch
    status: int | None = None  # of the answer, 499 where the client left; None while it is under way
    model: str | None = None
    worker: str | None = None
    lookup: str | None = None  # how its boundaries were found
    renders: int = 0  # asked of a worker for it
    boundaries: tuple[tuple[int, str], ...] = ()  # position and kind: all that are known of this prompt
    sent: tuple[int, ...] = ()
    shareable: int | None = None
    predicted: int | None = None
    prompt: int | None = None
    delivered: int | None = None
    reason: str | None = None  # None until the answer is complete, and where the worker does not say what it had cached
    changed: dict[str, Any] | None = None  # where it leaves the nearest recent request
    would_save: dict[str, int] = field(default_factory=dict)  # tokens by rule or volatile text
    rewrites: tuple[str, ...] = ()
    lost: dict[str, int] | None = None  # tokens by reason, at a worker without the plugin; None until that is judged

    def as_json(self) -> dict[str, Any]:
        """For `/seamark/requests/{id}`."""
        boundaries = [{"tokens": tokens, "kind": kind} for tokens, kind in self.boundaries]
        told = {name: value for name, value in self.__dict__.items() if name != "owner"}
        return {**told, "boundaries": boundaries}


class Explanations:
    """The last requests; the oldest is forgotten first."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._most = most
        self._requests: OrderedDict[str, Explanation] = OrderedDict()

    def add(self, explanation: Explanation) -> None:
        self._requests[explanation.request_id] = explanation
        self._requests.move_to_end(explanation.request_id)
        if len(self._requests) > self._most:
            self._requests.popitem(last=False)

    def newest(self, most: int) -> list[Explanation]:
        """The last ones, at most so many, the newest first."""
        return list(islice(reversed(self._requests.values()), most))

    def get(self, request_id: str) -> Explanation | None:
        return self._requests.get(request_id)
