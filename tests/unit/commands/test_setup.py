"""`seamark setup`: what is asked, looked for, refused, written and printed; the files are in `test_setup_files.py`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from proxy.commands import setup
from proxy.commands.setup import RunningVllm, running, source_folder
from proxy.commands.setup_files import SetupWay
from tests.deploy.compose_files import DEPLOY, OF_THE_USER
from tests.harness.published_recipes import RECIPES
from tests.harness.setup_answers import ANSWERS, SECOND, SPARK, WORKER, written

# What would be more than a name in a script, or in a file of settings.
INTO_SHELLS = ["x; id", "$(id)", "`id`", "x\nid", "x'", 'x"', "x y", "x&id", "x|id", "$HOME", "x\\", "x\x1b[2J"]


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[RunningVllm]:
    """What answers on the ports that are looked at: nothing at first. There is a checkout of spark-vllm-docker."""
    found: list[RunningVllm] = []

    def running(ports: range) -> list[RunningVllm]:
        assert list(ports) == [8000, 8001, 8002, 8003]
        return found

    monkeypatch.setattr(setup, "running", running)
    monkeypatch.setattr(setup, "image_version", lambda image: "")
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("mods", "recipes"):
        (home / SPARK / name).mkdir(parents=True)
    return found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """`terminal(*answers)`: somebody who answers so; the questions that were asked, with their defaults."""

    def terminal(*answers: str) -> list[tuple[str, str]]:
        left, asked = iter(answers), []

        def said(prompt: str) -> str:
            question, _, default = prompt.removesuffix("? ").partition(" [")
            asked.append((question, default.removesuffix("]")))
            return next(left)

        monkeypatch.setattr("builtins.input", said)
        for stream in ("stdin", "stdout"):
            monkeypatch.setattr(getattr(setup.sys, stream), "isatty", lambda: True, raising=False)
        return asked

    return terminal


@pytest.fixture(params=ANSWERS)
def folder(request, tmp_path, capsys) -> Path:
    """A folder with the files that came of flags; it has a blank in its name."""
    out = tmp_path / "my files"
    flags, files = ANSWERS[request.param]
    assert setup.main([*flags, "--out", str(out)]) == 0, capsys.readouterr().err
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == files
    return out


def variables(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_every_file_begins_with_what_it_is_for_and_every_script_is_one(folder):
    for path in folder.rglob("*.*"):
        lines = path.read_text().splitlines()
        assert (path.suffix == ".sh") == os.access(path, os.X_OK)
        if path.suffix == ".sh":
            assert lines.pop(0) == "#!/bin/sh" and stat.S_IMODE(path.stat().st_mode) == 0o755
        assert lines[0].startswith("# "), path


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_nothing_is_overwritten_unless_that_is_said(tmp_path, capsys):
    out = written(tmp_path, "pip, vLLM runs")
    (out / "gateway.sh").unlink()
    (out / "seamark.toml").write_text("mine")
    capsys.readouterr()
    flags = [*ANSWERS["pip, vLLM runs"][0], "--out", str(out)]
    assert setup.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "seamark.toml" in line and "--force" in line and "gateway.sh" not in line
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
        (["--way", "pip", "--workers", "1", *WORKER, *SECOND, "--model", "\n"], "--model"),
        (["--way", "kubernetes", "--workers", "1", *SECOND, "--worker", "http://a"], "name all 1"),
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
        *(
            ([*flag, "vllm serve m"], f"{flag[0]}: the recipe says it")
            for flag in (["--model", "m"], ["--cpu"], WORKER)
        ),
        (["--workers", "1", "vllm serve m"], "--workers: the recipe says it"),
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
        (["vllm serve m", "--source", "/nowhere"], "--source: /nowhere is no checkout"),
    ],
)
def test_what_is_missing_or_cannot_be_is_said_in_one_line(flags, said, tmp_path, capsys):
    out = tmp_path / "out"
    assert setup.main([*flags, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark setup: ")
    assert said in line and "secret" not in line and not out.exists()


def test_a_folder_that_a_script_cannot_name_is_refused(capsys):
    assert setup.main(["--way", "pip", *WORKER, "--out", "/tmp/a\nb"]) == 2
    assert "--out: a folder whose name can be written into a script" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert setup.main(["--way", "pip", *WORKER, "--out", str(tmp_path / "file/out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("answers", "asked", "files"),
    [
        (
            ["slurm", SetupWay.SPARK, "a/B", "{out}"],
            ["How do you run vLLM", "How do you run vLLM", "Which model", "Folder for the files"],
            ["seamark-b.yaml"],
        ),
        (
            [SetupWay.COMPOSE, "a/B", OF_THE_USER["SECOND_SPARK"], "{out}"],
            ["How do you run vLLM", "Which model", "The second machine's IP address", "Folder for the files"],
            ["seamark.env"],
        ),
        (
            [SetupWay.COMPOSE, "a/B", "", "{out}"],
            ["How do you run vLLM", "Which model", "The second machine's IP address", "Folder for the files"],
            ["seamark.env"],
        ),
        (
            [SetupWay.KUBERNETES, "a/B", "3", "{out}"],
            ["How do you run vLLM", "Which model", "How many vLLM servers", "Folder for the files"],
            ["values.yaml"],
        ),
        (
            ["", "  a/B ", "{out}"],  # the first way is the default
            ["How do you run vLLM", "Which model", "Folder for the files"],
            ["worker.sh"],
        ),
        (
            [SetupWay.SYSTEMD, "", "{out}"],
            ["How do you run vLLM", "Where does vLLM run", "Folder for the files"],
            ["install.sh"],
        ),
        (
            [SetupWay.BESIDE, "http://a:1/v1", "{out}"],
            ["How do you run vLLM", "Where does vLLM run", "Folder for the files"],
            ["compose.sh"],
        ),
    ],
)
def test_a_terminal_is_asked_for_what_the_flags_leave_open(answers, asked, files, terminal, tmp_path, capsys):
    out = tmp_path / "out"
    questions = terminal(*(each.replace("{out}", str(out)) for each in answers))
    assert setup.main([]) == 0
    assert [question.partition(" (")[0].partition(",")[0] for question, _ in questions] == asked
    assert all((out / name).exists() for name in files)
    assert questions[0][1] == "pip" and questions[-1][1] == "seamark-setup"
    if answers[0] == "slurm":
        assert "One of: pip, compose, " in capsys.readouterr().out
    if SetupWay.SYSTEMD in answers:
        assert questions[1][1] == "http://127.0.0.1:8000"
        assert variables(out / "seamark.env")["SEAMARK_WORKER"] == "http://127.0.0.1:8000"
    if SetupWay.COMPOSE in answers:
        second = variables(out / "seamark.env").get("SECOND_SPARK", "")
        assert second == answers[2]
    if SetupWay.KUBERNETES in answers:
        assert yaml.safe_load((out / "values.yaml").read_text())["worker"]["replicas"] == 3


@pytest.mark.parametrize("answer", ["two", "10000", "-1", "٣"])
def test_a_number_of_servers_that_is_none_is_refused(answer, terminal, capsys):
    terminal(answer)
    assert setup.main(["--way", "kubernetes", "--model", "m"]) == 2
    assert "--workers: " in capsys.readouterr().err


def test_who_leaves_before_the_end_is_told_that_nothing_was_written(monkeypatch, terminal, capsys):
    terminal()

    def left(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", left)
    assert setup.main([]) == 2
    assert capsys.readouterr().err == "\nseamark setup: nothing was written\n"


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_where_one_end_is_no_terminal_nobody_is_asked(stream, monkeypatch, terminal, capsys):
    asked = terminal()
    monkeypatch.setattr(getattr(setup.sys, stream), "isatty", lambda: False, raising=False)
    assert setup.main([]) == 2 and not asked and "--way" in capsys.readouterr().err


HERE = [RunningVllm("http://127.0.0.1:8000", ("m",)), RunningVllm("http://127.0.0.1:8001", ())]


@pytest.mark.parametrize("way", [SetupWay.BESIDE, SetupWay.SYSTEMD])
def test_what_goes_before_a_vllm_takes_the_one_that_answers(way, answering, tmp_path):
    answering.append(HERE[0])
    assert setup.main(["--way", way, "--out", str(tmp_path)]) == 0
    assert variables(tmp_path / "seamark.env")["SEAMARK_WORKER"].endswith(":8000")


def test_servers_are_known_by_their_models(monkeypatch):
    answers = {
        8000: httpx.Response(200, json={"data": [{"id": "m"}, {"id": "n"}]}),
        8001: httpx.Response(401),
        8002: httpx.Response(200, json=[]),
        8003: httpx.Response(404, json={"data": [{"id": "m"}]}),
        8005: httpx.Response(200, json={"data": []}),
    }

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models"
        if request.url.port not in answers:
            raise httpx.ConnectError("refused")
        return answers[request.url.port]

    real = httpx.Client

    def client(**given: Any) -> httpx.Client:
        assert given == {"timeout": 1.0, "trust_env": False}  # no proxy lies between this machine and itself
        return real(transport=httpx.MockTransport(answer), **given)

    monkeypatch.setattr(setup.httpx, "Client", client)
    assert running([8004, *answers]) == [
        RunningVllm("http://127.0.0.1:8000", ("m", "n")),
        RunningVllm("http://127.0.0.1:8001", ()),
        RunningVllm("http://127.0.0.1:8005", ()),
    ]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], None]:
    """`noted(what)`: what pip has noted of where it installed this from, and no checkout is around the module."""
    monkeypatch.setattr(setup, "__file__", str(tmp_path / "a/b/c.py"))

    def noted(what: str | None) -> None:
        monkeypatch.setattr(setup.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: what))

    return noted


@pytest.mark.parametrize("what", [None, "{}", "no JSON"])  # from a package index: pip notes no URL
def test_where_pip_has_noted_no_checkout_there_is_none(noted, what):
    noted(what)
    assert source_folder() is None


def test_a_checkout_that_pip_has_noted_is_the_source_if_it_is_still_there(noted, tmp_path):
    checkout = tmp_path / "my seamark"
    noted(json.dumps({"url": f"file://{tmp_path}/my%20seamark"}))
    assert source_folder() is None
    (checkout / "deploy").mkdir(parents=True)
    (checkout / "deploy/compose.yaml").write_text("")
    assert source_folder() == checkout


def test_the_checkout_that_this_runs_in_comes_first_installed_or_not(monkeypatch):
    assert source_folder() == DEPLOY.parent

    def gone(name: str) -> Any:
        raise setup.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(setup.metadata, "distribution", gone)
    assert source_folder() == DEPLOY.parent


def test_without_a_checkout_pip_is_set_up_and_a_recipe_is_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup, "source_folder", lambda: None)
    assert setup.main(["--way", "pip", *WORKER, "--out", str(tmp_path / "a")]) == 0
    assert setup.main(["vllm serve m", "--out", str(tmp_path / "b")]) == 2
    assert "--source: a recipe's files need a checkout" in capsys.readouterr().err


def from_recipe(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, list[str]]:
    out = tmp_path / "my files"
    assert setup.main([given, "--out", str(out)]) == 0, capsys.readouterr().err
    return out, printed(capsys)


@pytest.mark.parametrize(
    ("line", "base", "notes"),
    [
        ("vllm serve m --host 127.0.0.1", "http://127.0.0.1:8080", []),
        ("vllm serve m --host 10.0.0.7", "http://10.0.0.7:8080", ["the gateway listens where vLLM did (10.0.0.7)"]),
        ("vllm serve m --host localhost --api-key k", "http://127.0.0.1:8080", ["vLLM wants a key: "]),
        ("VLLM_API_KEY=k vllm serve m --host localhost", "http://127.0.0.1:8080", ["vLLM wants a key: "]),
        (
            "VLLM_USE_RUST_FRONTEND=1 vllm serve Qwen3.6-27B --host localhost",
            "http://127.0.0.1:8080",
            ["its HTTP server is the one in Rust"],
        ),
    ],
)
def test_clients_of_a_recipe_are_told_where_and_with_which_key(line, base, notes, tmp_path, capsys):
    _, said = from_recipe(line, tmp_path, capsys)
    assert f"Clients:    base_url {base}/v1" in said
    told = [each.removeprefix("Note: ") for each in said if each.startswith("Note: ") and "in vLLM's env" not in each]
    assert len(told) == len(notes) and all(map(str.startswith, told, notes))


def test_a_recipe_is_written_again_only_if_that_is_said(tmp_path, capsys):
    out, _ = from_recipe("vllm serve m", tmp_path, capsys)
    assert setup.main(["vllm serve n", "--out", str(out)]) == 2 and "--force" in capsys.readouterr().err
    assert "serve m" in (out / "worker.sh").read_text()
    assert setup.main(["vllm serve n", "--out", str(out), "--force"]) == 0
    assert "serve n" in (out / "worker.sh").read_text()


def test_what_a_recipe_says_is_printed_without_what_a_terminal_would_obey(tmp_path, capsys):
    _, said = from_recipe("vllm serve 'Qwen3.6\x1b[2J\n'", tmp_path, capsys)
    assert "\x1b" not in "".join(said)
