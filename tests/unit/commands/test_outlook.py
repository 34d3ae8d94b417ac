"""What is said of a recipe by its model's name, and where people look it up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from proxy.commands.outlook import family_of, outlook
from proxy.commands.recipe import Recipe, read_recipe

PAGE = Path(__file__).parents[3] / "deploy" / "SPARK.md"


class Promised(NamedTuple):
    """A model's row of the page."""

    model: str
    hits: str
    unit: str
    beside_drafts: str


def promised() -> Iterator[Promised]:
    table = PAGE.read_text().partition("## Will it help?")[2].partition("\n\n*Beside")[0]
    for row in re.findall(r"^\| (`.*) \|$", table, re.M):
        models, *told = row.split(" | ")
        yield from (Promised(model, *told) for model in re.findall(r"`([^`]+)`", models))


PROMISED = list(promised())


def recipe(model: str, *drafts: str) -> Recipe:
    return read_recipe(" ".join(("vllm serve", model, *drafts)), lambda name: None)


def test_the_page_has_every_family_that_writes_its_states_inside_a_pass():
    families = {family for row in PROMISED if (family := family_of(row.model)) is not None}
    assert len(families) == 6 and all(family.inside for family in families)


@pytest.mark.parametrize("row", PROMISED, ids=lambda row: row.model)
def test_what_a_page_promises_of_a_model_is_what_setup_says_of_it(row):
    said = outlook(recipe(row.model))
    assert bool(said.hits) == row.hits.startswith("yes")
    assert f"on multiples of {row.unit}" in said.verdict
    beside = outlook(recipe(row.model, "--speculative-config", """'{"method": "mtp", "num_speculative_tokens": 2}'"""))
    assert bool(beside.hits) != row.beside_drafts.startswith("no: ")
    if beside.change:
        assert beside.change in row.beside_drafts.replace("`", "")
