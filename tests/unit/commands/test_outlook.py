"""What is said of a recipe by its model's name, and where people look it up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from proxy.commands.outlook import FAMILIES, IMAGE, SUPPORTED, Outlook, base_image, family_of, outlook, tag_version
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


TAKE = f"take vLLM {SUPPORTED}, for one the image {IMAGE}"

MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3%s}'"""

CONNECTOR = """--kv-transfer-config '{"kv_connector": "%s"}'"""


def said(line: str, version: str = "") -> Outlook:
    return outlook(read_recipe(f"vllm serve {line}", lambda name: None), version)


def in_image(image: str, model: str = "Qwen3.6-27B", *builds: str) -> Recipe:
    return Recipe(RecipeKind.SPARK, "a.yaml", "a", [model], image=image, builds=builds)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.states)
def test_a_family_is_known_by_each_of_its_words_however_a_folder_spells_them(family):
    for word in family.words:
        assert family_of(f"org/{word}-NVFP4") is family_of(f"/models/{word.upper().replace('-', '_')}") is family


@pytest.mark.parametrize("model", ["./models/mine", "Llama-4", "", "qwen3-32b"])
def test_a_model_that_no_family_is_known_of_by_its_name_is_not_judged(model):
    assert family_of(model) is None
    seen = outlook(Recipe(RecipeKind.COMMAND, "a line", "", [model]))
    assert seen.hits is None and "--explain gpu" in seen.verdict and not seen.change


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


@pytest.mark.parametrize(
    "line",
    [
        "Qwen3.6-27B",
        f"Qwen3.6-27B -pp 1 {MTP % ''}",
        "Qwen3.6-27B -pp 2",
        f"Qwen3.6-27B {CONNECTOR % 'NixlConnector'}",
        "Qwen3.6-27B " + MTP % ', "num_speculative_tokens_per_batch_size": [], "enable_adaptive_verification": false',
        """Olmo-Hybrid-7B --speculative-config '{"method": "ngram"}'""",
        """Qwen3.6-27B --speculative-config '{"method": "qwen3_5_mtp"}'""",
        """Qwen3.6-27B --speculative-config '{"model": "some/head"}'""",
        "Qwen3.6-27B --load-format auto",
    ],
)
def test_what_keeps_from_no_hit_is_no_change(line):
    seen = said(line)
    assert seen.hits is True and not seen.change and seen.verdict.startswith("will hit from request 2 on: ")


@pytest.mark.parametrize("line", [f"Llama-4 -pp 2 {MTP % ''}", f"Llama-4 {CONNECTOR % 'LMCacheMPConnector'}"])
def test_of_a_model_that_may_have_attention_alone_nothing_is_said_against_drafts_and_connectors(line):
    assert said(line).hits is None


def test_the_verdict_says_states_unit_and_drafts():
    assert "gated delta nets, states inside the pass, on multiples of 64 tokens" in said("Qwen3.6-27B").verdict
    assert "linear attention, states cut: a pass for each, on multiples of 16" in said("MiniMax-Text-01").verdict
    assert "on multiples of 128 tokens" in said("Qwen3.6-27B --prefix-match-unit 128").verdict
    assert "beside" not in said("Qwen3.6-27B").verdict
    tried = said(f"Qwen3.6-27B {MTP % ''}").verdict
    assert tried.endswith("; beside its drafts (mtp, 3 tokens) once they have stood a trial, at each start")
    assert "(mtp)" in said("""Qwen3.6-27B -sc '{"method": "glm_mtp"}'""").verdict


@pytest.mark.parametrize(("value", "tried"), [("1", False), ("0", True), ("auto", True)])
def test_drafts_without_a_trial_are_said_by_their_variable(value, tried):
    line = f"SEAMARK_DRAFTS={value} vllm serve Qwen3.6-27B {MTP % ''}"
    assert ("trial" in outlook(read_recipe(line, lambda name: None)).verdict) is tried


