"""What is said of a recipe by its model's name, and where people look it up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from proxy.commands.outlook import IMAGE, SUPPORTED, Outlook, outlook
from proxy.commands.recipe import Recipe, RecipeKind, read_recipe
from proxy.errors import SettingsError

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


@pytest.mark.parametrize("row", PROMISED, ids=lambda row: row.model)
def test_what_a_page_promises_of_a_model_is_what_setup_says_of_it(row):
    said = outlook(recipe(row.model))
    assert bool(said.hits) == row.hits.startswith("yes")
    assert f"on multiples of {row.unit}" in said.verdict
    beside = outlook(recipe(row.model, "--speculative-config", """'{"method": "mtp", "num_speculative_tokens": 2}'"""))
    assert bool(beside.hits) != row.beside_drafts.startswith("no: ")
    if beside.change:
        assert beside.change in row.beside_drafts.replace("`", "")


TAKE = f"take vLLM {SUPPORTED}, for one the image {IMAGE}"

MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3%s}'"""

CONNECTOR = """--kv-transfer-config '{"kv_connector": "%s"}'"""


def said(line: str, version: str = "") -> Outlook:
    return outlook(read_recipe(f"vllm serve {line}", lambda name: None), version)


def in_image(image: str, model: str = "Qwen3.6-27B", *builds: str) -> Recipe:
    return Recipe(RecipeKind.SPARK, "a.yaml", "a", [model], image=image, builds=builds)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (f"Olmo-Hybrid-7B {MTP % ''}", "leave --speculative-config away"),
        (f"Qwen3.6-27B -pp 2 {MTP % ''}", "take tensor parallelism, or no drafts"),
        (f"Qwen3.6-27B --pipeline-parallel-size=2 {MTP % ''}", "take tensor parallelism, or no drafts"),
        (
            "Qwen3.6-27B " + MTP % ', "num_speculative_tokens_per_batch_size": [1]',
            "leave num_speculative_tokens_per_batch_size of --speculative-config away",
        ),
        (
            "Qwen3.6-27B " + MTP % ', "enable_adaptive_verification": true',
            "leave enable_adaptive_verification of --speculative-config away",
        ),
        ("Qwen3.6-27B -sc.method suffix", "leave --speculative-config away, or take one of mtp, ngram, "),
        (f"Qwen3.6-27B {CONNECTOR % 'LMCacheMPConnector'}", "leave --kv-transfer-config away"),
        (
            f"Qwen3.6-27B {CONNECTOR % 'NixlConnector'} {MTP % ''}",
            "leave --speculative-config or --kv-transfer-config away",
        ),
        ("Qwen3.6-27B --load-format b12x", TAKE),
        ("Qwen3.6-27B --gdn-decode-kernel x", TAKE),
        ("Llama-4 --max-parallel-prefills 2", TAKE),
    ],
)
def test_the_one_change_is_named(line, change):
    seen = said(line)
    assert seen.hits is False and seen.verdict.startswith("no hits yet: ") and seen.change.startswith(change)


@pytest.mark.parametrize(("value", "tried"), [("1", False), ("0", True), ("auto", True)])
def test_drafts_without_a_trial_are_said_by_their_variable(value, tried):
    line = f"SEAMARK_DRAFTS={value} vllm serve Qwen3.6-27B {MTP % ''}"
    assert ("trial" in outlook(read_recipe(line, lambda name: None)).verdict) is tried


@pytest.mark.parametrize(
    "recipe", [in_image("b12x/vLLM:1"), in_image("B12X/vllm"), in_image("x", "m", "--ref", "B12x")]
)
def test_a_fork_is_known_by_its_image_and_by_what_builds_it(recipe):
    seen = outlook(recipe)
    assert seen.hits is False and "a fork of vLLM" in seen.verdict and seen.change == TAKE


@pytest.mark.parametrize("size", ["two", "-1", "9" * 10, "٣"])
def test_a_number_that_is_none_is_refused_with_its_flag(size):
    with pytest.raises(SettingsError, match=f"the command: --pipeline-parallel-size {size} is not a number"):
        said(f"Qwen3.6-27B -pp {size} {MTP % ''}")
