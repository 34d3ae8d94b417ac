"""The files of each way of running vLLM: what the plan says is in them, and what it lacks is named by its flag."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.commands.setup_files import (
    SetupPlan,
    SetupWay,
    WrittenFile,
    files_for,
    gateway_script,
    gateway_toml,
    this_python,
)
from proxy.config_files import read_toml
from proxy.errors import SettingsError
from tests.deploy.compose_files import DEPLOY

SOURCE = DEPLOY.parent

VLLM = "http://127.0.0.1:8000"

SECOND = "http://192.168.1.11:8000"


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    for name in ("mods", "recipes"):
        (tmp_path / "spark vllm" / name).mkdir(parents=True)
    return tmp_path / "spark vllm"


def plan(way: SetupWay, **more: Any) -> SetupPlan:
    usual: dict[str, Any] = {"model": "", "workers": (), "machines": 1, "out": Path("/my out"), "source": SOURCE}
    usual |= {"spark": Path("/nowhere"), "registry": "", "cpu": False}
    return SetupPlan(way, **{**usual, **more})


def lines(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]


def words(written: WrittenFile, script: str) -> list[str]:
    """The command that a script ends in."""
    return shlex.split(lines(written.files[script])[-1])


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines(text))


def test_before_a_vllm_that_runs_there_is_a_gateway_alone():
    written = files_for(plan(SetupWay.PIP, workers=("http://a:1", VLLM)))
    assert list(written.files) == ["seamark.toml", "gateway.sh"]
    assert written.files["seamark.toml"] == gateway_toml(("http://a:1", VLLM))
    start, doctor = written.go_on
    assert start == "sh '/my out/gateway.sh'"
    assert doctor == f"{this_python()} -m proxy.cli doctor --worker http://a:1"
    assert "seamark doctor" in written.notes[0] and len(written.off) == 1
    assert words(written, "gateway.sh")[1:] == [*shlex.split(this_python()), *GATEWAY]


GATEWAY = ["-m", "proxy.cli", "serve", "--config", "/my out/seamark.toml", "$@"]


@pytest.mark.parametrize("has_vllm", [True, False])
def test_the_worker_is_started_here_or_in_the_environment_that_is_active(has_vllm, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_vllm and name == "vllm" else None)
    written = files_for(plan(SetupWay.PIP, model="a/B c"))
    assert list(written.files) == ["seamark.toml", "gateway.sh", "worker.sh"] and len(written.off) == 2
    assert written.go_on == ("sh '/my out/worker.sh'", "sh '/my out/gateway.sh'")
    command = [*shlex.split(this_python()), "-m", "engine_patches"] if has_vllm else ["seamark"]
    assert words(written, "worker.sh") == ["exec", *command, "worker", "a/B c", "--port", "8000", "$@"]
    check = "command -v seamark >/dev/null || "
    assert (check in written.files["worker.sh"]) is not has_vllm
    assert [note.rpartition(": ")[2] for note in written.notes] == (
        [] if has_vllm else [f"pip install --no-deps {shlex.quote(str(SOURCE))}"]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (note,) = files_for(plan(SetupWay.PIP, model="m", source=None)).notes
    assert note.endswith("/path/to/seamark")


@pytest.mark.parametrize(
    ("urls", "host", "worker"),
    [([], "127.0.0.1", [VLLM]), (["http://a:1", "http://b:1"], "10.0.0.7", ["http://a:1", "http://b:1"])],
)
def test_the_gateways_settings_are_toml(urls, host, worker, tmp_path):
    path = tmp_path / "seamark.toml"
    path.write_text(gateway_toml(urls, host))
    assert read_toml("config", path) == {"worker": worker, "host": host, "port": 8080, "shadow": False}
    assert read_toml("config", path)["host"] == host
    path.write_text(gateway_toml(urls))
    assert read_toml("config", path)["host"] == "127.0.0.1"


def test_the_gateways_script_names_the_settings_as_one_word():
    assert gateway_script(Path("/a b")).endswith("--config '/a b/seamark.toml' \"$@\"\n")


def composed(written: WrittenFile) -> list[str]:
    """The files that Compose is given."""
    given = words(written, "compose.sh")
    assert given[:5] == ["exec", "docker", "compose", "--env-file", "/my out/seamark.env"] and given[-1] == "$@"
    assert given[5:-1:2] == ["-f"] * (len(given[5:-1]) // 2)
    return [str(path) for path in given[6:-1:2]]


def deployed(*names: str) -> list[str]:
    return [str(DEPLOY / name) for name in names]


USUAL = {"COMPOSE_PROFILES": "monitoring", "SEAMARK_SHADOW": "false"}


@pytest.mark.parametrize(
    ("more", "overlays", "chosen"),
    [
        ({"model": "nemotron-3-super"}, [], {"MODEL_FILE": "nemotron-3-super.yaml"}),
        ({"cpu": True}, ["compose.cpu.yaml"], {}),
        (
            {"model": "qwen3.6-35b", "machines": 2, "workers": (SECOND,)},
            ["compose.two-sparks.yaml"],
            {"MODEL_FILE": "qwen3.6-35b.yaml", "SECOND_SPARK": "192.168.1.11", "WORKER_BIND": "127.0.0.1"},
        ),
    ],
)
def test_compose_gets_the_files_of_deploy_and_what_is_chosen_in_them(more, overlays, chosen):
    written = files_for(plan(SetupWay.COMPOSE, **more))
    assert list(written.files) == ["seamark.env", "compose.sh"]
    assert composed(written) == deployed("compose.yaml", *overlays)
    assert variables(written.files["seamark.env"]) == {**chosen, **USUAL}
    script = "sh '/my out/compose.sh'"
    assert written.go_on == (f"{script} up --build -d", f"{script} logs -f gateway")
    assert written.off[0].startswith(f"{script} down") and len(written.notes) == len(more.get("workers", ()))
    if "workers" in more:
        assert "WORKER_BIND=192.168.1.11 sh compose.sh up" in written.notes[0]


def test_a_model_of_the_users_own_has_a_file_of_its_own():
    written = files_for(plan(SetupWay.COMPOSE, model='a/"B"'))
    assert list(written.files) == ["seamark.env", "compose.sh", "models/model.yaml", "compose.model.yaml"]
    assert composed(written) == [*deployed("compose.yaml"), "/my out/compose.model.yaml"]
    assert variables(written.files["seamark.env"])["MODEL_FILE"] == "model.yaml"
    model = yaml.safe_load(written.files["models/model.yaml"])
    assert model == {"model": 'a/"B"', "gpu-memory-utilization": 0.8}
    (volume,) = yaml.safe_load(written.files["compose.model.yaml"])["services"]["worker"]["volumes"]
    assert volume == "/my out/models:/etc/seamark/models:ro"


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("nemotron-3-super", "nemotron-3-super.yaml"),
        ("nemotron-3-super.yaml", "nemotron-3-super.yaml"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "nemotron-3-super.yaml"),  # the plainer one of two
        ("nvidia/NVIDIA-Nemotron-3-Super", "model.yaml"),
    ],
)
def test_a_model_that_deploy_has_flags_for_is_known_by_either_name(model, file):
    written = files_for(plan(SetupWay.COMPOSE, model=model))
    assert variables(written.files["seamark.env"])["MODEL_FILE"] == file


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        (VLLM, "http://host.docker.internal:8000"),
        ("http://localhost:8001", "http://host.docker.internal:8001"),
        ("http://[::1]:8000", "http://host.docker.internal:8000"),
        ("https://127.0.0.1", "https://host.docker.internal"),
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
    ],
)
def test_a_container_is_told_where_its_machine_is(url, seen):
    written = files_for(plan(SetupWay.BESIDE, workers=(url, "http://b:1")))
    assert variables(written.files["seamark.env"]) == {"SEAMARK_WORKER": f"{seen},http://b:1", **USUAL}
    assert composed(written) == deployed("compose.yaml", "compose.beside.yaml")
    assert "172.17.0.1" in written.notes[0] and "seamark doctor" in written.notes[1]


def test_a_recipe_is_written_for_a_model_that_has_none(spark):
    written = files_for(plan(SetupWay.SPARK, model="some/My Model_1.5", spark=spark, workers=(SECOND,)))
    assert list(written.files) == ["seamark.toml", "gateway.sh", "seamark-my-model-1.5.yaml", "start.sh"]
    assert written.files["seamark.toml"] == gateway_toml((SECOND,))
    recipe = yaml.safe_load(written.files["seamark-my-model-1.5.yaml"])
    shipped = yaml.safe_load((DEPLOY / "spark-vllm-docker/recipes/seamark-qwen3.6-35b.yaml").read_text())
    assert recipe.keys() == shipped.keys() and recipe["mods"] == shipped["mods"]
    assert recipe["model"] == "some/My Model_1.5" and recipe["solo_only"] is True
    assert recipe["defaults"] == {"port": 8000, "host": "127.0.0.1", "gpu_memory_utilization": 0.8}
    command = shlex.split(recipe["command"].format(**recipe["defaults"]))
    assert command[:3] == ["vllm", "serve", "some/My Model_1.5"]
    assert {word for word in command if word.startswith("--enable")} <= set(shlex.split(shipped["command"]))
    assert "engine_patches.reporting.events_api.EventsEndpoint" in command
    strict, target, make_mod, copy, folder, run = lines(written.files["start.sh"])
    assert (strict, target) == ("set -eu", f"target={shlex.quote(str(spark))}")
    assert make_mod.endswith('make-mod.sh "$target"') and folder == 'cd "$target"'
    assert copy == "cp '/my out/seamark-my-model-1.5'.yaml \"$target/recipes/\""
    assert run == "exec ./run-recipe.sh seamark-my-model-1.5 --solo"
    assert written.go_on == ("sh '/my out/start.sh'", "sh '/my out/gateway.sh'") and not written.notes
    assert "recipes/seamark-my-model-1.5.yaml" in written.off[1]


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "seamark-nemotron-3-super --solo"),  # the plainer one of two
        ("nemotron-3-super", "seamark-nemotron-3-super --solo"),
        ("glm-5.3-flash", "seamark-glm-5.3-flash"),  # for several machines
    ],
)
def test_a_recipe_that_is_there_is_run_and_all_that_were_copied_go_again(model, command, spark):
    written = files_for(plan(SetupWay.SPARK, model=model, spark=spark))
    assert list(written.files) == ["seamark.toml", "gateway.sh", "start.sh"]
    assert lines(written.files["start.sh"])[-1] == f"exec ./run-recipe.sh {command}"
    assert "\ncp " not in written.files["start.sh"]
    (removed,) = re.findall(r"rm -r mods/seamark (.*?) +#", written.off[1])
    copied = [f"recipes/{path.name}" for path in (DEPLOY / "spark-vllm-docker/recipes").glob("*.yaml")]
    assert sorted(removed.split()) == sorted(copied)


def test_the_unit_is_that_of_deploy_and_its_settings_are_put_beside_it():
    written = files_for(plan(SetupWay.SYSTEMD, workers=(VLLM, "http://b:1")))
    unit = "seamark-gateway.service"
    assert list(written.files) == [unit, "seamark.env", "install.sh", "remove.sh"]
    assert written.files[unit] == (DEPLOY / "systemd" / unit).read_text()
    settings = variables(written.files["seamark.env"])
    assert settings == {"SEAMARK_WORKER": f"{VLLM},http://b:1", "SEAMARK_SHADOW": "false"}
    assert "install -D -m 600 '/my out'/seamark.env /etc/seamark/seamark.env\n" in written.files["install.sh"]
    assert f"pip install {shlex.quote(str(SOURCE))}\n" in written.files["install.sh"]
    assert f"rm -f /etc/systemd/system/{unit} /etc/seamark/seamark.env\n" in written.files["remove.sh"]
    assert written.go_on == (
        "sudo sh '/my out/install.sh'",
        f"/opt/seamark/bin/seamark doctor --worker {VLLM}",
    )
    assert written.off == ["sudo sh '/my out/remove.sh'"] and "seamark doctor" in written.notes[0]


@pytest.mark.parametrize(
    ("more", "values", "halves"),
    [
        (
            {"model": "a/B", "machines": 3, "registry": "reg:5000/us/"},
            {
                "images": {"registry": "reg:5000/us/"},
                "worker": {"replicas": 3, "modelConfig": '"model": a/B\n'},
            },
            ["gateway", "worker"],
        ),
        (
            {"model": "qwen3.6-35b"},
            {"images": {"registry": ""}, "worker": {"replicas": 1, "modelFile": "qwen3.6-35b.yaml"}},
            ["gateway", "worker"],
        ),
        (
            {"workers": ("http://a:1", "http://b:1")},
            {
                "images": {"registry": ""},
                "worker": {"enabled": False},
                "gateway": {"settings": {"worker": ["http://a:1", "http://b:1"]}},
            },
            ["gateway"],
        ),
    ],
)
def test_the_charts_values_and_the_images_that_pods_want(more, values, halves):
    written = files_for(plan(SetupWay.KUBERNETES, **more))
    assert list(written.files) == ["values.yaml", "images.sh"]
    given = yaml.safe_load(written.files["values.yaml"])
    if "modelConfig" in given.get("worker", {}):
        model = yaml.safe_load(given["worker"].pop("modelConfig"))
        assert model["model"] == "a/B" and values["worker"].pop("modelConfig")
    assert given == values
    prefix = more.get("registry", "")
    root = shlex.quote(str(SOURCE))
    expected = ["set -eu"]
    for half in halves:
        expected.append(f"docker build -f {root}/deploy/{half}.Dockerfile -t {prefix}seamark-{half} {root}")
        expected += [f"docker push {prefix}seamark-{half}"] if prefix else []
    assert lines(written.files["images.sh"]) == expected
    assert len(written.notes) == (1 if prefix else 2) and "port-forward" in written.notes[0]
    assert ("kubectl -n seamark create secret" in written.files["values.yaml"]) == ("worker" in halves)
    build, install = written.go_on
    assert build == "sh '/my out/images.sh'" and install.endswith("--values '/my out/values.yaml'")
    assert written.off[0] == "helm uninstall seamark --namespace seamark" and len(written.off) == 2


def test_a_registry_ends_in_one_slash():
    for given in ("us", "us/", "us//"):
        written = files_for(plan(SetupWay.KUBERNETES, model="m", registry=given))
        assert "docker push us/seamark-worker\n" in written.files["images.sh"]


@pytest.mark.parametrize(
    ("way", "more", "said"),
    [
        (SetupWay.PIP, {}, "--model: which model"),
        (SetupWay.COMPOSE, {}, "--model: which model"),
        (SetupWay.SPARK, {}, "--model: which model"),
        (SetupWay.SPARK, {"model": "m"}, "--spark: /nowhere is no checkout"),
        (SetupWay.BESIDE, {}, "--worker: --way compose-beside goes before"),
        (SetupWay.SYSTEMD, {}, "--worker: --way systemd goes before"),
        *(
            (
                way,
                {"model": "m", "workers": (SECOND,) if way is not SetupWay.COMPOSE else (), "source": None},
                "--source",
            )
            for way in (SetupWay.COMPOSE, SetupWay.BESIDE, SetupWay.SYSTEMD, SetupWay.KUBERNETES, SetupWay.SPARK)
        ),
        (SetupWay.COMPOSE, {"model": "m", "machines": 2}, "--worker: name the second machine's address once"),
        (SetupWay.COMPOSE, {"model": "m", "machines": 2, "workers": (SECOND, SECOND)}, "--worker: name the second"),
        (SetupWay.COMPOSE, {"model": "m", "machines": 2, "workers": ("http://b:1",)}, "--worker: b is a name"),
        (SetupWay.COMPOSE, {"model": "m", "machines": 3}, "--workers: Compose starts"),
        (SetupWay.COMPOSE, {"model": "m", "workers": (SECOND,)}, "--workers: Compose starts"),
        (SetupWay.COMPOSE, {"cpu": True, "machines": 2, "workers": (SECOND,)}, "--workers: Compose starts"),
        (SetupWay.KUBERNETES, {"workers": ("http://a:1", VLLM)}, f"--worker: in a pod {VLLM} is the pod itself"),
    ],
)
def test_what_is_missing_or_cannot_be_is_named_by_its_flag(way, more, said):
    with pytest.raises(SettingsError) as error:
        files_for(plan(way, **more))
    assert str(error.value).startswith(said)
