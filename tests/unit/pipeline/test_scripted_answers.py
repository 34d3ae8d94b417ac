"""What is made of a worker's answer word by word: who is blamed, who is asked again, what goes on to the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.fleet.worker import Worker
from proxy.http.client import Answer, Broken, Exhausted, Malformed, Silent, Stale, Unreachable
from tests.harness.gateways import CHAT, chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker

JSON, EVENTS = (b"content-type", b"application/json"), (b"content-type", b"text/event-stream")

USAGE = {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 160}}

WHOLE = json.dumps({"id": "chatcmpl-1", "choices": [], "usage": USAGE}).encode()

DELTA, DONE = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', b"data: [DONE]\n\n"


class Said(Answer):
    """An answer; a piece may be what breaks it off."""

    def __init__(
        self, status: int, *pieces: bytes | Exception, headers: Sequence[tuple[bytes, bytes]] = (JSON,)
    ) -> None:
        self.status, self.headers, self.pieces, self.closed = status, tuple(headers), [*pieces], 0

    def header(self, name: str) -> str | None:
        return next((value.decode() for own, value in self.headers if own.decode() == name), None)

    async def next_chunk(self) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.chunks()])

    def close(self) -> None:
        self.closed += 1


class Scene:
    """A gateway before two workers that say what is scripted, whichever is asked."""

    def __init__(self, own: InMemoryGateway) -> None:
        self.own, self.pool = own, own.gateway.pool
        self.script: list[Said | Exception] = []
        self.asked: list[tuple[str, str, dict[bytes, bytes], bytes, bool]] = []
        self.failures: list[tuple[Worker, bytes]] = []
        self.successes: list[Worker] = []
        self.down: list[Worker] = []
        own.gateway.upstream.send = self._send  # type: ignore[method-assign]
        self.pool.record_failure = lambda *what: self.failures.append(what)  # type: ignore[method-assign]
        self.pool.record_success = self.successes.append  # type: ignore[method-assign]
        mark_down = self.pool.mark_down

        def marked(worker: Worker, why: str = "") -> None:
            self.down.append(worker)
            mark_down(worker, why)

        self.pool.mark_down = marked  # type: ignore[method-assign]

    async def _send(
        self,
        method: str,
        url: str,
        headers: Any = (),
        body: bytes = b"",
        read_timeout: float | None = None,
        fresh: bool = False,
    ) -> Answer:
        if b"x-request-id" not in dict(headers):  # the gateway's own, such as what it asks of templates
            raise Unreachable("not in the script")
        self.asked.append((method, url, dict(headers), body, fresh))
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    @property
    def workers(self) -> list[str]:
        """Those that were asked, in order."""
        return [url.split("/")[2] for _, url, _, _, _ in self.asked]

    async def post(self, *script: Said | Exception, body: Any = None, path: str = CHAT, **headers: str) -> Any:
        self.script = [*script]
        answer = await self.own.post(chat("Tide?") if body is None else body, path, **headers)
        assert not self.script, "not all of the script was asked for"
        return answer

    def lack(self, *paths: str) -> None:
        """The workers' HTTP server has no such routes."""
        for worker in self.pool.workers:
            frontend = worker.probed.frontend._replace(lacks=frozenset(paths))
            worker.probed = replace(worker.probed, frontend=frontend)

    def counted(self) -> tuple[int, int]:
        """Requests under way, and tokens that are still to be computed."""
        workers = self.pool.workers
        return sum(worker.inflight for worker in workers), sum(worker.prefill_tokens for worker in workers)


@pytest.fixture
def scene_of(in_memory) -> Callable[..., Awaitable[Scene]]:
    async def of(workers: int = 2, **settings: Any) -> Scene:
        own = await in_memory(*(RecordingWorker() for _ in range(workers)), is_started=False, **settings)
        await own.gateway.pool.check_all()
        return Scene(own)

    return of


@pytest.fixture
async def scene(scene_of) -> Scene:
    return await scene_of()


