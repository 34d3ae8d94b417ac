"""Every command line that deploy/ starts vLLM with is one that vLLM takes."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from engine_patches.commands import worker
from engine_patches.commands.worker import MIDDLEWARE, NEEDED_FLAGS, vllm_arguments
from tests.deploy.compose_files import DEPLOY, EVERY_WAY, OF_THE_USER, read

MODELS = sorted((DEPLOY / "models").glob("*.yaml"))

RECIPES = sorted((DEPLOY / "spark-vllm-docker" / "recipes").glob("*.yaml"))

WITH_MTP = {"nemotron-3-super-mtp"}

COMMANDS = [
    pytest.param(way, name, id=f"{way[-1]}:{name}")
    for way in EVERY_WAY
    for name, service in read(way[-1])["services"].items()
    if name.startswith("worker") and "command" in service
]


@pytest.fixture(scope="module")
def vllm():
    """vLLM's own parser of a server's command line."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def interpolated(text: str) -> str:
    """As Compose does it, with nothing set but what has no default."""
    return re.sub(r"\$\{([A-Z_]+)(?::[-?]([^}]*))?\}", lambda found: OF_THE_USER.get(found[1], found[2] or ""), text)


def within_container(words: list[str]) -> list[str]:
    """The same words with the folders that are here."""
    folders = {"/etc/seamark/models": str(DEPLOY / "models"), "/model": str(DEPLOY)}
    return [re.sub(r"^(/etc/seamark/models|/model\b)", lambda found: folders[found[1]], word) for word in words]


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_vllm_takes_the_flags_of_every_model_file(vllm, model: Path):
    parsed = vllm.parse_args(vllm_arguments(None, ["--config", str(model)]))
    assert parsed.model == yaml.safe_load(model.read_text())["model"]
    assert parsed.enable_prefix_caching and parsed.enable_prompt_tokens_details
    # Unified memory is wedged by more.
    assert parsed.gpu_memory_utilization <= 0.8
    assert (parsed.speculative_config is not None) == (model.stem in WITH_MTP)


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_every_model_file_names_its_source_and_that_it_was_not_run(model: Path):
    comment = " ".join(line.lstrip("# ") for line in model.read_text().splitlines() if line.startswith("#"))
    assert "Source:" in comment and "Not run by us on a Spark" in comment


@pytest.mark.parametrize(("way", "name"), COMMANDS)
def test_vllm_takes_the_command_of_every_service(vllm, monkeypatch, way, name):
    service = read(way[-1])["services"][name]
    words = within_container(shlex.split(interpolated(service["command"])))
    if service.get("entrypoint") == ["vllm", "serve"]:
        parsed = vllm.parse_args(words)
        assert parsed.headless and parsed.node_rank == 1
        return
    monkeypatch.setattr(worker, "is_cpu_build", lambda: "compose.cpu.yaml" in way)
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    started: list[list[str]] = []
    monkeypatch.setattr(worker, "serve", lambda arguments, _: started.append(arguments) or 0)
    assert worker.main(words) == 0
    parsed = vllm.parse_args(started[0])
    parsed.model = parsed.model_tag or parsed.model
    assert parsed.port == 8000 and parsed.enable_prefix_caching
    assert parsed.model and parsed.gpu_memory_utilization <= 0.92


def test_two_models_share_the_memory():
    services = read("compose.two-models.yaml")["services"]
    shares = [
        interpolated(services[name]["command"]).split("--gpu-memory-utilization ")[1] for name in ("worker", "worker-2")
    ]
    assert sum(float(share.split()[0]) for share in shares) <= 0.8


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_the_model_file_says(vllm, recipe: Path):
    """With the placeholders filled in the way run-recipe does it."""
    content = yaml.safe_load(recipe.read_text())
    words = shlex.split(content["command"].format(**content["defaults"]).replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", content["model"]] and content["mods"] == ["mods/seamark"]
    given = vllm.parse_args(["--model", *words[2:]])
    model = DEPLOY / "models" / (recipe.stem.removeprefix("seamark-") + ".yaml")
    file = vllm.parse_args(
        vllm_arguments(None, ["--host", given.host, "--port", str(given.port), "--config", str(model)])
    )
    assert vars(given) == vars(file) | _defaults_of_a_list(given)
    assert {*NEEDED_FLAGS, MIDDLEWARE[0]} <= set(words)


def _defaults_of_a_list(given: Namespace) -> dict[str, object]:
    """vLLM's parser appends to its default list of middleware, which is one for all who parse."""
    return {"middleware": given.middleware}
