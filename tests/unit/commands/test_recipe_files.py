"""What is written for a recipe: all of it but what vLLM dropped, and the plugin and the flags that hits need.

Where the scripts are run: `tests/gateway/test_setup_recipes.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.commands.cures import NEEDED
from proxy.commands.outlook import IMAGE
from proxy.commands.recipe import EVERYWHERE, Recipe, RecipeKind, read_recipe
from proxy.commands.recipe_files import (
    Places,
    RecipeFiles,
    files_of,
)
from proxy.errors import SettingsError

ADDED = list(NEEDED)

# What vLLM dropped, as it may be spelt, before and behind what stays.
DROPPED = "--mamba-cache-mode align --a 1 --no-enable-prefix-caching --mamba_cache_mode=align --b"


HOST = ["--host", EVERYWHERE]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Folders with a blank in their names, and what is read of them."""
    made = Places(tmp_path / "my out", tmp_path / "sea mark", tmp_path / "spark vllm")
    shipped = made.source / "deploy/spark-vllm-docker/recipes"
    for folder in (shipped, made.spark / "mods", made.spark / "recipes"):
        folder.mkdir(parents=True)
    for name in ("seamark-b.yaml", "seamark-a.yaml", "notes.md"):
        (shipped / name).write_text("")
    return made


def quoted(*path: Path | str) -> str:
    return shlex.quote(str(Path(*path)))


def read(given: str | Path) -> Recipe:
    return read_recipe(str(given), lambda name: None)


def line(*arguments: str, **more: Any) -> Recipe:
    return Recipe(RecipeKind.COMMAND, "a line", "", arguments, **more)


