"""What is said of a recipe, by its flags, its image and its model's family (`golden/outlook.txt`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.commands.outlook import Outlook, outlook
from proxy.commands.recipe import Recipe, RecipeKind
from proxy.commands.recipe_reader import read_recipe
from proxy.commands.versions import release_image


def promised() -> Iterator[tuple[str, ...]]:
    """Each model of the page: whether it hits, its unit, and what is said of it beside drafts."""
    page = Path(__file__).parents[3] / "deploy" / "SPARK.md"
    table = page.read_text().partition("## Will it help?")[2].partition("\n\n*With")[0]
    for row in re.findall(r"^\| (`.*) \|$", table, re.M):
        models, *told = row.split(" | ")
        yield from ((model, *told) for model in re.findall(r"`([^`]+)`", models))


@pytest.mark.parametrize(("model", "hits", "unit", "beside_drafts"), [*promised()])
def test_what_a_page_promises_of_a_model_is_what_setup_says_of_it(model, hits, unit, beside_drafts):
    alone, beside = said(model), said(f"{model} {MTP % ''}")
    assert bool(alone.hits) == hits.startswith("yes") and f"match unit {unit}" in alone.verdict
    assert bool(beside.hits) != beside_drafts.startswith("no: ")
    assert (beside.change or "") in beside_drafts.replace("`", "")


MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3%s}'"""

CONNECTOR = """--kv-transfer-config '{"kv_connector": "%s"}'"""

TAKEN = "--mamba-cache-mode align --no-enable-prefix-caching"

QWEN = "Qwen3.6-27B"

