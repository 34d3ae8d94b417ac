"""What `seamark setup` writes is taken by those who read it: the gateway, sh, systemd, Compose, Helm."""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from proxy.commands import setup
from proxy.commands.render_server import free_port
from proxy.commands.setup_files import SetupWay
from proxy.settings import Settings, add_arguments, load
from tests.deploy.compose_files import DEPLOY, OF_THE_USER, example, read
from tests.harness import helm
from tests.harness.gateways import CHAT, chat
from tests.harness.kubernetes_schemas import complaints
from tests.harness.published_recipes import RECIPES
from tests.harness.recording_worker import recording_worker
from tests.harness.waiting import wait_for

WORKER = ("--worker", "http://127.0.0.1:8000/v1")

# What would be more than a name in a script, or in a file of settings.
INTO_SHELLS = ["x; id", "$(id)", "`id`", "x\nid", "x'", 'x"', "x y", "x&id", "x|id", "$HOME", "x\\", "x\x1b[2J"]

# What make-mod.sh wants of a checkout, in the home folder.
SPARK = "spark-vllm-docker"

SECOND = ("--worker", f"http://{OF_THE_USER['SECOND_SPARK']}:8000")

# Every kind of answer: the flags, and files that have to come of them.
ANSWERS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "pip": (("--way", "pip", "--model", "a/B c"), {"seamark.toml", "gateway.sh", "worker.sh"}),
    "pip, vLLM runs": (("--way", "pip", *WORKER, *SECOND), {"seamark.toml", "gateway.sh"}),
    "compose": (("--way", "compose", "--model", "nemotron-3-super"), {"compose.sh", "seamark.env"}),
    "compose, own model": (
        ("--way", "compose", "--model", "a/B"),
        {"compose.sh", "seamark.env", "compose.model.yaml", "models/model.yaml"},
    ),
    "compose, CPU": (("--way", "compose", "--cpu"), {"compose.sh", "seamark.env"}),
    "compose, two": (("--way", "compose", "--model", "qwen3.6-35b", *SECOND), {"compose.sh", "seamark.env"}),
    "beside": (("--way", "compose-beside", *WORKER), {"compose.sh", "seamark.env"}),
    "spark": (
        ("--way", "spark-vllm-docker", "--model", "a/B"),
        {"start.sh", "gateway.sh", "seamark.toml", "seamark-b.yaml"},
    ),
    "spark, our recipe": (
        ("--way", "spark-vllm-docker", "--model", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"),
        {"start.sh", "gateway.sh", "seamark.toml"},
    ),
    "spark, our recipe for two": (
        ("--way", "spark-vllm-docker", "--model", "glm-5.3-flash"),
        {"start.sh", "gateway.sh", "seamark.toml"},
    ),
    "systemd": (
        ("--way", "systemd", *WORKER),
        {"seamark-gateway.service", "seamark.env", "install.sh", "remove.sh"},
    ),
    "kubernetes": (
        ("--way", "kubernetes", "--workers", "2", "--model", "a/B", "--registry", "registry.example/us"),
        {"values.yaml", "images.sh"},
    ),
    "kubernetes, our model": (("--way", "kubernetes", "--model", "qwen3.6-35b"), {"values.yaml", "images.sh"}),
    "kubernetes, vLLM runs": (
        ("--way", "kubernetes", "--worker", "http://vllm.models:8000"),
        {"values.yaml", "images.sh"},
    ),
}


@pytest.fixture(autouse=True)
def nothing_answers(monkeypatch, tmp_path_factory) -> None:
    """On the ports that are looked at, whatever runs on this machine; and there is a checkout of spark-vllm-docker."""
    monkeypatch.setattr(setup, "PORTS", [free_port()])
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("mods", "recipes"):
        (home / SPARK / name).mkdir(parents=True)


@pytest.fixture(params=ANSWERS)
def folder(request, tmp_path, capsys) -> tuple[str, Path]:
    """The answers' name, and a folder with the files that came of them; it has a blank in its name."""
    out = tmp_path / "my files"
    flags, files = ANSWERS[request.param]
    assert setup.main([*flags, "--out", str(out)]) == 0, capsys.readouterr().err
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == files
    return request.param, out


