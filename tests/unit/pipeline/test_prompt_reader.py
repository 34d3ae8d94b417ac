"""A request's boundaries are there at once: what is not known is learnt beside the requests."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from datetime import date
from typing import Any

import pytest

from proxy.boundaries.template_facts import DEFAULT, Opener, Setting, TemplateFacts
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.json_body import NOTHING, Memory, memory_of, parse_object
from proxy.metrics import Metrics
from proxy.pipeline.prompt_reader import DATES_PER_KEY, DATES_PER_WORKER, TOKENS_PER_BYTE, PromptReader
from proxy.pipeline.request import ProxiedRequest, request_of
from proxy.settings import Settings
from tests.harness.probed import probed

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
    for _ in range(2):
        found = (await read(Learner(), serving, reader=reader, messages=DATED)).prompt.found
        assert found.entries() == ("last:3", -5)
    assert len(tokenizer.texts) == 1


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


@pytest.mark.parametrize(("key", "most"), [(None, DATES_PER_WORKER), (KEY, DATES_PER_KEY)])
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


async def test_an_older_plugin_is_asked_for_no_tokens():
    serving = worker()
    serving.renderer = Tokenizer()
    serving.probed = probed("a", EngineInfo("0.2.0", "0.32.0", match_unit=16, block_size=384), "m")
    request = await read(Learner(one=FACTS), serving, messages=DATED)
    assert not serving.renderer.texts and "first" not in str(request.prompt.found.entries())


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
