"""`seamark setup`: what is refused; what is written (`golden/recipe_files.txt`); what is printed: `tests/data/setup`.

What is written for a recipe: all of it but what vLLM dropped, and the plugin and the flags that hits need. Where the
scripts are run: `tests/gateway/test_setup_recipes.py`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from proxy.commands import setup
from proxy.commands.cures import EVENTS_FLAG, NEEDED
from proxy.commands.recipe import EVERYWHERE
from proxy.commands.recipe_files import Places, RecipeFiles, files_of
from proxy.commands.recipe_reader import read_recipe
from proxy.commands.setup import gateway_host, gateway_worker, run_script, source_folder, undo_script
from proxy.errors import SettingsError
from tests.deploy.compose_files import DEPLOY

SOURCE = DEPLOY.parent


LINE = "vllm serve m"


def test_nothing_is_overwritten_unless_that_is_said(tmp_path, capsys):
    out = tmp_path / "my files"
    flags = [LINE, "--out", str(out)]
    assert setup.main(flags) == 1  # nobody knows the model
    (out / "gateway.sh").unlink()
    (out / "seamark.toml").write_text("mine")
    capsys.readouterr()
    assert setup.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "seamark.toml" in line and "--force" in line and "gateway.sh" not in line
    assert (out / "seamark.toml").read_text() == "mine" and not (out / "gateway.sh").exists()
    assert setup.main([*flags, "--force"]) == 1
    assert (out / "seamark.toml").read_text() != "mine" and (out / "gateway.sh").exists()


@pytest.mark.parametrize(
    ("given", "flags", "said"),
    [
        ("Qwen/Qwen3.6-27B", [], "is no file, no command with `vllm serve`"),
        (LINE, ["--source", "/nowhere"], "--source: /nowhere is no checkout"),
        (LINE, ["--out", "/dev/null/out"], "Not a directory"),
        ("./launch-cluster.sh exec vllm serve m", ["--spark", "/nowhere"], "--spark: /nowhere is no checkout"),
    ],
)
def test_what_is_missing_or_cannot_be_is_said_in_one_line(given, flags, said, tmp_path, capsys):
    out = tmp_path / "out"
    assert setup.main([given, "--out", str(out), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark setup: ") and said in line and not out.exists()


def test_without_a_recipe_one_is_asked_for(capsys):
    with pytest.raises(SystemExit, match="2"):
        setup.main([])
    assert "required: RECIPE" in capsys.readouterr().err


def test_the_source_is_the_checkout_that_this_runs_in_else_the_one_that_pip_has_noted_if_it_is_there(
    monkeypatch, tmp_path
):
    def installed(what: str | None) -> None:
        monkeypatch.setattr(setup.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: what))

    monkeypatch.setattr(setup.metadata, "distribution", Mock(side_effect=setup.metadata.PackageNotFoundError))
    assert source_folder() == SOURCE
    monkeypatch.setattr(setup, "__file__", str(tmp_path / "a/b/c.py"))
    assert source_folder() is None
    for what in (None, "{}", "no JSON"):  # from a package index: pip notes no URL
        installed(what)
        assert source_folder() is None
    installed(json.dumps({"url": f"file://{tmp_path}/my%20seamark"}))
    assert source_folder() is None
    (tmp_path / "my seamark/deploy").mkdir(parents=True)
    (tmp_path / "my seamark/deploy/compose.yaml").write_text("")
    assert source_folder() == tmp_path / "my seamark"


def test_without_a_checkout_nothing_is_set_up(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup, "source_folder", lambda: None)
    assert setup.main([LINE, "--out", str(tmp_path / "b")]) == 2
    assert "--source: " in capsys.readouterr().err


# What vLLM dropped, as it may be spelt, before and behind what stays.
DROPPED = "--mamba-cache-mode align --a 1 --no-enable-prefix-caching --mamba_cache_mode=align --b"

MINE = {"name": "mine", "container": "vllm-node", "mods": ["mods/seamark", "mods/theirs"], "defaults": {"port": 8000}}
MINE |= {"command": f"echo {{port}}\nvllm serve 'm m' {DROPPED} --port {{port}}   \n# end", "extra": 1}


def compose(**service: Any) -> dict[str, Any]:
    usual = {"image": "vllm/vllm-openai:v0.33.0", "command": f"m --port 8001 {DROPPED}"}
    return {"services": {"my llm": {**usual, **service}}}


# A file's name and what is in it, as a text or YAML; without a name, a line.
WRITTEN: dict[str, tuple[str, Any]] = {
    "a line": ("", "vllm serve m a --b 1 2 --c --d=1 x -e y"),
    "a line with all flags": ("", f"vllm serve m {' '.join(NEEDED)}"),
    "a line with some flags": ("", f"vllm serve m --enable_scale_out {EVENTS_FLAG} --middleware mine"),
    "a line, Rust": ("", "VLLM_USE_RUST_FRONTEND=1 vllm serve m"),
    "a script": ("mine.sh", f"#!/bin/bash\nsource a/b\nvllm serve m {DROPPED} 2>&1 | tee log\nend\n"),
    "a script with a line in its name": ("a\ntouch b.sh", "vllm serve m\n"),
    "the launcher": ("run.sh", "#!/usr/bin/env bash\na\n./launch-cluster.sh -t x exec vllm serve m --a 1\nb\n"),
    "spark": ("My Recipe.yaml", MINE),
    "spark, alone": ("solo.yaml", {**MINE, "solo_only": True}),
    "docker": (
        "My Run_2.x.sh",
        f"#!/bin/bash\necho a\ndocker run --rm --entrypoint vllm -p 80:8000 -e 'A=b c' i:1 serve m {DROPPED}\nb\n",
    ),
    "podman, a shell": (
        "ä.sh",
        "podman run --entrypoint=a --entrypoint=bash --name=x i -c 'pip install a && vllm serve m --host 1.2.3.4'",
    ),
    "config": (
        "my vllm.yaml",
        {"model": "m", "mamba_cache_mode": "align", "no-enable-prefix-caching": True, "text": "a\nb\n"},
    ),
    "config with a host": ("my vllm.yaml", {"model": "m", "host": "10.0.0.7"}),
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Folders with a blank in their names, and what is read of them."""
    made = Places(tmp_path / "my out", tmp_path / "sea mark", tmp_path / "spark vllm")
    for folder in (made.source, made.spark / "mods", made.spark / "recipes"):
        folder.mkdir(parents=True)
    return made