def written(tmp_path: Path, name: str) -> Path:
    out = tmp_path / "out"
    assert setup.main([*ANSWERS[name][0], "--out", str(out)]) == 0
    return out


def variables(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def gateway_settings(given: dict[str, str]) -> Settings:
    """Those that variables make, as the gateway reads them: refused if there is no such setting."""
    return Settings(
        **{name.removeprefix("SEAMARK_").lower(): value for name, value in given.items() if name.startswith("SEAMARK_")}
    )


def test_every_file_begins_with_what_it_is_for_and_every_script_is_one(folder):
    _, out = folder
    for path in out.rglob("*.*"):
        lines = path.read_text().splitlines()
        if path.suffix == ".sh":
            assert lines.pop(0) == "#!/bin/sh" and os.access(path, os.X_OK)
            subprocess.run(["sh", "-n", str(path)], check=True)
        assert lines[0].startswith("# "), path


@pytest.mark.parametrize("name", ["pip", "pip, vLLM runs", "spark"])
def test_the_gateway_takes_the_toml_file(name, tmp_path):
    out = written(tmp_path, name)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    settings = load(parser.parse_args(["--config", str(out / "seamark.toml")]), {})
    expected = ("http://127.0.0.1:8000", SECOND[1]) if name == "pip, vLLM runs" else ("http://127.0.0.1:8000",)
    assert settings.worker == expected and (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert not settings.shadow


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith(("compose", "beside"))])
def test_compose_gets_files_that_are_there_and_variables_that_it_knows(name, tmp_path):
    out = written(tmp_path, name)
    words = shlex.split((out / "compose.sh").read_text().partition("\nexec ")[2])
    files = [Path(words[at + 1]) for at, word in enumerate(words) if word == "-f"]
    assert words[:4] == ["docker", "compose", "--env-file", str(out / "seamark.env")] and words[-1] == "$@"
    assert files[0] == DEPLOY / "compose.yaml" and all(path.is_file() for path in files)
    given = variables(out / "seamark.env")
    assert given.keys() <= example().keys() | OF_THE_USER.keys()
    # Variables without a default are set where an overlay wants them.
    wanted = {variable for path in files for variable in re.findall(r"\$\{([A-Z_]+):\?", path.read_text())}
    assert wanted <= given.keys()
    gateway_settings({"SEAMARK_WORKER": "http://a", **given})
    if "MODEL_FILE" in given:
        mounted = out / "models" if (out / "models").exists() else DEPLOY / "models"
        assert yaml.safe_load((mounted / given["MODEL_FILE"]).read_text())["model"]
    if (overlay := out / "compose.model.yaml").exists():
        (volume,) = yaml.safe_load(overlay.read_text())["services"]["worker"]["volumes"]
        assert volume == f"{out / 'models'}:/etc/seamark/models:ro"
        targets = [each.split(":")[1] for each in read("compose.yaml")["services"]["worker"]["volumes"]]
        assert volume.split(":")[1] in targets, "it takes the place of the models of deploy/"
    has_compose = shutil.which("docker") and not subprocess.run(["docker", "compose", "version"]).returncode
    if has_compose:
        subprocess.run(["sh", str(out / "compose.sh"), "config", "--quiet"], check=True)