@pytest.mark.parametrize(
    ("error", "status", "code", "blamed"),
    [
        (Broken("gone"), 502, "worker_failed", True),
        (Silent("quiet"), 504, "worker_silent", True),
        (Malformed("odd"), 502, "worker_failed", False),
        (Exhausted("no descriptor"), 503, "overloaded", False),
    ],
)
async def test_what_a_worker_may_have_read_is_not_sent_again(scene, error, status, code, blamed):
    answer = await scene.post(error)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert len(scene.failures) == blamed and scene.down == [] and scene.counted() == (0, 0)
    said = Said(200, b"{", Silent("quiet") if status == 504 else Broken("gone"))
    assert (await scene.post(said)).status_code == (504 if status == 504 else 502) and said.closed
    assert len(scene.failures) == blamed  # it has answered


@pytest.mark.parametrize(("error", "words"), [(Silent(""), "silence_timeout"), (Malformed(""), "no valid HTTP")])
async def test_the_client_is_told_what_its_worker_did(scene, error, words):
    answer = await scene.post(error)
    message = answer.json()["error"]["message"]
    assert words in message and scene.workers[0] in message


async def test_a_worker_without_a_connection_is_down_and_another_one_is_asked(scene):
    answer = await scene.post(Unreachable("connection refused"), Said(200, WHOLE))
    assert answer.status_code == 200 and len(set(scene.workers)) == 2
    (down,) = scene.down
    assert down.name == scene.workers[0] and down.why_down == "connection refused" and not scene.failures
    metric = scene.own.metric("seamark_resent_total", worker=down.name, reason="unreachable")
    assert metric == 1 and scene.counted() == (0, 0)
    assert [fresh for *_, fresh in scene.asked] == [False, False]


async def test_when_no_worker_is_reached_the_client_is_told_so(scene, monkeypatch):
    scene.pool.mark_down = Mock()  # as if each were found well again at once
    answer = await scene.post(*[Unreachable("refused")] * 3)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_worker"
    assert scene.counted() == (0, 0) and scene.own.metric("seamark_resent_total", reason="unreachable") == 2


async def test_a_closed_connection_is_tried_again_at_the_same_worker_once(scene):
    answer = await scene.post(Stale("closed"), Said(200, WHOLE))
    assert answer.status_code == 200 and len(set(scene.workers)) == 1
    assert [fresh for *_, fresh in scene.asked] == [False, True]
    assert scene.own.metric("seamark_resent_total", reason="stale") == 1
    answer = await scene.post(Stale("closed"), Stale("closed"))
    assert answer.status_code == 502 and not scene.down and not scene.failures
    assert scene.own.metric("seamark_resent_total", reason="stale") == 2 and scene.counted() == (0, 0)


@pytest.mark.parametrize("status", [502, 503])
async def test_a_worker_that_took_nothing_is_believed_once(scene, status):
    refusing = Said(status, b"{}")
    answer = await scene.post(refusing, Said(200, WHOLE))
    assert answer.status_code == 200 and len(set(scene.workers)) == 2 and refusing.closed == 1
    last = Said(status, b'{"last":1}')
    answer = await scene.post(Said(status, b"{}"), last)
    assert (answer.status_code, answer.content) == (status, b'{"last":1}') and last.closed
    assert scene.own.metric("seamark_resent_total", reason="refused") == 2
    scene.script = [Said(status, b"{}")]
    assert (await scene.own.get("/v1/other")).status_code == status  # a GET goes nowhere else


async def test_a_closed_connection_after_a_refusal_is_tried_on_a_new_one(scene):
    answer = await scene.post(Stale("closed"), Said(503, b"{}"), Said(200, WHOLE))
    assert answer.status_code == 200 and [fresh for *_, fresh in scene.asked] == [False, True, False]
    assert scene.workers[0] == scene.workers[1] != scene.workers[2]


