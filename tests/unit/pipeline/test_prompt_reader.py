"""What is read of a request, and what of its body reaches the worker; the unknown is learnt beside the requests."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from proxy import idle_work
from proxy.boundaries.layout import layout_of
from proxy.boundaries.template_facts import DEFAULT, Opener, Setting, TemplateFacts
from proxy.chat.chat import CHAT, GENERATE, MESSAGES, RESPONSES
from proxy.chat.reader import chat_request
from proxy.errors import BadRequest, NotFound
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.json_body import HINT, LOAD, NOTHING, PIN, TRANSFERS, XARGS, Memory, memory_of, parse_object
from proxy.metrics import Metrics
from proxy.observability.request_diff import RememberedRequest
from proxy.pipeline import exchange as request_module
from proxy.pipeline.exchange import Body, Exchange, Timings, affinity_key, choices_of, exchange_of, target_of
from proxy.pipeline.prompt_reader import TOKENS_PER_BYTE, PromptReader
from proxy.settings import Settings
from tests.harness.probed import pool_of
from tests.harness.recording_worker import RecordingWorker
from tests.harness.scripted_upstream import ScriptedUpstream
from tests.harness.waiting import until

FACTS = TemplateFacts({"user": 5}, {("alone", False): Opener((3,)), ("user", False): Opener((4,))})

ASKED = [{"role": "system", "content": "You pilot."}, {"role": "user", "content": "Tide?"}]

KEY = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")


class Learner:
    """Knows the facts of the default setting, and notes what it is asked to learn."""

    def __init__(self) -> None:
        self.asked: list[Setting] = []

    def facts(self, renderer_id: bytes, setting: Setting = DEFAULT) -> TemplateFacts:
        return FACTS if setting.is_default else replace(FACTS, ends={"user": 9}, is_own=False)

    def wants(self, renderer_id: bytes, setting: Setting = DEFAULT, owner: str | None = None) -> bool:
        return setting not in self.asked

    async def learn(self, renderer: Any, renderer_id: bytes, model: Any, setting: Setting, owner: str | None) -> None:
        self.asked.append(setting)


def worker(name: str = "a") -> Worker:
    engine = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384)
    return pool_of(ScriptedUpstream(), name, engine=engine).workers[0]


def reader_of(**settings: Any) -> PromptReader:
    return PromptReader(Settings(**settings), Metrics(), Learner(), pool_of(ScriptedUpstream(), "a"))


async def read(
    reader: PromptReader,
    *workers: Worker,
    has_slot: bool = True,
    memory: Memory = NOTHING,
    key: ApiKey | None = None,
    **body: Any,
) -> Exchange:
    """A request that has been read, and has got its slot if there is one."""
    parsed = {"model": "m", "messages": ASKED, **body}
    scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
    request = exchange_of(scope, json.dumps(parsed).encode(), "r", key)
    request.body.parsed, request.body.memory = parsed, memory
    request.ask()
    request.prompt = reader.read(request, workers)
    if has_slot:
        reader.learn(request)
    return request


@pytest.mark.parametrize(
    ("most", "body", "failure"),
    [(10, {}, None), (9, {}, "no_boundary"), *((10, {"messages": told}, "no_boundary") for told in ("x", [], [7]))],
)
async def test_in_a_body_of_too_many_values_no_boundaries_are_sought(most, body, failure):
    reader = reader_of(max_boundary_values=most)
    prompt = (await read(reader, worker(), memory=Memory(5000, 10), **body)).prompt
    assert prompt.found.failure == failure and prompt.tokens
    assert (prompt.remembered is None) == bool(failure) and (most == 10 or prompt.chat is None)
    assert reader.recent.held == (0 if failure else prompt.remembered.size) and (failure or reader.recent.held > 5000)


async def test_nothing_is_asked_for_a_request_without_a_slot():
    reader, fields = reader_of(), {"chat_template_kwargs": {"thinking": True}}
    found = (await read(reader, worker(), has_slot=False, **fields)).prompt.found
    await asyncio.sleep(0)
    assert found.entries() == ("last:3", -9) and not reader._facts.asked
    await read(reader, worker(), **fields)
    await asyncio.sleep(0)
    assert reader._facts.asked and idle_work._tasks  # a task that nobody holds may be lost
    await until(lambda: not idle_work._tasks)


async def test_a_failure_costs_the_hint_and_names_no_text(caplog, monkeypatch):
    monkeypatch.setattr(Learner, "facts", lambda *_: {}["You pilot."])
    request = await read(reader_of(), worker())
    assert (request.prompt.found.boundaries, request.prompt.found.failure) == ((), "no_facts")
    assert "boundary of request r: KeyError" in caplog.text and "ilot" not in caplog.text


async def test_answers_tell_how_many_tokens_a_byte_has():
    reader = reader_of()
    first = (await read(reader, worker())).prompt
    size = len(json.dumps({"model": "m", "messages": ASKED}).encode())
    assert first.tokens == round(size * TOKENS_PER_BYTE)
    for _ in range(200):
        reader.learn_tokens_per_byte("m", 100, 50)
    reader.learn_tokens_per_byte("m", 0, 50)
    reader.learn_tokens_per_byte(["m"], 100, 1)
    later = (await read(reader, worker())).prompt
    assert later.tokens == pytest.approx(size * 0.5, abs=1)
    assert later.found.boundaries[-1].estimate == later.tokens > first.found.boundaries[-1].estimate


async def test_what_is_remembered_has_its_shares_of_the_memory():
    reader = reader_of(memory_bytes=2**20, text_bytes=2**20)
    for number in range(3000):
        reader.positions.put(b"%d" % number, 7)
    assert len(reader.positions) == 2**19 // 250
    for number in range(200):
        messages = [{"role": "user", "content": f"{number} " + "x" * 9000}]
        chat = chat_request({"model": "m", "messages": messages})
        layout = layout_of(chat, b"%d" % number)
        reader.recent.add(RememberedRequest(layout, 9000))
        reader.stored.put(chat, {"id": f"resp_{number}", "output": []}, "w#1")
        reader.learner.shared_texts(layout)
    for name, size in {"recent": 2**20 // 4, "stored": 2**20 // 8, "learner": 2**20 * 3 // 8}.items():
        assert size - 12_000 < getattr(reader, name).held <= size, name
    assert reader.held == reader.recent.held + reader.stored.held + reader.learner.held


@pytest.mark.parametrize("workers", [1, 2])
async def test_beginnings_inside_texts_are_sought_only_to_choose_among_several_workers(workers):
    reader = reader_of()
    serving = [worker(name) for name in "ab"[:workers]]
    for question in ("High?", "Low?", "Neap?"):
        messages = [{"role": "user", "content": "Pilots name the tide before the berth. " * 30 + f"\n{question}"}]
        found = (await read(reader, *serving, messages=messages)).prompt.found
    assert any(each.kind == "learned" for each in found.boundaries) is (workers == 2)


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_rewrite_rule_changes_what_is_sent_and_what_is_known_of_it_and_is_counted(is_on):
    reader = reader_of(rewrite=("billing_header",) if is_on else ())
    told = [{"role": "system", "content": "x-anthropic-billing-header: cch=abc;\nYou pilot."}, ASKED[1]]
    request = await read(reader, worker(), messages=told)
    wanted = ASKED[0]["content"] if is_on else told[0]["content"]
    assert json.loads(request.body.raw)["messages"][0]["content"] == wanted
    assert request.body.parsed["messages"][0]["content"] == wanted
    assert request.prompt.rewrites == (("billing_header",) if is_on else ())
    assert request.prompt.chat.messages[0]["content"] == wanted

    value, named = reader._metrics.registry.get_sample_value, "seamark_rewrites_total"
    counted = [value(named, {"rule": "billing_header", "applied": each}) for each in ("true", "false")]
    assert counted == ([1.0, None] if is_on else [None, 1.0])


async def test_a_worker_that_renders_nothing_is_asked_once(in_memory):
    own = await in_memory(asked := RecordingWorker(patched=False), is_started=False)
    await own.gateway.pool.check_all()
    reader, (serving,) = own.gateway.reader, own.gateway.pool.workers
    serving.renderer_ids.clear()
    serving.unrendered_models.clear()
    asked.render_status = 500
    chat = chat_request({"model": "m", "messages": ASKED})
    renders = []
    for _ in range(2):
        assert (await reader.find_boundaries(chat, serving, 400, 1234, None)).found.failure == "no_facts"
        renders.append(asked.renders)
    assert renders[0] == renders[1] > 0 and serving.unrendered_models == {"m"}
    asked.render_status, serving.renderer_ids["m"] = 200, b"known by now"
    assert (await reader.find_boundaries(chat, serving, 400, 1234, None)).found.failure is None


def parts(n: int, seed: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": f"{seed}"}, *({"type": "text"} for _ in range(n))]}]


@pytest.mark.timeout(300)  # tracemalloc takes its time on a busy machine
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", lambda n, seed: {"messages": parts(1, seed), "tools": [[seed + 1e9] * n * 9]}),
        ("/v1/messages", lambda n, seed: {"messages": parts(n, seed), "max_tokens": 1}),
    ],
)
async def test_what_is_remembered_of_prompts_takes_no_more_than_it_may(endpoint, body):
    most, limits = 2**19, Settings().json_limits
    reader = reader_of(text_bytes=most)
    scope = {"method": "POST", "path": endpoint, "query_string": b"", "headers": []}
    for seed in range(40):
        if seed == 1:  # what stays for ever, such as patterns and interned texts, is there
            tracemalloc.start()
        raw = json.dumps({"model": "m", **body(150, seed)}).encode()
        request = exchange_of(scope, raw, f"{seed}")
        request.body.parsed = parse_object(raw, *limits)
        request.ask()
        request.body.memory = memory_of(request.body.parsed, len(raw), 10**6)
        request.prompt = reader.read(request, [worker()])
        reader.stored.put(request.prompt.chat, {"id": f"resp_{seed}"}, "w#1")
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert reader.recent.held and held < 1.5 * most


def test_a_session_of_an_agent_is_kept_together_unless_the_client_itself_wants_otherwise():
    agents = [[(name, b"ses_1")] for name in (b"x-session-id", b"session-id", b"session_id")]  # Codex, in two spellings
    agents.append([(b"x-session-affinity", b"ses_1"), (b"x-session-id", b"ses_other")])  # OpenCode
    agents.append([(b"user-agent", b"cli"), (b"x-claude-code-session-id", b"ses_1")])
    for headers in agents:
        assert {affinity_key(headers, {"prompt_cache_key": given}) for given in ("", 7, None)} == {"ses_1"}
        assert affinity_key(headers, {"prompt_cache_key": "mine"}) == "mine"
    for body in ({"session_id": "ses_1", "metadata": 7}, {"metadata": {"session_id": "ses_1"}, "session_id": ""}):
        assert affinity_key([], body) == "ses_1"


def test_only_known_paths_are_labels():
    for path, label in (("/tokenize", "/tokenize"), ("/v1/responses/resp_1", "other"), ("/anything", "other")):
        scope = {"method": "GET", "path": path, "query_string": b"", "headers": []}
        assert exchange_of(scope, b"", "r").head.endpoint == label


def test_a_path_goes_on_as_it_was_written_unless_it_leads_upwards():
    assert target_of({"path": "/v1/x", "query_string": b"a=/../b"}) == "/v1/x?a=/../b"
    assert target_of({"path": "/v1/a..b", "query_string": b""}) == "/v1/a..b"
    written = {"path": "/v1/a b", "raw_path": b"/v1/a%20b", "query_string": b"c=%20"}
    assert target_of(written) == "/v1/a%20b?c=%20"
    for upwards in ({"path": "/v1/../x"}, {"path": "/v1/..", "raw_path": b"/v1/%2E%2E"}):
        with pytest.raises(NotFound):
            target_of({**upwards, "query_string": b""})


def test_an_answer_has_so_many_choices_for_each_prompt():
    assert [choices_of({"n": number}) for number in ("3", "many")] == [3, 1]
    assert [choices_of({"prompt": prompt, "n": 2}) for prompt in ([], [[1, 2], [3]], [7, 8, 9])] == [2, 4, 2]


def test_the_gateways_own_time_is_what_it_did_not_wait(monkeypatch):
    monkeypatch.setattr(request_module.time, "perf_counter", lambda: 10.0)
    for arrived, waited, own in ((8.0, 0.5, 1500.0), (8.0, 2.5, 0.0)):
        timings = Timings(arrived=arrived, waited_seconds=waited)
        assert timings.own_milliseconds == own and not (timings.is_stream or timings.was_alone)


EVIL = {"remote_host": "evil"}


def body_of(raw: dict[str, Any], path: str = CHAT, key: ApiKey | None = None) -> Body:
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
    request = exchange_of(scope, json.dumps(raw).encode(), "r", key)
    request.take(dict(raw), asks_usage=False)
    return request.body


def sent(body: dict[str, Any], key: ApiKey | None = None, path: str = CHAT) -> dict[str, Any]:
    reached: dict[str, Any] = json.loads(body_of(body, path, key).encoded(()))
    return reached


@pytest.mark.parametrize("name", [HINT, PIN, *TRANSFERS])
def test_nothing_of_the_gateways_comes_from_a_client(name):
    body = {"token_ids": [1], "sampling_params": {"seed": 1, "extra_args": {name: EVIL, "mine": 1}}}
    kept = {"token_ids": [1], "sampling_params": {"seed": 1, "extra_args": {"mine": 1}}}
    assert sent(body, path=GENERATE) == kept
    assert sent({**body, "kv_transfer_params": EVIL}, KEY, GENERATE) == {**kept, "cache_salt": "salt"}
    if name in TRANSFERS:
        taken = body_of({"model": "m", name: EVIL, XARGS: {name: EVIL, "mine": 1}}, key=KEY)
        for _ in range(2):
            assert json.loads(taken.encoded(())) == {"model": "m", XARGS: {"mine": 1, HINT: []}, "cache_salt": "salt"}
        assert EVIL not in taken.parsed.values()


def test_media_that_all_keys_would_share_by_name_are_refused():
    body = {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {"image": ["a"]}}}
    with pytest.raises(BadRequest, match="content_parts"):
        sent(body, KEY, GENERATE)
    assert sent(body, path=GENERATE) == body


def test_a_response_is_not_stored_under_a_name_that_a_client_with_a_key_chose():
    body = {"model": "m", "input": "x", "request_id": "resp_of_another"}
    assert sent(body, KEY, RESPONSES) == {"model": "m", "input": "x", "cache_salt": "salt"}
    assert sent({**body, "cache_salt": "x"}, path=RESPONSES) == {**body, "cache_salt": "x"}


MINE = {"mine": 1}

MESSAGE = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Tide?"}]}


@pytest.mark.parametrize(
    ("xargs", "hint", "load", "sent"),
    [
        (None, (), "", None),
        (None, (7,), "g,1,1", {HINT: [7], LOAD: "g,1,1"}),
        ({**MINE, HINT: [9], PIN: 1, LOAD: "its own"}, (), "", {**MINE, HINT: []}),
        ({**MINE, LOAD: "its own"}, (7,), "g,1,1", {**MINE, HINT: [7], LOAD: "g,1,1"}),
        ("no object", (7,), "", "no object"),
    ],
)
def test_what_the_gateway_tells_the_engine_stands_beside_what_the_client_does(xargs, hint, load, sent):
    """Also where a message goes to the chat API."""
    given, reached = ({} if each is None else {XARGS: each} for each in (xargs, sent))
    body = body_of({"model": "m", **given})
    body.hint = (1,)  # of a try before
    assert json.loads(body.encoded(hint, load=load)) == {"model": "m", **reached}
    assert body.hint == (() if sent == "no object" else hint)
    body = body_of({**MESSAGE, **given}, MESSAGES)
    chat = json.loads(body.as_chat(hint, {"cache_salt": "s"}, load))
    assert (chat.get(XARGS) or None) == sent and body.hint == hint
    assert (chat["cache_salt"], chat["max_tokens"], chat["messages"][0]["role"]) == ("s", 8, "user")
