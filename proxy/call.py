"""One request on its way through the gateway."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from proxy import wire
from proxy.boundaries import Found
from proxy.chat import Chat
from proxy.errors import NotFound
from proxy.explanations import Explanation
from proxy.finding import HINTED
from proxy.outcome import Expectation
from proxy.recent import Recent
from proxy.workers import Worker

# Answers of these report cached tokens.
REPORTING = HINTED
ENDPOINTS = REPORTING | {"/v1/embeddings", "/tokenize", "/detokenize"}


@dataclass
class Call:
    """What is known of it so far."""

    method: str
    target: str  # path and query, as the client wrote them
    endpoint: str  # label: the path where it is a known one
    headers: wire.HeaderList
    request_id: str
    raw: bytes
    arrived: float  # time.perf_counter() when the body was complete
    body: dict[str, Any] = field(default_factory=dict)
    chat: Chat | None = None
    found: Found | None = None  # None: nothing that boundaries are sought for
    recent: Recent | None = None
    explanation: Explanation | None = None
    worker: Worker | None = None
    sent: tuple[int, ...] = ()  # positions in the hint
    expected: Expectation | None = None
    started: bool = False  # the response has begun
    status: int = 0
    first_byte: float | None = None

    @property
    def id_header(self) -> tuple[bytes, bytes]:
        """The request's identity, as clients and workers see it."""
        return (b"x-request-id", self.request_id.encode("latin-1"))


def call_of(scope: wire.Scope, raw: bytes, request_id: str) -> Call:
    """The call in an ASGI scope and its body. Raises `NotFound` for a path that leads out of where clients may go."""
    path = scope["path"]
    if not {".", ".."}.isdisjoint(path.split("/")):
        raise NotFound("No such path.")  # the way up leads to routes of the worker that are not for clients
    target = scope.get("raw_path", path.encode()).decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    return Call(
        method=scope["method"],
        target=target,
        endpoint=path if path in ENDPOINTS else "other",
        headers=wire.end_to_end(scope["headers"], wire.RECOMPUTED),
        request_id=request_id,
        raw=raw,
        arrived=time.perf_counter(),
    )
