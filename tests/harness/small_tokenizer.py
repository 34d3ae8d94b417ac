"""A tokenizer and a chat template of our own, written and rendered without vLLM, torch and transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine_patches.commands.model import CHAT_TEMPLATE, SPECIAL_TOKENS, train_bpe

VOCABULARY = 2048


class SmallTokenizer:
    """Renders a chat as transformers does: the whole text by the template, then all of it into tokens at once."""

    def __init__(self, folder: Path) -> None:
        """Written by `write_small_tokenizer`."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._template = environment.from_string((folder / "chat_template.jinja").read_text())

    def render(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt of a chat request."""
        text = self._template.render(
            messages=body["messages"],
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True),
        )
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def write_small_tokenizer(folder: Path) -> Path:
    """Write the generated models' kind of tokenizer, a smaller one, and their template."""
    train_bpe(VOCABULARY).save(str(folder / "tokenizer.json"))
    config = {"pad_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
