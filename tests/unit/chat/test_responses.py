"""The chats behind responses that a client may continue: bounded, and each its owner's alone."""

from __future__ import annotations

import sys

import pytest

from proxy.chat.chat import RESPONSES, Chat
from proxy.chat.reader import chat_in
from proxy.chat.responses import MAX_ID_CHARACTERS, StoredResponses


def asked(text: str, stored: StoredResponses) -> Chat:
    found = chat_in(RESPONSES, {"model": "m", "input": text}, stored)
    assert found is not None
    return found


def put(stored: StoredResponses, name: object, text: str = "Tide?", owner: str | None = None) -> None:
    answer = {"id": name, "output": [{"type": "message", "content": [{"type": "output_text", "text": "Nine."}]}]}
    stored.put(asked(text, stored), answer, "w#1", owner)


def test_workers_are_known_of_so_many_responses_and_others_learn_each_once():
    stored = StoredResponses(10**6, most=2)
    told = []
    stored.on_kept = lambda name, boot: told.append(name)
    for response_id in ("resp_1", "resp_2", "resp_2", "resp_3"):
        put(stored, response_id)
    assert len(told) == len(set(told)) == 3 and not any(b"resp" in name for name in told)
    stored.keep_remote(told[0], "w#2")
    assert [stored.boot(f"resp_{number}") for number in (1, 2, 3)] == ["w#2", None, "w#1"] and len(told) == 3


def test_a_response_is_known_to_its_owner_only():
    stored = StoredResponses(10**6)
    put(stored, "resp_1", owner="ann")
    put(stored, "resp_1", "Another?", owner="bob")
    for owner, first in (("ann", "Tide?"), ("bob", "Another?")):
        assert [message["content"] for message in stored.chat("resp_1", owner)] == [first, "Nine."]
    for name, owner in (
        ("resp_1", None),
        ("resp_1", ""),
        ("resp_1", "eve"),
        ("resp_2", "ann"),
        (None, "ann"),
        ([], "ann"),
    ):
        assert stored.chat(name, owner) is None and stored.boot(name, owner) is None


def test_what_is_kept_is_bounded_and_the_oldest_is_forgotten_first():
    stored = StoredResponses(20_000)
    for number in range(100):
        put(stored, f"resp_{number}", "x" * 1000)
        assert 0 < stored.held <= 20_000
    put(stored, "resp_large", "x" * 30_000)  # costs no other
    kept = [number for number in range(100) if stored.chat(f"resp_{number}") is not None]
    assert kept == list(range(kept[0], 100)) and len(kept) > 5
    assert sum(len(repr(stored.chat(f"resp_{number}"))) for number in kept) <= 20_000
    assert stored.chat("resp_large") is None and stored.boot("resp_large") == "w#1"  # where it can be asked for


@pytest.mark.parametrize("content", ["", [{"type": "input_text", "text": ""}] * 100])
def test_each_message_and_value_that_is_kept_counts(content):
    """A bound on text alone would let in any number of empty ones."""
    stored = StoredResponses(10**6)
    items = [{"role": "user", "content": content}] * (1 if content else 100)
    stored.put(chat_in(RESPONSES, {"model": "m", "input": items}, stored), {"id": "r"}, "w#1")
    assert stored.held >= 100 * sys.getsizeof({"role": "user", "content": ""})


def test_an_answer_without_a_sound_name_is_not_remembered():
    stored = StoredResponses(10**6)
    for name in (None, 7, ["r"], "r" * (MAX_ID_CHARACTERS + 1)):
        put(stored, name)
    assert not stored.held and not stored._boots
