"""Requests that render alike have one key, and nothing else has."""

from __future__ import annotations

import pytest

from proxy.chat.canonical import MARKS, chat_keys, own_hash, without_marks

CALL = {"id": "c", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Ayr"}'}}


def key(*messages, **body):
    return chat_keys(body, messages, b"renderer").after[-1]


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("x"), {"content": "x", "role": "user"}),
        (user("x"), user([{"type": "text", "text": "x"}])),
        (user("x"), user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])),
        (user("x"), user("x", name=None, cache_control={"type": "ephemeral"})),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL]}),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "tide", "arguments": '{"port":"Ayr"}'}}],
            },
        ),
    ],
)
def test_spellings_of_one_message_share_a_key(one, other):
    assert key(one) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("x"), user("y")),
        (user("x"), {"role": "tool", "content": "x"}),
        (user("x"), user("x", name="anna")),
        (user(""), {"role": "user", "content": None}),
        (user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), user("ab")),
        (
            user([{"type": "image_url", "image_url": {"url": "a"}}]),
            user([{"type": "image_url", "image_url": {"url": "b"}}]),
        ),
    ],
)
def test_different_messages_have_different_keys(one, other):
    assert key(one) != key(other)


def test_before_an_empty_text_is_not_after_it():
    keys = chat_keys({}, [user("")], b"r")
    assert keys.before != keys.after


def test_where_one_message_ends_matters():
    assert key(user("ab"), user("c")) != key(user("a"), user("bc"))


def test_a_message_alone_has_the_same_hash_wherever_it_stands():
    assert own_hash(user("a")) == own_hash(user([{"type": "text", "text": "a"}])) != own_hash(user("b"))


def test_a_long_model_name_or_salt_is_part_of_the_key_as_a_short_one_is():
    names = ("a", "b", "a" * 300, "a" * 299 + "b")
    assert len({key(user("x"), model=name) for name in names}) == len(names)
    assert len({key(user("x"), model="m", cache_salt=name) for name in names}) == len(names)
    assert key(user("x"), model="m", cache_salt=7) != key(user("x"), model="m")


def test_a_part_without_a_mark_stays_as_it_is_and_a_marked_one_loses_the_mark_only():
    part = {"type": "text", "text": "x", "other": 1}
    assert without_marks(part) is part and without_marks("x") == "x"
    for mark in MARKS:
        assert without_marks({**part, mark: {"type": "ephemeral"}}) == part


def test_halves_of_surrogate_pairs_have_keys_too():
    odd, other = ({"role": "user", "content": "x", "name": name} for name in ("\ud800", "\ud801"))
    assert key(odd) == key(dict(odd)) != key(other)


def test_arguments_that_are_no_json_are_compared_as_they_are():
    def call(arguments):
        return {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "tide", "arguments": arguments}}]}

    assert key(call("{")) != key(call("{{"))
    assert key(call('{"port": "Ayr"}')) == key({"role": "assistant", "tool_calls": [CALL]})


def test_a_message_in_parts_begins_alike_whatever_its_last_text_is():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    texts = [user([{"type": "text", "text": "Look:"}, image, {"type": "text", "text": text}]) for text in "xy"]
    one, other = (chat_keys({}, [message], b"renderer") for message in texts)
    assert len(one.before) == 1 and one.before == other.before and one.after != other.after