def words(text: str) -> list[str]:
    """Of a shell's text, its lines joined."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


def commands(script: str) -> list[str]:
    return [each for each in script.replace("\\\n    ", "").splitlines() if each and not each.startswith("#")]


SPARK = {
    "name": "mine",
    "container": "vllm-node",
    "mods": ["mods/seamark", "mods/theirs"],
    "defaults": {"port": 8000},
    "command": f"echo {{port}}\nvllm serve 'm m' {DROPPED} --port {{port}}   \n# end",
}


def spark(places: Places, folder: Path, **more: Any) -> tuple[Recipe, RecipeFiles, dict[str, Any]]:
    path = folder / "My Recipe.yaml"
    path.write_text(yaml.safe_dump({**SPARK, **more}))
    recipe = read(path)
    made = files_of(recipe, places)
    return recipe, made, yaml.safe_load(made.files["seamark-my-recipe.yaml"])


def test_a_recipe_in_a_checkout_is_run_there_and_another_one_wants_a_checkout(places, tmp_path):
    _, made, _ = spark(places._replace(spark=tmp_path / "none"), places.spark / "recipes")
    assert f"target={quoted(places.spark)}\n" in made.files["start.sh"]
    with pytest.raises(SettingsError, match="--spark: "):
        spark(places._replace(spark=tmp_path / "none"), tmp_path)


def compose(places: Places, **service: Any) -> tuple[RecipeFiles, Mapping[str, Any]]:
    path = places.source / "compose.yaml"
    whole = {"image": "vllm/vllm-openai:v0.33.0", "command": f"m --port 8001 {DROPPED}", **service}
    path.write_text(yaml.safe_dump({"services": {"my llm": whole}}))
    made = files_of(read(path), places)
    assert list(made.files) == ["compose.seamark.yaml", "start.sh"]
    ((name, overlay),) = yaml.safe_load(made.files["compose.seamark.yaml"])["services"].items()
    assert name == "my llm" and made.files["compose.seamark.yaml"].startswith(f"# {path} with Seamark's plugin")
    return made, overlay


def test_another_image_takes_the_place_of_one_that_does_not_fit(places):
    _, overlay = compose(places._replace(image=IMAGE))
    assert overlay["build"]["args"] == {"VLLM_IMAGE": IMAGE}


def docker(places: Places, text: str) -> tuple[RecipeFiles, list[str]]:
    path = places.source / "My Run.sh"
    path.write_text(text)
    made = files_of(read(path), places)
    return made, commands(made.files["start.sh"])


def test_a_line_of_docker_has_an_image_of_its_own_and_what_replaces_its_image(places):
    made = files_of(read("docker run vllm/vllm-openai:v0.28.0 m"), places._replace(image=IMAGE))
    build, run = commands(made.files["start.sh"])
    assert f"VLLM_IMAGE={IMAGE} -t seamark-worker-run " in build and "seamark-worker-run" in run


CONFIG: Mapping[str, Any] = {
    "Image": "vllm/vllm-openai:v0.33.0",
    "Entrypoint": ["vllm", "serve"],
    "Cmd": ["m", "--x", "it's $HOME"],
    "Env": ["PATH=/bin", "A=b c"],
}


def container(
    places: Places, config: Mapping[str, Any] | None = None, **host: Any
) -> tuple[RecipeFiles, list[str], list[str]]:
    """The files, the options of its `docker run`, and what stands behind the image."""
    told = {"Name": "/llm", "Config": {**CONFIG, **(config or {})}, "HostConfig": host}
    made = files_of(read_recipe("llm", lambda name: told), places)
    strict, build, stop, run = commands(made.files["start.sh"])
    assert strict == "set -eu" and stop == "docker stop llm" and " VLLM_IMAGE=vllm/vllm-openai:v0.33.0 " in build
    given = words(run)
    assert given[:4] == ["exec", "docker", "run", "-d"]
    at = given.index("seamark-worker-llm")
    return made, given[4:at], given[at + 1 :]


def test_a_container_is_run_again_in_its_place(places):
    made, options, arguments = container(places)
    assert options == ["--name=llm-seamark", "--env=A=b c"]
    assert arguments == ["m", "--x", "it's $HOME", *HOST]
    assert made.start == f"sh {quoted(places.out, 'start.sh')}"
    assert (made.undo[0], made.undo[-1]) == ("docker rm -f llm-seamark", "docker start llm") and len(made.undo) == 4


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ({"Binds": ["/a:/b", "/c:/d:ro"]}, ["--volume=/a:/b", "--volume=/c:/d:ro"]),
        (
            {"PortBindings": {"8000/tcp": [{"HostIp": "10.0.0.7", "HostPort": "1"}, {"HostPort": "2"}], "9/udp": None}},
            ["--publish=10.0.0.7:1:8000/tcp", "--publish=2:8000/tcp"],
        ),
        ({"PortBindings": {"8000/tcp": [{"HostIp": ""}]}}, ["--publish=:8000/tcp"]),
        ({"NetworkMode": "host"}, ["--network=host"]),
        *(({"NetworkMode": each}, []) for each in ("", "default", "bridge", None)),
        ({"IpcMode": "host"}, ["--ipc=host"]),
        *(({"IpcMode": each}, []) for each in ("", "private", "shareable", None)),
        ({"Runtime": "nvidia"}, ["--runtime=nvidia"]),
        *(({"Runtime": each}, []) for each in ("", "runc")),
        ({"ShmSize": 1 << 30}, ["--shm-size=1073741824"]),
        *(({"ShmSize": each}, []) for each in (0, 67108864, None)),
        ({"Memory": 1 << 30}, ["--memory=1073741824"]),
        ({"Memory": 0}, []),
        ({"Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": 7}]}, ["--ulimit=memlock=-1:7"]),
        ({"Devices": [{"PathOnHost": "/dev/x"}], "CapAdd": ["SYS_NICE"]}, ["--device=/dev/x", "--cap-add=SYS_NICE"]),
        ({"Privileged": True}, ["--privileged"]),
        ({"Privileged": False}, []),
        ({"RestartPolicy": {"Name": "always"}}, ["--restart=always"]),
        *(({"RestartPolicy": {"Name": each}}, []) for each in (None, "", "no")),
        ({"RestartPolicy": None}, []),
        ({"DeviceRequests": [{"Capabilities": [["gpu"]], "DeviceIDs": None}]}, ["--gpus=all"]),
        ({"DeviceRequests": [{"Capabilities": [["gpu"]], "DeviceIDs": ["0", "2"]}]}, ['--gpus="device=0,2"']),
        ({"DeviceRequests": [{"Capabilities": [["tpu"], ["gpu", "x"]]}]}, ["--gpus=all"]),
        ({"DeviceRequests": [{"Capabilities": [["tpu"]]}, {"Capabilities": None}]}, []),
    ],
)
def test_a_container_is_started_with_what_it_was_started_with(host, options, places):
    _, given, _ = container(places, {"Env": None}, **host)
    assert given == ["--name=llm-seamark", *options]


def test_a_container_of_a_shell_keeps_it(places):
    _, options, (letter, text) = container(places, {"Entrypoint": ["bash", "-c"], "Cmd": ["vllm serve m"], "Env": []})
    assert options == ["--name=llm-seamark", "--entrypoint=bash"] and letter == "-c"
    assert words(text) == words(f"vllm serve m {' '.join(ADDED)}")
