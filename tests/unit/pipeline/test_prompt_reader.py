"""A request's boundaries are there at once: what is not known is learnt beside the requests."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
import weakref
from datetime import date
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.boundaries.layout import layout_of
from proxy.boundaries.template_facts import DEFAULT, Opener, Setting, TemplateFacts
from proxy.chat.reader import chat_request
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.json_body import NOTHING, Memory, memory_of, parse_object
from proxy.metrics import Metrics
from proxy.observability.request_diff import RememberedRequest
from proxy.pipeline.prompt_reader import TOKENS_PER_BYTE, PromptReader
from proxy.pipeline.request import ProxiedRequest, request_of
from proxy.settings import Settings
from tests.harness.fake_engine import template, token_ids
from tests.harness.probed import probed
from tests.harness.recording_worker import RecordingWorker

FACTS = TemplateFacts({"user": 5}, {("alone", False): Opener((3,)), ("user", False): Opener((4,))})

MESSAGES = [{"role": "system", "content": "You pilot."}, {"role": "user", "content": "Tide?"}]


KEY = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")


class Learner:
    """Knows the facts of some settings, and notes what it is asked to learn."""

    def __init__(self, **known: TemplateFacts) -> None:
        self.known: dict[bytes, TemplateFacts] = {name.encode(): facts for name, facts in known.items()}
        self.asked: list[Setting] = []

    def facts(self, renderer_id: bytes, setting: Setting = DEFAULT) -> TemplateFacts | None:
        known = self.known.get(renderer_id)
        return known if known is None or setting.is_default else known.borrowed({"user": 9})

    def wants(self, renderer_id: bytes, setting: Setting = DEFAULT, owner: str | None = None) -> bool:
        return setting not in self.asked

    async def learn(
        self, renderer: Any, renderer_id: bytes, model: Any, setting: Setting = DEFAULT, owner: str | None = None
    ) -> None:
        self.asked.append(setting)


def worker(name: str = "a", renderer_id: bytes | None = b"one", *, patched: bool = True) -> Worker:
    engine = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384) if patched else None
    found = Worker(f"http://{name}", None, probed=probed(name, engine, "m"))
    if renderer_id is not None:
        found.renderer_ids["m"] = renderer_id
    return found


async def read(
    learner: Learner,
    *workers: Worker,
    reader: PromptReader | None = None,
    has_slot: bool = True,
    memory: Memory = NOTHING,
    key: ApiKey | None = None,
    **body: Any,
) -> ProxiedRequest:
    """A request that has been read, and has got its slot if there is one."""
    parsed = {"model": "m", "messages": MESSAGES, **body}
    scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
    request = request_of(scope, json.dumps(parsed).encode(), "r", key)
    request.body.parsed, request.body.memory = parsed, memory
    reader = reader if reader is not None else PromptReader(Settings(), Metrics(), learner)
    request.prompt = await reader.read(request, workers, lambda: has_slot)
    if has_slot:
        reader.learn(request)
    return request


async def test_a_request_of_a_known_template_has_its_entries_at_once():
    request = await read(Learner(one=FACTS), worker())
    found = request.prompt.found
    assert (found.entries(), found.failure, found.renderer_id) == (("last:3", -5), None, b"one")
    assert found.result == "learnt" and [each.kind for each in found.boundaries] == ["system", "turn"]


async def test_in_a_body_of_too_many_values_no_boundaries_are_sought():
    for most, failure in ((9, "no_boundary"), (10, None)):
        reader = PromptReader(Settings(max_boundary_values=most), Metrics(), Learner(one=FACTS))
        request = await read(Learner(), worker(), reader=reader, memory=Memory(5000, 10))
        prompt = request.prompt
        assert prompt.found.failure == failure
        assert (prompt.chat is None) == (prompt.remembered is None) == bool(failure)
        assert prompt.tokens and reader.recent.held == (0 if failure else prompt.remembered.size)
        assert failure or reader.recent.held > 5000


async def test_a_template_that_is_not_known_is_learnt_beside_the_request():
    learner = Learner()
    request = await read(learner, worker())
    assert (request.prompt.found.entries(), request.prompt.found.failure) == ((), "no_facts")
    assert not learner.asked  # nothing happens on the request's way
    await asyncio.sleep(0)
    assert learner.asked == [DEFAULT]


async def test_another_setting_has_the_openers_of_the_default_one_until_it_is_learnt():
    learner = Learner(one=FACTS)
    request = await read(learner, worker(), chat_template_kwargs={"enable_thinking": False})
    assert (request.prompt.found.entries(), request.prompt.found.end) == (("last:3", -9), None)
    await asyncio.sleep(0)
    assert [setting.fields for setting in learner.asked] == [{"chat_template_kwargs": {"enable_thinking": False}}]
    await read(learner, worker(), chat_template_kwargs={"enable_thinking": False})
    await asyncio.sleep(0)
    assert len(learner.asked) == 1


async def test_a_worker_that_has_not_said_what_it_renders_with_is_no_hindrance():
    found = (await read(Learner(one=FACTS), worker("a", None), worker("b"))).prompt.found
    assert (found.renderer_id, found.entries()) == (b"one", ("last:3", -5))
    learner = Learner(one=FACTS)
    assert (await read(learner, worker("a", None))).prompt.found.failure == "no_facts"
    await asyncio.sleep(0)
    assert not learner.asked


@pytest.mark.parametrize("workers", [(), (worker(patched=False),)])
async def test_without_a_worker_that_keeps_states_nothing_is_sought(workers):
    found = (await read(Learner(one=FACTS), *workers)).prompt.found
    assert (found.boundaries, found.failure) == ((), "unpatched")


@pytest.mark.parametrize(
    ("body", "failure"),
    [({"messages": "x"}, "no_boundary"), ({"messages": []}, "no_boundary"), ({"messages": [7]}, "no_boundary")],
)
async def test_a_body_that_is_no_chat_has_no_boundary(body, failure):
    assert (await read(Learner(one=FACTS), worker(), **body)).prompt.found.failure == failure


class Tokenizer:
    """In place of a worker's renderer: a token for each character."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs, self.texts = hangs, []

    async def tokenize(self, model: Any, text: str) -> list[int]:
        self.texts.append(text)
        if self.hangs:
            await asyncio.Event().wait()
        return list(map(ord, text))


