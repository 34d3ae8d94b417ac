"""Every error that a client can get, each with its HTTP status, in OpenAI's error envelope; and `SettingsError`.

A name that nobody knows is answered with those that read like it.
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


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooComplex(BadRequest):
    """The body is nested deeper, or has more values, than the gateway reads."""


class InvalidHttp(BadRequest):
    """What came is no HTTP, or the body is not framed as HTTP demands."""

    code = "invalid_http"


class Unauthorized(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(GatewayError):
    """The key is known, but does not allow this."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class TooSlow(GatewayError):
    """A head or a body did not come in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnreadableCoding(GatewayError):
    """The body is compressed, and vLLM reads none that is."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"


class NoWebSockets(GatewayError):
    """The client wants to go on in another protocol than HTTP."""

    status = 426
    type = "invalid_request_error"
    code = "no_websockets"


class KeyBusy(GatewayError):
    """The key already has as many requests under way and waiting as it may."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = RETRY_AFTER_SECONDS


class HeadTooLarge(GatewayError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class WorkerFailed(GatewayError):
    """A worker broke off after it had received the request, so the request was not sent again."""

    status = 502
    type = "upstream_error"
    code = "worker_failed"


class AdapterNotEverywhere(GatewayError):
    """Some workers have not loaded, or unloaded, what they were to; the message says which, and why."""

    status = 502
    type = "upstream_error"
    code = "adapter_not_everywhere"


class NoWorker(GatewayError):
    status = 503
    type = "service_unavailable"
    code = "no_worker"
    retry_after = RETRY_AFTER_SECONDS


class Overloaded(GatewayError):
    """Every worker has as many requests as it may, and the queue is full or the wait was too long."""

    status = 503
    type = "service_unavailable"
    code = "overloaded"
    retry_after = RETRY_AFTER_SECONDS


class Stopping(GatewayError):
    """The gateway stops, and the answer was not complete when the time to finish was over."""

    status = 503
    type = "service_unavailable"
    code = "stopping"
    retry_after = RETRY_AFTER_SECONDS


class WorkerSilent(GatewayError):
    status = 504
    type = "upstream_error"
    code = "worker_silent"


class SettingsError(Exception):
    """A setting that cannot be used; the message names the setting and the cure."""


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a complaint about a name: `; did you mean X or Y?`, or nothing if no known name reads like it.

    Names are compared without the `prefix` with which they are shown.
    """
    near = difflib.get_close_matches(given, list(known), n=2)
    return f"; did you mean {' or '.join(prefix + name for name in near)}?" if near else ""
