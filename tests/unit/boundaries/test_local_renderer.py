"""The fast renderer equals a model's own, is trusted only once proved, and goes off at the first difference."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy.boundaries import local_renderer
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.local_renderer import PROOFS, SAMPLE, LocalRender, VerifiedRenderer
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_request
from proxy.errors import SettingsError
from tests.harness.small_tokenizer import SmallTokenizer

SYSTEM = {"role": "system", "content": "You pilot ships into the harbour, and you name the tide. " * 5}

CALL = {"id": "c", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Ayr"}'}}

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]


class Reference:
    """A worker that renders each prompt as a whole."""

    def __init__(self, tokenizer: SmallTokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked = 0
        self.broken = False

    async def __call__(self, body, path=CHAT) -> TokenIds:
        self.asked += 1
        ids = self.tokenizer.render(body)
        return TokenIds.of([*ids, 7] if self.broken else ids)


@pytest.fixture(scope="module")
def local(tokenizer_folder) -> LocalRender:
    return LocalRender(tokenizer_folder, 10**7)


@pytest.fixture
def reference(tokenizer) -> Reference:
    return Reference(tokenizer)


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user("Tide?")]},
        {"messages": [SYSTEM, user("é 💡\n\n x"), {"role": "assistant", "content": "Nine."}, user("")]},
        {"messages": [SYSTEM, user("<|im_end|> quoted")], "tools": TOOLS, "add_generation_prompt": False},
    ],
)
async def test_it_equals_the_models_own(local, reference, body):
    assert local.tokens(body).raw == (await reference(body)).raw


async def test_it_is_trusted_after_enough_proofs_and_then_asks_nobody(local, reference):
    renderer = VerifiedRenderer(reference, local)
    bodies = [{"messages": [SYSTEM, user(f"{number} ships")]} for number in range(PROOFS + 5)]
    rendered = [await renderer(body) for body in bodies]
    assert reference.asked == PROOFS and renderer.is_cheap(bodies[0])
    assert not renderer.is_cheap({**bodies[0], "reasoning_effort": "low", "tools": TOOLS})
    assert rendered[-1].local and rendered[-1].raw == (await reference(bodies[-1])).raw


async def test_a_kind_that_renders_otherwise_is_left_to_the_worker(local, reference, caplog):
    renderer = VerifiedRenderer(reference, local)
    reference.broken = True
    for number in range(3):
        assert not (await renderer({"messages": [user(f"{number} ships")]})).local
    assert not renderer.is_cheap({"messages": [user("x")]}) and reference.asked == 3
    assert "ships" not in caplog.text


async def test_it_goes_off_loudly_at_the_first_difference(local, reference, caplog):
    caplog.set_level(logging.ERROR)
    logging.getLogger("seamark.render").propagate = True
    renderer = VerifiedRenderer(reference, local)
    for number in range(PROOFS):
        await renderer({"messages": [user(f"{number} ships")]})
    reference.broken = True
    for number in range(SAMPLE):
        await renderer({"messages": [user(f"{number} more")]})
    while renderer._samples:
        await asyncio.sleep(0)
    assert renderer.off and "off" in caplog.text and "more" not in caplog.text
    assert not (await renderer({"messages": [user("Tide?")]})).local
    renderer.forget()
    assert not renderer.off


async def test_known_and_new_prefixes_ask_no_worker_once_it_is_trusted(local, reference, monkeypatch):
    monkeypatch.setattr(local_renderer, "SAMPLE", 10**9)
    renderer, finder = VerifiedRenderer(reference, local), BoundaryFinder(PositionCache(10**6))
    for number in range(2 * PROOFS):
        chat = [{**SYSTEM, "content": f"{number} {SYSTEM['content']}"}, user("Tide?")]
        found = await finder.find(chat_request({"messages": chat}), renderer, b"r")
    assert found.result == "local" and found.renders == 0
    asked = reference.asked
    for number in range(2 * PROOFS):
        grown = [*chat, {"role": "assistant", "content": f"Nine, {number}."}, user("And then?")]
        found = await finder.find(chat_request({"messages": grown}), renderer, b"r")
    known = await finder.find(chat_request({"messages": [*grown[:3], user("What else?")]}), renderer, b"r")
    assert (known.result, known.renders) == ("local", 0)
    assert {boundary.kind for boundary in found.boundaries} == {"system", "history", "turn"}
    assert reference.asked - asked < 4 * PROOFS


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user([{"type": "image_url", "image_url": {"url": "data:,"}}])]},
        {"messages": [user("x")], "documents": [{"text": "y"}]},
        {"messages": [user("x")], "continue_final_message": True},
        {"messages": [{"role": "developer", "content": "x"}]},
        {"messages": [user("x"), SYSTEM]},
    ],
)
def test_what_is_known_to_render_otherwise_is_not_tried(local, body):
    from proxy.boundaries.local_renderer import NotLocal

    with pytest.raises(NotLocal):
        local.tokens(body)


def test_a_folder_without_a_tokenizer_is_refused_by_the_settings_name(tmp_path):
    with pytest.raises(SettingsError, match="tokenizer"):
        LocalRender(tmp_path, 0)
