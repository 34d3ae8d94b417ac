"""The chats behind responses that a client may continue: bounded, and each its owner's alone."""

from __future__ import annotations

import sys

from proxy.chat.chat import RESPONSES, Chat
from proxy.chat.reader import chat_in
from proxy.chat.responses import MAX_ID_CHARACTERS, StoredResponses


def asked(text: str, stored: StoredResponses) -> Chat:
    found = chat_in(RESPONSES, {"model": "m", "input": text}, stored)
    assert found is not None
    return found


def put(stored: StoredResponses, name: str, text: str = "Tide?", owner: str | None = None) -> None:
    answer = {"id": name, "output": [{"type": "message", "content": [{"type": "output_text", "text": "Nine."}]}]}
    stored.put(asked(text, stored), answer, "w#1", owner)


def test_a_response_is_continued_with_what_was_asked_and_answered():
    stored = StoredResponses(10**6)
    put(stored, "resp_1")
    assert stored.chat("resp_1") == [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "Nine."}]
    assert stored.boot("resp_1") == "w#1"
    for unknown in ("resp_2", None, 7, ["resp_1"]):
        assert stored.chat(unknown) is None and stored.boot(unknown) is None


def test_what_is_kept_is_bounded_and_the_oldest_is_forgotten_first():
    stored = StoredResponses(20_000)
    for number in range(100):
        put(stored, f"resp_{number}", "x" * 1000)
        assert 0 < stored.held <= 20_000
    kept = [number for number in range(100) if stored.chat(f"resp_{number}") is not None]
    assert kept == list(range(kept[0], 100)) and len(kept) > 5
    real = sum(len(repr(stored.chat(f"resp_{number}"))) for number in kept)
    assert real <= 20_000


def test_each_message_that_is_kept_counts():
    """A bound on text alone would let in any number of empty messages."""
    stored = StoredResponses(10**6)
    chat = chat_in(RESPONSES, {"model": "m", "input": [{"role": "user", "content": ""}] * 100}, stored)
    stored.put(chat, {"id": "r"}, "w#1")
    assert stored.held >= 100 * sys.getsizeof({"role": "user", "content": ""})


def test_each_value_inside_a_message_counts():
    stored = StoredResponses(10**6)
    items = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 100}]
    stored.put(chat_in(RESPONSES, {"model": "m", "input": items}, stored), {"id": "r"}, "w#1")
    assert stored.held >= 100 * sys.getsizeof({"type": "text", "text": ""})


def test_a_response_larger_than_the_bound_costs_no_other():
    stored = StoredResponses(20_000)
    put(stored, "resp_1")
    put(stored, "resp_2", "x" * 30_000)
    assert stored.chat("resp_1") is not None and stored.chat("resp_2") is None


def test_without_memory_for_texts_nothing_is_kept():
    stored = StoredResponses(0)
    put(stored, "resp_1")
    assert stored.chat("resp_1") is None and stored.held == 0


def test_a_response_is_known_to_its_owner_only():
    stored = StoredResponses(10**6)
    put(stored, "resp_1", owner="ann")
    put(stored, "resp_1", "Another?", owner="bob")
    for owner, asked_first in (("ann", "Tide?"), ("bob", "Another?")):
        assert stored.chat("resp_1", owner)[0]["content"] == asked_first
    for owner in (None, "", "eve"):
        assert stored.chat("resp_1", owner) is None and stored.boot("resp_1", owner) is None


def test_the_worker_is_known_of_responses_whose_chats_are_not_kept():
    for stored, text in ((StoredResponses(0), "x"), (StoredResponses(2000), "x" * 3000)):
        put(stored, "resp_1", text, owner="ann")
        assert stored.chat("resp_1", "ann") is None and stored.boot("resp_1", "ann") == "w#1"
    stored.put(None, {"id": "resp_2"}, "w#2", "ann")  # of one that has only begun
    assert stored.boot("resp_2", "ann") == "w#2" and stored.boot("resp_2", "bob") is None


def test_workers_are_known_of_so_many_responses_and_others_learn_each_once():
    stored = StoredResponses(10**6, most=2)
    told = []
    stored.on_kept = lambda name, boot: told.append(name)
    for response_id in ("resp_1", "resp_2", "resp_2", "resp_3"):
        put(stored, response_id)
    assert len(told) == len(set(told)) == 3 and not any(b"resp" in name for name in told)
    stored.keep_remote(told[0], "w#2")
    assert [stored.boot(f"resp_{number}") for number in (1, 2, 3)] == ["w#2", None, "w#1"] and len(told) == 3


def test_an_answer_without_a_sound_name_is_not_remembered():
    stored = StoredResponses(10**6)
    for name in (None, 7, ["r"], "r" * (MAX_ID_CHARACTERS + 1)):
        stored.put(asked("Tide?", stored), {"id": name}, "w#1", "ann")
    stored.put(asked("Tide?", stored), None, "w#1", "ann")
    assert not stored.held and not stored._boots
    longest = "r" * MAX_ID_CHARACTERS
    put(stored, longest)
    assert stored.boot(longest) == "w#1"


def test_of_an_answer_only_what_it_says_is_kept():
    stored = StoredResponses(10**6)
    content = [{"type": "output_text", "text": "Nine."}]
    output = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}, 7]
    stored.put(asked("Tide?", stored), {"id": "r", "output": [*output, {"type": "message", "content": content}]}, "w#1")
    assert [message["content"] for message in stored.chat("r")] == ["Tide?", "Nine."]
