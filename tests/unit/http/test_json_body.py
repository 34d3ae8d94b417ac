"""The hint is spliced in; every other byte stays. What is read is what Python's own reader reads, within bounds."""

import json
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.chat.reader import chat_request
from proxy.errors import BadRequest, TooComplex
from proxy.http import json_body, known_bodies
from proxy.http.json_body import LOAD, MOST_PER_BYTE, Edit, as_utf8, memory_of, parse_object, with_edits, with_fields
from proxy.http.known_bodies import KnownBodies
from proxy.pipeline.exchange import Body
from proxy.settings import Settings

LIMITS = Settings().json_limits


def with_hint(raw, parsed, entries, load=""):
    return Body(raw, parsed, names=tuple(parsed)).encoded(entries, load=load)


MANY = 10**9

TEXTS = st.text('ab"\\{[}]:,/é\u2028😀\ud83d', max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
SPELLINGS = st.sampled_from(
    [{}, {"indent": 2}, {"separators": (" ,", "\t:\r\n")}, {"separators": (",", ":"), "ensure_ascii": False}]
)


@st.composite
def objects(draw, *names):
    """An object as it may be sent: spaces anywhere, and a name may come twice, of which readers take the last."""
    style, space = draw(SPELLINGS), draw(st.sampled_from(["", " ", "\n\t"]))
    members = draw(st.lists(st.tuples(st.sampled_from(names) | TEXTS, VALUES), max_size=5))
    written = [f"{json.dumps(name, **style)}{space}:{json.dumps(value, **style)}" for name, value in members]
    return f"{space}{{{space}{f',{space}'.join(written)}{space}}}{space}".encode(errors="surrogatepass")


def edited(value, path, new):
    name, *more = path
    copied = list(value) if isinstance(value, list) else dict(value)
    copied[name] = edited(value[name], more, new) if more else new
    return copied


@given(objects("vllm_xargs"), objects("mine", "seamark_boundaries"), st.sampled_from([(), (5, "last:7")]))
def test_the_hint_takes_the_clients_place_and_every_other_byte_stays(raw, xargs, entries):
    if len(raw) % 2:
        opened, end = raw[: raw.rindex(b"}")], raw[raw.rindex(b"}") :]
        raw = opened + (b"," if json.loads(raw) else b"") + b'"vllm_xargs":' + xargs + end
    for load in ("", "g,9,3"):
        parsed = json.loads(raw)
        given_xargs = parsed.get("vllm_xargs")
        spliced = with_hint(raw, parse_object(raw, *LIMITS), entries, load)
        if given_xargs is not None and not isinstance(given_xargs, dict):
            assert spliced is raw  # the worker's to refuse
            continue
        wanted = dict(given_xargs or {})
        if entries or "seamark_boundaries" in wanted:
            wanted["seamark_boundaries"] = list(entries)
        if load:
            wanted[LOAD] = load
        if wanted == (given_xargs or {}) and "seamark_boundaries" not in wanted:
            assert spliced is raw
        else:
            assert json.loads(spliced) == {**parsed, "vllm_xargs": wanted}
            if given_xargs is None and "vllm_xargs" not in parsed:
                assert spliced.startswith(raw[: raw.rindex(b"}")]) and spliced.endswith(raw[raw.rindex(b"}") :])


def test_other_arguments_of_a_client_stay_byte_for_byte():
    raw = '{"vllm_xargs": {"a":1e999, "b":"é\\u00e9", "c":1.0e5 }}'.encode()
    assert with_hint(raw, json.loads(raw), (7,)) == raw[:-2] + b',"seamark_boundaries":[7]}}'


@given(objects("a", "b"), st.dictionaries(st.sampled_from("abc"), VALUES), st.sets(st.sampled_from("abc")))
def test_outermost_fields_are_set_and_removed_and_the_others_stay(raw, put, dropped):
    parsed = json.loads(raw)
    left = {name: value for name, value in parsed.items() if name not in dropped}
    found = with_fields(raw, parsed, put, dropped)
    assert json.loads(found) == {**left, **put}
    assert found is raw or put or dropped & parsed.keys()
    if not dropped & parsed.keys() and not put.keys() & parsed.keys():
        assert found.startswith(raw[: raw.rindex(b"}")]) and found.endswith(raw[raw.rindex(b"}") :])


@given(objects("a"), VALUES, st.data())
def test_values_are_replaced_by_their_paths(raw, new, data):
    value, path = json.loads(raw), ()
    while value and isinstance(value, dict | list) and (not path or data.draw(st.booleans())):
        name = data.draw(st.sampled_from([*value] if isinstance(value, dict) else range(len(value))))
        value, path = value[name], (*path, name)
    if path:
        assert json.loads(with_edits(raw, [Edit(path, new)])) == edited(json.loads(raw), path, new)
    assert with_edits(raw, []) == raw


def test_every_byte_beside_replaced_values_stays_and_a_path_that_is_not_there_is_none():
    raw = b' {"a": [ {"b" : 1.50} , [ ] , "x" ],"c":{} , "a2":"\xc3\xa9"} '
    edits = [Edit(("a2",), None), Edit(("a", 0, "b"), {"d": 2}), Edit(("a", 1), [7]), Edit(("c",), "e")]
    assert with_edits(raw, edits) == b' {"a": [ {"b" : {"d": 2}} , [7] , "x" ],"c":"e" , "a2":null} '
    for path in (("x",), ("a", 3), ("a", 0, "x"), ("a", -1), ("a", 1, 0)):
        with pytest.raises(KeyError):
            with_edits(raw, [Edit(path, 1)])


def outcome(read, raw, *errors):
    try:
        return repr({**read(raw)})
    except errors:
        return None


def as_python_does(raw):
    return outcome(json.loads, raw, ValueError, TypeError, RecursionError)


ODD = ["1e999", "-0", "01", "1.", "NaN", "Infinity", "tru", '"\\ud83d"', '"\\x"', '"\t"', "\x00", "9" * 30, "[]"]
ODD += [*'{}[],:"\\ 1', '"é"', '"a":1', "null", "1" * 5000, "-1.5e-310", "\ud83d", "[" * 60_000]


@given(st.lists(st.sampled_from(ODD), max_size=6), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]))
def test_bodies_are_read_as_pythons_json_reads_them_or_refused(pieces, encoding):
    for text in ('{"a":%s}', "{%s}", "%s", '{"a":1}%s'):
        raw = (text % "".join(pieces)).encode(encoding, "surrogatepass")
        assert outcome(lambda raw: parse_object(as_utf8(raw), 900, MANY), raw, BadRequest) == as_python_does(raw), raw