@pytest.mark.parametrize(
    "model", ["nemotron-3-super", "nemotron-3-super.yaml", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"]
)
def test_a_model_that_deploy_has_flags_for_is_known_by_either_name(model, tmp_path):
    assert setup.main(["--way", "compose", "--model", model, "--out", str(tmp_path)]) == 0
    assert variables(tmp_path / "seamark.env")["MODEL_FILE"] == "nemotron-3-super.yaml"


def test_a_container_is_told_where_its_machine_is(tmp_path):
    given = variables(written(tmp_path, "beside") / "seamark.env")
    assert given["SEAMARK_WORKER"] == "http://host.docker.internal:8000"


def test_a_recipe_has_the_flags_that_the_gateway_needs(tmp_path):
    recipe = yaml.safe_load((written(tmp_path, "spark") / "seamark-b.yaml").read_text())
    shipped = yaml.safe_load((DEPLOY / "spark-vllm-docker/recipes/seamark-qwen3.6-35b.yaml").read_text())
    assert recipe.keys() == shipped.keys() and recipe["mods"] == shipped["mods"] and recipe["model"] == "a/B"
    words = shlex.split(recipe["command"].format(**recipe["defaults"]))
    assert words[:3] == ["vllm", "serve", "a/B"]
    assert {word for word in words if word.startswith("--enable")} <= set(shlex.split(shipped["command"]))
    assert "engine_patches.reporting.events_api.EventsEndpoint" in words


def test_a_recipe_for_several_machines_is_not_started_on_one_and_all_that_were_copied_go_again(tmp_path, capsys):
    for name, command in (
        ("spark, our recipe", "seamark-nemotron-3-super --solo"),  # the plainer one of two
        ("spark, our recipe for two", "seamark-glm-5.3-flash"),
    ):
        start = (written(tmp_path / name.replace(" ", "-"), name) / "start.sh").read_text()
        assert start.endswith(f"exec ./run-recipe.sh {command}\n")
        (removed,) = re.findall(r"rm -r mods/seamark (.*?) +#", capsys.readouterr().out)
        copied = [f"recipes/{path.name}" for path in (DEPLOY / "spark-vllm-docker/recipes").glob("*.yaml")]
        assert sorted(removed.split()) == sorted(copied)


def test_the_unit_is_that_of_deploy_and_its_variables_are_settings(tmp_path):
    out = written(tmp_path, "systemd")
    unit = "seamark-gateway.service"
    assert (out / unit).read_text() == (DEPLOY / "systemd" / unit).read_text()
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(out / unit)
    installed = shlex.split((out / "install.sh").read_text())
    assert parser["Service"]["EnvironmentFile"] == "-/etc/seamark/seamark.env"
    assert "/etc/seamark/seamark.env" in installed and str(out / "seamark.env") in installed
    assert gateway_settings(variables(out / "seamark.env")).worker == ("http://127.0.0.1:8000",)


def in_cluster(tmp_path: Path, name: str, capsys) -> tuple[Path, dict[tuple[str, str], Mapping[str, Any]]]:
    """The folder, and what the printed command would have Helm send to the cluster."""
    out = written(tmp_path, name)
    (command,) = re.findall(r"^ +helm upgrade --install seamark (.*)$", capsys.readouterr().out, re.M)
    chart, *flags = shlex.split(command)
    assert flags == ["--namespace", "seamark", "--create-namespace", "--values", str(out / "values.yaml")]
    rendered = helm.render(Path(chart), flags)
    assert not rendered.error, rendered.error
    return out, {(each["kind"], each["metadata"]["name"]): each for each in rendered.objects}


def only_container(found: Mapping[tuple[str, str], Mapping[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (container,) = found[kind, name]["spec"]["template"]["spec"]["containers"]
    return container


def workers_of(found: Mapping[tuple[str, str], Mapping[str, Any]]) -> tuple[str, ...]:
    gateway = only_container(found, "Deployment", "seamark-gateway")
    return gateway_settings({each["name"]: each["value"] for each in gateway["env"]}).worker


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("kubernetes")])
def test_the_chart_takes_the_values_and_kubernetes_what_comes_of_them(name, tmp_path, capsys):
    _, found = in_cluster(tmp_path, name, capsys)
    assert {key: complaints(each) for key, each in found.items()} == {key: [] for key in found}


@pytest.mark.parametrize(
    ("name", "model", "replicas"),
    [("kubernetes", "a/B", 2), ("kubernetes, our model", "nvidia/Qwen3.6-35B-A3B-NVFP4", 1)],
)
def test_the_chart_runs_the_model_in_as_many_workers_as_asked_for(name, model, replicas, tmp_path, capsys):
    _, found = in_cluster(tmp_path, name, capsys)
    assert found["StatefulSet", "seamark-worker"]["spec"]["replicas"] == replicas
    assert workers_of(found) == tuple(f"http://seamark-worker-{n}.seamark-worker:8000" for n in range(replicas))
    config = only_container(found, "StatefulSet", "seamark-worker")["args"][-1]
    assert yaml.safe_load(found["ConfigMap", "seamark-models"]["data"][Path(config).name])["model"] == model


@pytest.mark.parametrize(("name", "registry"), [("kubernetes", "registry.example/us/"), ("kubernetes, our model", "")])
def test_the_images_that_pods_want_are_built_and_pushed(name, registry, tmp_path, capsys):
    out, found = in_cluster(tmp_path, name, capsys)
    parts = {"gateway": "Deployment", "worker": "StatefulSet"}
    wanted = [only_container(found, kind, f"seamark-{part}")["image"] for part, kind in parts.items()]
    assert wanted == [f"{registry}seamark-{part}" for part in parts]
    script = (out / "images.sh").read_text()
    assert re.findall(r"^docker build .* -t (\S+)", script, re.M) == wanted
    assert re.findall(r"^docker push (\S+)$", script, re.M) == (wanted if registry else [])


def test_beside_a_vllm_the_chart_starts_none_and_no_image_of_one_is_built(tmp_path, capsys):
    out, found = in_cluster(tmp_path, "kubernetes, vLLM runs", capsys)
    assert not any(name == "seamark-worker" for _, name in found)
    assert workers_of(found) == ("http://vllm.models:8000",) and "worker" not in (out / "images.sh").read_text()


def test_nothing_is_overwritten_unless_that_is_said(tmp_path, capsys):
    out = written(tmp_path, "pip, vLLM runs")
    (out / "gateway.sh").unlink()
    (out / "seamark.toml").write_text("mine")
    capsys.readouterr()
    flags = [*ANSWERS["pip, vLLM runs"][0], "--out", str(out)]
    assert setup.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "seamark.toml" in line and "--force" in line
    assert (out / "seamark.toml").read_text() == "mine" and not (out / "gateway.sh").exists()
    assert setup.main([*flags, "--force"]) == 0
    assert (out / "seamark.toml").read_text() != "mine" and (out / "gateway.sh").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--way: how do you run vLLM?"),
        (["--way", "compose"], "--model"),
        (["--way", "compose-beside"], "--worker"),
        (["--way", "systemd", "--worker", "localhost:8000"], "begins with http://"),
        (["--way", "pip", "--worker", "http://me:secret@a:1"], "no password"),
        (["--way", "pip", "--workers", "2", *WORKER], "name all 2"),
        (["--way", "pip", "--workers", "0", *WORKER], "less than one"),
        (["--way", "compose", "--model", "m", "--workers", "3"], "--way compose-beside"),
        (["--way", "compose", "--model", "m", "--workers", "2"], "second machine"),
        (["--way", "compose", "--model", "m", "--worker", "http://spark-2:8000"], "IP address"),
        (["--way", "kubernetes", *WORKER], "the pod itself"),
        (["--way", "compose", "--model", "m\nx: y"], "--model"),
        (["--way", "compose", "--model", "m", "--source", "/nowhere"], "no checkout"),
        (["--way", "spark-vllm-docker", "--model", "m", "--spark", "/nowhere"], "--spark: /nowhere is no checkout"),
        (["--way", "pip", "--model", str(RECIPES / "nemotron-3-ultra.yaml")], "a recipe and no model: seamark setup"),
        (["--way", "pip", str(RECIPES / "nemotron-3-ultra.yaml")], "--way: the recipe says it"),
        *((["--way", "kubernetes", "--model", "m", "--registry", each], "--registry") for each in INTO_SHELLS),
        *((["--way", "pip", "--worker", f"http://a:1/{each}"], "--worker") for each in INTO_SHELLS),
        (["--way", "systemd", "--worker", "http://a:1\nSEAMARK_API_KEYS=/tmp/k"], "--worker"),
        (["--way", "compose-beside", "--worker", "http://a:1,http://evil:1"], "--worker"),
        (["--way", "compose", "--model", "m", "--worker", "http://[fe80::1%25$(id)]:8000"], "--worker"),
        (["--way", "pip", *WORKER, "--source", "/a\nb"], "--source"),
        (["--way", "spark-vllm-docker", "--model", "m", "--spark", "/a\nb"], "--spark"),
        (["vllm serve m --port " + "9" * 5000], "is no port"),
        (['vllm serve qwen3-next --speculative-config \'{"method":"mtp"}\' -pp ' + "9" * 5000], "is not a number"),
        (["/nowhere.yaml"], "is no file, no command"),
        (["vllm serve m 'x"], "is not closed"),
        ([str(RECIPES)], "is a folder"),
        ([str(RECIPES / "glm-5.3-flash.yaml"), "--spark", "/nowhere"], "--spark: /nowhere is no checkout"),
    ],
)
def test_what_is_missing_or_cannot_be_is_said_in_one_line(flags, said, tmp_path, capsys):
    out = tmp_path / "out"
    assert setup.main([*flags, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "secret" not in line and not out.exists()


def test_a_terminal_is_asked_for_what_the_flags_leave_open(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    answers = iter(["slurm", SetupWay.SPARK, "a/B", str(out)])
    monkeypatch.setattr(setup, "_ask", lambda question, default: next(answers) or default)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(setup.sys, stream), "isatty", lambda: True, raising=False)
    assert setup.main([]) == 0
    assert "One of:" in capsys.readouterr().out and (out / "seamark-b.yaml").exists() and not list(answers)
    answers = iter([SetupWay.COMPOSE, "a/B", OF_THE_USER["SECOND_SPARK"], str(tmp_path / "two")])
    assert setup.main([]) == 0
    assert variables(tmp_path / "two/seamark.env")["SECOND_SPARK"] == OF_THE_USER["SECOND_SPARK"] and not list(answers)
    answers = iter([SetupWay.KUBERNETES, "a/B", "3", str(tmp_path / "three")])
    assert setup.main([]) == 0
    assert yaml.safe_load((tmp_path / "three/values.yaml").read_text())["worker"]["replicas"] == 3


def test_without_vllm_here_the_worker_wants_its_environment_active_and_says_how(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = written(tmp_path, "pip")
    (note,) = re.findall(r"^Note: (.*)$", capsys.readouterr().out, re.M)
    assert note.endswith(f"pip install --no-deps {shlex.quote(str(DEPLOY.parent))}")
    bare = {"PATH": str(tmp_path / "none")}
    told = subprocess.run(["/bin/sh", str(out / "worker.sh")], env=bare, capture_output=True, text=True)
    assert told.returncode == 1 and told.stderr.strip() == note
    # Whatever `seamark` is first there gets the model and vLLM's flags.
    (tmp_path / "none").mkdir()
    (tmp_path / "none/seamark").write_text('#!/bin/sh\nfor each; do echo "$each"; done\n')
    (tmp_path / "none/seamark").chmod(0o755)
    command = ["/bin/sh", str(out / "worker.sh"), "--max-model-len", "8192"]
    told = subprocess.run(command, env=bare, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["worker", "a/B c", "--port", "8000", "--max-model-len", "8192"]


def test_what_answers_on_this_machine_is_named_and_the_printed_commands_lead_to_a_hit(tmp_path, monkeypatch, capsys):
    out = tmp_path / "my files"
    with recording_worker() as worker, recording_worker(api_key="k") as locked:
        ports = [int(each.url.rpartition(":")[2]) for each in (worker, locked)]
        monkeypatch.setattr(setup, "PORTS", [free_port(), ports[0]])
        assert [each.models for each in setup.running(ports)] == [("m",), ()]
        assert setup.main(["--way", "pip", "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        assert f"Found: {worker.url} serves m" in printed
        command = next(line.strip() for line in printed.splitlines() if line.strip().startswith("sh "))
        port = free_port()
        process = subprocess.Popen([*shlex.split(command), "--port", str(port)], stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"

            def ready() -> bool:
                assert process.poll() is None
                try:
                    return httpx.get(f"{url}/ready").is_success
                except httpx.TransportError:
                    return False

            wait_for(ready)
            answer = httpx.post(url + CHAT, json=chat("When is high tide?"))
            assert answer.status_code == 200 and answer.headers["x-seamark-cached"] == str(worker.cached)
        finally:
            process.terminate()
            process.wait()


@pytest.mark.parametrize("noted", [None, "{}", "no JSON"])  # from a package index: pip notes no URL
def test_where_pip_has_noted_no_checkout_the_one_that_this_runs_in_is_the_source(monkeypatch, noted):
    monkeypatch.setattr(setup.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: noted))
    assert setup.source_folder() is not None


def test_without_an_installed_package_too(monkeypatch):
    def gone(name):
        raise setup.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(setup.metadata, "distribution", gone)
    assert setup.source_folder() is not None