def shown(made: RecipeFiles) -> str:
    files = "".join(f"--- {name}\n{text}" for name, text in made.files.items())
    return anywhere("\n".join([files, *(f"undo: {each}" for each in made.undo), *made.notes]))


def anywhere(text: str) -> str:
    """Without what tells one folder's images from another's."""
    return re.sub(r"(seamark-worker-[a-z0-9.-]*-)[0-9a-f]{8}\b", r"\1<FOLDER'S>", text)


def write(places: Places, name: str, what: Any) -> RecipeFiles:
    path = places.source / name
    if name:
        path.write_text(what if isinstance(what, str) else yaml.safe_dump(what))
    return files_of(read_recipe(str(path) if name else what, lambda name: None), places)


@pytest.mark.parametrize("case", WRITTEN)
def test_a_recipe_stays_but_for_what_vllm_dropped_and_gets_what_hits_need(case, places, expect_golden):
    made = write(places, *WRITTEN[case])
    expect_golden("recipe_files", case, shown(made), FOLDER=places.out.parent)


def test_a_recipe_in_a_checkout_is_run_there_and_another_one_wants_a_checkout(places, tmp_path):
    nowhere = places._replace(spark=tmp_path / "none")
    made = write(nowhere._replace(source=places.spark / "recipes"), "a.yaml", MINE)
    assert f"cd '{places.spark}'\n" in made.files["start.sh"]
    for missing in ("none", "mods", "recipes"):
        if missing != "none":
            shutil.rmtree(places.spark / missing)
            nowhere = places
        with pytest.raises(SettingsError, match=r"--spark: .* is no checkout of spark-vllm-docker"):
            write(nowhere, "b.yaml", MINE)