@pytest.mark.parametrize("status", [99, 101, 199, 600])
async def test_a_status_that_no_answer_has_is_a_bad_answer(scene, status):
    said = Said(status, b"{}")
    answer = await scene.post(said)
    assert answer.status_code == 502 and said.closed == 1


@pytest.mark.parametrize(
    ("path", "status", "model", "learns"),
    [
        (CHAT, 200, "m", True),
        (CHAT, 404, "m", False),
        (CHAT, 400, "m", None),
        ("/v1/embeddings", 200, "m", None),
    ],
)
async def test_whether_a_worker_takes_any_name_is_learnt_from_answers_that_tell(scene, path, status, model, learns):
    told: list[Any] = []
    scene.pool.answered_name = lambda worker, name, *, taken: told.append((worker.name, name, taken))  # type: ignore[method-assign]
    await scene.post(Said(status, b"{}"), body={**chat("Tide?"), "model": model, "input": "x"}, path=path)
    assert told == ([] if learns is None else [(scene.workers[0], model, learns)])
    named = {"model": model, "input": "x", "previous_response_id": "resp_1"}
    await scene.post(Said(404, b"{}"), Said(404, b"{}"), body=named, path="/v1/responses")
    assert len(told) == (learns is not None)  # it may be the response that is not there


async def test_how_much_there_is_to_do_is_told_in_a_body_that_carries_hints(scene):
    await scene.post(Said(200, WHOLE))
    await scene.post(Said(200, b"{}"), body={"model": "m", "input": "x"}, path="/v1/embeddings")
    assert [b"seamark_load" in body for _, _, _, body, _ in scene.asked] == [True, False]


@pytest.mark.parametrize(
    ("most", "is_collected"), [(len(WHOLE), True), (len(WHOLE) - 1, False), (0, False), (2**20, True)]
)
async def test_an_answer_is_collected_up_to_a_bound(scene_of, most, is_collected):
    scene = await scene_of(max_collected_bytes=most)
    said = Said(200, WHOLE[:40], WHOLE[40:], headers=[JSON, (b"content-length", b"%d" % len(WHOLE))])
    answer = await scene.post(said)
    assert answer.content == WHOLE and answer.headers["content-length"] == str(len(WHOLE)) and said.closed
    assert (answer.headers.get("x-seamark-cached") == "160") is is_collected
    assert ("x-seamark-reason" in answer.headers) is is_collected
    assert scene.own.metric("seamark_cached_tokens_total") == 160
    assert answer.headers["x-seamark-predicted"] == "0" and answer.headers["x-seamark-worker"] == scene.workers[0]


async def test_a_large_response_can_be_asked_for(scene_of):
    scene = await scene_of(max_collected_bytes=10)
    for status, is_known in ((200, True), (400, False)):
        raw = b'{"id": "resp_%d", "usage": {"input_tokens": 9}}' % status
        await scene.post(Said(status, raw[:25], raw[25:]), body={"model": "m", "input": "x"}, path="/v1/responses")
        known = scene.own.gateway.reader.stored.boot(f"resp_{status}", None)
        assert (known is not None) is is_known
    assert scene.own.metric("seamark_prompt_tokens_total") == 9


@pytest.mark.parametrize(
    ("status", "raw", "cached"),
    [(200, WHOLE, "160"), (201, WHOLE, None), (400, WHOLE, None), (200, b"{", None), (200, b"[1]", None)],
)
async def test_only_an_answer_200_says_what_came_from_the_cache(scene, status, raw, cached):
    answer = await scene.post(Said(status, raw))
    assert (answer.status_code, answer.content, answer.headers.get("x-seamark-cached")) == (status, raw, cached)
    assert scene.own.metric("seamark_prompt_tokens_total") == (300 if cached else 0)


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_has_no_length(scene, status):
    answer = await scene.post(Said(status, headers=[JSON, (b"content-length", b"7")]))
    assert (answer.status_code, answer.content) == (status, b"") and "content-length" not in answer.headers


