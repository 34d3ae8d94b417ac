"""`seamark worker` before it becomes vLLM: its command line, what it adds and refuses, and the trial that it starts.

And each command of the plugin in an environment without vLLM or torch: one line says what is missing, and the cure.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine_patches import __main__ as plugin
from engine_patches.commands import worker
from engine_patches.kv_connectors import transfer_flags
from engine_patches.settings import LOOPBACK

DRAFTING = ["--speculative-config", '{"method":"mtp"}']


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a process of its own."""
    for name in ("SEAMARK_ENGINE", "SEAMARK_DRAFTS", "VLLM_PLUGINS", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker.os, "environ", dict(worker.os.environ))
    return worker.os.environ


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hub's library, in which no model is found."""
    hub = ModuleType("huggingface_hub")
    hub.hf_hub_download = Mock(side_effect=OSError("no such model"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def model(folder: Path, text: str) -> str:
    """The folder of a model with this configuration."""
    (folder / "config.json").write_text(text)
    return str(folder)


@pytest.fixture
def hybrid(tmp_path: Path) -> str:
    return model(tmp_path, '{"model_type": "qwen3_next"}')


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What workers have come to: arguments and port of `serve`, and what is explained."""
    made = SimpleNamespace(served=[], explained=[], on_cpu=False)
    monkeypatch.setattr(worker, "is_cpu_build", lambda: made.on_cpu)
    monkeypatch.setattr(worker, "flags_lacking", lambda flags: [])
    monkeypatch.setattr(worker, "serve", lambda *given: made.served.append(given) or 7)
    explain = importlib.import_module("engine_patches.commands.explain")
    monkeypatch.setattr(explain, "main", lambda *given: made.explained.append(given) or 5)
    return made


@pytest.mark.parametrize(
    ("line", "name", "flags", "explain"),
    [
        ("m --a 1 --port 1", "m", "--a 1 --port 1", None),
        ("--port 1 m --a", "m", "--a --port 1", None),
        ("--model m -- --a 1", "m", "--a 1", None),
        ("--explain --model m", "m", "", "here"),
        ("--explain gpu m", "m", "", "gpu"),
        ("--help=all", None, "--help=all", None),
        ("m --mod x", "m", "--mod x", None),
    ],
)
def test_a_command_line_is_taken_apart(line, name, flags, explain):
    assert worker.read_command_line(line.split()) == worker.CommandLine(name, flags.split(), {}, explain)


@pytest.mark.parametrize(("given", "size"), [("96GiB", 96 << 30), ("128GB", 128 * 10**9), ("1.5 tib", 3 << 39)])
def test_the_memory_of_another_gpu_is_given_with_a_unit(given, size):
    line = worker.read_command_line(["m", "--explain", "--gpu-memory", given])
    assert (line.explain, line.gpu_memory) == ("gpu", size)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--a m", "no model is named: seamark worker MODEL"),
        ("/no/where", "there is no /no/where"),
        ("--model ../no/where", "there is no ../no/where"),
        ("m --config /no/where.yaml", "--config /no/where.yaml: "),
        ("""m --checkpoint-dir d --kv-transfer-config '{"kv_connector": "x"}'""", "leave --kv-transfer-config away"),
        ("m --checkpoint-keep some", "--checkpoint-keep"),
        ("m --gpu-memory 96GiB", "--gpu-memory goes with --explain"),
        ("m --explain --gpu-memory 0.9", "'0.9' is no size: give a number and a unit, as 96GiB"),
    ],
)
def test_what_cannot_be_started_ends_with_status_2(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        worker.read_command_line(shlex.split(line))
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_config_file_of_vllm_names_the_model_and_a_model_before_it_is_the_one(tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    flags = ["--config", str(file)]
    file.write_text("model: m\nport: 1\n")
    assert worker.read_command_line(flags) == worker.CommandLine(None, flags, {"model": "m", "port": 1}, None)
    assert worker.read_command_line(["n", *flags]).model == "n"
    for text, reason in (("- a\n", "flag: value"), ("a: [\n", "expected"), ("model: /no/where\n", "no /no/where")):
        file.write_text(text)
        with pytest.raises(SystemExit):
            worker.read_command_line(flags)
        assert reason in capsys.readouterr().err
    assert worker.read_command_line([str(tmp_path), *flags]).model == str(tmp_path)


@pytest.mark.parametrize(("flags", "given"), [("", ()), ("--checkpoint-bytes 5 --checkpoint-keep all", (5, "all"))])
def test_a_directory_for_states_is_a_connector_of_our_own(flags, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = worker.read_command_line(["m", "--checkpoint-dir", "states", *flags.split()])
    assert asked.flags == transfer_flags(str(tmp_path / "states"), *given)
    assert worker.transfer_config(worker.flags_of(asked.flags))["kv_connector"] == "SeamarkConnector"


NEEDED = [
    *("--host", LOOPBACK, "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"),
    *("--disable-access-log-for-endpoints", "/seamark/outcomes,/seamark/metrics"),
]


def test_what_is_needed_is_added_and_never_overrules_the_user(environment):
    def lacks(added: list[str], **how: Any) -> None:
        wanted = [each for each in (*NEEDED, *worker.MIDDLEWARE) if each not in added]
        assert worker.vllm_arguments(None, **how) == [*wanted, *how["given"]]

    lacks([], given=[])
    lacks(["--host", LOOPBACK], given=["--host=h", "-x"])
    lacks(["--enable-scale-out"], given=["--enable_scale_out"])
    lacks(["--enable-prefix-caching"], given=["--no-enable_prefix_caching"])
    lacks(["--host", LOOPBACK], given=[], config={"host": "h"})
    lacks(["--enable-prompt-tokens-details"], given=[], config={"enable_prompt_tokens_details": True})
    lacks(["--enable-scale-out"], given=[], lacking=["--enable-scale-out"])
    lacks([], given=["enable-scale-out"])
    lacks([], given=["--dtype", "bfloat16"], for_cpu={"--dtype": "float32"})
    added = worker.vllm_arguments("m", [], {}, {"--dtype": "float32", "--x": None})
    assert added == ["m", *NEEDED, "--dtype", "float32", "--x", *worker.MIDDLEWARE]
    environment["VLLM_USE_RUST_FRONTEND"] = "1"
    lacks([*worker.MIDDLEWARE], given=["--x"])


@pytest.mark.parametrize(
    ("given", "on_cpu", "expected"),
    [
        ({"A": "1"}, True, {"A": "1", **worker.CPU_ENVIRONMENT}),
        ({"VLLM_CPU_KVCACHE_SPACE": "4"}, True, {**worker.CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "4"}),
        ({"VLLM_PLUGINS": ""}, False, {"VLLM_PLUGINS": "seamark"}),
        ({"VLLM_PLUGINS": "seamarks"}, False, {"VLLM_PLUGINS": "seamarks,seamark"}),
    ],
)
def test_the_plugin_joins_those_a_user_admits_and_a_cpu_gets_what_is_unset(given, on_cpu, expected):
    assert worker.vllm_environment(given, on_cpu) == expected


@pytest.mark.parametrize("text", ["{", "[]", "{}", None])
def test_a_model_whose_configuration_cannot_be_read_is_left_to_vllm(text, tmp_path, hub):
    if text is not None:
        model(tmp_path, text)
    assert worker.config_of(str(tmp_path)) == {}


A, OFFLOADING = {"kv_connector": "A"}, {"kv_connector": "OffloadingConnector"}


@pytest.mark.parametrize(
    ("given", "config", "fields"),
    [
        ("", {}, {}),
        ("""--kv-transfer-config '{"kv_connector": "A", "n": 1}'""", {}, {"kv_connector": "A", "n": 1}),
        ("--kv-transfer-config {", {}, {}),
        ("--kv-transfer-config.kv_connector A --kv-transfer-config.kv_role=b", {}, {**A, "kv_role": "b"}),
        ("", {"kv_transfer_config": A}, A),
        ("", {"kv-transfer-config": '{"kv_connector": "A"}'}, A),
        ("""--kv-transfer-config '{"kv_connector": "B"}'""", {"kv_transfer_config": A}, {"kv_connector": "B"}),
        ("--kv-offloading-size 4", {}, OFFLOADING),
        ("--kv-offloading-size=4 --kv_offloading_backend lmcache", {}, {"kv_connector": "LMCacheMPConnector"}),
        ("", {"kv_offloading_size": 4, "kv_offloading_backend": "native"}, OFFLOADING),
    ],
)
def test_connectors_are_found_in_flags_and_in_the_file(given, config, fields):
    assert worker.transfer_config(worker.flags_of(shlex.split(given), config)) == fields


SERVED, GPU = "through NixlConnector and, on a GPU, OffloadingConnector it can", "needs a GPU in vLLM; on a CPU --check"


@pytest.mark.parametrize(
    ("transfer", "on_gpu", "on_cpu"),
    [
        ({"kv_connector": "LMCacheMPConnector"}, SERVED, SERVED),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [A, OFFLOADING]}}, "", GPU),
        ({**OFFLOADING, "kv_connector_extra_config": {"spec_module_path": "my.copies"}}, "", ""),
        ({"kv_connector": "NixlConnector"}, "", ""),
    ],
)
def test_a_connector_with_which_vllm_starts_no_hybrid_is_refused_in_one_sentence(transfer, on_gpu, on_cpu, hybrid):
    flags, by_file = ["--kv-transfer-config", json.dumps(transfer)], {"kv-transfer-config": transfer}
    for is_cpu, said in ((False, on_gpu), (True, on_cpu)):
        why = worker.refusal(hybrid, worker.flags_of(flags), on_cpu=is_cpu)
        assert (why is not None and said in why) if said else why is None
        assert worker.refusal(hybrid, by_file, on_cpu=is_cpu) == why
    model(Path(hybrid), '{"model_type": "llama", "num_attention_heads": 4}')
    assert worker.refusal(hybrid, by_file) is None


@pytest.mark.parametrize(
    ("version", "renamed", "expected"), [("0.33.0", False, False), ("0.33.0+cpu", False, True), (None, True, True)]
)
def test_a_build_for_cpus_is_known_by_its_name_or_version(version, renamed, expected, monkeypatch):
    there = {"vllm": version, "vllm-cpu": "0.32.0" if renamed else None}
    found = {name: [SimpleNamespace(version=each)] if each else [] for name, each in there.items()}
    monkeypatch.setattr(worker.metadata, "distributions", lambda name: found[name])
    assert worker.is_cpu_build() is expected


@pytest.mark.parametrize("by_file", [False, True])
def test_a_worker_becomes_vllm_with_its_flags(started, hybrid, by_file, tmp_path):
    name, flags = ["m"], [*DRAFTING, "--port", "8005"]
    if by_file:
        (tmp_path / "vllm.yaml").write_text("model: m\nport: 8005\n")
        name, flags = [], [*DRAFTING, "--config", str(tmp_path / "vllm.yaml")]
    assert worker.main([*name, *flags]) == 7
    assert started.served == [([*name, *NEEDED, *worker.MIDDLEWARE, *flags], "8005")]
    assert not started.explained
    assert worker.main([*name, *flags, "--explain=gpu"]) == 5 and worker.main([hybrid, *DRAFTING]) == 7
    assert started.explained == [([*name, *NEEDED, *worker.MIDDLEWARE, *flags], "gpu", None)]


def test_on_a_cpu_a_hybrid_drafts_nothing_has_its_flags_and_a_word_of_vllms_defects(
    started, hybrid, environment, capsys
):
    started.on_cpu = True
    assert worker.main([hybrid, *DRAFTING]) == 1 and not started.served
    assert "seamark worker: on a CPU vLLM drafts for no hybrid" in capsys.readouterr().err
    assert worker.main([hybrid, *DRAFTING, "--explain"]) == worker.main([hybrid, "--explain", "gpu"]) == 5
    here, gpu = (arguments for arguments, *_ in started.explained)
    assert here[here.index("--dtype") + 1] == "bfloat16" and "--mamba-ssm-cache-dtype" in here and "--dtype" not in gpu
    assert worker.CPU_ENVIRONMENT.items() <= environment.items() and not capsys.readouterr().err
    without = ["--no-enable-prefix-caching"]
    for mode, more, is_said in (("0", [], True), (" 0 ", [], True), ("1", [], False), ("0", without, False)):
        environment["SEAMARK_ENGINE"] = mode
        assert worker.main([hybrid, *more]) == 7
        assert ("SEAMARK_ENGINE=reference cures them" in capsys.readouterr().err) is is_said
    model(Path(hybrid), '{"model_type": "llama", "num_attention_heads": 4}')
    environment["SEAMARK_ENGINE"] = "0"
    assert worker.main([hybrid, *DRAFTING]) == 7 and not capsys.readouterr().err
    assert started.served[-1][0][started.served[-1][0].index("--dtype") + 1] == worker.CPU_FLAGS["--dtype"]


def test_flags_that_an_older_vllm_lacks_are_left_away_and_said_with_the_image_to_take(started, monkeypatch, capsys):
    asked: list[str] = []
    started.on_cpu = True
    monkeypatch.setattr(worker, "flags_lacking", lambda flags: asked.extend(flags) or ["--enable-scale-out"])
    assert worker.main(["m"]) == 7
    ((arguments, _),) = started.served
    assert "--enable-scale-out" not in arguments and "--enable-prefix-caching" in arguments
    assert set(asked) == {*worker.NEEDED_FLAGS, *worker.CPU_FLAGS}
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no --enable-scale-out" in line and "0.31 to 0.33" in line and "vllm/vllm-openai:v0.33.0" in line


HubError = type("HubError", (Exception,), {})  # of the hub's library
NotLocal = type("NotLocal", (HubError,), {})  # the same for a model that is not here


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, hub: ModuleType) -> SimpleNamespace:
    """vLLM's own command, which ends with `error`, and notes what it was given."""

    def run() -> None:
        command.argv = list(sys.argv)
        if command.error is not None:
            raise command.error

    command = SimpleNamespace(argv=[], error=None, importlib=importlib, main=run)
    errors: Any = ModuleType("huggingface_hub.errors")
    errors.HfHubHTTPError, errors.LocalEntryNotFoundError = HubError, NotLocal
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: command)
    monkeypatch.setattr(sys, "argv", ["python"])
    return command


@pytest.mark.parametrize("renamed", [True, False])
def test_the_server_is_vllms_own_command(vllm, renamed, monkeypatch):
    monkeypatch.setattr(worker.metadata, "distributions", lambda name: [] if renamed else [object()])
    monkeypatch.setattr(worker.metadata, "version", lambda name: f"{name} 1")
    assert worker.serve(["m", "--port", "1"], "1") == 0 and vllm.argv == ["vllm", "serve", "m", "--port", "1"]
    assert vllm.importlib.metadata.version("vllm") == ("vllm-cpu 1" if renamed else "vllm 1")  # which it would print
    assert (vllm.importlib is importlib) is not renamed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HubError("404\nmore"), "the model is neither here nor to be had: 404"),
        (NotLocal(" none "), "the model is neither here nor to be had: none"),
        (OSError(98, "Address already in use"), "port 8005 is held by somebody"),
    ],
)
def test_why_the_server_ended_costs_a_line(vllm, error, said, monkeypatch, capsys):
    monkeypatch.setattr(worker, "why_taken", lambda port: f"port {port} is held by somebody")
    vllm.error = error
    assert worker.serve(["m"], "8005") == 1 and capsys.readouterr().err == f"seamark worker: {said}\n"


