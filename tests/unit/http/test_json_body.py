"""The hint is spliced in; every other byte stays."""

import json
import tracemalloc
from random import Random

import pytest

from proxy.errors import BadRequest, TooComplex
from proxy.http import json_body
from proxy.http.json_body import (
    LOAD,
    MOST_CHARACTERS,
    MOST_PER_BYTE,
    Edit,
    OverBound,
    as_utf8,
    count,
    memory_of,
    object_in_steps,
    parse_object,
    with_edits,
    with_fields,
    with_hint,
)
from proxy.settings import Settings
from tests.harness.steps import finished

LIMITS = Settings().json_limits

MANY = 10**9

ODD_SPELLINGS = [
    b'{"model":"m","messages":[]}',
    b' \n{ "model" : "m" ,\t"n":1.50,"s":"\\u00e9\\/\\ud83d\\ude00 \xc3\xa9","e":1E5}\r\n',
    b'{"a":{"vllm_xargs":{"seamark_boundaries":[1]}},"b":"}"}',
    b"{}",
]


def hinted(raw, positions=(163, 210)):
    return with_hint(raw, parse_object(raw, *LIMITS), positions)


@pytest.mark.parametrize("raw", ODD_SPELLINGS)
def test_the_hint_is_added_and_every_other_byte_stays(raw):
    spliced = hinted(raw)
    parsed = json.loads(spliced)
    assert parsed.pop("vllm_xargs") == {"seamark_boundaries": [163, 210]}
    assert parsed == json.loads(raw)
    body, end = raw[: raw.rindex(b"}")], raw[raw.rindex(b"}") :]
    assert spliced.startswith(body) and spliced.endswith(end)


@pytest.mark.parametrize("raw", ODD_SPELLINGS)
def test_without_positions_nothing_changes(raw):
    assert hinted(raw, ()) is raw


def test_a_hint_sent_by_a_client_is_replaced_and_its_other_arguments_stay():
    raw = b'{"x":"\xc3\xa9", "vllm_xargs" : {"mine":[1,"a"],"seamark_boundaries":[9]} ,"y":2}'
    spliced = hinted(raw)
    assert json.loads(spliced)["vllm_xargs"] == {"mine": [1, "a"], "seamark_boundaries": [163, 210]}
    assert spliced.startswith(b'{"x":"\xc3\xa9", "vllm_xargs" : {') and spliced.endswith(b'} ,"y":2}')


def test_other_arguments_of_a_client_stay_byte_for_byte():
    raw = '{"vllm_xargs": {"a":1e999, "b":"é\\u00e9", "c":1.0e5 }}'.encode()
    assert hinted(raw) == raw[:-2] + b',"seamark_boundaries":[163,210]}}'


def test_a_hint_sent_by_a_client_is_emptied_where_there_is_none_to_send():
    raw = b'{"vllm_xargs":{"seamark_boundaries":[9],"mine":1},"y":2}'
    assert hinted(raw, ()) == raw.replace(b"[9]", b"[]")


def test_arguments_given_as_null_take_the_hint():
    assert json.loads(hinted(b'{"vllm_xargs":null}')) == {"vllm_xargs": {"seamark_boundaries": [163, 210]}}


def test_of_two_equal_names_the_one_that_counts_is_replaced():
    raw = b'{"vllm_xargs":{"a":1},"vllm_xargs":{"b":2}}'
    assert json.loads(hinted(raw)) == {"vllm_xargs": {"b": 2, "seamark_boundaries": [163, 210]}}


@pytest.mark.parametrize("raw", [b'{"vllm_xargs":7}', '{"é":1}'.encode("utf-16")])
def test_what_is_the_workers_to_refuse_is_left_alone(raw):
    assert hinted(raw) is raw


def test_lone_surrogates_survive():
    raw = b'{"s":"\xed\xa0\xbd","vllm_xargs":{}}'
    assert hinted(raw).startswith(b'{"s":"\xed\xa0\xbd","vllm_xargs":{"seamark')


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"[1]", b'"text"', b"{", b"\xff\xfe{", b"[" * 100_000])
def test_anything_but_an_object_is_a_bad_request(raw):
    with pytest.raises(BadRequest):
        parse_object(raw, *LIMITS)


