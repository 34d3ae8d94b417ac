"""Recent requests explained: what was shareable, predicted and delivered, and why anything was missed."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from proxy.boundaries.boundary import Boundary, Entry, resolved_positions

MAX_REQUESTS = 10_000  # explained, the last ones
MAX_CHARACTERS = 32  # of a client's name

# A product as RFC 9110 writes it, without a comment; OpenAI's SDKs put a space before the version.
_PRODUCT = re.compile(r"([A-Za-z][\w.+@/-]*)(?: (\d[\w.+-]*))?")

# Browsers all begin with Mozilla/5.0; the first of these that is there names the browser.
_BROWSER = re.compile(r"\b(Edg|OPR|Firefox|Chrome|Safari)/\d+")


class Explanation(Struct, eq=False):
    """One request; lengths in tokens. Its figures are noted when it is over, and put into words when somebody asks."""

    request_id: str
    endpoint: str
    owner: str | None = None  # of the API key it came with; not shown
    began: float = field(default_factory=time.time)  # seconds since the epoch
    look: Callable[[Explanation], None] | None = None  # notes how the request stands; None once it is over
    status: int | None = None  # of the answer, 499 if the client left; None while it is under way
    model: str | None = None
    worker: str | None = None
    lookup: str = "none"  # how its boundaries were found
    boundaries: tuple[Boundary, ...] = ()
    sent: tuple[Entry, ...] = ()  # the hint
    positions: tuple[int, ...] = ()  # what the engine made of it, in the hint's order; 0 for what is not there
    shareable: int | None = None
    predicted: int | None = None
    prompt: int | None = None
    delivered: int | None = None
    reason: str | None = None  # None until the answer is complete, and if it is not known
    changed: dict[str, Any] | None = None  # where it differs from the nearest recent request
    rewrites: tuple[str, ...] = ()
    keep: str | None = None  # "no" or "private" if nothing of it may be kept
    lost: dict[str, int] | None = None  # tokens by reason, in shadow mode; None until it is judged
    client: str | None = None  # name and version that the client gives itself, shortened
    missing: str | None = None  # what an answer 404 did not find: "model", "response" or "endpoint"

    @property
    def would_save(self) -> dict[str, int]:
        """Tokens behind text that changes by itself, by its kind."""
        return {kind: self.changed["lost"]} if self.changed is not None and (kind := self.changed["kind"]) else {}

    def as_json(self) -> dict[str, Any]:
        """For `/seamark/requests/{id}`."""
        positions = resolved_positions(self.sent, self.positions)
        boundaries = [
            {"entry": each.entry, "tokens": positions.get(each.entry) if each.entry else None, "kind": each.kind}
            for each in self.boundaries
        ]
        shown = {name: value for name, value in asdict(self).items() if name not in ("owner", "look")}
        return {**shown, "boundaries": boundaries, "would_save": self.would_save}


class Explanations:
    """The last requests, explained; the oldest is forgotten first. Clients choose the ids, so two may be equal."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._most = most
        self._requests: OrderedDict[tuple[str | None, str], Explanation] = OrderedDict()  # by owner and id

    def begin(self, explanation: Explanation) -> None:
        name = explanation.owner, explanation.request_id
        self._requests[name] = explanation
        self._requests.move_to_end(name)
        if len(self._requests) > self._most:
            self._requests.popitem(last=False)

    def newest(self, most: int) -> list[Explanation]:
        return [_as_it_stands(each) for each in islice(reversed(self._requests.values()), most)]

    def get(self, request_id: str, owner: str | None = None) -> Explanation | None:
        """The last request of this id that came with the API key `owner`."""
        found = self._requests.get((owner, request_id))
        return _as_it_stands(found) if found is not None else None

    def of_anyone(self, request_id: str) -> Explanation | None:
        """The last request of this id; for operators."""
        newest = reversed(self._requests.items())
        return next((_as_it_stands(found) for (_, name), found in newest if name == request_id), None)


def _as_it_stands(explanation: Explanation) -> Explanation:
    if explanation.look is not None:
        explanation.look(explanation)
    return explanation


@lru_cache(maxsize=64)
def client_name(header: bytes) -> str | None:
    """The client's name and version, at most `MAX_CHARACTERS`; None if its header says nothing of that form."""
    user_agent = header.decode("latin-1")
    if user_agent.startswith("Mozilla/"):
        browser = _BROWSER.search(user_agent)
        return browser[0] if browser is not None else "a browser"
    product = _PRODUCT.match(user_agent)
    return " ".join(filter(None, product.groups()))[:MAX_CHARACTERS] if product is not None else None
