"""Hints are entries that a worker's engine resolves: what each worker gets, and that no request waits for a render."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from datetime import date
from typing import Any

import pytest

from proxy.boundaries.facts_learner import TEMPLATES_PER_KEY
from proxy.observability.cures import CHANGE_TEXT
from tests.harness.api_keys import bearer, entry
from tests.harness.fake_engine import template
from tests.harness.gateways import CHAT, LAST_USER, SYSTEM, TURN_END, chat, hint_at
from tests.harness.in_memory_gateway import settled, told
from tests.harness.recording_worker import EVENTS, RecordingWorker
from tests.harness.waiting import until

COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"


def with_brackets(body: Mapping[str, Any]) -> str:
    """Another template: other markers, other words that ask for an answer."""
    text = "".join(f"[[{message['role']}]] {message.get('content') or ''}\n" for message in body["messages"])
    return text + ("[[assistant]] " if body.get("add_generation_prompt", True) else "")


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


async def test_no_request_is_rendered_however_long_it_is(in_memory):
    paths = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
    worker = RecordingWorker(streams=dict.fromkeys(paths, EVENTS))
    gateway = await in_memory(worker)
    renders = await settled(worker)
    for path in paths:
        for size in (1, 1, 200_000):
            for stream in (False, True):
                answer = await gateway.post({**body_for(path, size), "stream": stream}, path)
                assert answer.status_code == 200
                assert ("x-seamark-boundary" in answer.headers) == (path != COMPLETIONS)
    assert await settled(worker) == renders == gateway.metric("seamark_renders_total") > 0
    assert not any(seen.target.endswith("/render") for seen in worker.requests)


@pytest.mark.parametrize(
    "line",
    [
        "Current date: {0}/11/{1}",
        "今天是{0}年11月{1}日。",
        "Time: {unix}",
    ],
)
async def test_what_stands_before_a_date_is_hinted_at_first_sight(in_memory, worker, line):
    gateway = await in_memory(worker)
    rules = "".join(f"Rule {number}: the pilot names the tide before the berth. " for number in range(20))
    notes = "The pilot boards at the outer buoy.\n" * 20
    for days in range(2):
        today = date.today()
        line_of_today = line.format(today.year, 7 + days, unix=int(time.time()) // 86_400 * 86_400 + 86_400 * days)
        system = {"role": "system", "content": f"{rules}\n{line_of_today}\n{notes}"}
        answer = await gateway.post({**chat("Tide?"), "messages": [system, *chat(f"Tide {days}?")["messages"][1:]]})
        shown = await gateway.explained(answer)
        (before, *_) = shown["boundaries"]
        # Three characters before the line with the date: the tokens there may be others in another prompt.
        assert (before["kind"], before["tokens"]) == ("learned", len(f"<system>{rules}\n") - 3)
    assert worker.tokenized == 1
    assert shown["changed"]["kind"] == "dates" and shown["changed"]["cure"] == CHANGE_TEXT["dates"].cure


@pytest.mark.parametrize("has_facts", [True, False])
async def test_what_a_client_says_of_hints_and_outcomes_reaches_no_worker(in_memory, worker, has_facts):
    worker.render_status = 200 if has_facts else 500
    gateway = await in_memory(worker)
    own = {"seamark_boundaries": [16, "last:1"], "a": 1}
    answer = await gateway.post(chat("Tide?", vllm_xargs=own), x_seamark_outcome="client")
    sent = worker.requests[-1]
    xargs = json.loads(sent.body)["vllm_xargs"]
    xargs.pop("seamark_load", None)
    assert xargs == {"seamark_boundaries": [LAST_USER, TURN_END] if has_facts else [], "a": 1}
    assert [value for name, value in sent.headers if name == b"x-seamark-outcome"] == [b"1"]
    assert "x-seamark-outcome" not in answer.headers and answer.headers["x-seamark-reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_facts_change_no_answer(in_memory, worker, caplog, stream):
    """The worker computes something else than what it renders."""
    worker.rendered, worker.cached = with_brackets, 0
    gateway = await in_memory(worker)
    for question in ("one", "two", "one"):
        body = chat(question, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        raw = json.dumps(body).encode()
        answer = await gateway.post(raw, x_request_id=question)
        assert answer.status_code == 200 and answer.content == worker.answers[-1]
        sent = json.loads(worker.requests[-1].body)
        assert sent.pop("vllm_xargs")["seamark_boundaries"] and sent == json.loads(raw)
        await told(worker)
    opener, _ = (await gateway.explained("two"))["positions"]
    assert opener == 0  # it is not in the prompt
    assert " failed: " not in caplog.text and "ERROR" not in caplog.text


def thinking(body: Mapping[str, Any]) -> str:
    """A template with a switch that moves the end."""
    on = (body.get("chat_template_kwargs") or {}).get("style") == "long"
    asks = body.get("add_generation_prompt", True)
    return template(body) + ("<think>" if on and asks else "")


async def test_a_setting_is_learnt_beside_the_first_request_that_has_it(in_memory):
    worker = RecordingWorker(template=thinking)
    gateway = await in_memory(worker)
    renders = await settled(worker)
    body = chat("Tide?", chat_template_kwargs={"style": "long"})
    await gateway.post(body)
    assert hint_at(worker)[0] == LAST_USER  # the opener is no setting's
    assert await settled(worker) > renders
    await gateway.post(body)
    assert hint_at(worker) == [LAST_USER, TURN_END - len("<think>")]


TIDE = {"role": "user", "content": "Tide?"}

AT_ONCE = 40


def dated(number: int) -> dict[str, Any]:
    text = f"You are pilot {number}. " + "Mind the tide. " * 60 + f"\nToday is {date.today():%Y}-03-01."
    return {"model": "m", "messages": [{"role": "system", "content": text}, TIDE]}


def templated(number: int) -> dict[str, Any]:
    return {"model": "m", "chat_template": f"{{# {number} #}}", "messages": [TIDE]}


def switched(number: int) -> dict[str, Any]:
    return {"model": "m", "chat_template_kwargs": {"number": number}, "messages": [TIDE]}


def marked(number: int) -> dict[str, Any]:
    """Each head twice: the second time it would be rendered."""
    part = {"type": "text", "text": f"{number // 2} " + "word " * 100, "cache_control": {"type": "ephemeral"}}
    return {"model": "m", "messages": [{"role": "system", "content": [part] * 4}, TIDE]}


@pytest.mark.parametrize("make", [dated, templated, switched, marked])
async def test_a_request_that_is_refused_has_nothing_rendered(in_memory, worker, keys, make):
    keys.write_text(entry("eve", max_inflight=1, max_queued=0) + entry("root", admin=True))
    gateway = await in_memory(worker, api_keys=keys)

    async def ask(body: dict[str, Any]) -> int:
        return (await gateway.post(body, **bearer("eve"))).status_code

    await settled(worker)  # what is learnt in advance
    worker.hold.set()
    first = asyncio.create_task(ask({"model": "m", "messages": [TIDE]}))
    await until(lambda: len(worker.requests) == 1)
    before = worker.renders, worker.tokenized
    assert set(await asyncio.gather(*map(ask, map(make, range(AT_ONCE))))) == {429}
    assert (await settled(worker), worker.tokenized) == before
    worker.hold.clear()
    assert await first == 200


async def test_many_templates_of_one_key_are_learnt_one_by_one_and_few_of_them(in_memory, worker, keys):
    gateway = await in_memory(worker, api_keys=keys)
    await settled(worker)
    of_one = worker.renders  # the default setting, and those learnt in advance
    worker.renders = worker.most_rendering = 0
    for number in range(5 * TEMPLATES_PER_KEY):
        answer = await gateway.post(templated(number), **bearer("ann"))
        assert answer.status_code == 200
    await settled(worker)
    assert worker.most_rendering == 1 and worker.renders <= TEMPLATES_PER_KEY * of_one
