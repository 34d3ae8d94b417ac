"""What `seamark setup` writes is taken by sh, Compose and Helm, and leads to a hit; the rest: `tests/unit/commands`."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.commands import setup
from proxy.commands.render_server import free_port
from proxy.settings import Settings
from tests.deploy.compose_files import DEPLOY
from tests.harness import helm
from tests.harness.gateways import CHAT, chat
from tests.harness.kubernetes_schemas import complaints
from tests.harness.recording_worker import recording_worker
from tests.harness.setup_answers import ANSWERS, SPARK, written
from tests.harness.waiting import wait_for


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


def gateway_settings(given: dict[str, str]) -> Settings:
    """Those that variables make, as the gateway reads them: refused if there is no such setting."""
    return Settings(
        **{name.removeprefix("SEAMARK_").lower(): value for name, value in given.items() if name.startswith("SEAMARK_")}
    )


def test_sh_takes_every_script_and_compose_its_files_where_it_is_installed(folder):
    name, out = folder
    scripts = list(out.glob("*.sh"))
    assert scripts
    for path in scripts:
        subprocess.run(["sh", "-n", str(path)], check=True)
    has_compose = shutil.which("docker") and not subprocess.run(["docker", "compose", "version"]).returncode
    if name.startswith(("compose", "beside")) and has_compose:
        subprocess.run(["sh", str(out / "compose.sh"), "config", "--quiet"], check=True)


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
