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

RETRY_AFTER_SECONDS = 2


class GatewayError(Exception):
    """Base of the tree; `str(error)` is the message a client reads."""

    status = 500
    type = "internal_server_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None  # seconds

    def body(self) -> bytes:
        """The JSON body of the answer."""
        return json.dumps({"error": self.as_dict()}).encode()

    def as_dict(self) -> dict[str, str | None]:
        """The inner object of OpenAI's envelope."""
        return {"message": str(self), "type": self.type, "param": self.param, "code": self.code}


class ClientError(GatewayError):
    """The request cannot be served as it is."""

    status = 400
    type = "invalid_request_error"


class BadRequest(ClientError):
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooComplex(BadRequest):
    """The body is nested deeper, or has more values, than the gateway reads."""


class InvalidHttp(BadRequest):
    """What came is no HTTP, or the body is not framed as HTTP demands."""

    code = "invalid_http"


class Unauthorized(ClientError):
    status = 401
    code = "invalid_api_key"


class Forbidden(ClientError):
    """The key is known, but does not allow this."""

    status = 403
    code = "forbidden"


class NotFound(ClientError):
    status = 404
    code = "not_found"


class TooSlow(ClientError):
    """A head or a body did not come in time."""

    status = 408
    code = "request_timeout"


class PinRefused(ClientError):
    """The engines' share of pinned prompts is full."""

    status = 409
    code = "no_room"


class BodyTooLarge(ClientError):
    status = 413
    code = "request_too_large"


class UnreadableCoding(ClientError):
    """The body is compressed, and vLLM reads none that is."""

    status = 415
    code = "unsupported_content_encoding"


class NoWebSockets(ClientError):
    """The client wants to go on in another protocol than HTTP."""

    status = 426
    code = "no_websockets"


class KeyBusy(GatewayError):
    """The key already has as many requests under way and waiting as it may."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = RETRY_AFTER_SECONDS


class HeadTooLarge(ClientError):
    status = 431
    code = "headers_too_large"


class WorkerError(GatewayError):
    """A worker's fault."""

    status = 502
    type = "upstream_error"


class WorkerFailed(WorkerError):
    """A worker broke off after it had received the request, so the request was not sent again."""

    code = "worker_failed"


class NotServed(WorkerError):
    """The worker's HTTP server has no such route."""

    status = 501
    code = "not_served"


class AdapterNotEverywhere(WorkerError):
    """Some workers have not loaded, or unloaded, what they were to; the message says which, and why."""

    code = "adapter_not_everywhere"


class WorkerSilent(WorkerError):
    status = 504
    code = "worker_silent"


class Unavailable(GatewayError):
    """The same request may be served later."""

    status = 503
    type = "service_unavailable"
    retry_after = RETRY_AFTER_SECONDS


class NoWorker(Unavailable):
    code = "no_worker"


class Overloaded(Unavailable):
    """Every worker has as many requests as it may, and the queue is full or the wait was too long."""

    code = "overloaded"


class Stopping(Unavailable):
    """The gateway stops, and the answer was not complete when the time to finish was over."""

    code = "stopping"


class SettingsError(Exception):
    """A setting that cannot be used; the message names the setting and the cure."""


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a complaint about a name: `; did you mean X or Y?`, or nothing if no known name reads like it.

    Names are compared without the `prefix` with which they are shown.
    """
    near = difflib.get_close_matches(given, list(known), n=2)
    return f"; did you mean {' or '.join(prefix + name for name in near)}?" if near else ""
