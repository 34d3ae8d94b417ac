"""A chat's answer as a message, piece by piece; the tokens that a worker reports; and which requests render alike.

That vLLM's own route says the same: tests/engine/unit/test_conversions.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from proxy.chat.canonical import HEAD_FIELDS, MAX_ARGUMENTS, canonical, chat_keys, own_hash
from proxy.chat.through_chat import MessageStream, chat_of, error_of, message_of
from proxy.chat.usage import MAX_TOKENS, MOST_USAGE_BYTES, PassingUsage, Usage, usage_of
from tests.harness.messages import user

QUESTION = {"role": "user", "content": "High tide?"}


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"temperature": 0, "top_p": 0.5, "top_k": 0}, {"temperature": None, "top_p": None}),
        *({"stop_sequences": ["END"]}, {"watermarking": "w", "kv_transfer_params": {"a": 1}}, {"max_tokens": 0}),
        *({"ec_transfer_params": {"b": 1}, "vllm_xargs": {}, "cache_salt": "s"}, {"stream": "false"}, {"stream": 1}),
        *({"tool_choice": {"disable_parallel_tool_use": each}} for each in (True, "no")),
        *(
            {"tools": [{"name": "f"}], "tool_choice": {"type": each, "name": "f"}}
            for each in ("any", "tool", "none", 7)
        ),
        *({"thinking": {"type": each, "budget_tokens": 9}} for each in ("enabled", "adaptive", "disabled")),
        *({"thinking": {"type": "enabled", **each}} for each in ({}, {"budget_tokens": 0})),
        {"thinking": "enabled", "tool_choice": 7, "output_config": []},
        *(
            {"output_config": {"format": each}}
            for each in ({"type": "json_schema", "schema": {}}, {"type": "x"}, "json")
        ),
        *({"messages": each} for each in ([], 7)),
    ],
)
def test_a_field_of_a_request_becomes_the_chat_apis(given, expect_golden):
    made = chat_of({"model": "m", "messages": [QUESTION], **given})
    expect_golden("through_chat", f"asked {json.dumps(given)}", json.dumps(made))


CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": 5}'}}


def whole(said: dict[str, Any], finish: Any = "stop", stop: Any = None, usage: Any = None) -> dict[str, Any]:
    choice = {"message": said, "finish_reason": finish, "stop_reason": stop}
    answer = {"id": "chat-1", "model": "m", "choices": [choice], "usage": usage}
    made: dict[str, Any] = json.loads(message_of(json.dumps(answer).encode()))
    return made


SIGNED = re.compile(r'("signature": ")[0-9a-f]{32}"')


def golden_json(value: Any) -> str:
    """A line for each event or message; signatures are drawn anew each time."""
    lines = value if isinstance(value, list) else [value]
    return SIGNED.sub(r'\1..."', "\n".join(map(json.dumps, lines)))


ENDS = [
    *(("stop", stop) for stop in (None, 7, "END")),
    *((finish, stop) for finish in ("length", "tool_calls", "abort", None) for stop in (None, "END")),
]

WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "thoughts, texts and calls": ({"content": "So.", "reasoning": "Hm.", "tool_calls": [CALL]}, {}),
    **{f"{finish}, {stop}": ({"content": "x"}, {"finish": finish, "stop": stop}) for finish, stop in ENDS},
    **{
        f"calls, {each}": ({"tool_calls": [CALL]}, {"finish": each, "stop": "END"})
        for each in ("stop", "length", "abort")
    },
    **{
        f"arguments {given}, {finish}, {stop}": (
            {"tool_calls": [{**CALL, "function": {"name": "tide", "arguments": given}}]},
            {"finish": finish, "stop": stop},
        )
        for given, finish, stop in (
            *(("", "tool_calls", None), ("null", "stop", None), (None, "stop", "END"), (" ", "length", None)),
            *(('{"at', "length", None), ('{"at', "stop", "END"), ('{"at', "abort", None)),
        )
    },
    **{f"nothing, {said}": (said, {}) for said in ({}, {"content": None, "reasoning": "", "tool_calls": []})},
    **{
        f"usage {usage}": ({"content": "x"}, {"usage": usage})
        for usage in (
            {"prompt_tokens": 9},
            {"prompt_tokens": 90, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}},
            {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 16}},
            {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 91}},
        )
    },
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_answer_is_the_message_that_clients_read(case, expect_golden):
    said, more = WHOLE[case]
    expect_golden("through_chat", f"whole: {case}", golden_json(whole(said, **more)))


NO_CHATS = [
    *(b"", b"no JSON", b"[" * 100_000, b"7", b"[]", b"{}", b'{"error": "text"}', b'{"error": ["text"]}'),
    *(b'{"choices": []}', b'{"choices": [{}]}', b'{"choices": [{"message": 7}]}', b'{"detail": [{"msg": "No."}]}'),
    *(
        b'{"error": {}}',
        b'{"error": {"message": "No.", "type": "BadRequestError"}}',
        b'{"object": "error", "message": "No."}',
    ),
    b'{"choices": [{"message": {"tool_calls": [{"id": "c"}]}}]}',
]


@pytest.mark.parametrize("answer", NO_CHATS, ids=lambda answer: answer[:60].decode())
def test_what_is_no_chats_answer_is_an_error_of_anthropics(answer, expect_golden):
    with pytest.raises(ValueError, match="no chat completion"):
        message_of(answer)
    expect_golden("through_chat", f"error {answer[:60].decode()}", golden_json(json.loads(error_of(answer, 502))))


@pytest.mark.parametrize("arguments", ["{", "north", '{"a": 1}{"b": 2}', "[1]", '"{}"', "[" * 100_000, 7])
def test_a_call_with_arguments_that_are_no_object_does_not_run(arguments):
    for finish in ("tool_calls", "stop"):
        with pytest.raises(ValueError, match=r"arguments|no chat"):
            whole({"tool_calls": [CALL, {**CALL, "function": {"name": "tide", "arguments": arguments}}]}, finish)


def delta(said: dict[str, Any], finish: Any = None, stop: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": said, "finish_reason": finish, "stop_reason": stop}
    return {"id": "chat-1", "model": "m", "choices": [choice], "usage": {"prompt_tokens": 9}}


LAST = {"id": "chat-1", "model": "m", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def content(text: str, **more: Any) -> dict[str, Any]:
    return delta({"content": text, **more})


def call(index: int = 0, arguments: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {} if arguments is None else {"function": {"arguments": arguments}}
    return delta({"tool_calls": [{"index": index, **function, **fields}]})


def opened(index: int, name: str, arguments: str = "") -> dict[str, Any]:
    return call(index, id=name, function={"name": "tide", "arguments": arguments})


HM = delta({"reasoning": "Hm."})

# The chunks of each, as JSON or raw; [DONE] comes behind them.
STREAMS: dict[str, list[Any]] = {
    "a text": [content("", role="assistant"), content("Nine"), delta({}, "stop"), LAST],
    "a thought, signed": [delta({"reasoning": "H"}), HM, content("Nine."), LAST],
    "calls, late and nobody's arguments": [
        *(content("Let me see."), opened(0, "c1"), call(0, '{"at"'), call(0, ": 5}"), opened(1, "c2"), call(0, "late")),
        *(call(2, "nobody's"), call(1, "{}"), delta({}, "tool_calls"), LAST),
    ],
    "a call that names itself again": [opened(0, "c1", "{"), opened(0, "c1", "}"), LAST],
    "a call without a name or an id yet": [
        *(call(0, "early"), call(0, id="c1"), call(0, "still early", id="c1"), opened(0, "c1", "{}"), LAST),
    ],
    "text within a call": [
        *(opened(0, "c1"), content("an"), content("d"), call(0, "{}"), opened(1, "c2"), content(" then"), LAST),
    ],
    "a thought behind a call": [opened(0, "c1"), HM, call(0, "late"), LAST],
    **{f"ends, {finish}, {stop}": [content("x"), delta({}, finish, stop), content(""), LAST] for finish, stop in ENDS},
    # a call that a stop string cut short must not run; each is judged by its own arguments
    **{
        f"a call of {arguments[:9]}, {stop}": [opened(0, "c1", arguments), delta({}, "stop", stop), LAST]
        for arguments, stop in (('{"at": 5}', "END"), ('{"at": ', "END"), ('{"at": ', None), ("[" * 100_000, "END"))
    },
    "two calls, the first cut short": [opened(0, "c1", '{"at'), opened(1, "c2", "{}"), delta({}, "stop", "END"), LAST],
    "no usage": [content("x")],
    "nothing": [],
    "no content": [delta({}), LAST],
    "an error": [b'{"error": {"message": "No.", "type": "t"}}'],
    "an error within": [content("x"), b'{"error": {"message": "No.", "type": "t"}}', content("y"), LAST],
    "half of a surrogate pair": [b'{"choices": [{"delta": {"content": "\\ud83d"}}]}'],
    **{
        f"no chunk: {odd[:30].decode()}": [content("x"), odd]
        for odd in (b"{", b"7", b"[]", b"{}", b'{"choices": 7}', b'{"choices": [{}]}', b'{"choices": [{"delta": 7}]}')
    },
    "no chunk, nested too deep": [b"[" * 100_000],
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_has_each_event_once_in_its_order_in_whatever_pieces_it_arrives(case, expect_golden):
    chunks = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in STREAMS[case]]
    raw = b": comment\n\nevent: x\n\n" + b"".join(b"data: %b\r\n\r\n" % each for each in [*chunks, b"[DONE]"])
    for size in (len(raw), 7, 1) if len(raw) < 10_000 else (len(raw),):
        stream = MessageStream()
        events = b"".join(stream.events(raw[at : at + size]) for at in range(0, len(raw), size)).decode()
        told = [json.loads(each.partition("\ndata: ")[2]) for each in events.split("\n\n")[:-1]]
        assert events == "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in told)
        expect_golden("through_chat", f"stream: {case}", golden_json(told))


NONSENSE = (-1, MAX_TOKENS + 1, True, 1.5, "9", [], None)


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        *((told, None) for told in (None, {}, {"prompt_tokens": "9"})),
        *(({name: MAX_TOKENS}, Usage(MAX_TOKENS, None)) for name in ("prompt_tokens", "input_tokens")),
        *(({name: odd}, None) for name in ("prompt_tokens", "input_tokens") for odd in NONSENSE),
        ({"prompt_tokens": 64, "completion_tokens": 7}, Usage(64, None, 7)),
        ({"prompt_tokens": 64, "completion_tokens": -1}, Usage(64, None, 0)),
        ({"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}, Usage(64, 48)),
        *(({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": odd}}, Usage(9, None)) for odd in NONSENSE),
        *(({"input_tokens": 9, "cache_read_input_tokens": odd}, Usage(9, None)) for odd in NONSENSE),
        ({"input_tokens": 64, "input_tokens_details": {"cached_tokens": 48}, "output_tokens": 7}, Usage(64, 48, 7)),
        ({"input_tokens": 10, "input_tokens_details": None, "cache_read_input_tokens": 48}, Usage(58, 48)),
        ({"input_tokens": 10, "cache_read_input_tokens": 48, "cache_creation_input_tokens": 6}, Usage(64, 48)),
        ({"input_tokens": 10, "cache_creation_input_tokens": 6}, Usage(16, None)),
        ({"input_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}, Usage(10, 0)),
    ],
)
def test_each_spelling_is_read_and_what_no_counter_takes_is_no_number(told, usage):
    assert usage_of({"usage": told}) == usage
    for within in ({"usage": told}, {"message": {"usage": told}}):
        assert usage_of({"response": within}) == usage_of({"message": {"usage": told}}) == usage
    assert usage_of({"other": {"usage": told}}) is usage_of([]) is usage_of(None) is None
    assert usage_of({"usage": {"prompt_tokens": 2}, "response": {"usage": told}}) == Usage(2, None)


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_usage_is_found_in_an_answer_that_is_not_kept_and_the_last_one_counts(size):
    told = [{"prompt_tokens": 1}, {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 160}}]
    answer = b"".join(
        b'data: {"text":"%b","usage": \n%b}\n\n' % (b"x" * 3000, json.dumps(each).encode()) for each in told
    )
    passing = PassingUsage()
    for at in range(0, len(answer), size):
        passing.see(answer[at : at + size])
        assert len(passing._held) <= MOST_USAGE_BYTES
    assert passing.usage == Usage(300, 160)


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        *((odd, None) for odd in (b"", b"{}", b'{"usage":null}', b'{"usage":{"prompt', b'{"usage":' + b"[" * 10_000)),
        (b'{"usage":{"x":"","prompt_tokens":1}}', Usage(1, None)),
        (b'{"usage":{"x":"' + b"x" * MOST_USAGE_BYTES + b'","prompt_tokens":1}}', None),  # longer than any
    ],
)
def test_an_answer_without_usage_has_none(answer, usage):
    passing = PassingUsage()
    passing.see(answer)
    assert passing.usage == usage


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
        (calling(CALL), calling({**CALL, "function": {"name": "tide", "arguments": '{"at":5}'}})),
    ],
)
def test_spellings_of_one_message_share_a_key(one, other):
    assert key(one) == key(other) and own_hash(one) == own_hash(other)


@pytest.mark.parametrize("field", HEAD_FIELDS)
def test_whatever_a_template_or_a_renderer_sees_beside_the_messages_parts_the_keys(field):
    assert len({key(user("x"), **each) for each in ({}, {field: "a"}, {field: ["a"]}, {field: 1})}) == 4
    for unseen in ({}, *({field: default} for default in (None, [], {}))):
        assert key(user("x"), tool_choice="none", response_format={}, temperature=1, **unseen) == key(user("x"))
    for of_a_chat in ({}, {"messages": []}):  # else a prompt
        default = {**of_a_chat, "add_special_tokens": not of_a_chat}
        assert key(user("x"), **of_a_chat) == key(user("x"), **default)
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


def called(arguments):
    return calling({**CALL, "function": {"name": "tide", "arguments": arguments}})


@pytest.mark.parametrize("arguments", ["{", "[" * 30_000, '"\ud800"'], ids=["no JSON", "too deep", "half a pair"])
def test_arguments_that_are_no_sound_json_are_compared_as_they_are(arguments):
    assert key(called(arguments)) == key(called(arguments)) != key(called(arguments + "["))


def test_of_one_request_so_much_of_the_arguments_is_read_and_what_is_behind_is_compared_as_written():
    long = json.dumps(["x" * (MAX_ARGUMENTS // 2)] * 2)
    for before, tight, spaced in (([], "[1,2]", "[1, 2]"), ([called(long[: MAX_ARGUMENTS // 2])], "[1,2]", "[1, 2]")):
        assert key(*before, called(tight)) == key(*before, called(spaced))
    for before, given in (([], long), ([called(long)], "[1, 2]"), ([called(long[: MAX_ARGUMENTS - 2])], "[1, 2]")):
        assert key(*before, called(given)) != key(*before, called(given.replace(" ", "")))


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
