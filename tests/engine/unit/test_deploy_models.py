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

# What decides which flags the chart gives.
CHARTS: tuple[tuple[str, ...], ...] = (
    ("mode=gateway",),
    ("mode=sidecar",),
    ("prefill.replicas=1",),
    ("worker.checkpoints.storage=64Gi",),
    ("worker.modelFile=glm-5.3-flash.yaml", "worker.args={--max-model-len=8192}"),
)


def of_service(way: Sequence[str], name: str) -> list[str]:
    """The arguments of the vLLM that a service of a compose file starts."""
    service = read(way[-1])["services"][name]
    words = within_container(shlex.split(interpolated(service["command"])))
    if service.get("entrypoint") == ["vllm", "serve"]:
        return words
    return flags_parser.given_by_worker(words, on_cpu="compose.cpu.yaml" in way)


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


def of_recipe(recipe: Path) -> list[str]:
    """A recipe's arguments of `vllm serve`, with the placeholders filled in the way run-recipe does it."""
    content = yaml.safe_load(recipe.read_text())
    words = shlex.split(content["command"].format(**content["defaults"]).replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", content["model"]]
    return ["--model", *words[2:]]


def lines() -> dict[str, list[str]]:
    """Every command line that deploy/ has, by where."""
    found = {
        f"models/{model.stem}": vllm_arguments(None, ["--config", str(model)])
        for model in (DEPLOY / "models").glob("*.yaml")
    }
    found |= {
        f"recipes/{recipe.stem}": of_recipe(recipe) for recipe in (DEPLOY / "spark-vllm-docker/recipes").glob("*.yaml")
    }
    found |= {f"charts/{flags}/{number}": line for flags in CHARTS for number, line in enumerate(of_chart(flags))}
    for way in EVERY_WAY:
        services = read(way[-1])["services"]
        workers = [name for name in services if name.startswith("worker") and "command" in services[name]]
        found |= {f"{way[-1]}/{name}": of_service(way, name) for name in workers}
    return found


def check(name: str, parsed: dict[str, Any]) -> None:
    """What vLLM's parser makes of a line."""
    if parsed["headless"]:
        assert parsed["node_rank"] == 1, name
        return
    assert parsed["enable_prefix_caching"] and (parsed["model_tag"] or parsed["model"]), name
    assert parsed["gpu_memory_utilization"] <= (0.8 if name.startswith("models/") else 0.92), name  # unified memory
    if not name.startswith("models/"):
        assert parsed["port"] == 8000, name
    if name.startswith("charts/"):
        assert parsed["host"] == ("127.0.0.1" if "sidecar" in name else "0.0.0.0"), name  # noqa: S104


def test_the_installed_vllm_takes_every_command_line():
    parser = flags_parser.parser()
    for name, line in lines().items():
        check(name, vars(parser.parse_args(line)))


@pytest.mark.thorough  # another vLLM, in a process of its own
def test_the_newest_vllm_takes_every_command_line():
    taken = lines()
    parsed = run_apart("flags_parser", json.dumps(list(taken.values())), source=engine_of(NEWEST))
    for name, each in zip(taken, parsed, strict=True):
        check(name, each)
