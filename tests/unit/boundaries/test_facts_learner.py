"""Facts are learnt once, beside the requests; a worker that fails, and clients with endless settings, cost little."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_patches.commands.model import train_bpe
from proxy.boundaries.facts_learner import (
    COMMON_SETTINGS,
    LEARNING_SECONDS,
    MAX_SETTINGS,
    REST,
    SETTINGS_PER_KEY,
    TEMPLATES_PER_KEY,
    FactsLearner,
)
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.template_facts import DEFAULT, MAX_SCALAR, setting_of
from proxy.chat.chat import CHAT
from tests.harness.template_renderer import TemplateRenderer
from tests.harness.virtual_time import VirtualTimeLoop

ID = b"renderer"

OFF = setting_of({"chat_template_kwargs": {"enable_thinking": False}})

# What `enable_thinking` does to most templates, and what one of its settings does to all words of a few.
SWITCHED = """\
{%- set mark = '<|human|>' if style == 'other' else '<|user|>' %}
{%- for message in messages %}
{{- (mark if message.role == 'user' else '<|' + message.role + '|>') + (message.content or '') + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{% endif %}{% endif %}
"""


class Clock:
    """Time that passes when a test says so, in seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def trained() -> str:
    text: str = train_bpe(2048).to_str()
    return text


@pytest.fixture
def renderer(trained: str) -> TemplateRenderer:
    return TemplateRenderer(Tokenizer.from_str(trained), SWITCHED)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def learner(clock: Clock) -> FactsLearner:
    return FactsLearner(clock)


def numbered(number: int) -> Any:
    return setting_of({"chat_template_kwargs": {"number": number}})


async def test_a_renderer_that_is_broken_raises_nothing(learner):
    async def broken(body: Any, path: str = "") -> Any:
        raise RuntimeError("secret")

    await learner.learn(broken, ID, "m")
    await learner.learn_common(broken, ID, "m")
    assert learner.facts(ID) is None
    assert learner.failures == 1


async def test_a_restart_forgets_what_was_learnt_and_what_is_being_learnt(learner, renderer):
    assert learner.wants(ID) and learner.facts(ID, OFF) is None
    for name, setting in ((ID, DEFAULT), (ID, OFF), (b"other", DEFAULT)):
        await learner.learn(renderer, name, "m", setting)
    facts = learner.facts(ID)
    assert facts.is_own and facts.end("user") == 1 and facts.opener("user", False) is not None
    learner.forget(ID)
    assert learner.facts(ID) is learner.facts(ID, OFF) is None and learner.facts(b"other") is not None
    running = asyncio.create_task(learner.learn(renderer, ID, "m"))
    await asyncio.sleep(0)
    learner.forget(ID)
    await running
    assert learner.facts(ID) is None and learner.wants(ID)


async def test_one_api_key_leaves_learnings_to_the_others(learner, renderer):
    await learner.learn(renderer, ID, "m")
    for number in range(SETTINGS_PER_KEY):
        await learner.learn(renderer, ID, "m", numbered(number), "ann")
    assert not learner.wants(ID, numbered(-1), "ann")
    assert learner.wants(ID, numbered(-1), "bob") and learner.wants(ID, numbered(-1))
    own = [setting_of({"chat_template": f"{number}"}) for number in range(TEMPLATES_PER_KEY + 1)]
    for setting in own:
        await learner.learn(renderer, ID, "m", setting, "ann")
    assert learner.facts(ID, own[-1]) is None
    assert not learner.wants(ID, own[-1], "ann") and learner.wants(ID, own[-1], "bob")


def test_one_learning_has_one_deadline_however_many_renders_it_takes():
    class Hanging:
        asked = 0

        async def __call__(self, body: Any, path: str = CHAT) -> Any:
            self.asked += 1
            await asyncio.sleep(5.0)
            raise RenderFailed("planned", b"a template that refuses all")

    async def learnt() -> tuple[float, int]:
        loop, hanging = asyncio.get_running_loop(), Hanging()
        learner = FactsLearner(loop.time)
        await learner.learn(hanging, ID, "m")
        assert not learner.wants(ID)  # for a while
        return loop.time(), hanging.asked

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        seconds, asked = runner.run(learnt())
    assert seconds <= LEARNING_SECONDS and 0 < asked <= LEARNING_SECONDS / 5.0


def test_settings_are_those_that_can_recur():
    asked = {"model": "m", "messages": [], "temperature": 0.5, "tools": [{}], "tool_choice": "required"}
    assert setting_of(asked) is DEFAULT
    assert setting_of({"chat_template_kwargs": {}, "reasoning_effort": None}) is DEFAULT
    assert setting_of({"documents": [{"text": "x"}], "response_format": {"type": "json_object"}}) is DEFAULT
    assert setting_of({"chat_template_kwargs": {"documents": [1], "date": "x" * (MAX_SCALAR + 1)}}) is DEFAULT
    low = setting_of({**asked, "reasoning_effort": "low"})
    assert low.fields == {"reasoning_effort": "low"}
    assert low.key != setting_of({"reasoning_effort": "high"}).key
    one = setting_of({"chat_template_kwargs": {"a": True, "b": 1}})
    assert one == setting_of({"chat_template_kwargs": {"b": 1, "a": True, "c": [1]}})
    assert not one.is_default and not one.template
    own = setting_of({"chat_template": "x" * 1000})
    assert own.template and own.fields == {"chat_template": "x" * 1000}


async def test_clients_settings_are_bounded_and_one_in_use_is_not_the_one_that_is_forgotten(learner, renderer, clock):
    await learner.learn(renderer, ID, "m")
    for number in range(MAX_SETTINGS):
        clock.now += 10
        await learner.learn(renderer, ID, "m", numbered(number))
    assert learner.facts(ID, numbered(0)).is_own
    clock.now += 10
    await learner.learn(renderer, ID, "m", numbered(MAX_SETTINGS))
    known = [learner.facts(ID, numbered(number)).is_own for number in (0, 1, 2, MAX_SETTINGS)]
    assert known == [True, False, True, True] and len(learner) == 1 + MAX_SETTINGS
    renderer.down = True
    for number in range(2 * MAX_SETTINGS):
        clock.now += 10
        await learner.learn(renderer, ID, "m", numbered(-1 - number))
    assert len(learner) == 1 + MAX_SETTINGS and len(learner._failed) == MAX_SETTINGS


async def test_clients_cause_no_learning_right_behind_a_long_one(learner, renderer, clock):
    class Slow:
        async def __call__(self, body: Any, path: str = CHAT) -> Any:
            clock.now += 0.1
            return await renderer(body, path)

    slow = Slow()
    await learner.learn_common(slow, ID, "m")
    assert all(learner.facts(ID, setting).is_own for setting in COMMON_SETTINGS)
    began = clock.now
    await learner.learn(slow, ID, "m", numbered(1))
    took = clock.now - began
    assert took > 0.1 and not learner.wants(ID, numbered(2))
    await learner.learn(slow, b"another", "m")  # a worker that boots does not wait
    assert learner.facts(b"another") is not None
    clock.now = began + took * (1 + REST)
    assert learner.wants(ID, numbered(2))
