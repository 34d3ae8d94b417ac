"""The table of families: what is documented, what the code knows, and what vLLM's source holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from engine_patches import families
from tests.harness import families as documented
from tests.harness.families import BEGIN, CHOSEN, DOCUMENT, END, VERSION, Class, Source
from tests.harness.recipe_models import MODELS
from tests.harness.versions import source_of


@pytest.fixture(scope="module")
def installed() -> Source:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Source(Path(spec.origin).parents[1])


def rows() -> list[list[str]]:
    """Of the documented table: architectures, states, how they are written, how shown, beside drafts."""
    between = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in between.splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


@pytest.mark.parametrize("layer", families.INSIDE, ids=lambda layer: layer.path.partition(":")[0].rpartition(".")[2])
def test_a_layer_that_writes_inside_a_pass_is_in_vllm_and_in_the_table(installed, layer):
    module, _, name = layer.path.partition(":")
    methods = [
        part.name
        for each in installed.ancestors(Class(module, name))
        if (source := installed.module(each.module)) is not None
        for part in getattr(source.definitions.get(each.name), "body", ())
        if hasattr(part, "name")
    ]
    assert layer.core in methods, f"{layer.path} has no {layer.core}"
    documented_as = [row for row in rows() if layer.kind.name in row[1].split(" and ") and row[2] == "inside a pass"]
    assert documented_as, f"no row of {DOCUMENT.name} is of {layer.kind.name}"


@pytest.mark.thorough  # reads the Python source of another vLLM
def test_the_documented_table_is_that_of_the_source():
    text = DOCUMENT.read_text()
    assert text == documented.with_table(text, documented.generated()), "run: python -m tests.harness.families"


@pytest.mark.thorough  # reads the Python source of another vLLM
def test_the_layers_that_a_recipe_s_config_tells_are_those_that_vllm_makes_of_it():
    source = Source(source_of(VERSION))
    registered = source.models()
    for name, config in MODELS.items():
        (architecture,) = config["architectures"]
        chosen = CHOSEN.get(architecture)
        made = {source.named(layer) for layer in source.recurrent_layers(registered[architecture])}
        told = set(families.layers_in(config.get("text_config", config)))
        assert told == ({chosen} if chosen is not None else made), name
