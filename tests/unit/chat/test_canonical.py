"""Requests that render alike have one key, and nothing else has."""

from __future__ import annotations

import pytest

from proxy.chat.canonical import HEAD_FIELDS, MARKS, canonical, chat_keys, digest, own_hash, without_marks

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


@pytest.mark.parametrize("field", HEAD_FIELDS)
def test_whatever_a_template_or_a_renderer_sees_beside_the_messages_parts_the_keys(field):
    without, null, one, other = (
        key(user("x"), **fields) for fields in ({}, {field: None}, {field: "a"}, {field: ["a"]})
    )
    assert len({without, null, one, other}) == 4


def test_the_rest_of_a_request_parts_no_keys_and_another_renderer_does():
    assert key(user("x"), model="m", temperature=1, n=2) == key(user("x"), model="m")
    heads = {chat_keys({"model": "m"}, [], renderer).head for renderer in (b"a", b"b")}
    assert len(heads) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("x", name="a", id="b"), {"id": "b", "content": "x", "name": "a", "role": "user"}),
        (user("x", name=[]), user("x")),
        (user("x", prompt_cache_breakpoint={"mode": "explicit"}), user("x")),
        (user([{"type": "text", "text": "x"}], name=None), user("x")),
        (user(None), {"role": "user"}),
        (user([{"type": "text", "text": "x", "prompt_cache_breakpoint": 1}]), user("x")),
    ],
)
def test_what_no_template_reads_is_no_difference(one, other):
    assert key(one) == key(other) and own_hash(one) == own_hash(other)


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


def test_keys_of_a_chat_are_chained_and_there_is_one_for_each_message():
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    keys = chat_keys({}, messages, b"r")
    assert len({keys.head, *keys.before, *keys.after}) == 7
    shorter = chat_keys({}, messages[:2], b"r")
    assert (shorter.before, shorter.after) == (keys.before[:2], keys.after[:2])
    changed = chat_keys({}, [user("z"), *messages[1:]], b"r")
    assert changed.before[0] == keys.before[0]
    assert not {*changed.before[1:], *changed.after} & {*keys.before, *keys.after}


def test_a_key_of_one_kind_is_none_of_another_however_its_parts_are_cut():
    keys = [digest("a"), digest("b"), digest("a", b"x"), digest("a", b"x", b"y"), digest("a", b"xy"), digest("ax")]
    assert len(set(keys)) == len(keys) and {len(each) for each in keys} == {16}


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
