"""`seamark setup`: what is refused, and what is written whatever is given (`golden/recipe_files.txt`).

What is said, written and run for each way to run vLLM: `tests/data/setup`.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from proxy.commands import setup, unit_files
from proxy.commands.recipe import EVERYWHERE
from proxy.commands.recipe_files import Places, RecipeFiles, files_of
from proxy.commands.recipe_reader import read_recipe
from proxy.commands.setup import gateway_host, gateway_worker, left_behind, run_script, source_folder, undo_script
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


MINE = {"name": "mine", "container": "vllm-node", "command": "vllm serve m"}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Folders with a blank in their names, and what is read of them."""
    made = Places(tmp_path / "my out", tmp_path / "sea mark", tmp_path / "spark vllm")
    for folder in (made.source, made.spark / "mods", made.spark / "recipes"):
        folder.mkdir(parents=True)
    return made


def write(places: Places, name: str, what: Any) -> RecipeFiles:
    path = places.source / name
    path.write_text(yaml.safe_dump(what))
    return files_of(read_recipe(str(path), lambda name: None), places)


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


# Of each something stays: what vLLM compiled, what was cached of a build, a volume, an image that was taken.
LEFT = (("vllm serve m", ""), ("docker run i m", ""), ("podman run -v a:/root/.cache/vllm i m", "new:1"))


def test_vllm_and_the_gateway_run_in_one_terminal_and_all_is_undone(places, expect_golden):
    leaves = [left_behind(read_recipe(line, lambda name: None), places._replace(image=image)) for line, image in LEFT]
    undo = undo_script(places, ["docker x", "podman y", "rm z", *chain(*leaves)])
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


@pytest.mark.parametrize(("mode", "of_user", "user"), [(0o755, False, "llm"), (0o750, False, None), (0o750, True, "")])
def test_the_gateway_runs_as_vllm_does_where_that_user_may_read_seamark(mode, of_user, user, monkeypatch, tmp_path):
    path = tmp_path / (".config/systemd/user" if of_user else "") / "vllm.service"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[Service]\nUser=llm\nExecStart=/srv/bin/vllm serve m\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    unit = read_recipe(str(path), lambda name: None).document
    monkeypatch.setattr(unit_files.Path, "stat", lambda self: SimpleNamespace(st_mode=mode))
    assert unit_files.gateway_user(unit) == (pwd.getpwuid(os.getuid()).pw_name if user is None else user)