@pytest.mark.parametrize("raw", [b"\xff\xfe{", b"\xff\xfe{\x00}", b"\xff\xfe\x00\xd8{\x00}\x00"])
def test_broken_utf_16_is_a_bad_request(raw):
    with pytest.raises(BadRequest):
        parse_object(as_utf8(raw), *LIMITS)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_what_a_body_is_made_of_is_counted_outside_strings_wherever_it_is_cut(monkeypatch, size):
    monkeypatch.setattr(json_body, "SLICE", size)
    random = Random(17)
    escapes = [r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u005c", r"\u0022", r"\u00e9"]
    pieces = [*escapes, *escapes[:2], *"{[}]:,xbn/"]
    for _ in range(500):
        one, two, three = ("".join(random.choices(pieces, k=random.randint(0, 6))) for _ in range(3))
        raw = f'{{"k{one}":["{two}",{{"{three}":[]}}],"":{{}}}}'
        assert parse_object(raw.encode(), 4, 8) == json.loads(raw)
        for limits in ((3, 8), (4, 7)):
            with pytest.raises(TooComplex):
                parse_object(raw.encode(), *limits)


def test_bodies_are_read_as_deep_and_as_wide_as_the_limits_allow():
    deep, wide = b'{"a":' * 900 + b"1" + b"}" * 900, b'{"a":[' + b"7," * 99 + b"7]}"
    assert parse_object(deep, 900, MANY) == json.loads(deep) and parse_object(wide, 4, 10) == json.loads(wide)
    for raw, limits, setting in ((deep, (899, MANY), "max_json_depth"), (wide, (4, 9), "max_json_values")):
        with pytest.raises(TooComplex, match=setting):
            parse_object(raw, *limits)


@pytest.mark.parametrize(
    ("value", "values"),
    [({}, 1), ("x", 0), ({"a": {"b": 1}}, 4), ({"a": [{}] * 30}, 36), ({"a": [7] * 1000}, 13), ({"a": [7] * 99}, 12)],
)
def test_values_are_counted_as_the_limit_counts_them(value, values):
    assert memory_of(value, 1, MANY).values == values
    assert memory_of(value, 1, values).values == values
    if values:
        assert memory_of(value, 1, values - 1) == (MOST_PER_BYTE, values)


@pytest.mark.parametrize("piece", ["1.5", '"tide"', '{"a":[7]}', "[[]]"])
def test_what_is_counted_is_about_what_parsed_json_takes(piece):
    raw = f"[{','.join([piece] * 5000)}]".encode()
    tracemalloc.start()
    try:
        parsed = json.loads(raw)
        real = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.8 * real < memory_of(parsed, len(raw), MANY).size < 3 * real


def test_what_is_nested_too_deep_for_any_reader_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deep"):
        json_body.loads(b"[" * 200_000)


MESSAGES = (
    st.builds(
        lambda role, text, more: {"role": role, "content": text, **more},
        *[st.sampled_from(["user", "tool"]), TEXTS, st.just({}) | st.dictionaries(st.just("tool_calls"), VALUES)],
    )
    | VALUES
)
FIELDS = st.lists(st.tuples(st.sampled_from(["model", "model", "tools", "messages"]), VALUES), max_size=2)
CHANGES = st.sampled_from(["none", "none", "none", "last", "last", "messages", "before", "after", "twice", "json"])


@given(st.data(), SPELLINGS, st.sampled_from([MANY, 9000]))
def test_each_body_is_read_as_if_it_were_the_only_one(data, style, size):
    known, find = KnownBodies(size, 60, MANY, MANY), BoundaryFinder(PositionCache(MANY)).find
    before, messages, after = data.draw(FIELDS), [], data.draw(FIELDS)
    for changes in data.draw(st.lists(CHANGES, min_size=4, max_size=8)):
        kept = (
            data.draw(st.integers(0, len(messages))) if changes == "messages" else len(messages) - (changes == "last")
        )
        messages = messages[:kept] + data.draw(st.lists(MESSAGES, min_size=1, max_size=2))
        before = data.draw(FIELDS) if changes == "before" else before
        after = data.draw(FIELDS) if changes == "after" else after
        twice = [("messages", [7, 8])] if changes == "twice" else []
        given = *before, ("messages", messages), *after, *twice
        fields = [(name, json.dumps(value, **style)) for name, value in given]
        raw = ("{" + ", ".join(f'"{name}" :{value}' for name, value in fields) + "}").encode(errors="surrogatepass")
        if changes == "json":
            at = data.draw(st.integers(0, len(raw)))
            raw = raw[:at] + data.draw(st.sampled_from([b"", b",", b'"', b"]}", b"\xff"])) + raw[at + 1 :]
        owner = data.draw(st.sampled_from([None, None, "ann"]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(known_bodies, "LEAST_BYTES", 1)
            try:
                alone = parse_object(raw, 60, MANY)
            except BadRequest:
                with pytest.raises(BadRequest):
                    known.read(raw, owner, is_chat=True)
                continue
            read = known.read(raw, owner, is_chat=True)
        assert repr(read.parsed) == repr(alone) and known.held <= size  # 1 is not True, nor 1.0
        weighed = memory_of(alone, len(raw), MANY)
        assert 0.8 * weighed.size < read.memory.size < weighed.size + 500
        assert abs(weighed.values - read.memory.values) <= 3 + raw.count(b",") // 8  # tenths are rounded apart
        if (chat := chat_request(read.parsed)) is not None:
            if read.known is not None and read.known.keys is not None:
                chat.continues = read.known.keys
            found = find(chat, None, b"r", len(raw))
            assert repr(found) == repr(find(chat_request(alone), None, b"r", len(raw)))
            if read.known is not None and found.layout is not None:
                read.known.keys = found.layout.keys.of(read.known.messages)


def test_a_conversations_next_turn_has_the_very_messages_of_the_one_before():
    known, messages = KnownBodies(MANY, 9, MANY, MANY), [{"role": "user", "content": "Tide? " * 4000}, {}]
    _, first, *others = (  # nothing is kept of a beginning that came once
        known.read(json.dumps({"tools": [{}], "messages": messages + more, "n": 1}).encode(), owner, is_chat=True)
        for more, owner in (([], "ann"), ([], "ann"), ([{}], "ann"), ([{"role": "user"}], "ann"), ([{}], "bob"))
    )
    same = [other.parsed["messages"][0] is first.parsed["messages"][0] for other in others]
    assert same == [other.parsed["tools"] is first.parsed["tools"] for other in others] == [True, True, False]
    assert (
        KnownBodies(0, 9, MANY, MANY).read(json.dumps({"messages": messages}).encode(), None, is_chat=True).known
        is None
    )
