"""What is learnt of a template is true of chats it was not learnt from, is learnt once, and costs little."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from engine_patches.commands.model import train_bpe
from proxy.boundaries.boundary import encode_opener, resolve
from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.facts_learner import (
    COMMON_SETTINGS,
    LEARNING_SECONDS,
    MAX_SETTINGS,
    REST,
    SETTINGS_PER_KEY,
    TEMPLATES_PER_KEY,
    FactsLearner,
)
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import HeadPositions, PositionCache
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.template_facts import (
    DEFAULT,
    GAP,
    MAX_SCALAR,
    Opener,
    OpenerPlace,
    TemplateFacts,
    Turn,
    setting_of,
)
from proxy.boundaries.template_probe import CHATS, RICH, learn_facts
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_request
from tests.harness.messages import assistant, system, user
from tests.harness.render_models import MARKERS
from tests.harness.virtual_time import on_virtual_time


class TemplateRenderer:
    """One tokenizer and template, as vLLM's chat route renders plain chats. Fails when it is told to."""

    def __init__(self, template: str, special: bool = True) -> None:
        """`special`: what looks like a marker in the template is a token of its own."""
        self._tokenizer = Tokenizer.from_str(trained())
        if special:
            self._tokenizer.add_special_tokens(
                [AddedToken(marker) for marker in sorted(set(MARKERS.findall(template)))]
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = Mock(side_effect=TemplateError)
        self._template = environment.from_string(template)
        self.down = False

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        await asyncio.sleep(0)
        if self.down:
            raise RenderFailed("Unreachable")
        return self.render(body)

    async def detokenize(self, model: Any, ids: Sequence[int]) -> str | None:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def render(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt. Raises `RenderFailed` if the template refuses the chat."""
        try:
            text = self._template.render(
                messages=[_message(message) for message in body["messages"]],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                bos_token="<s>",
                eos_token="</s>",
                reasoning_effort=body.get("reasoning_effort"),
                **(body.get("chat_template_kwargs") or {}),
            )
        except TemplateError as error:
            raise RenderFailed("status 400", str(error).encode()) from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of calls as an object, as vLLM hands them to a template."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "templates").glob("*.jinja"))}

TOOLS = {"tools": [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]}

# No two begin alike, and none as what is learnt from.
TEXTS = ("When is high tide?", "\nOn a line", ")x", " so", "9 ships", "")


def calls(*ids: str) -> dict[str, Any]:
    function = {"name": "tide", "arguments": '{"port": "Ayr", "hours": [1, 2]}'}
    made = [{"id": number, "type": "function", "function": function} for number in ids]
    return {"role": "assistant", "content": "Let me look.", "tool_calls": made}


def result(number: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": text}


PILOT = system("You pilot ships into the harbour. Answer briefly.")

BEFORE: dict[OpenerPlace, list[dict[str, Any]]] = {
    "alone": [PILOT],
    "user": [PILOT, user("First?"), assistant("One.")],
    "tool": [PILOT, user("First?"), calls("abcdef123")],
    "results": [PILOT, user("First?"), calls("abcdef123", "bcdefg234"), result("abcdef123", "It is high. " * 20)],
}


def chat(place: OpenerPlace, text: str, with_tools: bool = False) -> dict[str, Any]:
    """A chat with its last text in a place."""
    last = user(text)
    if place in ("tool", "results"):
        last = result("bcdefg234" if place == "results" else "abcdef123", text)
    return {"messages": [*BEFORE[place], last], **(TOOLS if with_tools else {})}


@cache
def trained() -> str:
    """A byte-level tokenizer."""
    text: str = train_bpe(2048).to_str()
    return text


async def learnt(renders: TemplateRenderer) -> TemplateFacts | None:
    learner = FactsLearner()
    await learner.learn(renders, ID, "m")
    return learner.facts(ID)


def gap(renders: TemplateRenderer, facts: TemplateFacts, place: OpenerPlace, with_tools: bool) -> int | None:
    """Tokens that an opener leads to before the place; None if it is not known."""
    opener = facts.openers.get((place, with_tools))
    if opener is None:
        return None
    (position,) = resolve([encode_opener(opener)], renders.render(chat(place, RICH, with_tools)))
    assert position
    first, *others = (renders.render(chat(place, text, with_tools)) for text in TEXTS)
    return min(common_prefix(first, other) for other in others) - position  # from where they really part


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_an_opener_leads_to_the_place_or_just_before_it_and_its_first_to_where_new_chats_part(name, special):
    renders = TemplateRenderer(TEMPLATES[name], special)
    facts = await learnt(renders)
    gaps = {}
    for place in BEFORE:
        for with_tools in (False, True) if place in ("alone", "user") else (True,):
            gaps[place, with_tools] = gap(renders, facts, place, with_tools)
    assert all(each is None or 0 <= each <= GAP for each in gaps.values()), gaps
    unknown = {where for where, each in gaps.items() if each is None}
    if name == "system-in-last-user":  # what stands before a user's text is another system prompt in each chat
        assert unknown == {("alone", False), ("user", False), ("alone", True), ("user", True)}
    elif name == "tools-in-first-user":
        assert unknown <= {("alone", True)}
    else:
        assert not unknown
    far = {where for where, each in gaps.items() if each is not None and each > 1}
    assert far == ({("tool", True), ("results", True)} if name == "id-before-result" else set())
    for with_tools in (False, True) if special else ():
        opener = facts.openers.get(("first", with_tools))
        if name == "system-in-last-user" or (name == "tools-in-first-user" and with_tools):
            assert opener is None
            continue
        prompt = renders.render(chat("user", "Second?", with_tools))
        true = min(common_prefix(prompt, renders.render(chat("alone", text, with_tools))) for text in TEXTS)
        assert opener is not None
        assert true - resolve([encode_opener(opener, "first")], prompt)[0] in (0, 1)


SYSTEM = system("You pilot ships into the harbour. Answer briefly, and name the tide. " * 6)
HISTORY = [SYSTEM, user("First?"), assistant("One, and that is all."), user("Second?"), assistant("Two.")]
THOUGHT = {**HISTORY[2], "reasoning_content": "They ask for the tide, so a table will do. " * 3}
LOOP = [SYSTEM, user("Look up the tide."), calls("abcdef123"), result("abcdef123", "high at nine")]
EDITED = [*LOOP[:2], {**LOOP[2], "content": "Let me ask."}, result("abcdef123", "low")]
NEXT = [assistant("At nine."), user("Where?")]

# One request and the next, with tools or without.
FOLLOWING: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], bool]] = {
    "another question": ([SYSTEM, user("When?")], [SYSTEM, user("and the wind?")], False),
    "another question, tools": ([SYSTEM, user("When?")], [SYSTEM, user("and the wind?")], True),
    "a fork": ([*HISTORY, user("When?")], [*HISTORY, user("and the wind?")], False),
    "a turn": ([*HISTORY, user("When?")], [*HISTORY, user("When?"), *NEXT], False),
    "a turn, tools": ([*HISTORY, user("When?")], [*HISTORY, user("When?"), *NEXT], True),
    "a thought dropped": ([SYSTEM, user("First?"), THOUGHT, *HISTORY[3:4]], [*HISTORY[:4], *NEXT], False),
    "another result": (LOOP, [*LOOP[:3], result("abcdef123", "low")], True),
    "a loop that goes on": (LOOP, [*LOOP, calls("bcdefg234"), result("bcdefg234", "low")], True),
    "a loop that is over": (LOOP, [*LOOP, *NEXT], True),
    "a call edited": (LOOP, EDITED, True),
}

# What only rendering tells, from the third request on: by template.
UNTOLD = {
    "system-in-last-user": {"another question", "another question, tools", "a fork", "a call edited"},
    "tools-in-first-user": {"another question, tools", "a call edited"},
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_what_the_next_request_shares_has_a_boundary_near_its_end(name):
    renders = TemplateRenderer(TEMPLATES[name])
    facts, far, later = await learnt(renders), set(), set()
    for case, (one, other, with_tools) in FOLLOWING.items():
        body, following = ({"messages": each, **(TOOLS if with_tools else {})} for each in (one, other))
        prompt, positions = renders.render(body), PositionCache(10**6)
        shared, heads = common_prefix(prompt, renders.render(following)), HeadPositions(positions)
        for missed in (far, set(), later):
            found = BoundaryFinder(positions).find(chat_request(body), facts, ID)
            reached = max((each for each in resolve(found.entries(), prompt) if each <= shared), default=0)
            missed |= {case} if shared - reached > (shared // 2 if case == "a call edited" else GAP) else set()
            heads.learn(found, renders)
            await (heads._worker or asyncio.sleep(0))
    assert far == UNTOLD.get(name, set()) and later <= {"a call edited"}


# Templates of a few characters, each a token.


def written(
    body: Any, user: str = "<u>", result: str = "<t>", close: str = "</>", closed: str = "</>", asks: str = "<a>"
) -> str:
    """A chat; its last message ends with `close`, all before it with `closed`."""
    text = f"<tools>{len(body['tools'])}</>" if body.get("tools") else ""
    messages = body["messages"]
    for number, message in enumerate(messages):
        opened = {"user": user, "tool": result}.get(message["role"], f"<{message['role']}>")
        called = "".join(f"[{call['function']['name']}]" for call in message.get("tool_calls", ()))
        text += opened + (message["content"] or "") + called + (close if number == len(messages) - 1 else closed)
    return text + (asks if body.get("add_generation_prompt", True) else "")


async def facts_of(template: Callable[[Any], str]) -> TemplateFacts | None:
    async def render(body: Any) -> list[int]:
        return [*map(ord, template(body))]

    async def detokenize(ids: Any) -> str | None:
        return "".join(map(chr, ids))

    return await learn_facts(render, detokenize)


@pytest.mark.parametrize(("merged", "holds"), [(0, True), (1, True), (2, False)])
async def test_one_token_of_a_turn_may_merge_with_what_follows(merged, holds):
    facts = await facts_of(lambda body: written(body, close="--" + "]" * merged, closed="--" + ")" * merged))
    assert facts.ends["user"] == facts.ends["tool"] == 3
    assert facts.turn_holds("user", later=True, system=True, tools=False) is holds
    assert facts.turn_holds("tool", later=True, system=False, tools=True) is holds
    if not holds:
        kinds = {each.turn for each in CHATS}
        assert facts.broken == kinds and Turn("tool", True, True, True) in kinds
    assert ("system" in facts.ends) is holds


@pytest.mark.parametrize(("size", "is_known"), [(1, True), (2, True), (GAP, True), (GAP + 1, False)])
async def test_an_opener_leads_to_a_result_behind_an_id_unless_that_is_too_long(size, is_known):
    def template(body: Any) -> str:
        messages = [
            {**each, "content": (each["tool_call_id"] * 3)[:size] + each["content"]} if each["role"] == "tool" else each
            for each in body["messages"]
        ]
        return written({**body, "messages": messages})

    found = (await facts_of(template)).openers.get(("tool", True))
    assert found == (Opener(tuple(map(ord, "</><t>")), "</><t>") if is_known else None)


async def test_nothing_is_learnt_of_a_template_that_refuses_all_chats():
    async def refuses(body: Any) -> tuple[int, ...]:
        return ()

    assert await learn_facts(refuses, refuses) is None


# A small world: chats of up to four messages of these roles, in templates of a few characters.

ROLES = ("system", "user", "assistant", "tool")

WORLD: dict[str, Callable[[Any], str]] = {
    "plain": partial(written, asks="[?]"),
    "an end that changes": partial(written, close="--]", closed="--)", asks="[?]"),
    "no closing": partial(written, close="", closed="", result="<r><t>", asks="[?]"),
}


def small_chats() -> Iterator[list[dict[str, Any]]]:
    for size in range(1, 5):
        for roles in itertools.product(ROLES if size < 4 else ROLES[:3], repeat=size):
            for first in "ab":  # of what may be said first; nothing else differs
                yield [{"role": role, "content": f"{first if not at else 'c'}{at}"} for at, role in enumerate(roles)]


@pytest.mark.parametrize("name", WORLD)
@pytest.mark.parametrize("tools", [{}, TOOLS], ids=["no tools", "tools"])
async def test_each_boundary_is_the_longest_beginning_that_others_share_and_its_key_stands_for_that_alone(name, tools):
    """One too far is met by nobody, one too short computes again; and the next request finds each again."""
    template, prefixes, kinds = WORLD[name], {}, Counter()
    facts, finder = await facts_of(template), BoundaryFinder(PositionCache(10**6))

    def text_of(messages: list[dict[str, Any]]) -> str:
        return template({"messages": messages, **tools})

    def shared(messages: list[dict[str, Any]], at: int) -> int:
        """With a chat whose message `at` says something else, and has nothing behind it in common."""
        others = [[*messages[:at], {**messages[at], "content": other}, *messages[at + 1 :]] for other in ("Z", "!", "")]
        return min(common_prefix(text_of(messages), text_of(other)) for other in others)

    for messages in small_chats():
        prompt = text_of(messages)
        found = finder.find(chat_request({"messages": messages, **tools}), facts, name.encode())
        going_on = [*messages, {"role": "assistant", "content": "Yes."}, user("And?")]
        grown = finder.find(chat_request({"messages": going_on, **tools}), facts, name.encode())
        for boundary in found.boundaries:
            position = resolve([boundary.entry], [*map(ord, prompt)])[0] if boundary.entry is not None else 0
            if not position:  # none is told, or the engine finds none
                continue
            kinds[boundary.kind] += 1
            assert prefixes.setdefault(boundary.key, prompt[:position]) == prompt[:position], messages
            assert boundary.key in found.prefixes
            if boundary.kind == "turn":
                shared_with_next = common_prefix(prompt, text_of(going_on))  # one token may merge with what follows
                assert position - 1 <= shared_with_next <= position, messages
            else:
                partings = [shared(messages, at) for at in range(len(messages))]
                assert position in partings, (messages, boundary, partings)
                assert boundary.key in grown.prefixes, messages
    assert kinds["history"] > 50 and kinds["system"] > 20 and kinds["turn"] > 50


ID = b"renderer"

OFF = setting_of({"chat_template_kwargs": {"enable_thinking": False}})

# What `enable_thinking` does to most templates, and what one of its settings does to all words of a few.
SWITCHED = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' + (message.content or '') + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{% endif %}{% endif %}
"""


@pytest.fixture
def switched() -> TemplateRenderer:
    return TemplateRenderer(SWITCHED)


@pytest.fixture
def clock() -> SimpleNamespace:
    """Seconds that pass when a test says so."""
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def learner(clock: SimpleNamespace) -> FactsLearner:
    return FactsLearner(lambda: clock.now)


def numbered(number: int) -> Any:
    return setting_of({"chat_template_kwargs": {"number": number}})


async def test_a_setting_has_facts_of_its_own_and_one_that_moves_nothing_the_default_ones(learner, switched):
    for setting in (DEFAULT, OFF, numbered(1)):
        await learner.learn(switched, ID, "m", setting)
    default, off = learner.facts(ID), learner.facts(ID, OFF)
    assert learner.facts(ID, numbered(1)) is default
    assert off.is_own and off.openers == default.openers and off.ends["user"] > default.ends["user"]


async def test_a_renderer_that_is_broken_raises_nothing(learner):
    async def broken(body: Any, path: str = "") -> Any:
        raise RuntimeError("secret")

    await learner.learn(broken, ID, "m")
    await learner.learn_common(broken, ID, "m")
    assert learner.facts(ID) is None and not learner.wants(ID)


async def test_a_restart_forgets_what_was_learnt_and_what_is_being_learnt(learner, switched):
    assert learner.wants(ID) and learner.facts(ID, OFF) is None
    for name, setting in ((ID, DEFAULT), (ID, OFF), (b"other", DEFAULT)):
        await learner.learn(switched, name, "m", setting)
    facts = learner.facts(ID)
    assert facts.is_own and facts.ends["user"] == 1 and ("user", False) in facts.openers
    learner.forget(ID)
    assert learner.facts(ID) is learner.facts(ID, OFF) is None and learner.facts(b"other") is not None
    running = asyncio.create_task(learner.learn(switched, ID, "m"))
    await asyncio.sleep(0)
    learner.forget(ID)
    await running
    assert learner.facts(ID) is None and learner.wants(ID)


async def test_one_api_key_leaves_learnings_to_the_others(learner, switched):
    await learner.learn(switched, ID, "m")
    for number in range(SETTINGS_PER_KEY):
        await learner.learn(switched, ID, "m", numbered(number), "ann")
    assert not learner.wants(ID, numbered(-1), "ann")
    assert learner.wants(ID, numbered(-1), "bob") and learner.wants(ID, numbered(-1))
    own = [setting_of({"chat_template": f"{number}"}) for number in range(TEMPLATES_PER_KEY + 1)]
    for setting in own:
        await learner.learn(switched, ID, "m", setting, "ann")
    assert learner.facts(ID, own[-1]) is None
    assert not learner.wants(ID, own[-1], "ann") and learner.wants(ID, own[-1], "bob")


@on_virtual_time
async def test_one_learning_has_one_deadline_however_many_renders_it_takes():
    class Hanging:
        asked = 0

        async def __call__(self, body: Any, path: str = CHAT) -> Any:
            self.asked += 1
            await asyncio.sleep(5.0)
            raise RenderFailed("planned", b"a template that refuses all")

    loop, hanging = asyncio.get_running_loop(), Hanging()
    learner = FactsLearner(loop.time)
    await learner.learn(hanging, ID, "m")
    assert not learner.wants(ID)  # for a while
    assert loop.time() <= LEARNING_SECONDS and 0 < hanging.asked <= LEARNING_SECONDS / 5.0


def test_settings_are_those_that_can_recur():
    asked = {"model": "m", "messages": [], "temperature": 0.5, "tools": [{}], "tool_choice": "required"}
    odd = {"chat_template_kwargs": {"documents": [1], "date": "x" * (MAX_SCALAR + 1)}}
    for each in (asked, {"chat_template_kwargs": {}, "reasoning_effort": None}, {"documents": [{"text": "x"}]}, odd):
        assert setting_of(each) is DEFAULT
    low = setting_of({**asked, "reasoning_effort": "low"})
    assert low.fields == {"reasoning_effort": "low"}
    longest = {"reasoning_effort": "x" * MAX_SCALAR}
    assert setting_of(longest).fields == longest
    assert low.key != setting_of({"reasoning_effort": "high"}).key
    one = setting_of({"chat_template_kwargs": {"a": True, "b": 1}})
    assert one == setting_of({"chat_template_kwargs": {"b": 1, "a": True, "c": [1]}})
    assert not one.is_default and not one.template
    own = setting_of({"chat_template": "x" * 1000})
    assert own.template and own.fields == {"chat_template": "x" * 1000}


async def test_clients_settings_are_bounded_and_one_in_use_is_not_the_one_that_is_forgotten(learner, switched, clock):
    await learner.learn(switched, ID, "m")
    for number in range(MAX_SETTINGS):
        clock.now += 10
        await learner.learn(switched, ID, "m", numbered(number))
    assert learner.facts(ID, numbered(0)).is_own
    clock.now += 10
    await learner.learn(switched, ID, "m", numbered(MAX_SETTINGS))
    known = [learner.facts(ID, numbered(number)).is_own for number in (0, 1, 2, MAX_SETTINGS)]
    assert known == [True, False, True, True] and len(learner._templates[ID].facts) == 1 + MAX_SETTINGS
    switched.down = True
    for number in range(2 * MAX_SETTINGS):
        clock.now += 10
        await learner.learn(switched, ID, "m", numbered(-1 - number))
    template = learner._templates[ID]
    assert len(template.facts) == 1 + MAX_SETTINGS and len(template.failed) == MAX_SETTINGS


async def test_clients_cause_no_learning_right_behind_a_long_one(learner, switched, clock):
    class Slow:
        async def __call__(self, body: Any, path: str = CHAT) -> Any:
            clock.now += 0.1
            return await switched(body, path)

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
