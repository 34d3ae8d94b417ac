"""What is learnt of a template is true of chats it was not learnt from, one template for each quirk of real ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_patches.commands.model import train_bpe
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.resolve import encode_opener, resolve
from proxy.boundaries.template_facts import GAP, Opener, OpenerPlace, TemplateFacts, Turn
from proxy.boundaries.template_probe import CHATS, RICH, ends_with, learn_facts
from proxy.boundaries.token_ids import common_prefix
from proxy.chat.reader import chat_request
from tests.harness.messages import assistant, system, user
from tests.harness.template_renderer import TemplateRenderer

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


def renderer(name: str, special: bool = True) -> TemplateRenderer:
    return TemplateRenderer(Tokenizer.from_str(trained()), TEMPLATES[name], special)


@cache
def trained() -> str:
    """A byte-level tokenizer."""
    text: str = train_bpe(2048).to_str()
    return text


async def learnt(renders: TemplateRenderer) -> TemplateFacts:
    async def render(body: Any) -> list[int] | None:
        try:
            return renders.render(body)
        except RenderFailed:
            return None

    async def detokenize(ids: Any) -> str | None:
        return await renders.detokenize("m", ids)

    facts = await learn_facts(render, detokenize, {})
    assert facts is not None
    return facts


def parting(render: Callable[[Any], list[int]], place: OpenerPlace, with_tools: bool = False) -> int:
    """Where chats that differ in the last text really part."""
    first, *others = (render(chat(place, text, with_tools)) for text in TEXTS)
    return min(common_prefix(first, other) for other in others)


def gap(renders: TemplateRenderer, facts: TemplateFacts, place: OpenerPlace, with_tools: bool = False) -> int | None:
    """Tokens that an opener leads to before the place; None if it is not known."""
    opener = facts.opener(place, with_tools)
    if opener is None:
        return None
    (position,) = resolve([encode_opener(opener)], renders.render(chat(place, RICH, with_tools)))
    assert position
    return parting(renders.render, place, with_tools) - position


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_an_opener_leads_to_the_place_or_just_before_it(name, special):
    renders = renderer(name, special)
    facts = await learnt(renders)
    gaps = {}
    for place, with_tools in (("alone", False), ("user", False), ("alone", True), ("user", True)):
        gaps[place, with_tools] = gap(renders, facts, place, with_tools)
    for place in ("tool", "results"):
        gaps[place, True] = gap(renders, facts, place, with_tools=True)
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


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_the_first_occurrence_leads_to_where_a_new_conversation_parts(name):
    renders = renderer(name)
    facts = await learnt(renders)
    for with_tools in (False, True):
        opener = facts.opener("first", with_tools)
        if name == "system-in-last-user" or (name == "tools-in-first-user" and with_tools):
            assert opener is None
            continue
        prompt = renders.render(chat("user", "Second?", with_tools))
        true = min(common_prefix(prompt, renders.render(chat("alone", text, with_tools))) for text in TEXTS)
        assert opener is not None
        assert true - resolve([encode_opener(opener, "first")], prompt)[0] in (0, 1)


async def test_a_template_that_takes_none_of_our_chats_has_no_facts():
    async def refuses(body: Any) -> None:
        return None

    async def no_text(ids: Any) -> str | None:
        return None

    assert await learn_facts(refuses, no_text, {}) is None


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


async def facts_of(template: Callable[[Any], str | None]) -> TemplateFacts:
    async def render(body: Any) -> list[int] | None:
        text = template(body)
        return [*map(ord, text)] if text is not None else None

    async def detokenize(ids: Any) -> str | None:
        return "".join(map(chr, ids))

    facts = await learn_facts(render, detokenize, {})
    assert facts is not None
    return facts


def opener(text: str, **known: bool) -> Opener:
    return Opener(tuple(map(ord, text)), text, **known)


@pytest.mark.parametrize(("merged", "holds"), [(0, True), (1, True), (2, False)])
async def test_one_token_of_a_turn_may_merge_with_what_follows(merged, holds):
    facts = await facts_of(lambda body: written(body, close="--" + "]" * merged, closed="--" + ")" * merged))
    assert facts.ends["user"] == facts.ends["tool"] == 3
    assert facts.turn_holds("user", later=True, system=True, tools=False) is holds
    assert facts.turn_holds("tool", later=True, system=False, tools=True) is holds
    if not holds:
        kinds = {each.turn for each in CHATS if each.following}
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

    found = (await facts_of(template)).opener("tool", tools=True)
    assert found == (opener("</><t>", exact=size <= 1) if is_known else None)


async def test_under_another_setting_the_ends_are_learnt_and_whether_the_openers_hold():
    plain = await facts_of(written)

    def rendering(**changes: str) -> Callable[[Any], Any]:
        async def render(body: Any) -> list[int] | None:
            assert body["reasoning_effort"] == "low"
            return [*map(ord, written(body, **changes))]

        return render

    fields = {"reasoning_effort": "low"}
    same = await ends_with(rendering(asks="<a>--"), plain, fields)
    assert same is not None and same == ({"user": 5, "tool": 5, "system": 5}, True)
    for moved in ({"user": "<v>"}, {"result": "<v>"}):
        other = await ends_with(rendering(**moved), plain, fields)
        assert other is not None and not other.openers_hold
    unknown = await ends_with(rendering(user="<v>", result="<v>"), TemplateFacts(), fields)
    assert unknown is not None and unknown.openers_hold  # nothing is known that could move

    async def refuses(body: Any) -> None:
        return None

    assert await ends_with(refuses, plain, fields) is None


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
