"""Positions: how a worker renders and compares ids, how entries resolve, and heads that no fact tells."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from engine_patches.scheduler import hints
from proxy.boundaries import positions as positions_module
from proxy.boundaries.boundary import MAX_ENTRIES, MAX_IDS, Found, encode_opener, resolve
from proxy.boundaries.divergence import common_prefix
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import (
    HEAD_SECONDS,
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_WAITING_OF_KEY,
    TEXTS,
    HeadPositions,
    PositionCache,
)
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.boundaries.template_facts import Opener, TemplateFacts
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_request
from proxy.http.client import Unreachable
from tests.harness.messages import assistant, system, user
from tests.harness.virtual_time import on_virtual_time


def test_occurrences_are_those_of_the_naive_search():
    rng = random.Random(5)
    for _ in range(2000):
        ids = [rng.randrange(3) for _ in range(rng.randrange(40))]
        size = rng.randrange(1, 4)
        pattern = [rng.randrange(3) for _ in range(size)]
        found = [at + size for at in range(len(ids) - size + 1) if ids[at : at + size] == pattern]  # where each ends
        wanted = [found[0] if found else 0, *(found[-1 - skip] if len(found) > skip else 0 for skip in range(4))]
        opener = Opener(tuple(pattern))
        entries = [encode_opener(opener, "first"), *(encode_opener(opener, skip=skip) for skip in range(4))]
        assert resolve(entries, ids) == wanted


def test_the_engine_reads_the_same_entries_in_the_same_way():
    rng = random.Random(6)
    for _ in range(2000):
        ids = [rng.randrange(3) for _ in range(rng.randrange(40))]
        pattern = ",".join(str(rng.randrange(3)) for _ in range(rng.randrange(4)))
        words = rng.choice(["first", "last", "last-0", "last-1", "last-3", "first-1", "last-", "at"])
        odd = rng.choice([None, True, 2.0, [1], "7"])
        hint = [rng.randrange(-45, 45), f"{words}:{pattern}", f"last:{pattern}", odd]
        assert tuple(resolve(hint, ids)) == hints.resolve(hint, ids, len(ids), lambda reason: None)


@pytest.mark.parametrize(
    ("entry", "position"),
    [(4, 4), (7, 0), (-1, 5), (-6, 0), (0, 0), ("first:7,8", 2), ("last:7,8", 5), ("last-1:7,8", 2), ("last:9", 6)]
    + [(odd, 0) for odd in ("last:", "last: 7", "last:-7", "first-1:7", "last:7,", "LAST:7", "last:٧", True, 1.0, [7])],
)
def test_an_entry_names_a_position_in_the_prompt_or_none(entry, position):
    assert resolve([entry, 1], [7, 8, 1, 7, 8, 9]) == [position, 1]
    assert len(resolve([1] * 20, [7])) == MAX_ENTRIES


def test_an_opener_is_written_as_an_entry_that_finds_it_a_long_one_by_its_end():
    ids = [1, 7, 8, 2, 7, 8, 3]
    opener = Opener((7, 8))
    assert resolve([encode_opener(opener), encode_opener(opener, "first"), encode_opener(opener, skip=1)], ids) == [
        6,
        3,
        3,
    ]
    long = [*range(1000, 1000 + MAX_IDS + 20)]
    assert resolve([encode_opener(Opener(tuple(long)))], [*long, 5]) == [len(long)]
    assert encode_opener(Opener(tuple(long))).count(",") == MAX_IDS - 1


def test_less_than_a_million_occurrences_are_skipped():
    assert resolve(["last-999999:7", "last-1000000:7"], [7] * 1_000_001) == [2, 0]


async def test_templates_that_write_tools_otherwise_are_told_apart_and_who_does_not_answer_is_none():
    def template(tools_become: int | None, silent_at: int = 0):
        asked = itertools.count(1)

        async def rendered(body, path=CHAT):
            if next(asked) == silent_at:
                raise RenderFailed("Unreachable") from Unreachable("refused")
            if body.get("tools") and tools_become is None:
                raise RenderFailed("status 400", b"no tools")
            return [1, *([tools_become] if body.get("tools") else []), 2]

        return rendered

    found = [await identify_renderer(template(tools_become), "m") for tools_become in (7, 8, None, 7)]
    assert None not in found and len(set(found)) == 3 and found[0] == found[3]
    for silent in (template(7, 1), template(7, 2)):
        assert [await identify_renderer(silent, "m") for _ in range(2)] == [None, found[0]]


class Routes:
    """An upstream with some routes: by path, a status and an answer, or what is raised."""

    def __init__(self, **routes: tuple[int, bytes] | Exception) -> None:
        self.routes = routes
        self.asked: list[tuple[str, Any]] = []

    async def fetch(
        self, method: str, url: str, body: bytes = b"", timeout: float | None = None, **_: Any
    ) -> tuple[int, bytes]:
        name = url.removeprefix("http://worker/").removeprefix("v1/chat/completions/")
        assert (method, timeout) == ("POST", 7.0)
        self.asked.append((name, json.loads(body)))
        answer = self.routes.get(name, (404, b""))
        if isinstance(answer, Exception):
            raise answer
        return answer


def rendering(asked: Counter | None = None, **routes: tuple[int, bytes] | Exception) -> tuple[Routes, WorkerRenderer]:
    upstream = Routes(**routes)
    return upstream, WorkerRenderer(upstream, "http://worker", timeout=7.0, asked=asked)


BODY = {"model": "m", "messages": [{"role": "user", "content": "Tide?"}], "temperature": 1, "tools": []}


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        (b'{"token_ids":[1,22,3],"n":1}', [1, 22, 3]),
        (b'[{"a":"]", "token_ids": [1, 22,\n3]}]', [1, 22, 3]),
        *(
            (b'{"token_ids":%b}' % odd, None)
            for odd in (b"null", b"[]", b'["a"]', b"[1", b"12]", b"[1.5]", b"[-1]", b"[[1]]")
        ),
        (b'[{"token_ids":[1]},{"token_ids":[2]}]', None),  # a batch has no ids of its own
    ],
)
async def test_ids_are_read_out_of_an_answer_or_there_are_none(answer, ids):
    _, render = rendering(render=(200, answer))
    if ids:
        assert await render(BODY) == ids
    else:
        with pytest.raises(RenderFailed):
            await render(BODY)


@given(st.lists(st.sampled_from([1, 11, 111, 2, 22, 5])), st.integers(0, 13), st.lists(st.sampled_from([1, 11, 5])))
def test_a_common_prefix_is_the_longest(left, kept, more):
    right = left[:kept] + more
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    assert common_prefix(left, right) == common_prefix(right, left) == len([*pairs])


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        (200, b'{"prompt": "<|im_start|>user"}', "<|im_start|>user"),
        (200, b'{"prompt": "caf\\ufffd"}', None),  # a part of a character
        *((200, odd, None) for odd in (b'{"prompt": null}', b'["x"]', b"no JSON")),
        (404, b'{"prompt": "x"}', None),
        (0, b"", None),
    ],
)
async def test_a_worker_says_what_token_ids_spell_or_nothing(status, answer, text):
    upstream, render = rendering(detokenize=(status, answer) if status else Unreachable("refused"))
    assert await render.detokenize("m", (7, 8)) == text
    assert upstream.asked == [("detokenize", {"model": "m", "tokens": [7, 8]})]


async def test_what_is_no_chat_is_rendered_by_its_route_or_not_at_all():
    upstream, render = rendering(**{"v1/completions/render": (200, b'{"token_ids":[3]}')})
    assert await render({"prompt": "x"}, "/v1/completions") == [3]
    with pytest.raises(RenderFailed, match="/v1/other"):
        await render({"prompt": "x"}, "/v1/other")
    assert [name for name, _ in upstream.asked] == ["v1/completions/render", "v1/other/render"]


async def test_each_render_that_is_asked_for_counts_once():
    counter = Counter("renders", "asked for", registry=None)
    _, render = rendering(counter, tokenize=(200, b'{"tokens":[1,2]}'), detokenize=(200, b'{"prompt":"x"}'))
    await render(BODY)  # by the second route
    with pytest.raises(RenderFailed):
        await render(BODY, "/v1/other")
    await render.detokenize("m", [1])
    assert [sample.value for family in counter.collect() for sample in family.samples if "total" in sample.name] == [2]


RENDERS = len(TEXTS)  # of a place


class Characters:
    """A worker whose tokens are characters, that takes `seconds` for each chat, and may raise an error."""

    def __init__(self, seconds: float = 0.0, error: type[Exception] | None = None) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.seconds, self.error = seconds, error

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> list[int]:
        self.bodies.append(body)
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error("planned")
        text = "".join(f"<{message['role']}>{message['content']}" for message in body["messages"])
        return [*map(ord, text + "<assistant>")]


class Gateway:
    """Requests for which the finder is told no opener, and the positions that are learnt for them."""

    def __init__(self, **renderer: Any) -> None:
        self.renderer = Characters(**renderer)
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


def chat(question: str, head: str = "You pilot ships into the harbour.") -> list[Any]:
    return [system(head), user("First?"), assistant("One."), user(question)]


async def test_the_second_request_with_a_head_renders_and_a_third_has_its_position():
    gateway = Gateway()
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
    gateway = Gateway()
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
    gateway = Gateway(error=error)
    with caplog.at_level(logging.ERROR):
        for question in ("a?", "b?"):
            gateway.ask(chat(question))
        await gateway.idle()
    assert len(gateway.renderer.bodies) == 1 and "planned" not in caplog.text
    assert ("KeyError" in caplog.text) == (error is KeyError)
    gateway.renderer.error = None
    for question in ("a?", "b?"):
        assert gateway.ask(chat(question)).entries() == ()
        gateway.ask(chat(question, "Another head."))
    await gateway.idle()
    assert len(gateway.renderer.bodies) == 1 + RENDERS
    assert gateway.ask(chat("c?", "Another head.")).entries()


async def test_all_that_is_remembered_and_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(positions_module, "MAX_KNOWN", 6)
    monkeypatch.setattr(positions_module, "MAX_WAITING", 3)
    gateway = Gateway()
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
    gateway = Gateway()
    for _ in range(2):
        for owner in ("ann", "bob"):
            for number in range(2 * MAX_WAITING_OF_KEY):
                gateway.ask(chat("a?", f"Head {number} of {owner}."), owner=owner)
    await gateway.idle()
    assert len(gateway.renderer.bodies) == 2 * MAX_WAITING_OF_KEY * RENDERS


@on_virtual_time
async def test_all_renders_of_a_head_have_one_deadline(monkeypatch):
    monkeypatch.setattr(positions_module, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
    gateway = Gateway(seconds=HEAD_SECONDS * 0.4)
    for question in ("a?", "b?"):
        gateway.ask(chat(question))
    await gateway.idle()
    assert (len(gateway.renderer.bodies), len(gateway.positions)) == (3, 0)
