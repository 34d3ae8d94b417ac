"""What a model is rendered with is known by what a probe renders to."""

from proxy.boundaries.renderer import RenderFailed, identify_renderer
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT


async def test_a_template_without_a_system_role_is_identified_by_the_second_probe():
    async def no_system(body, path=CHAT):
        if body["messages"][0]["role"] == "system":
            raise RenderFailed("refused")
        return TokenIds.of([1, 2])

    async def nothing(body, path=CHAT):
        raise RenderFailed("refused")

    assert await identify_renderer(no_system, "m") is not None
    assert await identify_renderer(nothing, "m") is None
