"""Requests that pass through: what the client sends, what workers say, what the client gets, and what is told of it.

HTTP itself is in `tests/gateway/`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from proxy.chat.chat import GENERATE, RESPONSES
from proxy.fleet.worker import Worker
from proxy.http import token_limits
from proxy.http.client import Answer, Broken, Exhausted, Malformed, Silent, Stale, Unreachable
from proxy.http.token_limits import LIMIT, REMAINING, RESET
from tests.harness.api_keys import bearer, entry
from tests.harness.fake_engine import Computed
from tests.harness.gateways import CHAT, LAST_USER, SYSTEM, TURN_END, chat
from tests.harness.in_memory_gateway import InMemoryGateway, learnt
from tests.harness.recording_worker import EVENTS, RecordingWorker
from tests.harness.scripted_upstream import JSON, Said, ScriptedUpstream, Sent
from tests.harness.waiting import until

STREAM = (b"content-type", b"text/event-stream")

WHOLE = b'{"id":"c","choices":[],"usage":{"prompt_tokens":300,"prompt_tokens_details":{"cached_tokens":160}}}'

DELTA, DONE = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', b"data: [DONE]\n\n"


class Scene:
    """A gateway before two workers that say what is scripted, whichever is asked."""

    def __init__(self, own: InMemoryGateway) -> None:
        self.own, self.pool = own, own.gateway.pool
        self.upstream = ScriptedUpstream()
        self.failures: list[tuple[Worker, bytes]] = []
        own.gateway.upstream.send = self._send  # type: ignore[method-assign]
        self.pool.record_failure = lambda *what: self.failures.append(what)  # type: ignore[method-assign]

    async def _send(self, method: str, url: str, headers: Any = (), *rest: Any) -> Answer:
        if b"x-request-id" not in dict(headers):  # the gateway's own, such as what it asks of templates
            raise Unreachable("not in the script")
        return await self.upstream.send(method, url, headers, *rest)

    async def post(self, *script: Said | Exception, body: Any = None, path: str = CHAT, **headers: str) -> Any:
        self.upstream.script = [*script]
        self.upstream.sent.clear()
        answer = await self.own.post(chat("Tide?") if body is None else body, path, **headers)
        assert not self.upstream.script, "not all of the script was asked for"
        return answer

    @property
    def asked(self) -> str:
        """The workers, in order: a the first one; a capital for a new connection."""
        names = list(dict.fromkeys(sent.worker for sent in self.upstream.sent))
        letters = ["abc"[names.index(sent.worker)] for sent in self.upstream.sent]
        return "".join(
            each.upper() if sent.fresh else each for each, sent in zip(letters, self.upstream.sent, strict=True)
        )

    def lack(self, path: str) -> None:
        for worker in self.pool.workers:
            worker.learn(replace(worker.probed, frontend=worker.probed.frontend._replace(lacks=frozenset([path]))))

    def counted(self) -> tuple[int, int]:
        """Requests under way, and tokens that are still to be computed."""
        workers = self.pool.workers
        return sum(worker.inflight for worker in workers), sum(worker.prefill_tokens for worker in workers)


@pytest.fixture
def scene_of(in_memory) -> Callable[..., Awaitable[Scene]]:
    async def of(**settings: Any) -> Scene:
        own = await in_memory(RecordingWorker(), RecordingWorker(), is_started=False, **settings)
        await own.gateway.pool.check_all()
        return Scene(own)

    return of


@pytest.fixture
async def scene(scene_of) -> Scene:
    return await scene_of()


class Row(NamedTuple):
    script: list[Any]
    status: int = 200
    code: str | None = None  # of an error
    words: str = ""  # in its message
    asked: str = "a"
    body: Any = None
    path: str = CHAT
    headers: dict[str, str | None] = {}  # noqa: RUF012
    blamed: int = 0  # failures of workers that count
    down: int = 0  # workers afterwards
    resent: str = ""  # for which reasons
    prompt: int = 0  # tokens that are counted
    explained: dict[str, Any] = {}  # noqa: RUF012


OTHER = {"model": "m", "input": "x"}
USED = {"prompt": 300, "headers": {"x-seamark-cached": "160", "x-seamark-predicted": "0"}}
UNUSED = {"x-seamark-cached": None, "x-seamark-reason": None}

REQUESTS = {
    "a whole answer tells what came from the cache": Row(
        [Said(200, WHOLE)], prompt=300, headers={**USED["headers"], "x-seamark-reason": "hit"}
    ),
    "half a JSON answer is passed on": Row([Said(200, b"{")], headers=UNUSED),
    "without a body there is no length": Row(
        [Said(204, headers=[JSON, (b"content-length", b"7")])], status=204, headers={"content-length": None}
    ),
    "what a worker may have read is not sent again": Row([Broken("gone")], 502, "worker_failed", "broke off", blamed=1),
    "nor what it was silent about": Row([Silent("")], 504, "worker_silent", "silence_timeout", blamed=1),
    "nor what it answered in no HTTP, of which it may not be guilty": Row(
        [Malformed("odd")], 502, "worker_failed", "no valid HTTP"
    ),
    "a worker's error counts": Row([Said(500, b"{}")], status=500, blamed=1, headers=UNUSED),
    "but not that it cannot do a thing": Row([Said(501, b"{}")], status=501, headers=UNUSED),
    "a lack of the gateway's own is no worker's fault": Row([Exhausted("no descriptor")], 503, "overloaded"),
    "a whole answer that breaks off is an error": Row([Said(200, b"{", Broken("gone"))], 502, "worker_failed"),
    "without a connection another worker is asked": Row(
        [Unreachable("refused"), Said(200, WHOLE)], asked="ab", down=1, resent="unreachable", **USED
    ),
    "a closed connection is tried anew at the same worker": Row(
        [Stale("closed"), Said(200, WHOLE)], asked="aA", resent="stale", **USED
    ),
    "but once": Row([Stale("closed"), Stale("closed")], 502, "worker_failed", asked="aA", resent="stale"),
    "a worker that took nothing is believed": Row(
        [Said(502, b"{}"), Said(200, WHOLE)], asked="ab", blamed=1, resent="refused", **USED
    ),
    "once": Row(
        [Said(503, b"{}"), Said(503, b'{"last":1}')], status=503, asked="ab", blamed=2, resent="refused", headers=UNUSED
    ),
    "also on a new connection": Row(
        [Stale("closed"), Said(503, b"{}"), Said(200, WHOLE)], asked="aAb", blamed=1, resent="stale refused", **USED
    ),
    "of a compressed answer nothing is read": Row(
        [Said(200, b"\x1f\x8b", headers=[JSON, (b"content-encoding", b"br")])], headers=UNUSED
    ),
    "what reports nothing is passed on": Row([Said(200, b'{"data":1}')], body=OTHER, path="/v1/other"),
    "the request is explained by its name": Row(
        [Said(200, WHOLE)],
        **{**USED, "headers": {"x-request-id": "mine"}},
        explained={"request_id": "mine", "endpoint": CHAT, "status": 200, "reason": "hit"},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_comes_to_what_its_row_says(scene, name):
    row = REQUESTS[name]
    script = copy.deepcopy(row.script)
    answer = await scene.post(*script, body=row.body, path=row.path, x_request_id="mine")
    assert answer.status_code == row.status and scene.asked == row.asked
    if row.code is not None:
        error = answer.json()["error"]
        assert error["code"] == row.code and row.words in error["message"]
        assert not row.words or scene.upstream.sent[-1].worker in error["message"]
    elif isinstance(row.script[-1], Said):
        assert answer.content == b"".join(row.script[-1].pieces)
        assert answer.headers["x-seamark-worker"] == scene.upstream.sent[-1].worker
    assert {name: answer.headers.get(name) for name in row.headers} == row.headers
    assert float(answer.headers["x-seamark-overhead-ms"]) >= 0
    assert all(each.closed for each in script if isinstance(each, Said)) and scene.counted() == (0, 0)
    assert len(scene.failures) == row.blamed and sum(not worker.up for worker in scene.pool.workers) == row.down
    reasons = {"unreachable", "stale", "refused"}
    assert {why for why in reasons if scene.own.metric("seamark_resent_total", reason=why)} == set(row.resent.split())
    assert scene.own.metric("seamark_prompt_tokens_total") == row.prompt
    assert scene.own.metric("seamark_requests_total", code=str(row.status)) == 1
    explained = (await scene.own.get("/seamark/requests/mine")).json()
    assert {field: explained[field] for field in row.explained} == row.explained


async def test_when_no_worker_is_reached_the_client_is_told_so(scene):
    scene.pool.mark_down = lambda worker, why: None  # as if each were found well again at once
    answer = await scene.post(*[Unreachable("refused")] * 3)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_worker"
    assert scene.counted() == (0, 0) and scene.own.metric("seamark_resent_total", reason="unreachable") == 2


@pytest.mark.parametrize(
    ("broken", "code", "status"), [(Broken("gone"), "worker_failed", "502"), (Silent("quiet"), "worker_silent", "504")]
)
async def test_a_stream_that_breaks_off_says_so_in_its_last_event(scene, broken, code, status):
    answer = await scene.post(Said(200, DELTA, broken, headers=[STREAM]), body=chat("Tide?", stream=True))
    events = answer.content.split(b"\n\n")
    assert answer.status_code == 200 and events[0] + b"\n\n" == DELTA
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == code
    assert scene.own.metric("seamark_requests_total", code=status) == 1 and scene.counted() == (0, 0)


@pytest.mark.parametrize(("pieces", "code"), [((DELTA, DONE), "200"), ((DELTA,), "499")])
async def test_who_leaves_a_stream_behind_its_last_event_has_all_of_it(scene, pieces, code):
    class Held(Said):
        async def next_chunk(self) -> bytes:
            return await super().next_chunk() or await asyncio.Event().wait()

    scene.upstream.script = [Held(200, *pieces, headers=[STREAM])]
    client = scene.own.opened(chat("Tide?", stream=True, stream_options={"include_usage": True}))
    await client.message()
    for piece in pieces:
        assert (await client.message())["body"] == piece
    client.leave()
    await client.task
    await scene.own.gateway.idle.caught_up()
    assert scene.own.metric("seamark_requests_total", code=code) == 1 and scene.counted() == (0, 0)


@pytest.mark.parametrize(
    ("path", "status", "learns"),
    [(CHAT, 200, True), (CHAT, 404, False), (CHAT, 400, None), ("/v1/embeddings", 200, None)],
)
async def test_whether_a_worker_takes_any_name_is_learnt_from_answers_that_tell(scene, path, status, learns):
    told: list[Any] = []
    scene.pool.answered_name = lambda worker, name, *, taken: told.append((worker.name, name, taken))
    await scene.post(Said(status, b"{}"), body={**chat("Tide?"), "input": "x"}, path=path)
    assert told == ([] if learns is None else [(scene.upstream.sent[0].worker, "m", learns)])
    named = {**OTHER, "previous_response_id": "resp_1"}
    await scene.post(Said(404, b"{}"), Said(404, b"{}"), body=named, path="/v1/responses")
    assert len(told) == (learns is not None)  # it may be the response that is not there


@pytest.mark.parametrize(("most", "is_collected"), [(len(WHOLE), True), (len(WHOLE) - 1, False), (0, False)])
async def test_an_answer_is_collected_up_to_a_bound(scene_of, most, is_collected):
    scene = await scene_of(max_collected_bytes=most)
    said = Said(200, WHOLE[:40], WHOLE[40:], headers=[JSON, (b"content-length", b"%d" % len(WHOLE))])
    answer = await scene.post(said)
    assert answer.content == WHOLE and answer.headers["content-length"] == str(len(WHOLE)) and said.closed
    assert ("x-seamark-cached" in answer.headers) is ("x-seamark-reason" in answer.headers) is is_collected
    assert scene.own.metric("seamark_cached_tokens_total") == 160


async def test_a_large_response_can_be_asked_for(scene_of):
    scene = await scene_of(max_collected_bytes=10)
    for status, is_known in ((200, True), (400, False)):
        raw = b'{"id": "resp_%d", "usage": {"input_tokens": 9}}' % status
        await scene.post(Said(status, raw[:25], raw[25:]), body=OTHER, path="/v1/responses")
        assert (scene.own.gateway.reader.stored.boot(f"resp_{status}", None) is not None) is is_known
    assert scene.own.metric("seamark_prompt_tokens_total") == 9


@pytest.mark.parametrize(
    ("status", "location", "seen"),
    [
        (307, "{url}/v1/some/thing?a=1", "/v1/some/thing?a=1"),
        (300, "http://inside.cluster:8000/v1/x", None),
        (399, "http://[broken/v1", None),
        (503, "/v1/x", "/v1/x"),  # and a GET goes nowhere else
    ],
)
async def test_a_redirect_of_a_worker_does_not_show_its_address(scene, status, location, seen):
    def says(sent: Sent) -> Said:
        told = location.format(url=f"http://{sent.worker}").encode()
        return Said(status, headers=[(b"location", told)])

    scene.upstream.say = says
    answer = await scene.own.get("/v1/some/thing/")
    assert (answer.status_code, answer.headers.get("location"), len(scene.upstream.sent)) == (status, seen, 1)


@pytest.mark.parametrize("is_told", [True, False])  # whether the answer names what was made
@pytest.mark.parametrize(
    ("path", "behind"),
    [("/v1/videos/video_7", "/content"), ("/v1/files/a-file", ""), ("/v1/fine_tuning/jobs/ft-4", "/events")],
)
async def test_what_a_worker_has_made_is_asked_of_it_or_else_of_all(scene, path, behind, is_told):
    (where, _, name), made = path.rpartition("/"), set[str]()

    def says(sent: Sent) -> Said:
        if sent.url.endswith(where):  # a list, or another thing at each worker
            return Said(200, b'{"id": "%s"}' % (name if is_told and not made else "other1").encode())
        return Said(200 if sent.worker in made and "none" not in sent.url else 404, b"{}")

    scene.upstream.say = says
    made.add((await scene.post(body=OTHER, path=where)).headers["x-seamark-worker"])
    scene.upstream.sent.clear()
    assert [(await scene.own.get(path + behind)).status_code for _ in range(4)] == [200] * 4
    assert (await scene.own.post({"input_file_id": name, "a": 1}, "/v1/batches")).status_code == 200
    assert len(scene.upstream.sent) <= 6 - is_told
    assert (await scene.own.get(where + "/none")).status_code == 404
    assert {(await scene.own.get(where)).headers["x-seamark-worker"] for _ in range(9)} > made  # a list is no one's


async def test_what_is_too_long_for_a_worker_goes_to_one_that_takes_more_and_stays_there(scene, caplog):
    small, large = scene.pool.workers
    for worker, length in ((small, 512), (large, 32_768)):
        cards = [{"id": "m", "max_model_len": length}]
        scene.pool._note(worker, replace(worker.probed, boot=f"{length}", models=cards))
    assert "max_model_len" in caplog.text and "max_model_len" in str((await scene.own.get("/seamark/status")).json())
    assert [card["max_model_len"] for card in (await scene.own.get("/v1/models")).json()["data"]] == [32_768]
    scene.upstream.say = lambda sent: Said(400 if sent.worker == small.name else 200, WHOLE)
    talk = [{"role": "user", "content": "x" * 2000}]
    for _ in range(5):
        assert (await scene.own.post({"model": "m", "messages": talk})).status_code == 200
        talk += [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    assert len(scene.upstream.sent) <= 6
    scene.upstream.say = lambda sent: Said(400, b"{}")
    assert (await scene.own.post(chat("Tide?"))).status_code == 400 and scene.counted() == (0, 0)


async def test_the_way_that_a_rust_frontend_lacks_is_named(scene):
    scene.lack("/v1/responses")
    for status, code in ((404, "not_served"), (405, "not_served"), (501, "not_served"), (400, None)):
        answer = await scene.post(Said(status, b"{}"), body=OTHER, path="/v1/responses")
        assert answer.status_code == (501 if code else status) and (answer.json().get("error", {}).get("code") == code)
    assert (await scene.post(Said(404, b"{}"))).status_code == 404  # this one it has


async def test_a_message_goes_to_the_chat_api_of_a_worker_that_lacks_its_own(scene):
    scene.lack("/v1/messages")
    said = {"id": "c", "model": "m", "choices": [{"message": {"content": "Ebb."}, "finish_reason": "stop"}]}
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Tide?"}]}
    raw = json.dumps(said).encode()
    headers = [(b"Content-Length", b"7"), (b"x-mine", b"1"), JSON]
    answer = await scene.post(Said(200, raw[:9], raw[9:], headers=headers), body=body, path="/v1/messages")
    assert answer.json()["content"] == [{"type": "text", "text": "Ebb."}] and answer.headers["x-mine"] == "1"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert scene.upstream.sent[0].url.endswith(CHAT)
    page, coded = [(b"content-type", b"text/html")], (b"content-encoding", b"br")
    for said, status, words in (
        *((Said(status, b"<p>", headers=page), status, str(status)) for status in (404, 500)),
        *((Said(200, b"<p>", headers=[kind, coded]), 502, "no chat") for kind in (JSON, STREAM)),
        *((Said(status, b"", headers=page), 502, "no chat") for status in (200, 307)),
        (Said(400, b'{"error": {"message": "No.", "type": "t"}}'), 400, "No."),
    ):
        answer = await scene.post(said, body=body, path="/v1/messages")
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert words in answer.json()["error"]["message"] and said.closed
    first = {"id": "c", "model": "m", "choices": [{"delta": {"content": "Ebb."}, "finish_reason": None}]}
    last = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    events = [f"data: {json.dumps(each)}\n\n".encode() for each in (first, last)] + [DONE]
    said = Said(200, events[0][:9], events[0][9:], *events[1:], headers=[STREAM])
    told = (await scene.post(said, body={**body, "stream": True}, path="/v1/messages")).content
    named = [line.removeprefix(b"event: ") for line in told.splitlines() if line.startswith(b"event: ")]
    assert named[:2] == [b"message_start", b"content_block_start"] and named[-2:] == [b"message_delta", b"message_stop"]
    assert b"Ebb." in told


async def test_system_messages_within_a_chat_go_to_its_head_where_a_template_takes_no_other(scene):
    scene.lack("/v1/messages")
    scene.pool.workers[1].up = False
    turns = [{"role": role, "content": role} for role in ("user", "system", "assistant")]
    answer = b'{"choices": [{"message": {"content": "Ebb."}, "finish_reason": "stop"}]}'
    within, ahead = (["You pilot. ", "user", "system", "assistant"], ["You pilot. system", "user", "assistant"])
    for statuses, sent in (
        ([200], [within]),
        ([404], [within]),
        ([400, 400], [within, ahead]),  # it was something else
        ([500, 200], [within, ahead]),
        ([200], [ahead]),  # that is known now
    ):
        script = [Said(status, answer) for status in statuses]
        await scene.post(*script, body={"system": "You pilot. ", "messages": turns}, path="/v1/messages")
        contents = [[message["content"] for message in each.fields["messages"]] for each in scene.upstream.sent]
        assert contents == sent and all(each.closed for each in script)
    scene.pool.workers[0].restarted()
    assert not scene.pool.workers[0].merges_system


TOLD, UNTOLD, GONE = WHOLE.replace(b"300,", b'300,"completion_tokens":7,'), b'{"choices":[]}', b"its client leaves"
WORKERS = [(LIMIT, b"7"), (b"x-ratelimit-limit-requests", b"8")]  # of its own
LAST, SSE = b"data: " + TOLD + b"\n\n", [STREAM, *WORKERS]


class Leaving(Said):
    async def next_chunk(self) -> bytes:
        if self.pieces[:1] == [GONE]:
            self.client.leave()
            await asyncio.Event().wait()
        return await super().next_chunk()


IMAGE, BYTES = "A" * 400, (b"content-type", b"application/octet-stream")

# Its limits, its path, what workers say, and what counts: P, the estimate of its prompt, and so many tokens.
CHARGED: dict[str, tuple[dict[str, Any], str, list[Any], str, int]] = {
    "all that the usage says": ({}, CHAT, [Said(200, TOLD, headers=[JSON, *WORKERS])], "", 307),
    "cached tokens at their weight": ({"cached_weight": 0.1}, CHAT, [Said(200, TOLD)], "", 163),
    "what is computed": ({"count": "computed"}, CHAT, [Said(200, TOLD)], "", 140),
    "the answer": ({"count": "output"}, CHAT, [Said(200, TOLD)], "", 7),
    "embeddings": ({}, "/v1/embeddings", [Said(200, TOLD)], "", 307),
    "embeddings as bytes, which tell nothing": ({}, "/v1/embeddings", [Said(200, b"0", headers=[BYTES])], "P", 50),
    "token ids: what their sampling parameters say": ({}, GENERATE, [Said(200, UNTOLD)], "P", 60),
    "a batch of chats whose client leaves": ({}, CHAT + "/batch", [Leaving(200, b"{", GONE)], "P", 50),
    "what goes on in the background": ({}, RESPONSES, [Leaving(200, DELTA, GONE, headers=SSE)], "P", 2 * 8192),
    "nothing where no token is computed": ({}, "/tokenize", [Said(200, UNTOLD)], "", 0),
    "a whole answer without usage: what it may have": ({}, CHAT, [Said(200, UNTOLD)], "P", 50),
    "a stream that tells it, since it is asked to": ({}, CHAT, [Leaving(200, DELTA, LAST, DONE, headers=SSE)], "", 307),
    "a stream without usage: its events": ({}, CHAT, [Leaving(200, DELTA + DELTA, DONE, headers=SSE)], "P", 3),
    "one whose client leaves": ({}, CHAT, [Leaving(200, DELTA, DELTA, GONE, headers=SSE)], "P", 2),
    "one whose client leaves before it begins": ({}, CHAT, [Leaving(200, GONE, headers=SSE)], "P", 0),
    "nothing that is not told is cached": ({"count": "computed"}, CHAT, [Leaving(200, GONE, headers=SSE)], "P", 0),
    "a whole answer whose client leaves: what it may have": ({}, CHAT, [Leaving(200, b"{", GONE)], "P", 50),
    "one request, however often it is sent": ({}, CHAT, [Unreachable("no"), Said(200, TOLD)], "", 307),
    "no error": ({}, CHAT, [Said(400, b"{}")], "", 0),
}


@pytest.mark.parametrize("name", CHARGED)
async def test_what_counts_at_a_key_with_limits_in_tokens(scene_of, tmp_path, monkeypatch, name):
    monkeypatch.setattr(token_limits, "time", SimpleNamespace(time=lambda: 86_390.0))
    limits, path, script, of_prompt, tokens = copy.deepcopy(CHARGED[name])
    (tmp_path / "keys").write_text(
        entry("ann", tokens_per_minute=1000, tokens_per_day=900, share="s", **limits) + entry("bob", share="s")
    )
    scene = await scene_of(api_keys=tmp_path / "keys", ask_usage=False)
    is_stream, says_usage = STREAM in getattr(script[-1], "headers", ()), TOLD in getattr(script[-1], "pieces", ())
    body = {**chat("Tide?"), "input": "x", "stream": is_stream, "max_tokens": 25, "n": 2, "background": True}
    body["messages"].append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]})
    body["sampling_params"] = {"max_tokens": 20, "n": 3}
    await scene.post(Said(200, UNTOLD), body=body, path=path, **bearer("bob"))  # so it may be in a cache
    estimate = round((len(json.dumps(body)) - len(IMAGE) * (path == CHAT)) / 4)
    scene.upstream.script, headers, counted = [*script], [], tokens + len(of_prompt) * estimate
    script[-1].client = client = scene.own.opened(body, path, **bearer("ann"))

    async def read() -> None:
        while (message := await client.message()) is not None:
            headers.extend(message.get("headers", ()))

    reading = asyncio.create_task(read())
    await client.task
    reading.cancel()
    assert (is_stream and path == CHAT) is (b"include_usage" in scene.upstream.sent[-1].body)
    windows = scene.own.gateway.keys.limited["ann"].now()
    assert [window.own for window in windows] == [min(counted, window.limit) for window in windows]
    left = dict(headers).get(REMAINING)
    own = [(LIMIT, b"900"), (REMAINING, left), (RESET, b"10s")] * bool(headers)
    assert [each for each in headers if b"ratelimit" in each[0] and each != WORKERS[1]] == own
    assert left == b"%d" % (900 - counted) or not says_usage or path != CHAT


async def test_what_is_answered_again_counts_nothing_and_goes_on_when_nothing_is_left(in_memory, tmp_path):
    (tmp_path / "keys").write_text(entry("ann", tokens_per_day=1) + entry("root", admin=True))
    gateway = await in_memory(RecordingWorker(computed=Computed()), response_cache=2**22, api_keys=tmp_path / "keys")
    bodies, headers = [{**chat(each), "temperature": 0} for each in ("Tide?", "Wind?", "Tide?")], bearer("ann")
    answers = [await gateway.post(body, x_seamark_cache="allow", **headers) for body in bodies]
    assert [each.status_code for each in answers] == [200, 429, 200]
    assert {each.headers["x-ratelimit-remaining-tokens"] for each in answers} == {"0"}
    error = answers[1].json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded") and "tokens_per_day" in error["message"]
    assert gateway.metric("seamark_key_refused_total", key="ann", per="day") == 1
    (limit,) = (await gateway.get("/seamark/status", **bearer("root"))).json()["keys"][0]["limits"]
    assert (limit["per"], limit["limit"], limit["others"]) == ("day", 1, 0) and limit["own"] > 1


# Before workers whose engines compute.


async def test_the_hint_is_spliced_into_the_clients_bytes(in_memory, worker):
    gateway = await in_memory(worker)
    raw = json.dumps(chat("Tide?"), indent=3).encode().replace(b"Tide", b"T\\u0069de")
    answer = await gateway.post(raw)
    assert answer.status_code == 200 and answer.content == worker.answers[-1]
    spliced = json.dumps([LAST_USER, TURN_END], separators=(",", ":")).encode()
    sent, load = worker.requests[-1].body.split(b',"seamark_load":')
    assert sent == raw[:-1] + b',"vllm_xargs":{"seamark_boundaries":' + spliced and load.endswith(b'"}}')
    assert answer.headers["x-seamark-boundary"] == f"{LAST_USER};{TURN_END}"
    await gateway.post(chat("Tide?", model="a client's own"))  # which becomes no label
    assert gateway.metric("seamark_requests_total", model="m") == gateway.metric("seamark_requests_total") == 2
    await gateway.post(OTHER, "/v1/embeddings")
    assert b"seamark_load" not in worker.requests[-1].body  # which takes no hints


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_usage_that_only_the_gateway_asked_for_is_taken_out_again(in_memory, worker, options):
    gateway = await in_memory(worker)
    worker.more_metrics = "seamark_pass_seconds 0.5\nseamark_token_seconds 0.001\n"
    answer = await gateway.post(chat("Tide?", stream=True, **options))
    assert json.loads(worker.requests[-1].body)["stream_options"] == {"include_usage": True}
    assert answer.content == EVENTS[0] + EVENTS[2] and float(answer.headers["x-seamark-overhead-ms"]) >= 0
    assert gateway.metric("seamark_cached_tokens_total") == 160
    await until(lambda: gateway.gateway.accounting.time_saved().saved == pytest.approx(160 * 0.001))
    assert gateway.metric("seamark_seconds_saved_total") == pytest.approx(160 * 0.001)
    assert 0 < gateway.metric("seamark_seconds_spent_total") < 10


@pytest.mark.parametrize(
    ("state", "settings", "reason"),
    [
        ({"patched": False}, {}, "unpatched"),
        ({"hang_renders": True, "cached": 0}, {"render_timeout": 0.2}, "no_facts"),
    ],
)
async def test_a_request_that_gets_no_hint_goes_on_as_it_was_written(in_memory, state, settings, reason):
    worker = RecordingWorker(**state)
    gateway = await in_memory(worker, **settings)
    raw = json.dumps(chat("Tide?")).encode()
    answer = await gateway.post(raw)
    assert answer.status_code == 200 and answer.headers["x-seamark-reason"] == reason
    load = b"" if reason == "unpatched" else b',"vllm_xargs":{"seamark_load":'
    assert worker.requests[-1].body.partition(load or b"x" * 9)[0] == (raw[:-1] if load else raw)
    assert gateway.metric("seamark_miss_total", model="m", reason=reason) == 1
    assert gateway.metric("seamark_engine_patched") == (reason != "unpatched")
    assert (await gateway.explained(answer))["reason"] == reason


@pytest.mark.parametrize("name", ["one", "/a/b?c=%2F#d e"])
@pytest.mark.parametrize(("path", "in_body"), [(CHAT, False), (CHAT, True), ("/v1/responses", True)])
async def test_two_requests_of_one_name_at_once_are_told_apart_at_the_worker(in_memory, worker, name, in_body, path):
    """Their name is that of their answers, and of an explanation."""
    gateway = await in_memory(worker)
    asked = chat("Tide?") if path == CHAT else {"model": "m", "input": "Tide?"}
    asked, headers = ({**asked, "request_id": name}, {}) if in_body else (asked, {"x-request-id": name})
    worker.hold.set()
    answers = [asyncio.create_task(gateway.post(asked, path, **headers)) for _ in range(2)]
    await until(lambda: len(worker.requests) == 2)
    worker.hold.clear()
    assert [(await answer).headers["x-request-id"] for answer in answers] == [name, name]
    names = sorted(dict(request.headers)[b"x-request-id"].decode() for request in worker.requests)
    assert names[0] == name and names[1].startswith(name + ".")
    if in_body:  # by which vLLM stores a response
        assert sorted(json.loads(request.body)["request_id"] for request in worker.requests) == names
    await gateway.post(asked, path, **headers)
    assert worker.requests[-1].header(b"x-request-id").decode() == name  # it is free again


ODD = [
    {"prompt_cache_key": "session \ud800"},
    {"prompt_cache_key": 7, "cache_salt": "x"},
    {"chat_template_kwargs": 3},
    {"tools": [7], "tool_choice": {"type": []}},
    {"messages": [{"role": ["user"], "content": "x" * 600}, 7, {"role": "user", "content": "?"}]},
    {"messages": [7, {"role": "user", "content": "?"}, {"role": {}, "content": [{"text": 7, "cache_control": 7}]}]},
    {"stream_options": 7, "vllm_xargs": 7, "truncate_prompt_tokens": -1},
]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_odd_bodies_reach_the_worker_and_log_no_error(in_memory, worker, caplog, path):
    gateway = await in_memory(worker)
    for fields in [each for each in ODD for _ in range(2)]:
        body = {**chat("Tide?"), "input": [SYSTEM, *fields.get("messages", [])], "prompt": "Tide?", **fields}
        assert (await gateway.post(body, path)).status_code == 200
    assert sum(not request.target.endswith("/render") for request in worker.requests) == 2 * len(ODD)
    assert " failed: " not in caplog.text and "boundary of request" not in caplog.text


@pytest.mark.parametrize("beside", [{}, {"user": "all"}, {"metadata": {"user_id": "all"}}], ids=str)
@pytest.mark.parametrize(("patched", "shadow"), [(False, False), (True, True)])
async def test_workers_that_get_no_hints_keep_their_conversations_and_share_those_of_one_user(
    in_memory, patched, shadow, beside
):
    workers = [RecordingWorker(patched=patched) for _ in range(2)]
    gateway = await in_memory(*workers, shadow=shadow, load_slack=0)
    talks = [[{"role": "user", "content": f"{number} " + "Tide? " * 20}] for number in range(11)]
    for _ in range(4):
        for messages in talks:
            await gateway.post({"model": "m", "messages": messages, **beside})
            messages += [{"role": "assistant", "content": "3 m"}, {"role": "user", "content": "And then?"}]
    asked = [
        {sent.fields["messages"][0]["content"] for sent in worker.requests if sent.path == CHAT} for worker in workers
    ]
    assert all(asked) and asked[0].isdisjoint(asked[1])


async def test_a_session_token_leads_through_any_gateway_to_the_worker_that_answered_until_that_restarts(in_memory):
    workers = [RecordingWorker() for _ in range(4)]
    first, other = [await in_memory(*workers) for _ in range(2)]
    await learnt(other)
    talk = [
        {"role": "user", "content": "Tide? " * 400},
        {"role": "assistant", "content": "3 m"},
        {**SYSTEM, "role": "user"},
    ]
    assert "x-session-token" not in (await first.post({"model": "m", "messages": talk})).headers
    token = (await first.post({"model": "m", "messages": talk}, x_session_token="")).headers["x-session-token"]
    for name in "ab":
        body = {"model": "m", "messages": [{"role": "user", "content": f"{name}{talk[0]['content']}"}, *talk[1:]]}
        assert (await other.post(body, x_session_token=token)).headers["x-session-token"] == token
    for worker in workers:
        worker.boot = "1.8e+09"
    await until(lambda: all("1.8e+09" in worker.boot for worker in other.gateway.pool.up))
    assert (await other.post(body, x_session_token=token)).headers["x-session-token"] != token
    for worker in first.gateway.pool.workers[1:]:
        worker.max_inflight = worker.inflight = 1
    assert "x-session-token" in (await first.post(body, x_session_token="")).headers
