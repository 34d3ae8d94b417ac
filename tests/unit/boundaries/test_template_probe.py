"""What is learnt of a template is true of chats it was not learnt from, one template for each quirk of real ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_patches.commands.model import train_bpe
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.resolve import encode_opener, resolve
from proxy.boundaries.template_facts import GAP, Opener, OpenerPlace, TemplateFacts, Turn
from proxy.boundaries.template_probe import CHATS, LONG_OPENER, RICH, ends_with, learn_facts, sample
from proxy.boundaries.token_ids import common_prefix
from tests.harness.template_renderer import TemplateRenderer

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "templates").glob("*.jinja"))}

TOOLS = {"tools": [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]}

BARE = {"add_generation_prompt": False}

# No two begin alike, and none as what is learnt from.
TEXTS = ("When is high tide?", "\nOn a line", ")x", " so", "9 ships", "")


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


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


async def learnt(renders: TemplateRenderer, fields: dict[str, Any] | None = None) -> TemplateFacts:
    async def render(body: Any) -> list[int] | None:
        try:
            return renders.render(body)
        except RenderFailed:
            return None

    async def detokenize(ids: Any) -> str | None:
        return await renders.detokenize("m", ids)

    facts = await learn_facts(render, detokenize, fields or {})
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


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_as_many_tokens_stand_behind_the_last_message_as_was_learnt(name, special):
    renders = renderer(name, special)
    facts = await learnt(renders)
    if name == "strict-roles":  # refuses a chat without the words that ask for an answer
        assert facts.ends == {}
        return
    for place in BEFORE:
        for text in TEXTS:
            body = chat(place, text, with_tools=True)
            prompt, bare = renders.render(body), renders.render({**body, "add_generation_prompt": False})
            role = "tool" if place in ("tool", "results") else "user"
            assert facts.end(role) == len(prompt) - common_prefix(prompt, bare)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_a_reminder_behind_the_last_message_has_an_end_that_stays(name):
    renders = renderer(name)
    end = (await learnt(renders)).end("system")
    messages = [PILOT, user("First?"), assistant("One."), user("Second?"), system("The tide turns at nine.")]
    try:
        prompt, bare = renders.render({"messages": messages}), renders.render({"messages": messages, **BARE})
        following = renders.render({"messages": [*messages, assistant("Two."), user("Third?")]})
    except RenderFailed:  # not all templates take a system message there
        assert end is None
        return
    true = len(prompt) - common_prefix(prompt, bare)
    stays = common_prefix(prompt, following) >= len(prompt) - true - 1
    if not stays or name == "plain-words":  # there the break behind a text may grow together with the text's end
        assert end is None
    else:
        assert end == true


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


async def test_turns_that_the_next_request_renders_anew_are_known():
    moved = await learnt(renderer("system-in-last-user"))
    assert not moved.turn_holds("user", later=True, system=True, tools=False)
    assert not moved.turn_holds("user", later=False, system=False, tools=True)
    assert moved.turn_holds("user", later=True, system=False, tools=False)
    assert moved.turn_holds("tool", later=True, system=True, tools=True)
    stays = await learnt(renderer("thinking-dropped"))
    assert not stays.broken


async def test_an_opener_that_each_user_message_has_once_can_be_counted():
    plain = (await learnt(renderer("trimmed"))).opener("user", False)
    assert plain is not None
    assert plain.per_user
    assert plain.no_tool
    # Results stand in a user's message there.
    shared = (await learnt(renderer("thinking-dropped"))).opener("user", True)
    assert shared is not None
    assert shared.per_user
    assert not shared.no_tool
    renders = renderer("trimmed")
    turns = [message for number in range(4) for message in (user(f"{number}?"), assistant("So."))]
    prompt = renders.render({"messages": [PILOT, *turns, user("Last?")]})
    others = renders.render({"messages": [PILOT, *turns[:4], user("x"), *turns[5:], user("Last?")]})
    assert resolve([encode_opener(plain, skip=2)], prompt) == [common_prefix(prompt, others)]


async def test_an_opener_is_known_as_text_to_be_counted_in_texts():
    renders = renderer("trimmed")
    opener = (await learnt(renders)).opener("user", False)
    assert opener is not None
    assert opener.text == "<|turn|>user\n"
    said = f"It begins {opener.text} and then {opener.text} again."
    position = resolve([encode_opener(opener, skip=said.count(opener.text))], renders.render(chat("user", said)))
    assert position == [parting(renders.render, "user")]


async def test_settings_reach_the_template():
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    renders = renderer("head-by-settings")
    seen: list[dict[str, Any]] = []

    async def render(body: Any) -> list[int] | None:
        seen.append(body)
        try:
            return renders.render(body)
        except RenderFailed:
            return None

    async def no_text(ids: Any) -> str | None:
        return None

    facts = await learn_facts(render, no_text, kwargs)
    assert facts is not None
    assert all(opener.text is None for opener in facts.openers.values())
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in seen)


async def test_a_template_that_takes_none_of_our_chats_has_no_facts():
    async def refuses(body: Any) -> None:
        return None

    async def no_text(ids: Any) -> str | None:
        return None

    assert await learn_facts(refuses, no_text, {}) is None


async def test_what_cannot_be_told_from_several_chats_is_not_known():
    """A template that takes a lone question only."""
    renders = renderer("trimmed")

    async def render(body: Any) -> list[int] | None:
        return renders.render(body) if len(body["messages"]) == 1 and not body.get("tools") else None

    async def no_text(ids: Any) -> str | None:
        return None

    facts = await learn_facts(render, no_text, {})
    assert facts is not None
    assert not facts.openers


# The last user message says whom the system prompt is for: some words of any length, few in our own chats.
HEAD_IN_LAST_USER = """
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'user' and loop.last %}{{- messages[0].content[:12] + ': ' }}{% endif %}
{{- message.content }}{{- message.tool_calls | tojson if message.tool_calls else '' }}{{- '<|end|>' }}
{%- endfor %}
{{- '<|assistant|>' }}"""


async def test_an_opener_that_something_else_stands_behind_is_not_known_however_short_that_is_in_our_chats():
    facts = await learnt(TemplateRenderer(Tokenizer.from_str(trained()), HEAD_IN_LAST_USER))
    for with_tools in (False, True):
        assert facts.opener("alone", with_tools) is None and facts.opener("user", with_tools) is None


def test_no_text_of_ours_begins_like_another():
    """Else chats would seem to part later than they do."""
    for each in CHATS:
        first_users = [message["content"] for message in each.before if message["role"] == "user"]
        assert all(not text.startswith("Q") for text in first_users)


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


BOTH = (False, True)


async def test_all_that_a_plain_template_writes_is_known():
    facts = await facts_of(written)
    users = opener("<u>", per_user=True, no_tool=True)
    wanted = {(place, tools): users for place in ("alone", "user", "first") for tools in BOTH}
    wanted |= {(place, tools): opener("</><t>") for place in ("tool", "results") for tools in BOTH}
    assert facts.ends == {"user": 3, "tool": 3, "system": 3}
    assert (facts.openers, facts.broken, facts.is_own) == (wanted, frozenset(), True)


@pytest.mark.parametrize("size", [LONG_OPENER, LONG_OPENER + 1])
async def test_of_a_long_opener_the_first_tokens_are_left_out(size):
    """What stands before it may grow together with them."""
    marker = "<" + "u" * (size - 2) + ">"
    facts = await facts_of(lambda body: written(body, user=marker))
    found = facts.opener("user", tools=False)
    assert found is not None and found.text == (marker if size <= LONG_OPENER else marker[2:])
    assert found.exact and found.per_user


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


async def test_an_end_that_is_not_one_number_is_none():
    by_tools = await facts_of(lambda body: written(body, asks="<a>!" if body.get("tools") else "<a>"))
    assert by_tools.ends == {"tool": 4}
    silent = await facts_of(lambda body: written(body, asks=""))
    assert silent.ends == {"user": 0, "tool": 0, "system": 0}


async def test_a_reminder_whose_end_differs_with_tools_has_none():
    def template(body: Any) -> str:
        reminded = body["messages"][-1]["role"] == "system"
        return written(body, asks="<a>!" if reminded and body.get("tools") else "<a>")

    assert (await facts_of(template)).ends == {"user": 3, "tool": 3}


@pytest.mark.parametrize("refused", ["asked", "bare", "followed"])
async def test_a_template_that_refuses_reminders_somewhere_has_no_end_for_them(refused):
    def template(body: Any) -> str | None:
        roles = [message["role"] for message in body["messages"]]
        how = "followed" if roles[-1] != "system" else "asked" if body.get("add_generation_prompt", True) else "bare"
        return None if "system" in roles[1:] and how == refused else written(body)

    assert (await facts_of(template)).ends == {"user": 3, "tool": 3}


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


async def test_an_opener_that_a_tools_result_holds_too_is_counted_without_them_only():
    facts = await facts_of(lambda body: written(body, result="<u>"))
    users = opener("<u>", per_user=True)
    assert facts.openers["user", False] == facts.openers["user", True] == users
    assert facts.openers["tool", True] == opener("</><u>")


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


async def test_two_settings_do_the_same_if_a_question_and_a_result_become_the_same():
    async def render(body: Any) -> list[int]:
        return [*map(ord, written(body, **body.get("chat_template_kwargs", {})))]

    plain = await sample(render, {})
    assert len(plain) == 2 and plain == await sample(render, {"chat_template_kwargs": {"user": "<u>"}})
    for change in ({"user": "<v>"}, {"result": "<v>"}, {"asks": ""}):
        assert plain != await sample(render, {"chat_template_kwargs": change})
