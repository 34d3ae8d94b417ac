"""Hints are entries that a worker's engine resolves: what each worker gets, and that no request waits for a render."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import httpx
import pytest

from proxy.bench.harness.servers import Server
from proxy.boundaries.facts_learner import COMMON_SETTINGS, SETTINGS_PER_MINUTE
from proxy.observability.cures import CHANGE_TEXT
from tests.harness.fake_engine import GENERATION, template
from tests.harness.forked_gateways import GatewayForks
from tests.harness.gateways import (
    CHAT,
    LAST_USER,
    SYSTEM,
    SYSTEM_END,
    TURN_END,
    chat,
    hint_at,
    metric,
    own_gateway,
    post,
    start_gateway,
    told,
    wait_for,
)
from tests.harness.load import connect, request, send_all
from tests.harness.mock_worker import MODEL, mock_worker
from tests.harness.recording_worker import EVENTS, RecordingWorker, recording_worker

COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"

OLD = "0.2.0"

SETTINGS = 10_000

RENDERS_OF_A_SETTING = 8  # at most, where it moves nothing


def with_brackets(body: Mapping[str, Any]) -> str:
    """Another template: other markers, other words that ask for an answer."""
    text = "".join(f"[[{message['role']}]] {message.get('content') or ''}\n" for message in body["messages"])
    return text + ("[[assistant]] " if body.get("add_generation_prompt", True) else "")


def status(gateway: Server) -> dict:
    return httpx.get(gateway.url + "/seamark/status").json()


def explained(gateway: Server, request_id: str) -> dict:
    return httpx.get(f"{gateway.url}/seamark/requests/{request_id}").json()


def settled(worker: RecordingWorker) -> int:
    """The renders that a gateway has asked for, once it asks for no more."""
    before = -1
    while before != worker.renders:
        before = worker.renders
        time.sleep(0.5)
    return before


def body_for(path: str, size: int) -> dict[str, Any]:
    question = "How high is the tide? " * (size // 22 + 1)
    if path == CHAT:
        return chat(question)
    if path == MESSAGES:
        question_alone = [{"role": "user", "content": question}]
        return {"model": "m", "max_tokens": 3, "system": SYSTEM["content"], "messages": question_alone}
    if path == RESPONSES:
        return {"model": "m", "instructions": SYSTEM["content"], "input": question}
    return {"model": "m", "prompt": SYSTEM["content"] + question}


def test_no_request_is_rendered_however_long_it_is(fleet):
    paths = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
    with recording_worker(streams=dict.fromkeys(paths, EVENTS)) as worker:
        gateway = start_gateway(fleet, worker)
        renders = settled(worker)
        for path in paths:
            for size in (1, 1, 200_000):
                for stream in (False, True):
                    answer = post(gateway, {**body_for(path, size), "stream": stream}, path)
                    assert answer.status_code == 200
                    assert ("x-seamark-boundary" in answer.headers) == (path != COMPLETIONS)
        assert settled(worker) == renders == metric(gateway, "seamark_renders_total") > 0
        assert not any(seen.target.endswith("/render") for seen in worker.requests)


def test_facts_are_learnt_before_a_worker_gets_requests(fleet, worker):
    gateway = start_gateway(fleet, worker)
    (only,) = status(gateway)["workers"]
    assert only["up"] and only["templates"]["m"]["learnt"]
    assert {"end of a user turn", "opener: alone", "opener: user with tools"} <= set(only["templates"]["m"]["known"])
    assert not set(only["templates"]["m"]["known"]) & set(only["templates"]["m"]["unknown"])
    post(gateway, chat("the very first"))
    assert hint_at(worker) == [LAST_USER, TURN_END]


@pytest.mark.parametrize("stream", [False, True])
def test_an_explanation_has_the_entries_and_what_the_engine_made_of_them(fleet, worker, stream):
    gateway = start_gateway(fleet, worker)
    answer = post(gateway, chat("Tide?", stream=stream), headers={"x-request-id": "one"})
    assert answer.headers["x-seamark-boundary"] == f"{LAST_USER};{TURN_END}"
    wait_for(lambda: explained(gateway, "one")["positions"])
    one = explained(gateway, "one")
    assert one["sent"] == [LAST_USER, TURN_END] and one["lookup"] == "learnt"
    assert one["positions"] == [SYSTEM_END, SYSTEM_END + len("Tide?")]
    assert one["boundaries"] == [
        {"entry": LAST_USER, "tokens": SYSTEM_END, "kind": "system"},
        {"entry": TURN_END, "tokens": SYSTEM_END + len("Tide?"), "kind": "turn"},
    ]


def test_positions_are_known_by_a_whole_answer_alone_if_the_feed_cannot_be_read(fleet, worker):
    worker.has_feed = False
    gateway = start_gateway(fleet, worker)
    post(gateway, chat("one"))
    answer = post(gateway, chat("two"))
    assert answer.headers["x-seamark-predicted"] == str(SYSTEM_END // 16 * 16)


def test_a_conversation_is_hinted_where_others_with_its_head_and_its_history_would_part(fleet, worker):
    gateway = start_gateway(fleet, worker)
    turns = [("user", "Tide?"), ("assistant", "Three metres."), ("user", "Wind?")]
    messages = [SYSTEM, *({"role": role, "content": text} for role, text in turns)]
    post(gateway, {"model": "m", "messages": messages}, headers={"x-request-id": "one"})
    assert hint_at(worker) == [LAST_USER.replace("last", "first"), LAST_USER, TURN_END]
    prompt = template({"messages": messages})
    positions = [SYSTEM_END, len(prompt) - len(f"Wind?{GENERATION}"), len(prompt) - len(GENERATION)]
    wait_for(lambda: explained(gateway, "one")["positions"] == positions)


def test_a_text_that_holds_the_openers_words_does_not_mislead(fleet, worker):
    """A text is tokenised as if its markers were the template's."""
    gateway = start_gateway(fleet, worker)
    post(gateway, chat("<user>, what is <user>?"), headers={"x-request-id": "one"})
    assert hint_at(worker)[0] == LAST_USER.replace("last", "last-2")
    wait_for(lambda: explained(gateway, "one")["positions"])
    assert explained(gateway, "one")["positions"][0] == SYSTEM_END


