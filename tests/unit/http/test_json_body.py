"""The hint is spliced in; every other byte stays."""

import json
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
    memory_of,
    object_in_steps,
    parse_object,
    with_edits,
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


def test_a_hint_sent_by_a_client_is_emptied_where_there_is_none_to_send():
    raw = b'{"vllm_xargs":{"seamark_boundaries":[9],"mine":1},"y":2}'
    assert hinted(raw, ()) == raw.replace(b"[9]", b"[]")


def test_arguments_given_as_null_take_the_hint():
    assert json.loads(hinted(b'{"vllm_xargs":null}')) == {"vllm_xargs": {"seamark_boundaries": [163, 210]}}


@pytest.mark.parametrize("raw", [b'{"vllm_xargs":7}', '{"é":1}'.encode("utf-16")])
def test_what_is_the_workers_to_refuse_is_left_alone(raw):
    assert hinted(raw) is raw


@pytest.mark.parametrize("raw", [b"\xff\xfe{", b"\xff\xfe{\x00}", b"{\x00}\x00\x00", b"\xff\xfe\x00\xd8{\x00}\x00"])
def test_broken_utf_16_is_a_bad_request(raw):
    with pytest.raises(BadRequest):
        parse_object(as_utf8(raw), *LIMITS)


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


@pytest.mark.parametrize("path", [("x",), ("a", 1), ("a", 0, "x"), ("a", -1), ("b", 0)])
def test_a_path_that_is_not_there_is_none_to_edit(path):
    with pytest.raises(KeyError):
        with_edits(b'{"a":[{}],"b":[]}', [Edit(path, 1)])


def test_what_is_nested_too_deep_for_any_reader_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deep"):
        json_body.loads(b"[" * 200_000)
    assert json_body.loads(b"[NaN, 1e999]")[1] == float("inf")
