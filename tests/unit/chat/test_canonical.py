"""Requests that render alike have one key, and nothing else has."""

from __future__ import annotations

import pytest

from proxy.chat.canonical import HEAD_FIELDS, canonical, chat_keys, own_hash
from tests.harness.messages import user

CALL = {"id": "c", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Ayr"}'}}


def calling(*calls):
    return {"role": "assistant", "tool_calls": [*calls]}


def key(*messages, **body):
    return chat_keys(body, messages, b"renderer").after[-1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("x"), {"content": "x", "role": "user"}),
        (user("x"), user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], name=None)),
        (user("x", name="a", id="b"), {"id": "b", "content": "x", "name": "a", "role": "user"}),
        (user("x", prompt_cache_breakpoint={"mode": "explicit"}, name=[]), user("x")),
        (user(None), {"role": "user"}),
        ({**calling(CALL), "content": None}, calling(CALL)),
        (calling(CALL), calling({**CALL, "function": {"name": "tide", "arguments": '{"port":"Ayr"}'}})),
    ],
)
def test_spellings_of_one_message_share_a_key(one, other):
    assert key(one) == key(other) and own_hash(one) == own_hash(other)


@pytest.mark.parametrize("field", HEAD_FIELDS)
def test_whatever_a_template_or_a_renderer_sees_beside_the_messages_parts_the_keys(field):
    fields = ({}, {field: None}, {field: "a"}, {field: ["a"]})
    assert len({key(user("x"), **each) for each in fields}) == 4
    assert key(user("x"), temperature=1, n=2) == key(user("x"))
    assert chat_keys({}, [], b"a").head != chat_keys({}, [], b"b").head


def test_keys_of_a_chat_are_chained_and_there_is_one_for_each_message():
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("")]
    keys = chat_keys({}, messages, b"r")
    assert len({keys.head, *keys.before, *keys.after}) == 7
    shorter, changed = (chat_keys({}, each, b"r") for each in (messages[:2], [user("z"), *messages[1:]]))
    assert (shorter.before, shorter.after) == (keys.before[:2], keys.after[:2])
    assert changed.before[0] == keys.before[0]
    assert not {*changed.before[1:], *changed.after} & {*keys.before, *keys.after}
    assert key(user("ab"), user("c")) != key(user("a"), user("bc"))


def test_a_long_model_name_or_salt_is_part_of_the_key_as_a_short_one_is():
    names = ("a", "b", "a" * 300, "a" * 299 + "b")
    assert len({key(user("x"), model=name) for name in names}) == len(names)
    assert len({key(user("x"), model="m", cache_salt=name) for name in names}) == len(names)
    assert key(user("x"), model="m", cache_salt=7) != key(user("x"), model="m")


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, '"\ud800"'], ids=["no JSON", "too deep", "half a pair"])
def test_arguments_that_are_no_sound_json_are_compared_as_they_are(arguments):
    def call(arguments):
        return calling({**CALL, "function": {"name": "tide", "arguments": arguments}})

    assert key(call(arguments)) == key(call(arguments)) != key(call(arguments + "["))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user([{"type": "text", "text": "x", "more": 1}]), user("x")),
        (user([]), user(None)),
        (user([{"type": "image_url"}]), user([{"type": "audio_url"}])),
        (user("x"), {"role": "tool", "content": "x"}),
        (user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), user("ab")),
        (user("x", name=""), user("x")),
        ({"role": 7, "content": "x"}, {"role": 8, "content": "x"}),
        (7, "7"),
        (None, {}),
        (user([{"type": "text", "text": "a"}, 7]), user([{"type": "text", "text": "a"}, 8])),
        (calling(CALL), calling(CALL, CALL)),
        ({"role": "assistant", "tool_calls": 7}, {"role": "assistant", "tool_calls": 8}),
        (calling({**CALL, "id": "d"}), calling(CALL)),
        (calling({"id": "c", "function": 7}), calling({"id": "c", "function": {"arguments": {}}})),
    ],
)
def test_what_a_template_may_read_is_a_difference(one, other):
    assert key(one) != key(other) and own_hash(one) != own_hash(other)


def test_json_has_one_spelling_and_its_names_keep_their_order():
    assert canonical({"b": "é", "a": [True, None, 1.5]}) == '{"b":"é","a":[true,null,1.5]}'.encode()
    assert canonical("\ud83d") == b'"\xed\xa0\xbd"'
