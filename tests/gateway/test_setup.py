"""What `seamark setup` writes is taken by sh, Compose and Helm, and leads to a hit; the rest: `tests/unit/commands`."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.commands import setup
from proxy.commands.render_server import free_port
from proxy.settings import Settings
from tests.harness import helm
from tests.harness.kubernetes_schemas import complaints
from tests.harness.setup_answers import ANSWERS, SPARK, written


@pytest.fixture(autouse=True)
def nothing_answers(monkeypatch, tmp_path_factory) -> None:
    """On the ports that are looked at, whatever runs on this machine; and there is a checkout of spark-vllm-docker."""
    monkeypatch.setattr(setup, "PORTS", [free_port()])
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("mods", "recipes"):
        (home / SPARK / name).mkdir(parents=True)


def gateway_settings(given: dict[str, str]) -> Settings:
    """Those that variables make, as the gateway reads them: refused if there is no such setting."""
    return Settings(
        **{name.removeprefix("SEAMARK_").lower(): value for name, value in given.items() if name.startswith("SEAMARK_")}
    )


def test_sh_takes_every_script(tmp_path):
    for number, name in enumerate(ANSWERS):
        scripts = list(written(tmp_path / f"my files {number}", name).glob("*.sh"))
        assert scripts, name
        for path in scripts:
            subprocess.run(["sh", "-n", str(path)], check=True)


def only_container(found: Mapping[tuple[str, str], Mapping[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (container,) = found[kind, name]["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize(
    ("name", "model", "workers", "registry"),
    [
        ("kubernetes", "a/B", 2, "registry.example/us/"),
        ("kubernetes, our model", "nvidia/Qwen3.6-35B-A3B-NVFP4", 1, ""),
        ("kubernetes, vLLM runs", None, 0, ""),
    ],
)
def test_the_chart_runs_the_model_in_as_many_workers_as_asked_for_from_the_images_that_are_built(
    name, model, workers, registry, tmp_path, capsys
):
    out = written(tmp_path, name)
    (command,) = re.findall(r"^ +helm upgrade --install seamark (.*)$", capsys.readouterr().out, re.M)
    chart, *flags = shlex.split(command)
    assert flags == ["--namespace", "seamark", "--create-namespace", "--values", str(out / "values.yaml")]
    rendered = helm.render(Path(chart), flags)
    assert not rendered.error and [complaints(each) for each in rendered.objects] == [[]] * len(rendered.objects)
    found = {(each["kind"], each["metadata"]["name"]): each for each in rendered.objects}
    script = (out / "images.sh").read_text()
    gateway = only_container(found, "Deployment", "seamark-gateway")
    settings = gateway_settings({each["name"]: each["value"] for each in gateway["env"]})
    if model is None:  # beside a vLLM that runs, the chart starts none
        assert settings.worker == ("http://vllm.models:8000",) and "worker" not in script
        assert not any(name == "seamark-worker" for _, name in found)
        return
    assert found["StatefulSet", "seamark-worker"]["spec"]["replicas"] == workers
    assert settings.worker == tuple(f"http://seamark-worker-{n}.seamark-worker:8000" for n in range(workers))
    worker = only_container(found, "StatefulSet", "seamark-worker")
    config = found["ConfigMap", "seamark-models"]["data"][Path(worker["args"][-1]).name]
    assert yaml.safe_load(config)["model"] == model
    wanted = [gateway["image"], worker["image"]]
    assert wanted == [f"{registry}seamark-gateway", f"{registry}seamark-worker"]
    assert re.findall(r"^docker build .* -t (\S+)", script, re.M) == wanted
    assert re.findall(r"^docker push (\S+)$", script, re.M) == (wanted if registry else [])
