"""Every error that a client can get, each with its HTTP status, in OpenAI's error envelope; and `SettingsError`.

GatewayError 500
    ClientError 400
        BadRequest 400: TooComplex, InvalidHttp
        Unauthorized 401, Forbidden 403, NotFound 404, TooSlow 408, PinRefused 409, BodyTooLarge 413,
        UnreadableCoding 415, NoWebSockets 426, HeadTooLarge 431
    KeyBusy 429
    WorkerError 502: WorkerFailed, AdapterNotEverywhere, NotServed 501, WorkerSilent 504
    Unavailable 503: NoWorker, Overloaded, Stopping
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

RETRY_AFTER_SECONDS = 2


class GatewayError(Exception):
    """Base of the tree; `str(error)` is the message a client reads. A kind of error inherits what it does not set."""

    status = 500
    type = "internal_server_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None  # seconds

    def __init_subclass__(cls, **fields: Any) -> None:
        """`fields`: those above, by their names."""
        for name, value in fields.items():
            setattr(cls, name, value)

    def body(self) -> bytes:
        return json.dumps({"error": self.as_dict()}).encode()

    def as_dict(self) -> dict[str, str | None]:
        return {"message": str(self), "type": self.type, "param": self.param, "code": self.code}


class ClientError(GatewayError, status=400, type="invalid_request_error"):
    """The request cannot be served as it is."""


class BadRequest(ClientError):
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooComplex(BadRequest):
    """The body is nested deeper, or has more values, than the gateway reads."""


class InvalidHttp(BadRequest, code="invalid_http"):
    """What came is no HTTP, or the body is not framed as HTTP demands."""


class Unauthorized(ClientError, status=401, code="invalid_api_key"):
    """No key that the gateway knows."""


class Forbidden(ClientError, status=403, code="forbidden"):
    """The key is known, but does not allow this."""


class NotFound(ClientError, status=404, code="not_found"):
    """There is nothing of this name, or nothing that this client may know of."""


class TooSlow(ClientError, status=408, code="request_timeout"):
    """A head or a body did not come in time."""


class PinRefused(ClientError, status=409, code="no_room"):
    """The engines' share of pinned prompts is full."""


class BodyTooLarge(ClientError, status=413, code="request_too_large"):
    """The body has more bytes than the gateway reads."""


class UnreadableCoding(ClientError, status=415, code="unsupported_content_encoding"):
    """The body is compressed, and vLLM reads none that is."""


class NoWebSockets(ClientError, status=426, code="no_websockets"):
    """The client wants to go on in another protocol than HTTP."""


class HeadTooLarge(ClientError, status=431, code="headers_too_large"):
    """The head has more bytes than the gateway reads."""


class KeyBusy(
    GatewayError, status=429, type="rate_limit_error", code="rate_limit_exceeded", retry_after=RETRY_AFTER_SECONDS
):
    """The key has as many requests under way and waiting, or has used as many tokens, as it may."""


class WorkerError(GatewayError, status=502, type="upstream_error"):
    """A worker's fault."""


class WorkerFailed(WorkerError, code="worker_failed"):
    """A worker broke off after it had received the request, so the request was not sent again."""


class NotServed(WorkerError, status=501, code="not_served"):
    """The worker's HTTP server has no such route."""


class AdapterNotEverywhere(WorkerError, code="adapter_not_everywhere"):
    """Some workers have not loaded, or unloaded, what they were to; the message says which, and why."""


class WorkerSilent(WorkerError, status=504, code="worker_silent"):
    """A worker sent no byte for as long as it may take."""


class Unavailable(GatewayError, status=503, type="service_unavailable", retry_after=RETRY_AFTER_SECONDS):
    """The same request may be served later."""


class NoWorker(Unavailable, code="no_worker"):
    """No worker is up that serves this."""


class Overloaded(Unavailable, code="overloaded"):
    """Every worker has as many requests as it may, and the queue is full or the wait was too long."""


class Stopping(Unavailable, code="stopping"):
    """The gateway stops, and the answer was not complete when the time to finish was over."""


class SettingsError(Exception):
    """A setting that cannot be used; the message names the setting and the cure."""


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a complaint about a name: `; did you mean X or Y?`, or nothing if no known name reads like it.

    Names are compared without the `prefix` with which they are shown.
    """
    near = difflib.get_close_matches(given, list(known), n=2)
    return f"; did you mean {' or '.join(prefix + name for name in near)}?" if near else ""
