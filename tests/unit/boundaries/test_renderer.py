"""What a model is rendered with is known by what a probe renders to; a worker may say what token ids spell."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter

from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.boundaries.token_ids import TokenIds, common_prefix
from proxy.chat.chat import CHAT
from proxy.http.client import Unreachable


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


def rendering(**routes: tuple[int, bytes] | Exception) -> tuple[Routes, WorkerRenderer]:
    upstream = Routes(**routes)
    return upstream, WorkerRenderer(upstream, "http://worker", timeout=7.0)


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
        assert (await render(BODY)).ids() == ids
    else:
        with pytest.raises(RenderFailed):
            await render(BODY)


@given(st.lists(st.sampled_from([1, 11, 111, 2, 22, 5])), st.integers(0, 13), st.lists(st.sampled_from([1, 11, 5])))
def test_token_ids_compared_as_text_say_the_same_as_compared_as_numbers(left, kept, more):
    right = left[:kept] + more
    one, other = TokenIds.of(left), TokenIds.of(right)
    assert one.common_prefix(other) == common_prefix(left, right)
    assert (len(one), one.ids()) == (len(left), left)


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
    upstream, render = rendering(detokenize=(status, answer) if status else Unreachable("refused"))
    assert await render.detokenize("m", (7, 8)) == text
    assert upstream.asked == [("detokenize", {"model": "m", "tokens": [7, 8]})]


async def test_what_is_no_chat_is_rendered_by_its_route_or_not_at_all():
    upstream, render = rendering(**{"v1/completions/render": (200, b'{"token_ids":[3]}')})
    assert (await render({"prompt": "x"}, "/v1/completions")).ids() == [3]
    with pytest.raises(RenderFailed, match="/v1/other"):
        await render({"prompt": "x"}, "/v1/other")
    assert [name for name, _ in upstream.asked] == ["v1/completions/render", "v1/other/render"]


async def test_a_text_alone_is_tokenized_without_special_tokens():
    upstream, render = rendering(tokenize=(200, b'{"tokens":[1,2]}'))
    assert await render.tokenize("m", "x") == [1, 2]
    assert upstream.asked == [("tokenize", {"model": "m", "prompt": "x", "add_special_tokens": False})]
    _, render = rendering(tokenize=(200, b'{"count":2}'))
    with pytest.raises(RenderFailed, match="without tokens"):
        await render.tokenize("m", "x")


async def test_each_render_that_is_asked_for_counts_once():
    counter = Counter("renders", "asked for", registry=None)
    upstream = Routes(tokenize=(200, b'{"tokens":[1,2]}'), detokenize=(200, b'{"prompt":"x"}'))
    render = WorkerRenderer(upstream, "http://worker", timeout=7.0, asked=counter)
    await render(BODY)  # by the second route
    with pytest.raises(RenderFailed):
        await render(BODY, "/v1/other")
    await render.tokenize("m", "x")
    assert await render.detokenize("m", [1]) == "x"
    assert [sample.value for family in counter.collect() for sample in family.samples if "total" in sample.name] == [2]