@pytest.mark.parametrize("command", [["worker", "m"], ["gpu-check"]], ids=lambda command: command[0])
@pytest.mark.parametrize("missing", ["vLLM", "torch"])
def test_what_starts_vllm_says_that_it_or_torch_is_missing(monkeypatch, capsys, tmp_path, command, missing):
    monkeypatch.chdir(tmp_path)
    found = [] if missing == "vLLM" else [SimpleNamespace(version="0.32.0")]
    monkeypatch.setattr(metadata, "distributions", lambda **_: found)
    if missing == "torch":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plugin.main(command) == (3 if command == ["gpu-check"] else 1)  # nothing was proven
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{missing} is not installed here" in line and "pip install --no-deps /path/to/seamark" in line


def test_a_model_needs_torch(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert plugin.main(["model", "--out", str(tmp_path / "model")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark model: torch is not installed here") and not (tmp_path / "model").exists()


def test_the_ledger_can_be_read_without_vllm_and_torch():
    without = "import sys; sys.modules.update(vllm=None, torch=None); from engine_patches.__main__ import main; "
    done = subprocess.run(
        [sys.executable, "-c", without + "sys.exit(main(['patches']))"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "block-copy (cure)" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "usage: python -m engine_patches"),
        (["--help"], 0, "usage: python -m engine_patches"),
        (["doctor", "--worker", "w"], 2, "seamark doctor: only the plugin is here"),
    ],
)
def test_a_command_that_is_not_the_plugins_is_answered_with_what_there_is(capsys, arguments, status, said):
    assert plugin.main(arguments) == status and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "config", "drafts"),
    [
        (DRAFTING, {}, True),
        (["-sc", "{}"], {}, True),
        (["--spec-method=mtp", "--host", "x"], {}, True),
        (["--speculative_config.method", "mtp"], {}, True),
        ([], {"speculative_config": {"method": "mtp"}}, True),
        (["--host", "speculative-config"], {"port": 1}, False),
    ],
    ids=str,
)
def test_a_command_line_drafts_by_its_flags_or_its_file(given, config, drafts):
    assert worker.drafts(worker.flags_of(given, config)) is drafts