DAYS = f"{date.today():%Y}-11-22", f"{date.today():%Y}-11-23"

DATED = [{"role": "system", "content": "Pilots name the tide. " * 40 + f"\nToday is {DAYS[0]}."}, MESSAGES[1]]


async def test_what_stands_before_a_date_has_an_entry_at_first_sight_and_its_tokens_are_asked_for_once():
    serving, reader = worker(), PromptReader(Settings(), Metrics(), Learner(one=FACTS))
    serving.renderer = tokenizer = Tokenizer()
    for day in DAYS:
        told = [{**DATED[0], "content": DATED[0]["content"].replace(DAYS[0], day)}, DATED[1]]
        request = await read(Learner(), serving, reader=reader, messages=told)
        before, system, turn = request.prompt.found.entries()
        *_, last = map(int, before.removeprefix("first:").split(","))
        assert chr(last) == "e" and (system, turn) == ("last:3", -5)  # of "the tide. \n" the last three may differ
        first = request.prompt.found.boundaries[0]
        assert (first.entry, first.kind) == (before, "learned")
    (piece,) = tokenizer.texts
    assert piece.endswith("the tide. \n")


async def test_no_request_waits_long_for_the_tokens_before_its_date_and_none_after_it():
    serving, reader = worker(), PromptReader(Settings(), Metrics(), Learner(one=FACTS))
    serving.renderer = tokenizer = Tokenizer(hangs=True)
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    for _ in range(2):
        found = (await read(Learner(), serving, reader=reader, messages=DATED)).prompt.found
        assert found.entries() == ("last:3", -5)
    gc.collect()
    assert len(tokenizer.texts) == 1 and errors == []


async def test_nothing_is_asked_for_a_request_without_a_slot():
    serving, reader, learner = worker(), None, Learner(one=FACTS)
    reader = PromptReader(Settings(), Metrics(), learner)
    serving.renderer = tokenizer = Tokenizer()
    fields = {"messages": DATED, "chat_template_kwargs": {"thinking": True}}
    found = (await read(learner, serving, reader=reader, has_slot=False, **fields)).prompt.found
    await asyncio.sleep(0)
    assert found.entries() == ("last:3", -9) and not tokenizer.texts and not learner.asked
    assert "first:" in str((await read(learner, serving, reader=reader, **fields)).prompt.found.entries())
    await asyncio.sleep(0)
    assert tokenizer.texts and learner.asked


