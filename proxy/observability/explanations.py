"""Recent requests explained: what was shareable, predicted and delivered, and why anything was missed."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from proxy.boundaries.boundary import Entry, resolved_positions

MAX_REQUESTS = 10_000  # explained, the last ones
MAX_CHARACTERS = 32  # of a client's name

# A product as RFC 9110 writes it, without a comment; OpenAI's SDKs put a space before the version.
_PRODUCT = re.compile(r"([A-Za-z][\w.+@/-]*)(?: (\d[\w.+-]*))?")

# Browsers all begin with Mozilla/5.0; the first of these that is there names the browser.
_BROWSER = re.compile(r"\b(Edg|OPR|Firefox|Chrome|Safari)/\d+")


class Explanation(NamedTuple):
    """One request; lengths in tokens."""

    request_id: str
    endpoint: str
    owner: str | None = None  # of the API key it came with; not shown
    began: float = 0.0  # seconds since the epoch
    status: int | None = None  # of the answer, 499 if the client left; None while it is under way
    model: str | None = None
    worker: str | None = None
    lookup: str | None = None  # how its boundaries were found
    boundaries: tuple[tuple[Entry | None, str], ...] = ()  # what is said of each, and its kind
    sent: tuple[Entry, ...] = ()  # the hint
    positions: tuple[int, ...] = ()  # what the engine made of it, in the hint's order; 0 for what is not there
    shareable: int | None = None
    predicted: int | None = None
    prompt: int | None = None
    delivered: int | None = None
    reason: str | None = None  # None until the answer is complete, and if the worker reports no cached tokens
    changed: dict[str, Any] | None = None  # where it differs from the nearest recent request
    would_save: Mapping[str, int] = MappingProxyType({})  # tokens behind text that changes, by its kind
    rewrites: tuple[str, ...] = ()
    lost: dict[str, int] | None = None  # tokens by reason, in shadow mode; None until it is judged
    client: str | None = None  # name and version that the client gives itself, shortened
    missing: str | None = None  # what an answer 404 did not find: "model", "response" or "endpoint"

    def as_json(self) -> dict[str, Any]:
        """For `/seamark/requests/{id}`."""
        positions = resolved_positions(self.sent, self.positions)
        named = [(entry, None if entry is None else positions.get(entry), kind) for entry, kind in self.boundaries]
        boundaries = [{"entry": entry, "tokens": tokens, "kind": kind} for entry, tokens, kind in named]
        shown = {name: value for name, value in self._asdict().items() if name != "owner"}
        return {**shown, "boundaries": boundaries, "would_save": dict(self.would_save)}


class Record:
    """What is said of one request: what is known by now while it is under way, and from its end on always the same."""

    __slots__ = ("_amended", "_so_far", "began")

    def __init__(self, so_far: Callable[[Record], Explanation]) -> None:
        """`so_far` explains the request as it stands."""
        self.began = time.time()  # seconds since the epoch
        self._so_far: Callable[[Record], Explanation] | Explanation = so_far
        self._amended: dict[str, Any] = {}

    @property
    def explanation(self) -> Explanation:
        explanation = self._so_far if isinstance(self._so_far, Explanation) else self._so_far(self)
        return explanation._replace(**self._amended) if self._amended else explanation

    def settle(self) -> None:
        """The request is over: nothing of it is kept but its explanation."""
        if not isinstance(self._so_far, Explanation):
            self._so_far = self._so_far(self)

    def amend(self, **fields: Any) -> None:
        """What was found out later, as fields of its explanation."""
        self._amended |= fields


class Explanations:
    """The last requests, explained; the oldest is forgotten first. Clients choose the ids, so two may be equal."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._most = most
        self._records: OrderedDict[tuple[str | None, str], Record] = OrderedDict()  # by owner and id

    def begin(self, request_id: str, owner: str | None, so_far: Callable[[Record], Explanation]) -> Record:
        """A request of the API key `owner` is under way; settle what is returned when it is over."""
        name = (owner, request_id)
        record = self._records[name] = Record(so_far)
        self._records.move_to_end(name)
        if len(self._records) > self._most:
            self._records.popitem(last=False)
        return record

    def newest(self, most: int) -> list[Explanation]:
        """The last ones, at most so many, the newest first."""
        return [record.explanation for record in islice(reversed(self._records.values()), most)]

    def get(self, request_id: str, owner: str | None = None) -> Explanation | None:
        """The last request of this id that came with the API key `owner`."""
        record = self._records.get((owner, request_id))
        return record.explanation if record is not None else None

    def of_anyone(self, request_id: str) -> Explanation | None:
        """The last request of this id; for operators."""
        newest = reversed(self._records.items())
        return next((record.explanation for (_, name), record in newest if name == request_id), None)


def client_name(user_agent: str | None) -> str | None:
    """The client's name and version, at most `MAX_CHARACTERS`; None if its header says nothing of that form."""
    if user_agent is None:
        return None
    if user_agent.startswith("Mozilla/"):
        browser = _BROWSER.search(user_agent)
        return browser[0] if browser is not None else "a browser"
    product = _PRODUCT.match(user_agent)
    return " ".join(filter(None, product.groups()))[:MAX_CHARACTERS] if product is not None else None
