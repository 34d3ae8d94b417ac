"""What a request is part of: its conversation, as clients and agents write it, and the response that it names."""

from __future__ import annotations

import pytest

from proxy.pipeline.request import affinity_key, request_of

SESSION = "0b5c9a52-3d5f-4a56-9a0e-6f6f1f6a7b10"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-session-affinity", b"ses_1"), (b"x-session-id", b"ses_other")],  # OpenCode
        [(b"x-session-id", b"ses_1")],
        [(b"session-id", b"ses_1")],  # Codex
        [(b"session_id", b"ses_1")],
        [(b"user-agent", b"cli"), (b"x-claude-code-session-id", b"ses_1")],
    ],
)
def test_a_session_of_an_agent_is_kept_together(headers):
    assert affinity_key(headers, {"model": "m"}) == "ses_1"


def test_two_sessions_of_one_agent_are_kept_apart():
    names = [b"ses_1", b"ses_2", SESSION.encode()]
    assert len({affinity_key([(b"x-session-id", name)], {}) for name in names}) == 3


def test_what_the_client_itself_wants_kept_together_comes_first():
    headers = [(b"session_id", b"ses_1")]
    assert affinity_key(headers, {"prompt_cache_key": "mine"}) == "mine"
    for nothing in ("", 7, None, ["mine"]):
        assert affinity_key(headers, {"prompt_cache_key": nothing}) == "ses_1"


def test_a_request_of_no_session_has_no_key():
    assert affinity_key([(b"x-request-id", b"r"), (b"x-session-id", b"")], {}) is None
    assert affinity_key([(b"x-session-id", b"\xff\xfe")], {}) == "\xff\xfe"  # any bytes make a name


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/", ""),
        ("/v1/responses", "resp_0"),
        ("/v1/responses/render", "resp_0"),
    ],
)
def test_a_stored_response_is_named_by_the_path_or_by_the_body(path, named):
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
    request = request_of(scope, b"", "r")
    request.body.parsed = {"previous_response_id": "resp_0"}
    assert request.response_id == named