@pytest.mark.parametrize(("key", "most"), [(None, 8), (KEY, 4)])
async def test_a_worker_is_asked_for_the_tokens_before_a_few_dates_at_once(key, most):
    serving, reader = worker(), PromptReader(Settings(), Metrics(), Learner(one=FACTS))
    serving.renderer = tokenizer = Tokenizer(hangs=True)

    def told(number: int) -> list[dict[str, str]]:
        return [{**DATED[0], "content": f"Ship {number}. {DATED[0]['content']}"}, DATED[1]]

    same = [read(Learner(), serving, reader=reader, key=key, messages=DATED) for _ in range(20)]
    await asyncio.gather(*same)
    assert len(tokenizer.texts) == 1  # one asks for all
    others = (read(Learner(), serving, reader=reader, key=key, messages=told(number)) for number in range(40))
    await asyncio.gather(*others)
    assert len(tokenizer.texts) == 1 + most
    tokenizer.hangs = False
    request = await read(Learner(), serving, reader=reader, key=key, messages=told(39))  # went without, not forgotten
    assert "first:" in str(request.prompt.found.entries())


async def test_a_failure_costs_the_hint_and_names_no_text(caplog):
    class Broken(Learner):
        def facts(self, renderer_id: bytes, setting: Setting = DEFAULT) -> TemplateFacts | None:
            raise KeyError("You pilot.")

    request = await read(Broken(), worker())
    assert (request.prompt.found.boundaries, request.prompt.found.failure) == ((), "no_facts")
    assert "boundary of request r: KeyError" in caplog.text and "pilot" not in caplog.text


async def test_answers_tell_how_many_tokens_a_byte_has():
    learner = Learner(one=FACTS)
    reader = PromptReader(Settings(), Metrics(), learner)
    first = (await read(learner, worker(), reader=reader)).prompt
    size = len(json.dumps({"model": "m", "messages": MESSAGES}).encode())
    assert first.tokens == round(size * TOKENS_PER_BYTE)
    for _ in range(200):
        reader.weigh("m", 100, 50)
    reader.weigh("m", 0, 50)
    reader.weigh(["m"], 100, 1)
    later = (await read(learner, worker(), reader=reader)).prompt
    assert later.tokens == pytest.approx(size * 0.5, abs=1)
    assert later.found.boundaries[-1].estimate == later.tokens > first.found.boundaries[-1].estimate


async def test_what_a_byte_weighs_is_known_of_the_last_256_models():
    reader = PromptReader(Settings(), Metrics(), Learner())

    async def rate(model: Any) -> float:
        request = await read(Learner(), reader=reader, model=model, user="x" * 10_000)
        return request.prompt.tokens / len(request.body.raw)

    assert await rate("m1") == pytest.approx(0.25, abs=1e-3)
    for number in range(1, 257):
        reader.weigh(f"m{number}", 100, 50)
    assert await rate("m1") == pytest.approx(0.275, abs=1e-3)  # one answer counts a tenth
    reader.weigh("m257", 1, 100)
    assert await rate("m2") == pytest.approx(0.25, abs=1e-3)
    assert [await rate(model) for model in ("m1", "m3", "m256")] == [pytest.approx(0.275, abs=1e-3)] * 3
    assert await rate(["m1"]) == pytest.approx(0.25, abs=1e-3)


