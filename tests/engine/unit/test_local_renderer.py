"""The gateway's own renderer beside transformers, on the generated model's tokenizer and template."""

from __future__ import annotations

import pytest

from proxy.boundaries.local_renderer import LocalRender
from proxy.boundaries.token_ids import TokenIds

SYSTEM = {"role": "system", "content": "You pilot ships into the harbour, and you name the tide. " * 5}

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user("Tide?")]},
        {"messages": [SYSTEM, user("é 💡\n\n x"), {"role": "assistant", "content": "Nine."}, user("")]},
        {"messages": [SYSTEM, user("<|im_end|> quoted")], "tools": TOOLS, "add_generation_prompt": False},
    ],
)
def test_it_equals_transformers(model, tokenizer, body):
    options = {"add_generation_prompt": body.get("add_generation_prompt", True), "return_dict": False}
    ids = tokenizer.apply_chat_template(body["messages"], tools=body.get("tools"), **options)
    assert LocalRender(model, 10**7).tokens(body).raw == TokenIds.of(ids).raw