@pytest.mark.parametrize("raw", [b"\xff\xfe{", b"\xff\xfe{\x00}", b"{\x00}\x00\x00", b"\xff\xfe\x00\xd8{\x00}\x00"])
def test_broken_utf_16_is_a_bad_request(raw):
    with pytest.raises(BadRequest):
        parse_object(as_utf8(raw), *LIMITS)


ODD_VALUES = [
    b"-0 0 -0.0 0e5 -0e-0 1E5 1e-400 5e-324 2.2250738585072011e-308 9007199254740993.0 1e999 -1e999 NaN -Infinity",
    b"18446744073709551615 18446744073709551616 -9223372036854775808 -9223372036854775809 " + b"7" * 90,
    b"8" * 4301,
    b"01 1. .5 +1 - --1 -01 1e 0x1 nan tru nul 'a' \xc2\xa01 \x0c1 1\x0b 1\x00",
    rb'"" "\u0000" "\ud83d\ude00" "\ud83d" "\ude00\ud83d" "\x" "\u12" "\u+123" "\u00E9\/\b\f\n\r\t\"\\"',
    b'"\xc3\xa9" "\xed\xa0\xbd" "\xff" "\xc0\x80" "\xf4\x90\x80\x80" "\xf0\x9f\x98\x80" "\x7f" "\x01" "\x00" "\t"',
    b'[] [1,] [,1] {} {"a":1,} {"a"} {"a":1,"b":2,"a":3} {"a":{"a":1,"a":{}},"":null} {1:2} [true,false,null]',
]


def outcome(read, raw):
    """What a reader makes of these bytes: types and order count, NaN equals NaN."""
    try:
        return repr(read(raw))
    except (ValueError, RecursionError, BadRequest):
        return BadRequest


def same_as_json(raw):
    ours = outcome(lambda raw: {**parse_object(raw, 900, MANY)}, raw)
    assert ours == outcome(lambda raw: {**json.loads(raw)}, raw), raw


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_odd_values_are_read_as_pythons_json_reads_them(encoding):
    for values in ODD_VALUES:
        for value in values.split(b" "):
            for raw in (b'{"x": %b}' % value, b"{%b: 1}" % value, b' {"x":[%b]}\n' % value, b'{"x":1}%b' % value):
                text = raw.decode(errors="surrogateescape")
                same_as_json(text.encode(encoding, "surrogatepass" if encoding != "utf-8" else "surrogateescape"))


def test_random_bodies_are_read_as_pythons_json_reads_them():
    random = Random(15)
    pieces = [*(value for values in ODD_VALUES for value in values.split(b" ")), *b'{ } [ ] , : " \\'.split()]
    for _ in range(20_000):
        body = b"".join(random.choices(pieces, k=random.randint(0, 6)))
        same_as_json(b'{"a":%b}' % body)
        number = f"{random.choice(['', '-'])}{random.randint(0, 10 ** random.randint(1, 25))}"
        fraction = f".{random.randint(0, 10 ** random.randint(1, 25))}e{random.randint(-330, 310)}"
        same_as_json(f'{{"a":{number},"b":{number}{fraction}}}'.encode())


def test_deep_bodies_are_read_as_far_as_the_limit_allows():
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    assert parse_object(deep, 900, MANY) == json.loads(deep)
    with pytest.raises(TooComplex):
        parse_object(deep, 899, MANY)


@pytest.mark.parametrize(
    ("raw", "depth"),
    [
        (rb'{"a":[{"b":"[[[["}],"c":[]}', 3),
        (rb'{"a\\":[1],"b\"[[[":2,"c\\\"[[":{"]":"\\"},"d":[[["\n\\\\"]]]}', 4),
        (b"[]", 1),
        (b'"[["', 0),
    ],
)
def test_brackets_inside_strings_are_no_depth(raw, depth):
    text = b'{"x":%b,"y":[%b]}' % (raw, b",".join([b"[]"] * 200))
    parse_object(text, max(depth + 1, 3), MANY)
    with pytest.raises(TooComplex):
        parse_object(text, max(depth + 1, 3) - 1, MANY)


