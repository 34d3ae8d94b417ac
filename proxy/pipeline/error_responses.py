"""How an error reaches a client: as the whole answer, or as the last event of a stream that has begun.

Errors have the form of the API that was asked, so that its SDK raises instead of taking a cut answer for a short one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from proxy.chat.chat import MESSAGES, RESPONSES
from proxy.errors import GatewayError
from proxy.http import asgi
from proxy.pipeline.sse import data_of_last

# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# What HTTP wants beside a status.
_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    415: {"accept-encoding": "identity"},
    426: {"upgrade": "HTTP/1.1", "connection": "upgrade"},
}


def error_body(error: GatewayError, path: str = "") -> bytes:
    """The JSON body: OpenAI's envelope, or Anthropic's for its API."""
    if not path.startswith(MESSAGES):
        return error.body()
    return json.dumps(_anthropic(error)).encode()


def _anthropic(error: GatewayError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {**error.as_dict(), "type": kind}}


def error_headers(error: GatewayError) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return headers | _HEADERS.get(error.status, {})


async def send_error(send: asgi.Send, error: GatewayError, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """The error as the whole answer to a request for `path`."""
    own = ((name.encode(), value.encode()) for name, value in error_headers(error).items())
    await asgi.send_whole(send, error.status, [*headers, *own], error_body(error, path))


def error_event(error: GatewayError, endpoint: str, first: bytes = b"", last: bytes = b"") -> bytes:
    """The error as the last event of a stream. `first` and `last` are events of the stream, if they were kept."""
    if endpoint == MESSAGES:
        return b"event: error\ndata: " + json.dumps(_anthropic(error)).encode() + b"\n\n"
    if endpoint == RESPONSES:
        return b"event: response.failed\ndata: " + json.dumps(_failed_response(error, first, last)).encode() + b"\n\n"
    return b"data: " + error.body() + b"\n\n"


def _failed_response(error: GatewayError, first: bytes, last: bytes) -> dict[str, Any]:
    """The `response.failed` event: the response as its first event announced it, numbered after the last one."""
    response = data_of_last(first).get("response")
    number = data_of_last(last).get("sequence_number")
    known = response if isinstance(response, dict) else {"object": "response", "output": []}
    failed = {**known, "status": "failed", "error": {"code": "server_error", "message": str(error)}}
    following = number + 1 if isinstance(number, int) else 0
    return {"type": "response.failed", "sequence_number": following, "response": failed}