def test_what_is_taken_away_is_noted_beside_each_verdict():
    taken = "--mamba-cache-mode align --no-enable-prefix-caching"
    for line in (f"Qwen3.6-27B {taken}", f"Llama-4 {taken}", f"Qwen3.6-27B {taken} --load-format b12x"):
        mode, caching = said(line).notes
        assert mode.startswith("--mamba-cache-mode is taken away: ")
        assert caching.startswith("--no-enable-prefix-caching is taken away: ")
    assert not said("Qwen3.6-27B --enable-prefix-caching").notes
    (note,) = outlook(read_recipe("VLLM_USE_RUST_FRONTEND=1 vllm serve Qwen3.6-27B", lambda name: None)).notes
    assert "the one in Rust" in note


@pytest.mark.parametrize(
    ("image", "version", "known"),
    [
        ("vllm/vllm-openai:v0.33.0", "", None),
        ("vllm/vllm-openai:v0.31.0", "", None),
        ("vllm/vllm-openai:latest", "", None),
        ("vllm-node", "", None),
        ("vllm-node", "no version", None),
        ("vllm-node", "0.33.1rc1", None),
        ("vllm/vllm-openai:v0.28.0", "0.32.1", None),
        ("vllm/vllm-openai:v0.30.2", "", "vLLM 0.30.2 (by its image's tag)"),
        ("vllm/vllm-openai:v0.34.0", "", "vLLM 0.34.0 (by its image's tag)"),
        ("vllm/vllm-openai:v1.32.0", "", "vLLM 1.32.0 (by its image's tag)"),
        ("vllm/vllm-openai:v0.33.0", "0.30.1", "vLLM 0.30.1 (in its image)"),
    ],
)
def test_an_image_is_believed_and_its_tag_if_it_could_not_be_asked(image, version, known):
    seen = outlook(in_image(image), version)
    assert seen.hits is (known is None) and (known or "will hit") in seen.verdict
    assert seen.change == ("" if known is None else TAKE)


@pytest.mark.parametrize(
    "recipe", [in_image("b12x/vLLM:1"), in_image("B12X/vllm"), in_image("x", "m", "--ref", "B12x")]
)
def test_a_fork_is_known_by_its_image_and_by_what_builds_it(recipe):
    seen = outlook(recipe)
    assert seen.hits is False and "a fork of vLLM" in seen.verdict and seen.change == TAKE


def test_of_several_obstacles_the_first_to_be_changed_is_said():
    seen = outlook(in_image("b12x:v1"), "0.30.0")
    assert "a fork" in seen.verdict
    assert "0.30.0" in said(f"Qwen3.6-27B -pp 2 {CONNECTOR % 'LMCacheMPConnector'} {MTP % ''}", "0.30.0").verdict


@pytest.mark.parametrize("size", ["two", "-1", "9" * 10, "٣"])
def test_a_number_that_is_none_is_refused_with_its_flag(size):
    with pytest.raises(SettingsError, match=f"the command: --pipeline-parallel-size {size} is not a number"):
        said(f"Qwen3.6-27B -pp {size} {MTP % ''}")


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.33.0", "0.33.0"),
        ("registry:5000/vllm/vllm-openai:v0.33", "0.33"),
        ("vllm/vllm-openai-rocm:v0.30.1-x", "0.30.1"),
        ("vllm-openai:v0.33.0", "0.33.0"),
        ("vllm/vllm-openai:latest", ""),
        ("mine/vllm:v0.33.0", ""),
        ("vllm/vllm-openai:v1234567.1", ""),
        ("", ""),
    ],
)
def test_the_version_in_a_tag_of_vllms_own_images(image, version):
    assert tag_version(image) == version


@pytest.mark.parametrize(
    ("image", "version", "base"),
    [
        ("vllm/vllm-openai:v0.28.0", "", IMAGE),
        ("vllm/vllm-openai:v0.33.0", "0.28.0", IMAGE),
        ("vllm/vllm-openai:v0.33.0", "", ""),
        ("vllm/vllm-openai:v0.28.0", "0.33.0", ""),
        ("mine:v0.28.0", "0.28.0", ""),
        ("vllm/vllm-openai:latest", "0.28.0", ""),
    ],
)
def test_only_an_image_of_vllms_own_that_does_not_fit_is_replaced(image, version, base):
    assert base_image(in_image(image), version) == base