@pytest.mark.parametrize(
    "told",
    [
        "Current date: {0}/11/{1}",
        "Date: {1}-Nov-{0}",
        "Hoy es {1} de noviembre de {0}.",
        "今天是{0}年11月{1}日。",
        "आज १{1} नवंबर {0} है",
        "Time: {unix}",
    ],
)
def test_what_stands_before_a_date_is_hinted_at_first_sight(fleet, worker, told):
    gateway = start_gateway(fleet, worker)
    rules = "".join(f"Rule {number}: the pilot names the tide before the berth. " for number in range(20))
    notes = "The pilot boards at the outer buoy.\n" * 20
    for days in range(2):
        today = date.today()
        line = told.format(today.year, 7 + days, unix=int(time.time()) // 86_400 * 86_400 + 86_400 * days)
        system = {"role": "system", "content": f"{rules}\n{line}\n{notes}"}
        answer = post(gateway, {**chat("Tide?"), "messages": [system, *chat(f"Tide {days}?")["messages"][1:]]})
        name = answer.headers["x-request-id"]
        wait_for(lambda name=name: explained(gateway, name)["reason"])
        shown = explained(gateway, name)
        (before, *_) = shown["boundaries"]
        # Three characters before the line with the date: the tokens there may be others in another prompt.
        assert (before["kind"], before["tokens"]) == ("learned", len(f"<system>{rules}\n") - 3)
    assert worker.tokenized == 1
    assert shown["changed"]["kind"] == "dates" and shown["changed"]["cure"] == CHANGE_TEXT["dates"].cure


def test_a_burst_before_any_answer_goes_to_one_worker(fleet):
    with recording_worker() as one, recording_worker() as other, ThreadPoolExecutor(8) as pool:
        gateway = start_gateway(fleet, one, other)
        wait_for(lambda: metric(gateway, "seamark_worker_up") == 2)
        for worker in (one, other):
            worker.hold.set()
        answers = [pool.submit(post, gateway, chat(f"question {number}")) for number in range(8)]
        wait_for(lambda: len(one.requests) + len(other.requests) == 8)
        assert sorted((len(one.requests), len(other.requests))) == [0, 8]
        for worker in (one, other):
            worker.hold.clear()
        assert {answer.result().status_code for answer in answers} == {200}


def test_an_older_plugin_gets_positions_alone(fleet):
    with recording_worker(version=OLD) as old:
        gateway = start_gateway(fleet, old)
        post(gateway, chat("Tide?"))
        assert hint_at(old) == []  # nothing has told a position yet
        told(old)
        post(gateway, chat("Tide?"))
        assert hint_at(old) == [SYSTEM_END + len("Tide?")]  # where the turn ended, by the first answer's usage
        assert all(b"last:" not in seen.body for seen in old.requests)


def test_in_a_mixed_fleet_an_older_plugin_gets_the_positions_that_a_newer_one_told(fleet):
    with recording_worker() as new, recording_worker(version=OLD, models=("other",)) as old:
        gateway = start_gateway(fleet, new, old, flags=("--health-interval", "0.2"))
        post(gateway, chat("one"))
        assert hint_at(new) == [LAST_USER, TURN_END]
        told(new)
        new.models, old.models = ("other",), ("m",)
        wait_for(lambda: [each["models"] for each in status(gateway)["workers"]] == [["other"], ["m"]])
        wait_for(lambda: status(gateway)["workers"][1]["templates"]["m"]["learnt"])
        post(gateway, chat("two"))
        assert hint_at(old) == [SYSTEM_END]
        new.models = ("m",)
        wait_for(lambda: status(gateway)["workers"][0]["models"] == ["m"])
        answers = {post(gateway, chat(f"again {number}")).status_code for number in range(4)}
        assert answers == {200}


def test_workers_with_different_templates_get_no_hint_by_each_others_facts(fleet):
    with recording_worker() as one, recording_worker(template=with_brackets) as other, ThreadPoolExecutor(8) as pool:
        gateway = start_gateway(fleet, one, other, flags=("--max-inflight", "2"))
        wait_for(lambda: metric(gateway, "seamark_worker_up") == 2)
        for worker in (one, other):
            worker.hold.set()
        answers = [pool.submit(post, gateway, chat(f"question {number}")) for number in range(4)]
        wait_for(lambda: len(one.requests) == len(other.requests) == 2)
        for worker in (one, other):
            worker.hold.clear()
        assert {answer.result().status_code for answer in answers} == {200}
        brackets = ",".join(str(ord(character)) for character in "[[user]]")
        assert all(brackets.encode() not in seen.body for seen in one.requests)
        assert all(LAST_USER.encode() not in seen.body for seen in other.requests)


@pytest.mark.parametrize("has_facts", [True, False])
def test_what_a_client_says_of_hints_and_outcomes_reaches_no_worker(fleet, worker, has_facts):
    worker.render_status = 200 if has_facts else 500
    gateway = start_gateway(fleet, worker)
    own = {"seamark_boundaries": [16, "last:1"], "a": 1}
    answer = post(gateway, chat("Tide?", vllm_xargs=own), headers={"x-seamark-outcome": "client"})
    sent = worker.requests[-1]
    assert json.loads(sent.body)["vllm_xargs"] == {
        "seamark_boundaries": [LAST_USER, TURN_END] if has_facts else [],
        "a": 1,
    }
    assert [value for name, value in sent.headers if name == b"x-seamark-outcome"] == [b"1"]
    assert "x-seamark-outcome" not in answer.headers and answer.headers["x-seamark-reason"]


def test_a_restarted_worker_with_another_template_gets_no_hint_by_old_facts(fleet, worker):
    gateway = start_gateway(fleet, worker, flags=("--health-interval", "0.1", "--replay-seconds", "0"))
    post(gateway, chat("before"))
    assert hint_at(worker) == [LAST_USER, TURN_END]
    worker.hang_renders, worker.template, worker.boot = True, with_brackets, "1.8e+09"
    wait_for(lambda: status(gateway)["workers"][0]["boot"].endswith("#1.8e+09"))
    answer = post(gateway, chat("at once"))
    assert answer.status_code == 200 and hint_at(worker) == []
    assert not status(gateway)["workers"][0]["templates"]["m"]["learnt"]


def test_a_restarted_worker_is_learnt_anew(fleet, worker):
    gateway = start_gateway(fleet, worker, flags=("--health-interval", "0.1", "--replay-seconds", "0"))
    post(gateway, chat("before"))
    worker.template, worker.boot = with_brackets, "1.8e+09"
    wait_for(lambda: status(gateway)["workers"][0]["boot"].endswith("#1.8e+09"))
    wait_for(lambda: status(gateway)["workers"][0]["templates"]["m"]["learnt"])
    post(gateway, chat("after"), headers={"x-request-id": "after"})
    opener, end = hint_at(worker)
    assert opener != LAST_USER and end == -len("[[assistant]] ")
    wait_for(lambda: explained(gateway, "after")["positions"])
    prompt = with_brackets(chat("after"))
    assert explained(gateway, "after")["positions"][1] == len(prompt) + end
    assert 0 <= len(prompt) - len("after\n[[assistant]] ") - explained(gateway, "after")["positions"][0] <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_facts_change_no_answer(fleet, worker, stream):
    """The worker computes something else than what it renders."""
    worker.rendered, worker.cached = with_brackets, 0
    gateway = start_gateway(fleet, worker)
    for question in ("one", "two", "one"):
        body = chat(question, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        raw = json.dumps(body).encode()
        answer = post(gateway, raw, headers={"x-request-id": question})
        assert answer.status_code == 200 and answer.content == worker.answers[-1]
        sent = json.loads(worker.requests[-1].body)
        assert sent.pop("vllm_xargs")["seamark_boundaries"] and sent == json.loads(raw)
        told(worker)
    wait_for(lambda: explained(gateway, "two")["positions"])
    opener, _ = explained(gateway, "two")["positions"]
    assert opener == 0  # it is not in the prompt
    assert " failed: " not in gateway.log_end() and "ERROR" not in gateway.log_end()


@pytest.mark.parametrize("broken", [{"hang_renders": True}, {"render_status": 500}, {"render_status": 400}])
def test_a_worker_that_renders_nothing_serves_all_the_same_and_soon(fleet: GatewayForks, broken):
    fleet.constants["proxy.fleet.pool.FACTS_SECONDS"] = 0.5
    with recording_worker(cached=0, **broken) as worker:
        gateway = fleet.gateway(worker)
        gateway.wait_until_ready("/health", seconds=30)
        began = time.monotonic()
        gateway.wait_until_ready("/ready", seconds=30)
        assert time.monotonic() - began < 5  # two renders that hang take twice as long
        began = time.monotonic()
        for question in ("one", "two"):
            answer = post(gateway, chat(question))
            assert answer.status_code == 200 and hint_at(worker) == []
        assert time.monotonic() - began < 5
        assert answer.headers["x-seamark-reason"] == "no_facts"
        assert metric(gateway, 'seamark_boundary_lookups_total{result="none"}') == 2


def test_a_template_that_is_learnt_late_is_used_from_then_on(fleet: GatewayForks, worker):
    fleet.constants |= {"proxy.fleet.pool.FACTS_SECONDS": 0.2, "proxy.boundaries.facts_learner.RETRY_SECONDS": 0.2}
    worker.render_status = 500
    gateway = start_gateway(fleet, worker, flags=("--health-interval", "0.2"))
    post(gateway, chat("early"))
    assert hint_at(worker) == []
    worker.render_status = 200
    wait_for(lambda: status(gateway)["workers"][0]["templates"]["m"]["learnt"])
    post(gateway, chat("late"))
    assert hint_at(worker) == [LAST_USER, TURN_END]


def thinking(body: Mapping[str, Any]) -> str:
    """A template with a switch that moves the end."""
    on = (body.get("chat_template_kwargs") or {}).get("style") == "long"
    asks = body.get("add_generation_prompt", True)
    return template(body) + ("<think>" if on and asks else "")


def test_a_setting_is_learnt_beside_the_first_request_that_has_it(fleet):
    with recording_worker(template=thinking) as worker:
        gateway = start_gateway(fleet, worker)
        renders = settled(worker)
        body = chat("Tide?", chat_template_kwargs={"style": "long"})
        post(gateway, body)
        assert hint_at(worker)[0] == LAST_USER  # the opener is no setting's
        assert settled(worker) > renders
        post(gateway, body)
        assert hint_at(worker) == [LAST_USER, TURN_END - len("<think>")]


async def test_ten_thousand_settings_cost_few_renders_and_little_memory(fleet):
    worker = mock_worker(fleet)
    worker.wait_until_ready()
    with own_gateway(worker) as own:
        wait_for(lambda: own.gateway.pool.up)
        clients = [await connect(own.url) for _ in range(8)]
        settings = ({"name": f"value {number}", "flag": True} for number in range(SETTINGS))
        bodies = ({**chat("Tide?", chat_template_kwargs=setting), "model": MODEL} for setting in settings)
        began, before = time.monotonic(), own.gateway.facts.renders
        await send_all(clients, [request(own.url, json.dumps(body).encode()) for body in bodies])
        minutes = (time.monotonic() - began) // 60 + 1
        learnt = own.gateway.facts.learnt
        assert 0 < learnt <= len(COMMON_SETTINGS) + 1 + SETTINGS_PER_MINUTE * minutes
        assert own.gateway.facts.renders - before <= learnt * RENDERS_OF_A_SETTING
        assert len(own.gateway.facts) <= learnt
        for client in clients:
            client.close()


def test_the_live_page_asks_for_an_update_of_an_older_plugin():
    with recording_worker(version=OLD) as old, recording_worker() as new, own_gateway(old, new) as own:
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        (warning,) = httpx.get(own.url + "/seamark/live").json()["warnings"]
        assert OLD in warning and "0.3 or later" in warning and old.url.removeprefix("http://") in warning
