"""A browser's question whether another site's page may ask: what is one, what a worker says to it, and how many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.errors import NoWorker, Overloaded, WorkerFailed
from proxy.http.client import Broken, Unreachable
from proxy.pipeline.preflight import Preflights, is_preflight
from tests.harness.probed import pool_of
from tests.harness.scripted_upstream import Said, ScriptedUpstream

HEADERS = [(b"origin", b"https://a"), (b"access-control-request-method", b"POST")]

SCOPE = {"method": "OPTIONS", "path": "/v1/x", "query_string": b"a=b", "headers": HEADERS}


def before(*script: Said | Exception) -> tuple[Preflights, ScriptedUpstream]:
    upstream = ScriptedUpstream(*script)
    return Preflights(pool_of(upstream, "a", "b"), upstream), upstream


async def answered(those: Preflights) -> list[Any]:
    got: list[Any] = []

    async def send(message: Any) -> None:
        got.append(message)

    await those.answer({**SCOPE, "headers": [*HEADERS, (b"authorization", b"x")]}, "id-1", send)
    return got


@pytest.mark.parametrize(
    ("more", "is_one"),
    [({}, True), ({"method": "GET"}, False), ({"headers": HEADERS[:1]}, False), ({"headers": HEADERS[1:]}, False)],
)
def test_a_browser_names_its_site_and_what_it_is_about_to_do(more, is_one):
    assert is_preflight({**SCOPE, **more}) is is_one


async def test_what_a_worker_says_is_passed_on_up_to_a_bound_and_no_key_goes_to_it():
    allowed = (b"access-control-allow-origin", b"https://a")
    said = Said(200, b"x" * 65_535, b"y", headers=[allowed, (b"X-Request-Id", b"the worker's")])
    those, upstream = before(said, too_large := Said(200, b"x" * 65_536, b"y"))
    start, body = await answered(those)
    length = (b"content-length", b"65536")
    assert (start["status"], start["headers"]) == (200, [allowed, (b"x-request-id", b"id-1"), length])
    assert len(body["body"]) == 65_536 and said.closed
    (sent,) = upstream.sent
    assert (sent.method, sent.url, sent.headers) == ("OPTIONS", "http://a/v1/x?a=b", dict(HEADERS))
    with pytest.raises(WorkerFailed, match="too large"):
        await answered(those)
    assert too_large.closed == 1


@pytest.mark.parametrize("failure", [Unreachable("refused"), Broken("gone"), Said(200, b"a", Broken("gone"))])
async def test_a_worker_that_fails_is_named_as_the_cause_and_where_none_is_ready_nobody_is_asked(failure):
    those, upstream = before(failure)
    with pytest.raises(WorkerFailed):
        await answered(those)
    assert not isinstance(failure, Said) or failure.closed == 1
    upstream.say = lambda sent: Unreachable("refused")
    those._pool.mark_down(those._pool.workers[0])
    those._pool.mark_down(those._pool.workers[1])
    with pytest.raises(NoWorker):
        await answered(those)
    assert [sent.method for sent in upstream.sent].count("OPTIONS") == 1


async def test_32_are_asked_at_once_and_each_gives_its_place_back_however_it_ends():
    those, upstream = before()
    for failure in (None, Broken("gone"), None):
        upstream.say = lambda sent, failure=failure: failure or Said(200)
        upstream.may_answer.clear()
        waiting = [asyncio.create_task(answered(those)) for _ in range(33)]
        with pytest.raises(Overloaded):
            await waiting[32]
        assert [each.done() for each in waiting] == [False] * 32 + [True]
        upstream.may_answer.set()
        ended = await asyncio.gather(*waiting[:32], return_exceptions=True)
        assert {isinstance(each, WorkerFailed) for each in ended} == {failure is not None}