@pytest.mark.parametrize(
    ("raw", "values", "elements"),
    [
        (rb'{"a":1,"b":[{},{"c":"{[:,\"{[:,"}]}', 7, 2),
        (b'{"a":[' + b"7," * 99 + b"7]}", 3, 99),
        (b'{"a":"' + b"{[:," * 99 + b'"}', 2, 0),
    ],
)
def test_values_are_counted_outside_strings(raw, values, elements):
    enough = max(values, -(-elements // 10))
    assert parse_object(raw, 4, enough) == json.loads(raw)
    with pytest.raises(TooComplex, match="max_json_values"):
        parse_object(raw, 4, enough - 1)


def test_what_a_body_is_made_of_is_seen_wherever_it_is_cut(monkeypatch):
    random = Random(16)
    pieces = ['"', "\\", "\\\\", "{", "[", "}", "]", ":", ",", "x"]
    for size in (1, 2, 3, 7, 1 << 20):
        monkeypatch.setattr(json_body, "SLICE", size)
        for _ in range(500):
            texts = ["".join(random.choices(pieces, k=random.randint(0, 9))) for _ in range(3)]
            value = {f"k{texts[0]}": [texts[1], {texts[2]: []}], "": {}}
            raw = json.dumps(value).encode()
            assert parse_object(raw, 4, 8)
            for limits in ((3, 8), (4, 7)):
                with pytest.raises(TooComplex):
                    parse_object(raw, *limits)


ESCAPES = (r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u005c", r"\u0022", r"\u00e9")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_an_escape_of_any_kind_neither_ends_a_string_nor_hides_its_end(monkeypatch, size):
    monkeypatch.setattr(json_body, "SLICE", size)
    random = Random(17)
    pieces = [*ESCAPES, *ESCAPES[:2], *"{[}]:,xbn/"]
    for _ in range(500):
        one, two, three = ("".join(random.choices(pieces, k=random.randint(0, 6))) for _ in range(3))
        raw = f'{{"k{one}":["{two}",{{"{three}":[]}}],"":{{}}}}'
        assert parse_object(raw.encode(), 4, 8) == json.loads(raw)
        for limits in ((3, 8), (4, 7)):
            with pytest.raises(TooComplex):
                parse_object(raw.encode(), *limits)


PIECES = (b"{}", b"[[]]", b'{"a":1}', b'{"a":{"b":1.5}}', '{"é":"ü"}'.encode(), b"1.5", b"7.0", b'"tide"', b'["",[1]]')


@pytest.mark.parametrize("piece", PIECES)
def test_parsed_json_takes_about_what_is_counted(piece):
    raw = b'{"x":[' + b",".join([piece] * 5000) + b"]}"
    tracemalloc.start()
    try:
        parsed = parse_object(raw, *LIMITS)
        real = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = memory_of(parsed, len(raw), MANY).size
    assert 0.8 * real < counted < 3 * real
    assert counted < memory_of(parsed, len(raw), 20).size == MOST_PER_BYTE * len(raw)


def test_long_names_and_wide_texts_count():
    assert memory_of({"x" * 10_000: ["y" * 10_000 + "\U0001f600"]}, 20_000, MANY).size > 50_000


@pytest.mark.parametrize(
    ("value", "values"),
    [({}, 1), ("x", 0), ({"a": {"b": 1}}, 4), ({"a": [{}] * 30}, 36), ({"a": [7] * 1000}, 13), ({"a": [7] * 99}, 12)],
)
def test_values_are_counted_as_the_limit_counts_them(value, values):
    assert memory_of(value, 1, MANY).values == values
    assert memory_of(value, 1, values).values == values
    if values:
        assert memory_of(value, 1, values - 1) == (MOST_PER_BYTE, values)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"a": []},
        {"a": [1], "b": {"c": [[]]}, "d": "]}", "é": None, "f": -1.5, "g": [{}, [], "x\\", "😀", True]},
        {"outcomes": [[f"r{number}", "hit", number] for number in range(3000)], "cursor": 12345678901234567890},
        {"long": "x" * 3000, "list": ["y" * 3000, [1] * 3000], "cut": [10**1030, 10**1022, 10**1023, 10**1024]},
    ],
)
@pytest.mark.parametrize("one_step_bytes", [0, json_body.ONE_STEP_BYTES])
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"separators": (",", ":"), "ensure_ascii": False}])
def test_an_object_is_read_in_steps_as_in_one_go(told, style, one_step_bytes, monkeypatch):
    monkeypatch.setattr(json_body, "ONE_STEP_BYTES", one_step_bytes)
    raw = json.dumps(told, **style).encode(errors="surrogatepass")
    assert finished(object_in_steps(raw, MANY)) == told == json.loads(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b"{}}",
        b'{"a":1',
        b'{"a":1,}',
        b'{"a":[1,]}',
        b'{"a":[1 2]}',
        b'{"a" 1}',
        b"{1:1}",
        b"{[]:1}",
        b'{"a":tru}',
        b"\xff{}",
        b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}",
        b'{"a":[' + b"7" * 5000 + b"]}",  # more digits than Python takes
    ],
)
@pytest.mark.parametrize("one_step_bytes", [0, json_body.ONE_STEP_BYTES])
def test_what_is_no_object_is_refused_in_steps(raw, one_step_bytes, monkeypatch):
    monkeypatch.setattr(json_body, "ONE_STEP_BYTES", one_step_bytes)
    with pytest.raises(ValueError):  # noqa: PT011  of several readers
        finished(object_in_steps(raw, MANY))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":[' + b",".join([b"1"] * 101) + b"]}",
        b"{" + b",".join([b'"a":1'] * 51) + b"}",  # the same name again and again
        b'{"a":["' + b"x" * MOST_CHARACTERS + b'"]}',
        b'{"a":[[' + b",".join([b"1"] * MOST_CHARACTERS) + b"]]}",
        b'{"' + b"x" * MOST_CHARACTERS + b'":1}',
    ],
)
def test_what_is_beyond_the_bounds_is_not_read(raw):
    with pytest.raises(OverBound):
        finished(object_in_steps(raw, 100))