async def test_a_compressed_answer_is_passed_on_and_not_read(scene):
    packed = (b"content-encoding", b"gzip")
    scene.own.client.headers["accept-encoding"] = "gzip"
    said = Said(200, b"\x1f\x8b", headers=[JSON, packed])
    said.pieces = [b"not read"]
    request = scene.own.opened(chat("Tide?"))
    scene.script = [said]
    start = await request.message()
    assert start is not None and packed in start["headers"]
    assert b"".join([piece async for piece in request.body()]) == b"not read"
    await scene.own.gateway.idle.caught_up()
    assert scene.own.metric("seamark_prompt_tokens_total") == 0 and scene.own.metric("seamark_requests_total") == 1


@pytest.mark.parametrize(("status", "seen"), [(299, "kept"), (300, "here"), (399, "here"), (400, "kept")])
async def test_only_a_redirect_is_turned_to_the_gateway(scene, status, seen):
    scene.script = [Said(status, b"", headers=[(b"location", b"http://inside.cluster/v1/x")])]
    answer = await scene.own.get("/v1/other")
    assert answer.headers.get("location") == ("http://inside.cluster/v1/x" if seen == "kept" else None)


@pytest.mark.parametrize(("broken", "code"), [(Broken("gone"), "worker_failed"), (Silent("quiet"), "worker_silent")])
async def test_a_stream_that_breaks_off_says_so_in_its_last_event(scene, broken, code):
    answer = await scene.post(Said(200, DELTA, broken, headers=[EVENTS]), body=chat("Tide?", stream=True))
    events = answer.content.split(b"\n\n")
    assert answer.status_code == 200 and events[0] + b"\n\n" == DELTA
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == code
    status = "504" if code == "worker_silent" else "502"
    assert scene.own.metric("seamark_requests_total", code=status) == 1 and scene.counted() == (0, 0)


@pytest.mark.parametrize(("pieces", "code"), [((DELTA, DONE), "200"), ((DELTA,), "499")])
async def test_who_leaves_a_stream_behind_its_last_event_has_all_of_it(scene, pieces, code):
    held = Said(200, *pieces, headers=[EVENTS])
    taken = held.next_chunk

    async def next_chunk() -> bytes:
        if not held.pieces:
            await asyncio.Event().wait()
        return await taken()

    held.next_chunk = next_chunk  # type: ignore[method-assign]
    scene.script = [held]
    client = scene.own.opened(chat("Tide?", stream=True, stream_options={"include_usage": True}))
    await client.message()
    for piece in pieces:
        assert (await client.message())["body"] == piece
    client.leave()
    await client.task
    await scene.own.gateway.idle.caught_up()
    assert scene.own.metric("seamark_requests_total", code=code) == 1 and scene.counted() == (0, 0)


async def test_the_way_that_a_rust_frontend_lacks_is_named(scene):
    scene.lack("/v1/responses")
    for status, code in ((404, "not_served"), (405, "not_served"), (501, "not_served"), (400, None)):
        answer = await scene.post(Said(status, b"{}"), body={"model": "m", "input": "x"}, path="/v1/responses")
        assert answer.status_code == (501 if code else status)
        assert code is None or answer.json()["error"]["code"] == code
    assert (await scene.post(Said(404, b"{}"))).status_code == 404  # this one it has


async def test_a_message_goes_to_the_chat_api_of_a_worker_that_lacks_its_own(scene):
    scene.lack("/v1/messages")
    said = {"id": "c", "model": "m", "choices": [{"message": {"content": "Ebb."}, "finish_reason": "stop"}]}
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Tide?"}]}
    answer = await scene.post(Said(200, json.dumps(said).encode()), body=body, path="/v1/messages")
    assert answer.json()["content"] == [{"type": "text", "text": "Ebb."}]
    assert scene.asked[0][1].endswith(CHAT)
    assert (await scene.post(Said(404, b"{}"), body=body, path="/v1/messages")).status_code == 404
