"""A tokenizer and a chat template of our own, written and rendered without vLLM, torch and transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine_patches.commands.model import CHAT_TEMPLATE, SPECIAL_TOKENS

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
    """Write a byte-level BPE tokenizer, trained on text that Python carries, and a template, as for a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"pad_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
