"""Requests that render alike have one key, and nothing else has."""

from __future__ import annotations

import pytest

from proxy.chat.canonical import canonical, chat_keys, own_hash

CALL = {"id": "c", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Ayr"}'}}


def key(*messages, **body):
    return chat_keys(body, messages, b"renderer").after[-1]


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def test_a_long_model_name_or_salt_is_part_of_the_key_as_a_short_one_is():
    names = ("a", "b", "a" * 300, "a" * 299 + "b")
    assert len({key(user("x"), model=name) for name in names}) == len(names)
    assert len({key(user("x"), model="m", cache_salt=name) for name in names}) == len(names)
    assert key(user("x"), model="m", cache_salt=7) != key(user("x"), model="m")


def test_halves_of_surrogate_pairs_have_keys_too():
    odd, other = ({"role": "user", "content": "x", "name": name} for name in ("\ud800", "\ud801"))
    assert key(odd) == key(dict(odd)) != key(other)


def test_arguments_that_are_no_json_are_compared_as_they_are():
    def call(arguments):
        return {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "tide", "arguments": arguments}}]}

    assert key(call("{")) != key(call("{{"))
    assert key(call('{"port": "Ayr"}')) == key({"role": "assistant", "tool_calls": [CALL]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user([{"type": "text", "text": "x", "more": 1}]), user("x")),
        (user([{"text": "x"}]), user("x")),
        (user([]), user("")),
        (user([]), user(None)),
        (user([{"type": "image_url"}]), user([{"type": "audio_url"}])),
        (user(7), user(8)),
        (user("x", name=""), user("x")),
        (user("x", name="a"), user("x", id="a")),
        ({"role": 7, "content": "x"}, {"role": 8, "content": "x"}),
        ({"content": "x"}, user("x")),
        (7, 8),
        (7, "7"),
        (None, {}),
        (user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), user([{"type": "text", "text": "b"}])),
        (user([{"type": "text", "text": "a"}, 7]), user([{"type": "text", "text": "a"}, 8])),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL, CALL]}),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [7]}),
        ({"role": "assistant", "tool_calls": 7}, {"role": "assistant", "tool_calls": 8}),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "id": "d"}]},
            {"role": "assistant", "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": 7}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": {}}}]},
        ),
    ],
)
def test_what_a_template_may_read_is_a_difference(one, other):
    assert key(one) != key(other) and own_hash(one) != own_hash(other)


def test_arguments_nested_too_deep_are_compared_as_they_are_written():
    def call(arguments):
        return {"role": "assistant", "tool_calls": [{**CALL, "function": {"arguments": arguments}}]}

    deep = "[" * 100_000
    assert key(call(deep)) == key(call(deep)) != key(call(deep + " "))


@pytest.mark.parametrize(
    ("value", "spelled"),
    [
        ({"b": 1, "a": [True, None, 1.5]}, b'{"b":1,"a":[true,null,1.5]}'),
        ("é", '"é"'.encode()),
        ("\ud83d", b'"\xed\xa0\xbd"'),
    ],
)
def test_json_has_one_spelling_and_its_names_keep_their_order(value, spelled):
    assert canonical(value) == spelled
