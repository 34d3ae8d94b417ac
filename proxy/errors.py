"""Everything that can go wrong towards a client, each with its HTTP status, in OpenAI's error envelope."""

from __future__ import annotations

import json

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


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class WorkerFailed(GatewayError):
    """A worker broke off after it had been given the request, so it was not sent again."""

    status = 502
    type = "upstream_error"
    code = "worker_failed"


class NoWorker(GatewayError):
    status = 503
    type = "service_unavailable"
    code = "no_worker"
    retry_after = RETRY_AFTER_SECONDS


class SettingsError(Exception):
    """A setting that cannot be used; the message names the setting and the cure."""