async def test_what_is_remembered_has_its_shares_of_the_memory():
    reader = PromptReader(Settings(memory_bytes=2**20, text_bytes=2**20), Metrics(), Learner())
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
    most = {"recent": 2**20 // 4, "stored": 2**20 // 8, "learner": 2**20 * 3 // 8}
    for name, size in most.items():
        assert size - 12_000 < getattr(reader, name).held <= size, name
    assert reader.held == reader.recent.held + reader.stored.held + reader.learner.held


async def test_all_names_of_a_model_have_the_same_beginnings():
    reader = PromptReader(Settings(), Metrics(), Learner(one=FACTS), lambda model: "m" if model == "alias" else model)
    serving = worker()
    serving.probed = probed("a", serving.engine, "m", "alias")
    serving.renderer_ids["alias"] = b"one"
    prefixes = []
    for model in ("m", "alias", "other"):
        request = await read(Learner(), serving, reader=reader, model=model)
        prefixes.append(request.prompt.found.prefixes)
        assert request.prompt.chat.body["model"] == model  # rendered by its own name
    assert prefixes[0] == prefixes[1] != prefixes[2]
    none = await read(Learner(), serving, reader=reader, model="alias", messages="x")
    assert none.prompt.found.failure == "no_boundary"


async def test_what_is_known_is_not_learnt_again():
    learner = Learner(one=FACTS)
    await read(learner, worker())
    await asyncio.sleep(0)
    assert learner.asked == []
    unwanted = Learner()
    unwanted.wants = lambda *_: False  # type: ignore[method-assign]
    await read(unwanted, worker())
    await asyncio.sleep(0)
    assert unwanted.asked == []


class Slow(Learner):
    """Learns for as long as a test wants."""

    async def learn(self, *what: Any) -> None:
        self.task = weakref.ref(asyncio.current_task())
        ends = asyncio.get_running_loop().create_future()
        self.ends = weakref.ref(ends)
        await ends


async def test_what_is_learnt_beside_a_request_stays_until_it_is_done_and_no_longer():
    learner = Slow()
    reader = PromptReader(Settings(), Metrics(), learner)
    await read(learner, worker(), reader=reader)
    await asyncio.sleep(0)
    gc.collect()
    ends = learner.ends()
    assert ends is not None
    ends.set_result(None)
    del ends
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert learner.task() is None


async def test_places_that_no_fact_tells_are_noted_once_some_facts_are_there():
    for facts, noted in ((FACTS, 1), (None, 0)):
        learner = Learner(**({"one": facts} if facts is not None else {}))
        reader = PromptReader(Settings(), Metrics(), learner)
        reader._heads.learn = Mock()
        serving = worker()
        request = await read(learner, serving, reader=reader, key=KEY)
        assert reader._heads.learn.call_count == noted
        if noted:
            reader._heads.learn.assert_called_with(request.prompt.found, serving.renderer, "ann")
        bare = SimpleNamespace(prompt=request.prompt._replace(found=None), client=request.client, model="m")
        reader.learn(bare)
        assert reader._heads.learn.call_count == noted


LONG_TEXT = "Pilots name the tide before they name the berth. " * 30


@pytest.mark.parametrize("workers", [1, 2])
async def test_beginnings_inside_texts_are_sought_only_to_choose_among_several_workers(workers):
    reader = PromptReader(Settings(), Metrics(), Learner(one=FACTS))
    serving = [worker(name) for name in "ab"[:workers]]
    for question in ("High?", "Low?", "Neap?"):
        messages = [{"role": "user", "content": f"{LONG_TEXT}\n{question}"}]
        found = (await read(Learner(), *serving, reader=reader, messages=messages)).prompt.found
    assert any(each.kind == "learned" for each in found.boundaries) is (workers == 2)


async def test_workers_without_the_plugin_do_not_count():
    reader = PromptReader(Settings(), Metrics(), Learner(one=FACTS))
    for question in ("High?", "Low?", "Neap?"):
        messages = [{"role": "user", "content": f"{LONG_TEXT}\n{question}"}]
        serving = worker("a", patched=False), worker("b")
        found = (await read(Learner(), *serving, reader=reader, messages=messages)).prompt.found
    assert found.renderer_id == b"one" and "learned" not in [each.kind for each in found.boundaries]


async def test_a_bare_prompt_needs_no_facts_and_is_not_remembered():
    learner = Learner()
    scope = {"method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    request = request_of(scope, b'{"model":"m","prompt":"Tide?"}', "r")
    request.body.parsed = {"model": "m", "prompt": "Tide?"}
    reader = PromptReader(Settings(), Metrics(), learner)
    request.prompt = await reader.read(request, [worker()], lambda: True)
    reader.learn(request)
    await asyncio.sleep(0)
    assert not learner.asked and request.prompt.unlearnt is None and request.prompt.remembered is None


HEADER = "x-anthropic-billing-header: cc_version=1; cch=abc;\n"


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_rewrite_rule_changes_what_is_sent_and_what_is_known_of_it_and_is_counted(is_on):
    metrics = Metrics()
    settings = Settings(rewrite=("billing_header",) if is_on else ())
    reader = PromptReader(settings, metrics, Learner(one=FACTS))
    told = [{"role": "system", "content": HEADER + "You pilot."}, MESSAGES[1]]
    request = await read(Learner(), worker(), reader=reader, messages=told)
    wanted = MESSAGES[0]["content"] if is_on else told[0]["content"]
    assert json.loads(request.body.raw)["messages"][0]["content"] == wanted
    assert request.body.parsed["messages"][0]["content"] == wanted
    assert request.prompt.rewrites == (("billing_header",) if is_on else ())
    assert request.prompt.chat.messages[0]["content"] == wanted

    def counted(applied: str) -> float | None:
        labels = {"rule": "billing_header", "applied": applied}
        return metrics.registry.get_sample_value("seamark_rewrites_total", labels)

    assert (counted("true"), counted("false")) == ((1.0, None) if is_on else (None, 1.0))


async def test_lookups_are_counted_by_how_they_ended():
    metrics = Metrics()
    reader = PromptReader(Settings(), metrics, Learner(one=FACTS))
    for messages in (MESSAGES, MESSAGES, "x"):
        await read(Learner(), worker(), reader=reader, messages=messages)
    value = metrics.registry.get_sample_value
    counted = [value("seamark_boundary_lookups_total", {"result": result}) for result in ("learnt", "none")]
    assert counted == [2, 1]


async def test_a_tokenizer_that_fails_costs_the_entry_before_the_date_and_names_no_text(caplog):
    class Failing(Tokenizer):
        async def tokenize(self, model: Any, text: str) -> list[int]:
            self.texts.append(text)
            raise KeyError(text)

    serving, reader = worker(), PromptReader(Settings(), Metrics(), Learner(one=FACTS))
    serving.renderer = tokenizer = Failing()
    for _ in range(2):
        found = (await read(Learner(), serving, reader=reader, messages=DATED)).prompt.found
        assert found.entries() == ("last:3", -5)
    assert len(tokenizer.texts) == 1 and "tokens before a date: KeyError" in caplog.text and "tide" not in caplog.text


async def test_waiting_for_the_tokens_before_a_date_is_not_the_gateways_own_time():
    serving, reader = worker(), PromptReader(Settings(), Metrics(), Learner(one=FACTS))
    serving.renderer = Tokenizer(hangs=True)
    assert (await read(Learner(), serving, reader=reader, messages=DATED)).timings.waited_seconds > 0
    assert (await read(Learner(), serving, reader=reader)).timings.waited_seconds == 0


async def at_a_worker(in_memory, **state: Any) -> tuple[PromptReader, Worker, RecordingWorker]:
    """A reader, and a worker that a gateway has looked at."""
    asked = RecordingWorker("http://w", **state)
    own = await in_memory(asked, is_started=False)
    await own.gateway.pool.check_all()
    (serving,) = own.gateway.pool.workers
    return own.gateway.reader, serving, asked


async def test_the_boundaries_of_what_a_plain_worker_has_answered_are_found_in_its_prompt(in_memory):
    reader, serving, _ = await at_a_worker(in_memory, patched=False)
    body = {"model": "m", "messages": MESSAGES}
    rendered = token_ids(template(body))
    prompt = await reader.find_boundaries(chat_request(body), serving, 400, 1234, "ann")
    assert list(prompt.ids) == rendered
    placed = {each.kind: each.tokens for each in prompt.found.boundaries}
    text = template(body)
    assert placed == {"system": text.index("Tide?"), "turn": text.index("<assistant>")}
    assert [each.tokens for each in prompt.found.boundaries] == sorted(placed.values())
    assert prompt.remembered.owner == "ann" and prompt.remembered.size > 1234
    assert reader.recent.held == prompt.remembered.size


async def test_a_prompt_that_is_not_rendered_has_no_boundaries(in_memory):
    reader, serving, asked = await at_a_worker(in_memory, patched=False)
    chat = chat_request({"model": "m", "messages": MESSAGES})
    await reader.find_boundaries(chat, serving, 400, 1234, None)  # the template is learnt
    asked.render_status = 500
    failed = await reader.find_boundaries(chat, serving, 400, 1234, None)
    assert (failed.found.failure, failed.found.boundaries, failed.ids) == ("no_facts", (), ())


async def test_a_worker_that_renders_nothing_is_asked_once(in_memory):
    reader, serving, asked = await at_a_worker(in_memory, patched=False)
    serving.renderer_ids.clear()
    serving.mute_models.clear()
    asked.render_status = 500
    chat = chat_request({"model": "m", "messages": MESSAGES})
    renders = []
    for _ in range(2):
        assert (await reader.find_boundaries(chat, serving, 400, 1234, None)).found.failure == "no_facts"
        renders.append(asked.renders)
    assert renders[0] == renders[1] > 0 and serving.mute_models == {"m"}
    asked.render_status, serving.renderer_ids["m"] = 200, b"known by now"
    assert (await reader.find_boundaries(chat, serving, 400, 1234, None)).found.failure is None


async def test_boundaries_that_no_client_waits_for_are_learnt_on_the_spot(in_memory):
    reader, serving, _ = await at_a_worker(in_memory)
    reader._heads.learn = Mock()
    noted = reader._heads.learn
    scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}

    def asked_for(messages: Any, values: int = 10) -> ProxiedRequest:
        request = request_of(scope, b"x" * 400, "r", KEY)
        request.body.parsed, request.body.memory = {"model": "m", "messages": messages}, Memory(5000, values)
        return request

    request = asked_for(MESSAGES)
    found = await reader.find_beside(request, serving)
    assert [each.kind for each in found.boundaries] == ["system", "turn"] and found.failure is None
    assert reader._facts.facts(serving.renderer_id("m"), DEFAULT) is not None
    noted.assert_called_once_with(found, serving.renderer, "ann")
    most = Settings().max_boundary_values
    assert (await reader.find_beside(asked_for(MESSAGES, most), serving)).failure is None
    for messages, values in ((MESSAGES, most + 1), ("x", 10)):
        assert (await reader.find_beside(asked_for(messages, values), serving)).failure == "no_boundary"
    assert noted.call_count == 2


def parts(n: int, seed: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": f"{seed}"}, *({"type": "text"} for _ in range(n))]}]


SHAPES = {
    "parts": ("/v1/chat/completions", lambda n, seed: {"messages": parts(n, seed)}),
    "messages": ("/v1/chat/completions", lambda n, seed: {"messages": [{"role": "user", "content": f"{seed}"}] * n}),
    "tools": ("/v1/chat/completions", lambda n, seed: {"messages": parts(1, seed), "tools": [{"a": seed}] * n}),
    "numbers": ("/v1/chat/completions", lambda n, seed: {"messages": parts(1, seed), "tools": [[seed + 1e9] * n * 9]}),
    "wide": (
        "/v1/chat/completions",
        lambda n, seed: {"messages": parts(1, seed), "tools": ["x" * n * 20 + "\U0001f600"]},
    ),
    "anthropic": ("/v1/messages", lambda n, seed: {"messages": parts(n, seed), "max_tokens": 1}),
    "responses": ("/v1/responses", lambda n, seed: {"input": [{"role": "user", "content": f"{seed}"}] * n}),
}


@pytest.mark.timeout(300)  # tracemalloc takes its time on a busy machine
@pytest.mark.parametrize("shape", SHAPES)
async def test_what_is_remembered_of_prompts_takes_no_more_than_it_may(shape):
    endpoint, body = SHAPES[shape]
    most = 2**19
    reader = PromptReader(Settings(text_bytes=most), Metrics(), Learner(one=FACTS))
    scope = {"method": "POST", "path": endpoint, "query_string": b"", "headers": []}

    async def send(seed: int) -> None:
        raw = json.dumps({"model": "m", **body(150, seed)}).encode()
        request = request_of(scope, raw, f"{seed}")
        request.body.parsed = parse_object(raw, *Settings().json_limits)
        request.body.memory = memory_of(request.body.parsed, len(raw), 10**6)
        request.prompt = await reader.read(request, [worker()], lambda: True)
        reader.stored.put(request.prompt.chat, {"id": f"resp_{seed}"}, "w#1")

    await send(0)  # what stays for ever, such as patterns and interned texts
    tracemalloc.start()
    try:
        for seed in range(1, 60):
            await send(seed)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert reader.recent.held or reader.stored.held
    assert held < 1.5 * most
