"""What `seamark setup RECIPE` writes to start vLLM is taken by vLLM's own parser, the installed and the newest one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_patches.commands.worker import MIDDLEWARE, vllm_arguments
from proxy.commands import setup
from proxy.commands.recipe import RecipeKind, read_recipe
from tests.harness import flags_parser
from tests.harness.published_recipes import RECIPES
from tests.harness.recipes import NEWEST
from tests.harness.scheduler_process import run_apart, run_forked
from tests.harness.versions import engine_of

NAMES = sorted(path.name for path in RECIPES.iterdir())

# Of a fork of vLLM, whose recipe keeps them; the rest of that line is vLLM's.
OF_A_FORK = {"glm-5.3-flash.yaml": ["--prefill-compute-share", "auto", "--max-parallel-prefills", "2"]}


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> dict[str, list[str]]:
    """The arguments of the vLLM that is started by what was written for a recipe, by the recipe's name."""
    return {name: _written(RECIPES / name, tmp_path_factory.mktemp("setup")) for name in NAMES}


def _written(recipe: Path, folder: Path) -> list[str]:
    spark, out = folder / "spark-vllm-docker", folder / "out"
    for name in ("mods", "recipes"):
        (spark / name).mkdir(parents=True)
    assert setup.main([str(recipe), "--out", str(out), "--spark", str(spark)]) == 0
    kind = read_recipe(str(recipe), lambda _: None).kind
    if kind is RecipeKind.CONFIG:
        return vllm_arguments(None, ["--config", str(out / "model.yaml")])
    if kind is RecipeKind.COMPOSE:
        (service,) = yaml.safe_load((out / "compose.seamark.yaml").read_text())["services"].values()
        if "entrypoint" not in service:  # the image's own is `seamark worker`
            words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]  # as Compose does it
            return flags_parser.given_by_worker(words)
        return list(read_recipe(service["command"][0], lambda _: None).arguments)
    names = {RecipeKind.SPARK: f"seamark-{recipe.name}", RecipeKind.COMMAND: "worker.sh"}
    arguments = list(read_recipe(str(out / names.get(kind, "start.sh")), lambda _: None).arguments)
    if kind is RecipeKind.DOCKER and MIDDLEWARE[0] not in arguments:  # the image's own is `seamark worker`
        return flags_parser.given_by_worker(arguments)
    if forks := OF_A_FORK.get(recipe.name):
        at = arguments.index(forks[0])
        assert arguments[at : at + len(forks)] == forks
        del arguments[at : at + len(forks)]
    return arguments


@pytest.fixture(scope="module")
def parsed(lines) -> dict[str, list[dict[str, Any]]]:
    given = json.dumps(list(lines.values()))
    of_each = run_forked("flags_parser", given), run_apart("flags_parser", given, source=engine_of(NEWEST))
    return {name: [of_one[number] for of_one in of_each] for number, name in enumerate(lines)}


@pytest.mark.parametrize("name", NAMES)
def test_vllm_takes_what_is_written_for_a_recipe(name, parsed):
    recipe = read_recipe(str(RECIPES / name), lambda _: None)
    for given in parsed[name]:
        assert recipe.model in (given["model_tag"], given["model"])
        assert given["enable_prefix_caching"] and given["enable_prompt_tokens_details"] and given["enable_scale_out"]
        assert MIDDLEWARE[1] in given["middleware"]
        assert given["port"] in (8000, recipe.port)  # a container's own, which is published as another one