def test_a_step_reads_little_whatever_there_is():
    told = {"a": [["r", "hit", 1]] * 5000, "b": ["x" * 60_000] * 20}
    raw = json.dumps(told).encode()
    assert sum(1 for _ in object_in_steps(raw, MANY)) > len(raw) / MOST_CHARACTERS


@pytest.mark.parametrize("value", [-1, 2**53 + 1, 1.0, float("inf"), float("nan"), "1", True, None, [], 10**400])
def test_what_nobody_can_have_counted_is_no_count(value):
    assert count(0) == 0 and count(2**53) == 2**53
    with pytest.raises(ValueError, match="no count"):
        count(value)


@pytest.mark.parametrize(
    ("raw", "put", "dropped", "wanted"),
    [
        (b"{}", {"c": 3}, (), b'{"c":3}'),
        (b"{ }", {"c": 3, "d": "\xe9"}, (), b'{ "c":3,"d":"\\u00e9"}'),
        (b'{"a":1}', {"c": [1, 2]}, (), b'{"a":1,"c":[1,2]}'),
        (b'{"a":1}', {"a": 2}, (), b'{"a":2}'),
        (b'{"a":1,"b":2}', {"a": 2}, (), b'{"b":2,"a":2}'),
        (b'{"a":1,"b":2,"a":3}', {"a": 9}, (), b'{"b":2,"a":9}'),
        (b'{"a":1}', {}, ("a",), b"{}"),
        (b'{"a":1,"b":2}', {"c": 3}, ("a", "b", "x"), b'{"c":3}'),
        (b' { "a" : 1 , "b" : [2] } ', {}, ("a",), b' { "b" : [2] } '),
        (b'{"b":{"a":1},"a":"}"}', {}, ("a",), b'{"b":{"a":1}}'),
    ],
)
def test_outermost_fields_are_set_and_removed_and_the_others_stay(raw, put, dropped, wanted):
    assert with_fields(raw, json.loads(raw), put, dropped) == wanted


def test_where_no_field_is_set_or_removed_nothing_changes():
    raw = b'{"a":1}'
    assert with_fields(raw, {"a": 1}, {}, ()) is raw and with_fields(raw, {"a": 1}, {}, ("b",)) is raw