LINES = [
    *(QWEN, "org/Qwen3_6-27B-NVFP4", "MiniMax-Text-01", "./models/mine", "Llama-4", "qwen3-32b", "Qwen3-Coder-Next"),
    *("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "granite-4.0-micro", "Starling-34B", "nemotron-340b", "a/../../b"),
    *(f"{QWEN} --prefix-match-unit 128", f"{QWEN} {MTP % ''}", f"""{QWEN} -sc '{{"method": "glm_mtp"}}'"""),
    *(f"Olmo-Hybrid-7B {MTP % ''}", """Olmo-Hybrid-7B --speculative-config '{"method": "ngram"}'"""),
    f"""{QWEN} --speculative-config '{{"model": "some/head"}}'""",
    *(f"{QWEN} -pp 2", f"{QWEN} -pp 1 {MTP % ''}", f"{QWEN} --pipeline-parallel-size=2 {MTP % ''}"),
    f"{QWEN} " + MTP % ', "num_speculative_tokens_per_batch_size": [1]',
    f"{QWEN} " + MTP % ', "enable_adaptive_verification": true',
    f"{QWEN} " + MTP % ', "num_speculative_tokens_per_batch_size": [], "enable_adaptive_verification": false',
    *(f"{QWEN} -sc.method suffix", f"{QWEN} --speculative_config.method suffix"),
    *(f"{QWEN} {CONNECTOR % name}" for name in ("LMCacheMPConnector", "NixlConnector")),
    f"{QWEN} {CONNECTOR % 'NixlConnector'} {MTP % ''}",
    *(f"Llama-4 -pp 2 {MTP % ''}", f"Llama-4 {CONNECTOR % 'LMCacheMPConnector'}"),
    *(f"{QWEN} --load-format b12x", f"{QWEN} --load-format auto", f"{QWEN} --gdn-decode-kernel x"),
    *("Llama-4 --max-parallel-prefills 2", f"{QWEN} --task generate"),
    *(f"{QWEN} {TAKEN}", f"Llama-4 {TAKEN}", f"{QWEN} {TAKEN} --load-format b12x"),
]

# An image, its flags for a build, and the version that is found in it.
IMAGES: list[tuple[str, ...]] = [
    *((f"vllm/vllm-openai:v{tag}", "") for tag in ("0.33.0", "0.31.0", "0.30.2", "0.34.0", "1.32.0", "1234567.1")),
    *(("vllm/vllm-openai:latest", version) for version in ("", "0.28.0")),
    *(("registry:5000/vllm/vllm-openai:v0.3", ""), ("vllm/vllm-openai:latest-cu130", "0.3")),
    ("vllm/vllm-openai-rocm:v0.29.0rc1-x@sha256:0", ""),
    *((f"{owner}/vllm:1", "") for owner in ("voipmonitor", "localinferencelab", "ghcr.io/local-inference-lab")),
    *(("vllm/vllm-openai:v0.28.0", "0.32.1"), ("vllm/vllm-openai:v0.33.0", "0.30.1"), ("mine/vllm:v0.28.0", "")),
    *(("mine:v0.28.0", "0.28.0"), ("vllm-node", "no version"), ("vllm-node", "0.33.1rc1"), ("b12x/vLLM:1", "")),
    *(("B12X/vllm", "0.30.0"), ("x", "", "--ref", "B12x")),
]


def told_of(seen: Outlook) -> str:
    told = {"hits": seen.hits, "change": seen.change, "asks": seen.ask, "taken instead": seen.image}
    return "\n".join([seen.verdict, *(f"{name}: {each}" for name, each in told.items() if each != ""), *seen.notes])


def said(line: str, version: str = "0.33.0", variables: str = "") -> Outlook:
    return outlook(read_recipe(f"{variables}vllm serve {line}", lambda name: None), version)


@pytest.mark.parametrize("line", LINES)
def test_what_keeps_from_hits_is_said_with_the_one_change(line, expect_golden):
    expect_golden("outlook", line, told_of(said(line)))


@pytest.mark.parametrize("given", IMAGES)
def test_an_image_is_believed_and_its_tag_if_it_could_not_be_asked(given, expect_golden):
    image, version, *builds = given
    seen = Recipe(RecipeKind.SPARK, "a.yaml", "a", [QWEN], image=image, builds=builds)
    expect_golden("outlook", " ".join(("image", *given)), told_of(outlook(seen, version)))


@pytest.mark.parametrize("kind", RecipeKind)
def test_each_way_has_a_command_that_asks_and_one_that_takes_a_vllm_that_fits(kind, expect_golden):
    image = "" if kind in (RecipeKind.COMMAND, RecipeKind.CONFIG, RecipeKind.LAUNCHER) else "mine:1"
    flags = [QWEN, "--api-key", "secret", "--max-model-len=65536", "--hf-token=secret"]
    seen = outlook(Recipe(kind, "a", "llm", flags, image=image, document={}, text="/v/bin/vllm serve m"))
    expect_golden("outlook", f"of {kind}", f"{told_of(seen)}\nexplains: {seen.explain}")


@pytest.mark.parametrize("tag", ["qwen38-flash-next", "latest", "v0.27.1", "v0.6.6.post1", "v0.30.0rc1@sha256:ab"])
@pytest.mark.parametrize("variant", ["", "-cu130"])
def test_an_image_gives_way_to_one_of_its_variant_whatever_model_its_tag_names(tag, variant):
    name, at, digest = tag.partition("@")
    assert release_image(f"vllm/vllm-openai:{name}{variant}{at}{digest}") == f"vllm/vllm-openai:v0.33.0{variant}"


def test_of_several_obstacles_the_first_to_be_changed_is_said():
    assert "0.30.0" in said(f"{QWEN} -pp 2 {CONNECTOR % 'LMCacheMPConnector'} {MTP % ''}", "0.30.0").verdict


@pytest.mark.parametrize(("value", "tried"), [("1", False), ("0", True), ("auto", True)])
def test_drafts_without_a_trial_are_said_by_their_variable(value, tried):
    assert ("trial" in said(f"{QWEN} {MTP % ''}", variables=f"SEAMARK_DRAFTS={value} ").verdict) is tried
