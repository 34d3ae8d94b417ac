"""Requests that render alike have one key, and nothing else has."""

from __future__ import annotations

import pytest

from proxy.chat.canonical import chat_keys, own_hash

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
