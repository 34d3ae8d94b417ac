"""Whose chat is read: salts part the keys at every endpoint, and a stored response is its owner's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.boundaries.layout import layout_of
from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Chat
from proxy.chat.lax_values import flag, number
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses

ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "Tide?"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "Tide?"}]},
    RESPONSES: {"input": "Tide?"},
    COMPLETIONS: {"prompt": "Tide?"},
}


def chat(endpoint: str, **body) -> Chat:
    found = chat_in(endpoint, {"model": "m", **ASKED[endpoint], **body}, StoredResponses(10**6))
    assert found is not None
    return found


@pytest.mark.parametrize("endpoint", ASKED)
def test_one_prompt_under_two_salts_has_two_keys_at_every_endpoint(endpoint):
    asked = [chat(endpoint, **salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})]
    keys = {layout.keys.after[-1] if (layout := layout_of(each, b"r")) else None for each in asked}
    assert len(keys) == 3 and [each.body.get("cache_salt") for each in asked] == [None, "a", "b"]
    assert chat(endpoint).is_bare is (endpoint == COMPLETIONS)


def test_a_chat_is_compared_by_the_models_own_name():
    asked = chat(CHAT)
    assert asked.head is asked.body and replace(asked, model="m").head is asked.body
    assert replace(asked, model="other").head == {**asked.body, "model": "other"}


def test_a_stored_response_is_its_owners_and_is_continued_under_the_salt_of_the_request():
    stored = StoredResponses(10**6)
    stored.put(chat(RESPONSES, cache_salt="a"), {"id": "resp_1", "output": []}, "boot", "ann")
    body = {"model": "m", "input": "And now?", "previous_response_id": "resp_1", "cache_salt": "b"}
    found = chat_in(RESPONSES, body, stored, "ann")
    assert found is not None and found.texts == ("Tide?", "And now?") and found.body["cache_salt"] == "b"
    for owner in ("bob", None):
        assert chat_in(RESPONSES, body, stored, owner) is None
    assert chat_in(RESPONSES, {**body, "previous_response_id": None}, stored) is not None


# Flags and numbers in the spellings that pydantic takes, and no others.


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *((value, True) for value in (True, 1, 1.0, "1", "true", "True", "yes", "on", "t", "y")),
        *((value, False) for value in (False, None, 0, 0.0, "0", "false", "no", "off")),
        *((value, None) for value in (2, -1, 0.5, "", "maybe", [], {}, [True])),
    ],
)
def test_a_flag_is_what_the_worker_reads(value, wanted):
    assert flag(value) is wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *((value, value) for value in (0, 7, -7)),
        *(("2", 2), (2.0, 2), (" 2 ", 2), (True, 1), (False, 0)),
        *((value, None) for value in (None, "", "two", 2.5, [], {})),
    ],
)
def test_a_number_is_what_the_worker_reads(value, wanted):
    found = number(value)
    assert found == wanted and type(found) is type(wanted)