@pytest.mark.parametrize(
    ("raw", "entries", "xargs"),
    [
        (b"{}", (), {LOAD: "g,9,3"}),
        (b'{"a":1}', (5, "last:7"), {"seamark_boundaries": [5, "last:7"], LOAD: "g,9,3"}),
        (b'{"vllm_xargs":{}}', (5,), {"seamark_boundaries": [5], LOAD: "g,9,3"}),
        (b'{"vllm_xargs":null}', (), {LOAD: "g,9,3"}),
        (b'{"vllm_xargs":{"mine":1}}', (5,), {"mine": 1, "seamark_boundaries": [5], LOAD: "g,9,3"}),
        (
            b'{"vllm_xargs":{"seamark_boundaries":[9],"mine":1}}',
            (5,),
            {"mine": 1, "seamark_boundaries": [5], LOAD: "g,9,3"},
        ),
        (b'{"vllm_xargs":{"seamark_boundaries":[9]}}', (), {"seamark_boundaries": [], LOAD: "g,9,3"}),
    ],
)
def test_what_a_request_is_expected_to_cost_goes_along_with_its_hint(raw, entries, xargs):
    spliced = with_hint(raw, json.loads(raw), entries, "g,9,3")
    assert json.loads(spliced) == {**json.loads(raw), "vllm_xargs": xargs}
    text = raw.decode()
    assert with_hint(raw, json.loads(text), entries).count(LOAD.encode()) == 0


def test_of_two_hints_of_a_client_the_one_that_counts_is_replaced():
    raw = b'{"vllm_xargs":{"seamark_boundaries":[1],"seamark_boundaries":[2]}}'
    assert json.loads(hinted(raw)) == {"vllm_xargs": {"seamark_boundaries": [163, 210]}}


def test_values_are_replaced_by_their_paths_and_every_other_byte_stays():
    raw = b' {"a": [ {"b" : 1.50} , [ ] , "x" ],"c":{} , "a2":"\xc3\xa9"} '
    edits = [Edit(("a2",), None), Edit(("a", 0, "b"), {"d": 2}), Edit(("a", 1), [7]), Edit(("c",), "e")]
    assert with_edits(raw, edits) == b' {"a": [ {"b" : {"d": 2}} , [7] , "x" ],"c":"e" , "a2":null} '
    assert with_edits(b'{"a":1,"a":2}', [Edit(("a",), 3)]) == b'{"a":1,"a":3}'
    assert with_edits(raw, []) == raw


@pytest.mark.parametrize("path", [("x",), ("a", 1), ("a", 0, "x"), ("a", -1), ("b", 0)])
def test_a_path_that_is_not_there_is_none_to_edit(path):
    with pytest.raises(KeyError):
        with_edits(b'{"a":[{}],"b":[]}', [Edit(path, 1)])


@pytest.mark.parametrize("one_step_bytes", [0, json_body.ONE_STEP_BYTES])
def test_space_around_an_object_is_none_of_it(one_step_bytes, monkeypatch):
    monkeypatch.setattr(json_body, "ONE_STEP_BYTES", one_step_bytes)
    assert finished(object_in_steps(b' {"a" : [ 1 , 2 ] , "b" : { } } \r\n\t', MANY)) == {"a": [1, 2], "b": {}}


@pytest.mark.parametrize("one_step_bytes", [0, json_body.ONE_STEP_BYTES])
def test_an_object_may_have_as_many_values_as_the_bound_says(one_step_bytes, monkeypatch):
    monkeypatch.setattr(json_body, "ONE_STEP_BYTES", one_step_bytes)
    raw = b'{"a":[1,2],"b":3}'  # two names and three values
    assert finished(object_in_steps(raw, 5)) == {"a": [1, 2], "b": 3}
    with pytest.raises(OverBound, match="more than 4 values"):
        finished(object_in_steps(raw, 4))


def test_what_is_nested_too_deep_for_any_reader_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deep"):
        json_body.loads(b"[" * 200_000)
    assert json_body.loads(b"[NaN, 1e999]")[1] == float("inf")
