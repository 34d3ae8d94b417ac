"""The chats behind responses that a client may continue: bounded, and each its owner's alone."""

from __future__ import annotations

from proxy.chat.chat import RESPONSES, Chat
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses


def asked(text: str, stored: StoredResponses) -> Chat:
    found = chat_in(RESPONSES, {"model": "m", "input": text}, stored)
    assert found is not None
    return found


def put(stored: StoredResponses, name: str, text: str = "Tide?", owner: str | None = None) -> None:
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


def test_of_an_answer_only_what_it_says_is_kept():
    stored = StoredResponses(10**6)
    content = [{"type": "output_text", "text": "Nine."}]
    output = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}, 7]
    stored.put(asked("Tide?", stored), {"id": "r", "output": [*output, {"type": "message", "content": content}]}, "w#1")
    assert [message["content"] for message in stored.chat("r")] == ["Tide?", "Nine."]