CONFIG: Mapping[str, Any] = {
    "Image": "vllm/vllm-openai:v0.33.0",
    "Entrypoint": ["vllm", "serve"],
    "Cmd": ["m", "--x", "it's $HOME"],
    "Env": ["PATH=/bin", "A=b c"],
}


def container(places: Places, config: Mapping[str, Any] | None = None, **host: Any) -> RecipeFiles:
    told = {"Name": "/llm", "Config": {**CONFIG, **(config or {})}, "HostConfig": host}
    return files_of(read_recipe("llm", lambda name: told), places)


def test_a_container_is_run_again_in_its_place_and_a_shell_in_it_stays(places, expect_golden):
    shell = {"Entrypoint": ["bash", "-c"], "Cmd": ["vllm serve m"], "Env": []}
    for case, config in {"a container": None, "a container of a shell": shell}.items():
        expect_golden("recipe_files", case, shown(container(places, config)), FOLDER=places.out.parent)


BOUND = {"8000/tcp": [{"HostIp": "10.0.0.7", "HostPort": "1"}, {"HostPort": "2"}], "9/udp": None}

# What Docker says that a container was started with.
HOSTS: list[dict[str, Any]] = [
    {"Binds": ["/a:/b", "/c:/d:ro"], "PortBindings": BOUND, "ShmSize": 1 << 30, "Memory": 1 << 30, "Privileged": True},
    {"NetworkMode": "host", "IpcMode": "host", "Runtime": "nvidia", "RestartPolicy": {"Name": "always"}},
    {"Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": 7}], "Devices": [{"PathOnHost": "/dev/x"}], "CapAdd": ["X"]},
    {"NetworkMode": "", "IpcMode": None, "Runtime": "runc"},
    *({"NetworkMode": network, "IpcMode": ipc} for network, ipc in (("default", "private"), ("bridge", "shareable"))),
    *({"ShmSize": size, "Memory": 0, "Privileged": False} for size in (0, 67108864, None)),
    *({"RestartPolicy": each} for each in (None, {"Name": ""}, {"Name": "no"})),
    {"PortBindings": {"8000/tcp": [{"HostIp": ""}]}},
    *(
        {"DeviceRequests": requests}
        for requests in (
            [{"Capabilities": [["gpu"]], "DeviceIDs": None}],
            [{"Capabilities": [["gpu"]], "DeviceIDs": ["0", "2"]}],
            [{"Capabilities": [["tpu"], ["gpu", "x"]]}],
            [{"Capabilities": [["tpu"]]}, {"Capabilities": None}],
        )
    ),
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_container_is_started_with_what_it_was_started_with(host, places, expect_golden):
    run = shown(container(places, {"Env": None}, **host)).partition("docker run")[2].partition("\nundo:")[0]
    expect_golden("recipe_files", f"a container with {host}", f"docker run{run}", FOLDER=places.out.parent)


def test_vllm_and_the_gateway_run_in_one_terminal_and_all_is_undone(places, expect_golden):
    undo = undo_script(places, ["docker x", "podman y", "rm z"])
    scripts = [run_script(places, "start.sh"), undo]
    expect_golden("recipe_files", "run and undo", "\n".join(scripts), FOLDER=places.out.parent)


@pytest.mark.parametrize(
    ("flags", "host", "worker"),
    [
        ("", EVERYWHERE, "http://127.0.0.1:8000"),
        ("--host localhost --port 8001", "127.0.0.1", "http://127.0.0.1:8001"),
        ("--host ::", "::", "http://127.0.0.1:8000"),
        ("--host fd00::7", "fd00::7", "http://[fd00::7]:8000"),
    ],
)
def test_the_gateway_listens_where_vllm_did_and_finds_it_there(flags, host, worker):
    recipe = read_recipe(f"vllm serve m {flags}", lambda name: None)
    assert (gateway_host(recipe), gateway_worker(recipe)) == (host, worker)
