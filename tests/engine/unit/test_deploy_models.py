"""Every command line that deploy/ starts vLLM with is one that vLLM takes: the installed one, and the newest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_patches.commands.worker import vllm_arguments
from tests.deploy.compose_files import DEPLOY, EVERY_WAY, OF_THE_USER, read
from tests.harness import flags_parser
from tests.harness.helm import render
from tests.harness.recipes import NEWEST
from tests.harness.scheduler_process import run_apart
from tests.harness.versions import engine_of

MODELS = sorted((DEPLOY / "models").glob("*.yaml"))

RECIPES = sorted((DEPLOY / "spark-vllm-docker" / "recipes").glob("*.yaml"))

# Method and number, of the model files that draft.
DRAFTS = {
    "glm-5.3-flash": ("mtp", 3),
    "nemotron-3-super-mtp": ("mtp", 3),
    "nemotron-3-ultra": ("mtp", 4),
    "nemotron-3.5-lightning": ("dspark", 7),
    "qwen3.8-27b": ("mtp", 3),
    "qwen3.8-27b-dflash2": ("dflash", 8),
    "qwen3.8-flash-next": ("mtp", 3),
    "qwen3.8-flash-next-two-sparks": ("mtp", 3),
}


# What a switch or a deprecated flag was once needed for is a default.
NOT_NEEDED = ("SEAMARK_DRAFTS", "--mamba-cache-mode", "mamba-cache-mode:")

COMMANDS = [
    pytest.param(way, name, id=f"{way[-1]}:{name}")
    for way in EVERY_WAY
    for name, service in read(way[-1])["services"].items()
    if name.startswith("worker") and "command" in service
]


# What decides which flags the chart gives.
CHARTS: tuple[tuple[str, ...], ...] = (
    ("mode=gateway",),
    ("mode=sidecar",),
    ("prefill.replicas=1",),
    ("worker.checkpoints.storage=64Gi",),
    ("worker.modelFile=glm-5.3-flash.yaml", "worker.args={--max-model-len=8192}"),
)


@pytest.fixture(scope="module")
def vllm():
    """vLLM's own parser of a server's command line."""
    return flags_parser.parser()


def of_service(way: Sequence[str], name: str) -> tuple[list[str], bool]:
    """The arguments of the vLLM that a service of a compose file starts; whether it is one without a server."""
    service = read(way[-1])["services"][name]
    words = within_container(shlex.split(interpolated(service["command"])))
    if service.get("entrypoint") == ["vllm", "serve"]:
        return words, True
    return flags_parser.given_by_worker(words, on_cpu="compose.cpu.yaml" in way), False


def of_chart(flags: Sequence[str]) -> list[list[str]]:
    """The arguments of each vLLM that the chart starts."""
    rendered = render(DEPLOY / "helm" / "seamark", [word for flag in flags for word in ("--set", flag)])
    assert rendered.objects, rendered.error
    pods = (each["spec"]["template"]["spec"] for each in rendered.objects if each["kind"] == "StatefulSet")
    given = (each["args"] for pod in pods for each in pod["containers"] if each["name"] == "worker")
    return [flags_parser.given_by_worker(within_container(words)) for words in given]


def interpolated(text: str) -> str:
    """As Compose does it, with nothing set but what has no default."""
    return re.sub(r"\$\{([A-Z_]+)(?::[-?]([^}]*))?\}", lambda found: OF_THE_USER.get(found[1], found[2] or ""), text)


def within_container(words: list[str]) -> list[str]:
    """The same words with the folders that are here."""
    folders = {"/etc/seamark/models": str(DEPLOY / "models"), "/model": str(DEPLOY)}
    return [re.sub(r"^(/etc/seamark/models|/model\b)", lambda found: folders[found[1]], word) for word in words]


def test_models_that_draft_are_there():
    assert DRAFTS.keys() <= {model.stem for model in MODELS}


@pytest.mark.parametrize("path", [*MODELS, *RECIPES], ids=lambda path: path.name)
def test_no_file_has_what_is_a_default_now(path: Path):
    assert not [word for word in NOT_NEEDED if word in path.read_text()]


@pytest.fixture(scope="module")
def newest() -> dict[str, dict[str, Any]]:
    """What the newest vLLM's parser makes of every command line that deploy/ has."""
    lines = {model.name: of_file(model) for model in MODELS}
    lines |= {recipe.name: of_recipe(recipe)[0] for recipe in RECIPES}
    lines |= {str(each.id): of_service(*each.values)[0] for each in COMMANDS}
    lines |= {f"{flags}:{number}": words for flags in CHARTS for number, words in enumerate(of_chart(flags))}
    parsed = run_apart("flags_parser", json.dumps(list(lines.values())), source=engine_of(NEWEST))
    return dict(zip(lines, parsed, strict=True))


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_every_model_file_names_its_source_and_that_it_was_not_run(model: Path):
    comment = " ".join(line.lstrip("# ") for line in model.read_text().splitlines() if line.startswith("#"))
    assert "Source:" in comment and "Not run by us on a Spark" in comment


@pytest.mark.parametrize(("way", "name"), COMMANDS)
def test_vllm_takes_the_command_of_every_service(vllm, newest, way, name):
    words, headless = of_service(way, name)
    for parsed in (vars(vllm.parse_args(words)), newest[f"{way[-1]}:{name}"]):
        if headless:
            assert parsed["headless"] and parsed["node_rank"] == 1
            continue
        assert parsed["port"] == 8000 and parsed["enable_prefix_caching"]
        assert (parsed["model_tag"] or parsed["model"]) and parsed["gpu_memory_utilization"] <= 0.92


def test_two_models_share_the_memory():
    services = read("compose.two-models.yaml")["services"]
    shares = [
        interpolated(services[name]["command"]).split("--gpu-memory-utilization ")[1] for name in ("worker", "worker-2")
    ]
    assert sum(float(share.split()[0]) for share in shares) <= 0.8


def of_file(model: Path, *given: str) -> list[str]:
    """The arguments by which `seamark worker --config` starts a server."""
    return vllm_arguments(None, [*given, "--config", str(model)])


def of_recipe(recipe: Path) -> tuple[list[str], dict[str, Any]]:
    """A recipe's arguments of `vllm serve`, with the placeholders filled in the way run-recipe does it; its content."""
    content = yaml.safe_load(recipe.read_text())
    words = shlex.split(content["command"].format(**content["defaults"]).replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", content["model"]]
    return ["--model", *words[2:]], content
