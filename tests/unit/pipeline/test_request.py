"""What a request says of itself: its path, its client, its model, its conversation, the response that it names."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import NotFound
from proxy.pipeline.request import (
    ProxiedRequest,
    affinity_key,
    choices_of,
    request_of,
    target_of,
)


def test_what_the_client_itself_wants_kept_together_comes_first():
    headers = [(b"session_id", b"ses_1")]
    assert affinity_key(headers, {"prompt_cache_key": "mine"}) == "mine"
    for nothing in ("", 7, None, ["mine"]):
        assert affinity_key(headers, {"prompt_cache_key": nothing}) == "ses_1"


def scope_of(path: str = "/v1/chat/completions", query: bytes = b"", *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"method": "POST", "path": path, "query_string": query, "headers": list(headers)}


def asked(path: str = "/v1/chat/completions", *headers: tuple[bytes, bytes], **body: Any) -> ProxiedRequest:
    request = request_of(scope_of(path, b"", *headers), b"x", "r")
    request.body.parsed = body
    return request


@pytest.mark.parametrize(
    ("path", "raw_path", "query", "target"),
    [
        ("/v1/x", None, b"", "/v1/x"),
        ("/v1/x", None, b"a=/../b", "/v1/x?a=/../b"),
        ("/v1/a b", b"/v1/a%20b", b"c=%20", "/v1/a%20b?c=%20"),
        ("/v1/.hidden", None, b"", "/v1/.hidden"),
        ("/v1/...", None, b"", "/v1/..."),
        ("/v1/a..b", None, b"", "/v1/a..b"),
        ("/v1/../x", None, b"", None),
        ("/v1/./x", None, b"", None),
        ("/v1/..", b"/v1/%2E%2E", b"", None),
        ("/.", None, b"", None),
    ],
)
def test_a_path_goes_on_as_it_was_written_unless_it_leads_upwards(path, raw_path, query, target):
    scope = scope_of(path, query) | ({} if raw_path is None else {"raw_path": raw_path})
    if target is None:
        with pytest.raises(NotFound):
            target_of(scope)
    else:
        assert target_of(scope) == target


def test_a_client_is_called_what_it_calls_itself():
    assert asked("/v1/x", (b"accept", b"a"), (b"user-agent", b"one \xe9"), (b"user-agent", b"b")).client.user_agent == (
        "one \xe9"
    )
    assert asked("/v1/x", (b"accept", b"a")).client.user_agent is None


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": "3"}, 3),
        ({"n": None}, 1),
        ({"n": 0}, 1),
        ({"n": "many"}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": []}, 1),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": [7, 8, 9], "n": 2}, 2),
    ],
)
def test_an_answer_has_so_many_choices_for_each_prompt(body, choices):
    assert choices_of(body) == choices


async def test_without_a_client_an_answer_goes_nowhere():
    request = request_of(scope_of(), b"", "r")
    await request.reply({"type": "http.response.start", "status": 200, "headers": []})
    assert request.status == 200
