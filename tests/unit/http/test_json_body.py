"""The hint is spliced in; every other byte stays."""

import json

import pytest

from proxy.errors import BadRequest
from proxy.http.json_body import parse_object, with_hint

ODD_SPELLINGS = [
    b'{"model":"m","messages":[]}',
    b' \n{ "model" : "m" ,\t"n":1.50,"s":"\\u00e9\\/\\ud83d\\ude00 \xc3\xa9","e":1E5}\r\n',
    b'{"a":{"vllm_xargs":{"seamark_boundaries":[1]}},"b":"}"}',
    b"{}",
]


def hinted(raw, positions=(163, 210)):
    return with_hint(raw, parse_object(raw), positions)


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
        parse_object(raw)
