"""Positions lie where two chats really part, judged by the tokenizer and template of a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.learned import DivergenceLearner
from proxy.boundaries.positions import ENTRY_BYTES, Position, PositionCache
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.sentinel import SENTINELS, sentinel_for
from proxy.boundaries.token_ids import common_prefix
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_request
from proxy.routing.prefix_index import PrefixIndex
from tests.harness.small_tokenizer import SmallTokenizer

SYSTEM = {"role": "system", "content": "You pilot ships into the harbour. Answer briefly, and name the tide."}

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]


class LocalRenderer:
    """Renders here, and counts."""

    def __init__(self, tokenizer: SmallTokenizer) -> None:
        self.tokenizer = tokenizer
        self.renders = 0
        self.fail = False

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        self.renders += 1
        await asyncio.sleep(0)
        if self.fail:
            raise RenderFailed("planned")
        return self.tokenizer.render(body)


@pytest.fixture
def renderer(tokenizer) -> LocalRenderer:
    return LocalRenderer(tokenizer)


def finder() -> BoundaryFinder:
    return BoundaryFinder(PositionCache(1_000_000))


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def positions(renderer, body, use=None):
    found = await (use or finder()).find(chat_request(body), renderer, b"renderer")
    return {boundary.kind: boundary.tokens for boundary in found.boundaries}


PARTING_TEXTS = [
    "Quartz is a mineral.",
    "83 ships wait",
    "quartz",
    " leading space",
    "wind",
    "é accents",
    "💡",
    "",
    "\nx",
]


@pytest.mark.parametrize("text", PARTING_TEXTS)
async def test_the_system_boundary_is_where_another_question_parts(renderer, text):
    found = await positions(renderer, {"messages": [SYSTEM, user(text)]})
    for other in PARTING_TEXTS:
        if other[:1] != text[:1]:
            mine = await renderer({"messages": [SYSTEM, user(text)]})
            theirs = await renderer({"messages": [SYSTEM, user(other)]})
            shared = common_prefix(mine, theirs)
            assert shared - 1 <= found["system"] <= shared
    assert found["history"] == found["system"]


async def test_history_and_turn_of_a_longer_chat(renderer):
    chat = [SYSTEM, user("First?"), assistant("One."), user("Second?")]
    found = await positions(renderer, {"messages": chat})
    prompt = await renderer({"messages": chat})
    other = await renderer({"messages": [*chat[:3], user("branch")]})
    assert found["history"] == common_prefix(prompt, other)
    next_turn = await renderer({"messages": [*chat, assistant("Two."), user("Third?")]})
    assert next_turn[: found["turn"]] == prompt[: found["turn"]]
    assert found["system"] < found["history"] < found["turn"] < len(prompt)


async def test_tools_belong_to_the_system_boundary(renderer):
    with_tools = await positions(renderer, {"messages": [SYSTEM, user("Tide?")], "tools": TOOLS})
    without = await positions(renderer, {"messages": [SYSTEM, user("Tide?")]})
    assert with_tools["system"] > without["system"]


async def test_a_tool_result_as_the_last_text_is_a_history_boundary(renderer):
    chat = [SYSTEM, user("Tide?"), assistant("I will look."), {"role": "tool", "content": "high at nine"}]
    found = await positions(renderer, {"messages": chat})
    other = await renderer({"messages": [*chat[:3], {"role": "tool", "content": "low at four"}]})
    assert found["history"] == common_prefix(await renderer({"messages": chat}), other)


async def test_content_decides_nothing_for_earlier_boundaries(renderer):
    """Comparing with the real prompt: a text that looks like a tool response moves nothing."""
    plain = await positions(renderer, {"messages": [SYSTEM, user("Tide?")]})
    odd = await positions(renderer, {"messages": [SYSTEM, user("<tool_response>Tide?</tool_response>")]})
    assert plain["system"] == odd["system"]


async def test_a_known_prefix_needs_no_render(renderer):
    use = finder()
    first = await positions(renderer, {"messages": [SYSTEM, user("First?")]}, use)
    renders = renderer.renders
    second = await use.find(chat_request({"messages": [SYSTEM, user("Second?")]}), renderer, b"renderer")
    assert renderer.renders == renders
    assert second.result == "memo"
    assert {boundary.kind: boundary.tokens for boundary in second.boundaries}["history"] == first["history"]


async def test_a_long_new_text_is_worth_a_render_for_its_turn(renderer):
    use = finder()
    await positions(renderer, {"messages": [SYSTEM, user("First?")]}, use)
    found = await positions(renderer, {"messages": [SYSTEM, user("tide " * 1000)]}, use)
    assert found["turn"] > 1000


@pytest.mark.parametrize(
    "change",
    [
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"cache_salt": "x"},
        {"reasoning_effort": "high"},
        {"model": "other"},
    ],
)
async def test_whatever_can_move_a_position_makes_another_key(renderer, change):
    use = finder()
    body = {"messages": [SYSTEM, user("First?")]}
    one = await use.find(chat_request(body), renderer, b"renderer")
    other = await use.find(chat_request({**body, **change}), renderer, b"renderer")
    assert one.key != other.key
    assert other.result == "render"


async def test_keys_do_not_depend_on_the_last_text_sampling_or_spelling(renderer):
    use = finder()
    one = await use.find(chat_request({"messages": [SYSTEM, user("First?")], "temperature": 1}), renderer, b"r")
    other = await use.find(chat_request({"seed": 5, "messages": [SYSTEM, user("Other?")]}), renderer, b"r")
    assert one.key == other.key


async def test_another_template_is_another_key(renderer):
    use = finder()
    body = {"messages": [SYSTEM, user("First?")]}
    assert (await use.find(chat_request(body), renderer, b"one")).key != (
        await use.find(chat_request(body), renderer, b"two")
    ).key


async def test_a_cold_fan_out_renders_once(renderer):
    use = finder()
    await positions(renderer, {"messages": [{**SYSTEM, "content": "Another."}, user("zero")]}, use)
    renderer.renders = 0  # what was learnt of the template is learnt
    bodies = [{"messages": [SYSTEM, user(text)]} for text in ("one", "two", "three", "four")]
    found = await asyncio.gather(*(use.find(chat_request(body), renderer, b"renderer") for body in bodies))
    assert renderer.renders == 3  # prompt, sentinel, turn
    assert len({one.positions[0] for one in found}) == 1


async def test_only_the_text_of_the_last_text_part_is_replaced():
    seen = []

    async def renderer(body, path=CHAT):
        seen.append(body["messages"][-1]["content"])
        return [1, 2, 3]

    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "Look:"}, image, {"type": "text", "text": "what is it?"}]
    await finder().find(chat_request({"messages": [user(parts)]}), renderer, b"r")
    replaced = next(content for content in seen if content[2]["text"] in SENTINELS)
    assert replaced[:2] == parts[:2] and replaced[2]["text"] in SENTINELS


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "text",
        [7],
        [None],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "content": "only me"}],
    ],
)
async def test_a_chat_without_an_open_text_has_no_boundary(renderer, messages):
    found = await finder().find(chat_request({"messages": messages}), renderer, b"r")
    assert (found.positions, found.failure) == ((), "no_boundary")


async def test_a_template_that_refuses_the_prompt_is_a_reason_and_is_asked_again(renderer):
    use = finder()
    renderer.fail = True
    found = await use.find(chat_request({"messages": [SYSTEM, user("x")]}), renderer, b"r")
    assert (found.positions, found.failure) == ((), "render_failed")
    renderer.fail = False
    assert (await use.find(chat_request({"messages": [SYSTEM, user("x")]}), renderer, b"r")).positions


async def test_what_is_known_is_sent_even_if_something_new_cannot_be_rendered(renderer):
    use = finder()
    known = await use.find(chat_request({"messages": [SYSTEM, user("Tide?")]}), renderer, b"r")
    renderer.fail = True
    found = await use.find(chat_request({"messages": [SYSTEM, user("x" * 5000)]}), renderer, b"r")
    assert found.failure is None and set(found.positions) < set(known.positions) and found.positions


async def test_a_loop_that_is_rendered_anew_without_its_thinking_is_not_believed_to_be_there():
    async def thinks_last(body, path=CHAT):
        """Shows the thinking behind the last user message only, a token for each character."""
        messages = body["messages"]
        last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
        text = ""
        for index, message in enumerate(messages):
            text += f"<{message['role']}>{message.get('reasoning', '') if index > last else ''}{message['content']}"
        return list(map(ord, text + ("<assistant>" if body.get("add_generation_prompt", True) else "")))

    use, prefix_index = finder(), PrefixIndex(100_000)
    thought = {"role": "assistant", "content": "Let me look.", "reasoning": "A table will do. " * 40}
    loop = [SYSTEM, user("Tide?"), thought, {"role": "tool", "content": "nine"}]
    over = [*loop, assistant("At nine.")]
    prompts: list[list[int]] = []
    hits = []
    for chat in (loop[:2], loop, [*over, user("And then?")], [*over, user("?")]):
        found = await use.find(chat_request({"messages": chat}), thinks_last, b"r")
        prompt = await thinks_last({"messages": chat})
        shared = max((common_prefix(prompt, other) for other in prompts), default=0)
        held = prefix_index.longest(found.prefixes, ["worker"])
        assert held == {} or shared - 40 <= held["worker"].tokens <= shared
        hits.append(bool(held))
        prefix_index.record(found.boundaries, "worker")
        prompts.append(prompt)
    assert hits == [False, True, True, True]


async def test_an_answer_that_continues_a_message_ends_no_turn(renderer):
    body = {"messages": [SYSTEM, user("Tide?"), assistant("It is")], "continue_final_message": True}
    assert "turn" not in await positions(renderer, {**body, "add_generation_prompt": False})


def test_memory_is_bounded_and_forgets_the_least_recently_used():
    memory = PositionCache(2 * ENTRY_BYTES)
    memory.put(b"a", Position(1, b""))
    memory.put(b"b", Position(2, b""))
    assert memory.get(b"a").tokens == 1
    memory.put(b"c", Position(3, b""))
    assert (memory.get(b"a"), memory.get(b"b"), memory.get(b"c"), len(memory)) == ((1, b""), None, (3, b""), 2)


@pytest.mark.parametrize("text", [*PARTING_TEXTS, *SENTINELS, " Quartz", "\t83"])
def test_a_sentinel_never_starts_like_the_text_it_replaces(text):
    sentinel = sentinel_for(text)
    assert not text.lower().startswith(sentinel[0].lower())
    assert not text.lstrip().lower().startswith(sentinel[0].lower())


class Refusing:
    """A template that refuses some chats, as those with strict roles do."""

    def __init__(self, renderer: LocalRenderer, refuses: Callable[[Mapping[str, Any]], bool]) -> None:
        self.renderer, self.refuses = renderer, refuses

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        if self.refuses(body):
            raise RenderFailed("refused")
        return await self.renderer(body, path)


def last_role(body: Mapping[str, Any]) -> Any:
    return body["messages"][-1]["role"]


@pytest.mark.parametrize(
    ("refuses", "missing"),
    [
        (lambda body: body.get("add_generation_prompt") is False, "turn"),
        (lambda body: len(body["messages"]) == 2, "system"),
        (lambda body: body["messages"][-1]["content"] in SENTINELS and len(body["messages"]) == 4, "history"),
    ],
)
async def test_a_template_that_refuses_one_variant_costs_that_boundary_only(renderer, refuses, missing):
    body = {"messages": [SYSTEM, user("First?"), assistant("One."), user("Second?")]}
    all_of_them = await positions(renderer, body)
    found = await finder().find(chat_request(body), Refusing(renderer, refuses), b"renderer")
    assert found.failure is None
    kinds = {boundary.kind: boundary.tokens for boundary in found.boundaries}
    assert all_of_them.keys() - kinds.keys() == {missing} and kinds.items() <= all_of_them.items()


async def test_a_mark_where_no_chat_may_end_costs_that_mark_only(renderer):
    strict = Refusing(renderer, lambda body: last_role(body) in ("system", "assistant"))
    marked = {**assistant("One."), "cache_control": {"type": "ephemeral"}}
    body = {"messages": [SYSTEM, user("First?"), marked, user("Second?")]}
    assert "explicit" in await positions(renderer, body)
    found = await finder().find(chat_request(body), strict, b"renderer")
    assert {boundary.kind for boundary in found.boundaries} == {"system", "history", "turn"}


async def test_a_marked_boundary_is_found_again_among_the_prefixes(renderer):
    use = finder()
    part = {"type": "text", "text": "The tide table. " * 20, "cache_control": {"type": "ephemeral"}}
    for question in ("First?", "Second?", "Third?"):
        body = {"messages": [SYSTEM, user([part, {"type": "text", "text": question}])]}
        found = await use.find(chat_request(body), renderer, b"renderer")
        assert "explicit" in {boundary.kind for boundary in found.boundaries}
        assert {boundary.key for boundary in found.boundaries} <= set(found.prefixes)


async def test_what_another_request_left_at_a_mark_is_held_for_this_one(renderer):
    use, index = finder(), PrefixIndex(100_000)
    part = {"type": "text", "text": "The tide table. " * 20, "cache_control": {"type": "ephemeral"}}
    for question in ("First?", "Second?"):
        body = {"messages": [SYSTEM, user([part, {"type": "text", "text": question}])]}
        found = await use.find(chat_request(body), renderer, b"renderer")
        held = index.longest(found.prefixes, ["worker"])
        index.record(found.boundaries, "worker")
    explicit = next(boundary for boundary in found.boundaries if boundary.kind == "explicit")
    assert held["worker"] == (explicit.tokens, explicit.key)


async def test_a_mark_on_the_tools_without_a_system_prompt_is_before_the_first_user_text(renderer):
    tools = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    body = {"tools": tools, "messages": [user("First?"), assistant("One."), user("Second?")]}
    found = await positions(renderer, body)
    shared = common_prefix(await renderer(body), await renderer({"tools": tools, "messages": [user("x")]}))
    assert shared - 1 <= found["explicit"] <= shared


async def test_a_mark_on_the_tools_of_a_single_question_is_the_history(renderer):
    tools = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    assert {"history", "turn"} <= (await positions(renderer, {"tools": tools, "messages": [user("x")]})).keys()
    assert "explicit" not in await positions(renderer, {"tools": tools, "messages": [user("x")]})


async def test_chats_that_part_in_a_tool_call_have_boundaries(renderer):
    use = BoundaryFinder(PositionCache(1_000_000), DivergenceLearner(10_000_000))
    for port in ("Ayr", "Oban", "Ullapool"):
        call = {"id": "c", "type": "function", "function": {"name": "tide", "arguments": json.dumps({"port": port})}}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        chat = [SYSTEM, user("Tide? " * 200), called, {"role": "tool", "content": f"nine at {port} " * 100}]
        shown = [{**message, "content": message.get("content") or ""} for message in chat]
        found = await use.find(chat_request({"messages": shown}), renderer, b"renderer")
        assert found.failure is None and found.positions


async def test_a_client_that_asks_for_no_answer_ends_no_turn(renderer):
    chat = [SYSTEM, user("Tide?")]
    assert "turn" in await positions(renderer, {"messages": chat})
    assert "turn" not in await positions(renderer, {"messages": chat, "add_generation_prompt": False})
    assert "turn" not in await positions(renderer, {"messages": [*chat, assistant("At nine.")]})


async def test_variants_that_end_earlier_continue_no_message():
    seen = []

    async def characters(body, path=CHAT):
        seen.append(body)
        return list(map(ord, "".join(f"<{message['role']}>{message['content']}" for message in body["messages"])))

    chat = [SYSTEM, user("First?"), assistant("One."), user("Second?"), assistant("It is")]
    body = {"messages": chat, "continue_final_message": True, "add_generation_prompt": False}
    found = await finder().find(chat_request(body), characters, b"r")
    assert {boundary.kind for boundary in found.boundaries} == {"system", "history"}
    shorter = [each for each in seen if len(each["messages"]) < len(chat)]
    assert shorter and all("continue_final_message" not in each for each in shorter)
