"""What is said of a recipe by its model's name, and where people look it up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from proxy.commands.outlook import Outlook, base_image, outlook
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


MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3%s}'"""

CONNECTOR = """--kv-transfer-config '{"kv_connector": "%s"}'"""

TAKEN = "--mamba-cache-mode align --no-enable-prefix-caching"

QWEN = "Qwen3.6-27B"

LINES = [
    *(QWEN, "org/Qwen3_6-27B-NVFP4", "MiniMax-Text-01", "./models/mine", "Llama-4", "qwen3-32b"),
    *(f"{QWEN} --prefix-match-unit 128", f"{QWEN} {MTP % ''}", f"""{QWEN} -sc '{{"method": "glm_mtp"}}'"""),
    *(f"Olmo-Hybrid-7B {MTP % ''}", """Olmo-Hybrid-7B --speculative-config '{"method": "ngram"}'"""),
    f"""{QWEN} --speculative-config '{{"model": "some/head"}}'""",
    *(f"{QWEN} -pp 2", f"{QWEN} -pp 1 {MTP % ''}", f"{QWEN} --pipeline-parallel-size=2 {MTP % ''}"),
    f"{QWEN} " + MTP % ', "num_speculative_tokens_per_batch_size": [1]',
    f"{QWEN} " + MTP % ', "enable_adaptive_verification": true',
    f"{QWEN} " + MTP % ', "num_speculative_tokens_per_batch_size": [], "enable_adaptive_verification": false',
    f"{QWEN} -sc.method suffix",
    *(f"{QWEN} {CONNECTOR % name}" for name in ("LMCacheMPConnector", "NixlConnector")),
    f"{QWEN} {CONNECTOR % 'NixlConnector'} {MTP % ''}",
    *(f"Llama-4 -pp 2 {MTP % ''}", f"Llama-4 {CONNECTOR % 'LMCacheMPConnector'}"),
    *(f"{QWEN} --load-format b12x", f"{QWEN} --load-format auto", f"{QWEN} --gdn-decode-kernel x"),
    "Llama-4 --max-parallel-prefills 2",
    *(f"{QWEN} {TAKEN}", f"Llama-4 {TAKEN}", f"{QWEN} {TAKEN} --load-format b12x"),
]

# An image, its flags for a build, and the version that is found in it.
IMAGES: list[tuple[str, ...]] = [
    *((f"vllm/vllm-openai:v{tag}", "") for tag in ("0.33.0", "0.31.0", "0.30.2", "0.34.0", "1.32.0", "1234567.1")),
    *(
        ("vllm/vllm-openai:latest", ""),
        ("vllm/vllm-openai:latest", "0.28.0"),
        ("registry:5000/vllm/vllm-openai:v0.3", ""),
    ),
    *(("vllm/vllm-openai:v0.28.0", "0.32.1"), ("vllm/vllm-openai:v0.33.0", "0.30.1"), ("mine/vllm:v0.28.0", "")),
    *(("mine:v0.28.0", "0.28.0"), ("vllm-node", "no version"), ("vllm-node", "0.33.1rc1"), ("b12x/vLLM:1", "")),
    *(("B12X/vllm", "0.30.0"), ("x", "", "--ref", "B12x")),
]


def shown(seen: Outlook) -> str:
    return "\n".join([f"hits: {seen.hits}", seen.verdict, f"change: {seen.change}", *seen.notes])


def said(line: str, version: str = "") -> Outlook:
    return outlook(read_recipe(f"vllm serve {line}", lambda name: None), version)


@pytest.mark.parametrize("line", LINES)
def test_what_keeps_from_hits_is_said_with_the_one_change(line, expect_golden):
    expect_golden("outlook", line, shown(said(line)))


@pytest.mark.parametrize("given", IMAGES)
def test_an_image_is_believed_and_its_tag_if_it_could_not_be_asked(given, expect_golden):
    image, version, *builds = given
    seen = Recipe(RecipeKind.SPARK, "a.yaml", "a", [QWEN], image=image, builds=builds)
    text = f"{shown(outlook(seen, version))}\ntaken instead: {base_image(seen, version)}"
    expect_golden("outlook", " ".join(("image", *given)), text)


def test_of_several_obstacles_the_first_to_be_changed_is_said():
    assert "0.30.0" in said(f"{QWEN} -pp 2 {CONNECTOR % 'LMCacheMPConnector'} {MTP % ''}", "0.30.0").verdict


@pytest.mark.parametrize(("value", "tried"), [("1", False), ("0", True), ("auto", True)])
def test_drafts_without_a_trial_are_said_by_their_variable(value, tried):
    line = f"SEAMARK_DRAFTS={value} vllm serve {QWEN} {MTP % ''}"
    assert ("trial" in outlook(read_recipe(line, lambda name: None)).verdict) is tried


@pytest.mark.parametrize("size", ["two", "-1", "9" * 10, "٣"])
def test_a_number_that_is_none_is_refused_with_its_flag(size):
    with pytest.raises(SettingsError, match=f"the command: --pipeline-parallel-size {size} is not a number"):
        said(f"{QWEN} -pp {size} {MTP % ''}")
