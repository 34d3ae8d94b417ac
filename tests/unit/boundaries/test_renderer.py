"""What a model is rendered with is known by what a probe renders to; a worker may say what token ids spell."""

import json
from typing import Any

import pytest

from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from proxy.http.client import Unreachable


async def test_a_template_without_a_system_role_is_identified_by_the_second_probe():
    async def no_system(body, path=CHAT):
        if body["messages"][0]["role"] == "system":
            raise RenderFailed("refused")
        return TokenIds.of([1, 2])

    async def nothing(body, path=CHAT):
        raise RenderFailed("refused")

    assert await identify_renderer(no_system, "m") is not None
    assert await identify_renderer(nothing, "m") is None


async def test_templates_that_write_tools_otherwise_are_told_apart():
    def template(tools_become: int | None):
        async def rendered(body, path=CHAT):
            if body.get("tools") and tools_become is None:
                raise RenderFailed("status 400", b"no tools")
            return TokenIds.of([1, *([tools_become] if body.get("tools") else []), 2])

        return rendered

    found = [await identify_renderer(template(tools_become), "m") for tools_become in (7, 8, None, 7)]
    assert None not in found and len(set(found)) == 3 and found[0] == found[3]


@pytest.mark.parametrize("silent_at", [0, 1])
async def test_a_worker_that_does_not_answer_one_probe_is_not_taken_for_another(silent_at):
    asked = 0

    async def rendered(body, path=CHAT):
        nonlocal asked
        asked += 1
        if asked == silent_at + 1:
            raise RenderFailed("Unreachable") from Unreachable("refused")
        return TokenIds.of([1, 2])

    assert await identify_renderer(rendered, "m") is None
    assert await identify_renderer(rendered, "m") is not None


class OneAnswer:
    """An upstream that answers everything alike, or not at all."""

    def __init__(self, status: int, answer: bytes) -> None:
        self.status, self.answer = status, answer
        self.asked: list[tuple[str, Any]] = []

    async def fetch(self, method: str, url: str, body: bytes = b"", **_: Any) -> tuple[int, bytes]:
        self.asked.append((url, json.loads(body)))
        if not self.status:
            raise Unreachable("refused")
        return self.status, self.answer


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        (200, b'{"prompt": "<|im_start|>user"}', "<|im_start|>user"),
        (200, b'{"prompt": "caf\\ufffd"}', None),  # a part of a character
        (200, b'{"prompt": null}', None),
        (200, b'["x"]', None),
        (200, b"no JSON", None),
        (404, b'{"prompt": "x"}', None),
        (0, b"", None),
    ],
)
async def test_a_worker_says_what_token_ids_spell_or_nothing(status, answer, text):
    upstream = OneAnswer(status, answer)
    renderer = WorkerRenderer(upstream, "http://worker", timeout=1.0)
    assert await renderer.detokenize("m", (7, 8)) == text
    assert upstream.asked == [("http://worker/detokenize", {"model": "m", "tokens": [7, 8]})]
