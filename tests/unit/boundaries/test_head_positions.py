"""The position of a head that no fact tells is rendered once, beside the requests, for the second that asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.boundaries import head_positions
from proxy.boundaries.boundary import Found
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.head_positions import HEAD_SECONDS, MAX_BYTES, MAX_CHARACTERS, MAX_WAITING_OF_KEY, HeadPositions
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.sentinel import MERGING, SENTINELS
from proxy.boundaries.template_facts import TemplateFacts
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_request
from tests.harness.messages import assistant, user
from tests.harness.virtual_time import VirtualTimeLoop

# Of a place: each sentinel, and each text that may merge with what stands before it.
RENDERS = len(SENTINELS) + len(MERGING)


class Characters:
    """A worker whose tokens are characters. `refuses` some chats; takes `seconds` for each."""

    def __init__(self, refuses: bool = False, seconds: float = 0.0, error: type[Exception] = RenderFailed) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.refuses, self.seconds, self.error = refuses, seconds, error
        self.asked_at: list[float] = []

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> TokenIds:
        self.bodies.append(body)
        self.asked_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.seconds)
        if self.refuses:
            raise self.error("planned")
        text = ""
        for message in body["messages"]:
            content = message["content"]
            parts = content if isinstance(content, str) else "|".join(part["text"] for part in content)
            text += f"<{message['role']}>{parts}"
        return TokenIds.of(map(ord, text + "<assistant>"))


class Gateway:
    """Requests for which the finder is told no opener, and the positions that are learnt for them."""

    def __init__(self, renderer: Characters) -> None:
        self.renderer = renderer
        self.positions = PositionCache(10**6)
        self.heads = HeadPositions(self.positions)

    def ask(self, messages: list[Any], owner: str | None = None, **body: Any) -> Found:
        chat = chat_request({"messages": messages, **body})
        found = BoundaryFinder(self.positions).find(chat, TemplateFacts(), b"renderer")
        self.heads.learn(found, self.renderer, owner)
        return found

    async def idle(self) -> None:
        """Return once nothing is left to be rendered."""
        if self.heads._worker is not None:
            await self.heads._worker


HEAD = {"role": "system", "content": "You pilot ships into the harbour."}


def chat(question: str, system: str = HEAD["content"]) -> list[Any]:
    return [{"role": "system", "content": system}, user("First?"), assistant("One."), user(question)]


async def test_the_second_request_with_a_head_renders_and_a_third_has_its_position():
    gateway = Gateway(Characters())
    gateway.ask(chat("a?"))
    await gateway.idle()
    assert not gateway.renderer.bodies
    assert gateway.ask(chat("b?")).entries() == ()
    await gateway.idle()
    assert len(gateway.renderer.bodies) == RENDERS
    found = gateway.ask(chat("c?"))
    assert found.entries() == (len("<system>You pilot ships into the harbour.<user>"),)
    assert found.result == "head" and found.unplaced == ()
    await gateway.idle()
    assert len(gateway.renderer.bodies) == RENDERS


@pytest.mark.parametrize(("more", "is_rendered"), [(0, True), (1, False)])
async def test_a_head_may_be_so_long_and_no_longer(more, is_rendered):
    gateway = Gateway(Characters())
    long = "x" * (MAX_CHARACTERS - len("First?One.a?") + 10 * more)
    tools = [{"type": "function", "function": {"name": "tide", "description": "x" * (MAX_BYTES - 1000 + 2000 * more)}}]
    for body in ({"messages": chat("a?", long)}, {"messages": chat("a?"), "tools": tools}):
        before = len(gateway.renderer.bodies)
        for _ in range(2):
            gateway.ask(**body)
        await gateway.idle()
        assert (len(gateway.renderer.bodies) > before) is is_rendered


@pytest.mark.parametrize("error", [RenderFailed, KeyError])
async def test_a_head_that_the_worker_cannot_render_is_not_tried_again_and_holds_up_no_other(error, caplog):
    gateway = Gateway(Characters(refuses=True, error=error))
    with caplog.at_level(logging.ERROR):
        for question in ("a?", "b?"):
            gateway.ask(chat(question))
        await gateway.idle()
    assert len(gateway.renderer.bodies) == 1 and "planned" not in caplog.text
    assert ("KeyError" in caplog.text) == (error is KeyError)
    gateway.renderer.refuses = False
    for question in ("a?", "b?"):
        assert gateway.ask(chat(question)).entries() == ()
        gateway.ask(chat(question, "Another head."))
    await gateway.idle()
    assert len(gateway.renderer.bodies) == 1 + RENDERS
    assert gateway.ask(chat("c?", "Another head.")).entries()


async def test_all_that_is_remembered_and_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(head_positions, "MAX_KNOWN", 6)
    monkeypatch.setattr(head_positions, "MAX_WAITING", 3)
    gateway = Gateway(Characters())
    for _ in range(2):
        for number in range(5):
            gateway.ask(chat("a?", f"Head {number}."))
    await gateway.idle()
    assert len(gateway.renderer.bodies) == 3 * RENDERS  # the queue was full for the others
    for number in (3, 4):
        gateway.ask(chat("b?", f"Head {number}."))
    await gateway.idle()
    assert len(gateway.renderer.bodies) == 5 * RENDERS  # which are tried when there is room
    for number in range(100):
        gateway.ask(chat("a?", f"Other head {number}."))
    assert len(gateway.heads._seen) == 6


async def test_one_api_key_leaves_room_for_the_heads_of_others():
    gateway = Gateway(Characters())
    for _ in range(2):
        for owner in ("ann", "bob"):
            for number in range(2 * MAX_WAITING_OF_KEY):
                gateway.ask(chat("a?", f"Head {number} of {owner}."), owner=owner)
    await gateway.idle()
    assert len(gateway.renderer.bodies) == 2 * MAX_WAITING_OF_KEY * RENDERS


def test_all_renders_of_a_head_have_one_deadline(monkeypatch):
    async def one_head() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(head_positions, "time", SimpleNamespace(monotonic=loop.time))
        gateway = Gateway(Characters(seconds=HEAD_SECONDS * 0.4))
        for question in ("a?", "b?"):
            gateway.ask(chat(question))
        await gateway.idle()
        return len(gateway.renderer.bodies), len(gateway.positions)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(one_head()) == (3, 0)
