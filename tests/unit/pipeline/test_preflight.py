"""A browser's question whether another site's page may ask: what is one, what a worker says to it, and how many."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.errors import NoWorker, Overloaded, WorkerFailed
from proxy.fleet.worker import Worker
from proxy.http.client import Broken, Unreachable
from proxy.pipeline.preflight import Preflights, is_preflight
from tests.harness.scripted_upstream import ScriptedUpstream

ORIGIN, METHOD = (b"origin", b"https://a"), (b"access-control-request-method", b"POST")


def asked(method: str = "OPTIONS", headers: Sequence[tuple[bytes, bytes]] = (ORIGIN, METHOD)) -> dict[str, Any]:
    return {"method": method, "path": "/v1/x", "query_string": b"a=b", "headers": list(headers)}


class Said(ScriptedUpstream):
    """What a worker says, and what it was sent."""

    def __init__(self, *pieces: bytes | Exception, status: int = 200) -> None:
        super().__init__(pieces, status)
        self.headers = ((b"access-control-allow-origin", b"https://a"), (b"X-Request-Id", b"the worker's"))
        self.sent: list[tuple[Any, ...]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def send(self, method, url, headers=(), body=b"", read_timeout=None, fresh=False):
        self.sent.append((method, url, dict(headers), body, read_timeout))
        await self.may_answer.wait()
        return self.answer()


def preflights(upstream: Said, *names: str) -> Preflights:
    workers = [Worker(f"http://{name}", None) for name in names or ("a", "b")]  # type: ignore[arg-type]

    async def ready() -> list[Worker]:
        return workers if names != ("down",) else []

    return Preflights(SimpleNamespace(ready=ready, workers=workers), upstream)  # type: ignore[arg-type]


async def answered(those: Preflights, scope: dict[str, Any] | None = None) -> list[Any]:
    """What the browser gets."""
    got: list[Any] = []

    async def send(message: Any) -> None:
        got.append(message)

    await those.answer(scope or asked(), "id-1", send)
    return got


@pytest.mark.parametrize(
    ("scope", "is_one"),
    [
        (asked(), True),
        (asked("GET"), False),
        (asked("POST"), False),
        (asked(headers=[METHOD]), False),
        (asked(headers=[ORIGIN]), False),
        (asked(headers=[]), False),
    ],
)
def test_a_browser_names_its_site_and_what_it_is_about_to_do(scope, is_one):
    assert is_preflight(scope) is is_one


async def test_without_a_worker_that_is_ready_nobody_is_asked():
    upstream = Said()
    with pytest.raises(NoWorker):
        await answered(preflights(upstream, "down"))
    assert not upstream.sent


@pytest.mark.parametrize("failure", [Unreachable("refused"), Broken("gone")])
async def test_a_worker_that_fails_is_named_as_the_cause(failure):
    upstream = Said(b"a", failure)
    with pytest.raises(WorkerFailed):
        await answered(preflights(upstream))
    assert upstream.closed == 1
    upstream.failure = failure
    with pytest.raises(WorkerFailed):
        await answered(preflights(upstream))


async def test_an_answer_is_read_up_to_a_bound():
    _, body = await answered(preflights(Said(b"x" * 65_535, b"y")))
    assert len(body["body"]) == 65_536
    upstream = Said(b"x" * 65_536, b"y")
    with pytest.raises(WorkerFailed, match="too large"):
        await answered(preflights(upstream))
    assert upstream.closed == 1


async def test_32_are_asked_at_once_and_each_gives_its_place_back_however_it_ends():
    upstream = Said()
    those = preflights(upstream)
    for failure in (None, Broken("gone"), None):
        upstream.failure = failure
        upstream.may_answer.clear()
        waiting = [asyncio.create_task(answered(those)) for _ in range(33)]
        with pytest.raises(Overloaded):
            await waiting[32]
        assert [each.done() for each in waiting] == [False] * 32 + [True]
        upstream.may_answer.set()
        ended = await asyncio.gather(*waiting[:32], return_exceptions=True)
        assert {isinstance(each, WorkerFailed) for each in ended} == {failure is not None}
