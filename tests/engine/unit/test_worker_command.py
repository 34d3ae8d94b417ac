"""`seamark worker` adds what is needed and never overrules the user."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine_patches.commands import worker
from engine_patches.commands.worker import (
    cpu_flags,
    main,
    model_type_of,
    read_command_line,
    serve,
    vllm_arguments,
    vllm_environment,
)


@pytest.fixture
def started(monkeypatch):
    """The arguments with which `vllm serve` would have been started, here with a GPU."""
    calls: list[list[str]] = []
    monkeypatch.setattr(worker, "is_cpu_build", lambda: False)
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    monkeypatch.setattr(worker, "serve", lambda arguments, port: calls.append(arguments) or 0)
    return calls


def test_a_frontend_in_rust_gets_no_middleware(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "--middleware" not in vllm_arguments("model", []) and "--enable-prefix-caching" in vllm_arguments(
        "model", []
    )


@pytest.mark.parametrize("where", ["entrypoints/openai", "entrypoints/launchers"])
def test_flags_that_an_older_vllm_lacks_are_left_away_and_said_with_the_image_to_take(
    where, started, tmp_path, monkeypatch, capsys
):
    for path, text in (
        ("engine/arg_utils.py", "enable_prefix_caching"),
        (f"{where}/cli_args.py", "enable_prompt_tokens"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "_details: disable_access_log_for_endpoints")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: spec)
    assert main(["m"]) == 0
    assert "--enable-scale-out" not in started[0] and "--enable-prefix-caching" in started[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no --enable-scale-out" in line and "0.31 to 0.33" in line and "vllm/vllm-openai:v0.33.0" in line


def test_the_installed_vllm_lacks_no_flag_that_is_needed():
    assert worker.flags_lacking([*worker.NEEDED_FLAGS, *worker.CPU_GDN_FLAGS]) == []
    assert worker.flags_lacking(["--no-such-flag"]) == ["--no-such-flag"]


def test_the_model_comes_first_and_the_needed_flags_are_added():
    arguments = vllm_arguments("model", [])
    assert arguments[:3] == ["model", "--host", "127.0.0.1"]
    assert arguments[-2:] == ["--middleware", "engine_patches.reporting.events_api.EventsEndpoint"]
    flags = {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"}
    assert set(arguments[3:-2]) == {*flags, "--disable-access-log-for-endpoints", "/seamark/outcomes,/seamark/metrics"}


@pytest.mark.parametrize(
    "line",
    [
        ["m", "--max-model-len", "64", "--port", "1"],
        ["--port", "1", "m", "--max-model-len", "64"],
        ["--model", "m", "--port", "1", "--max-model-len", "64"],
        ["--max-model-len", "64", "--model=m", "--port=1"],
        ["--model", "m", "--port", "1", "--", "--max-model-len", "64"],
        ["m", "--", "--max-model-len", "64", "--port", "1"],
    ],
    ids=" ".join,
)
def test_vllms_flags_are_taken_with_and_without_dashes_before_them(started, line):
    assert main(line) == 0
    assert started[0][0] == "m" and started[0].count("m") == 1
    given = " ".join(started[0][started[0].index(worker.MIDDLEWARE[1]) + 1 :])
    assert given in ("--max-model-len 64 --port 1", "--port 1 --max-model-len 64")


def test_where_no_port_is_given_vllms_own_holds(started):
    assert main(["m"]) == 0
    assert "--port" not in started[0]


@pytest.mark.parametrize("given", [["--host", "192.0.2.1"], ["--host=192.0.2.1"], ["--", "--host", "192.0.2.1"]])
def test_the_server_listens_to_this_machine_alone_unless_told_otherwise(started, given):
    assert main(["m"]) == main(["m", *given]) == 0
    assert started[0][1:3] == ["--host", "127.0.0.1"] and "127.0.0.1" not in started[1]


@pytest.mark.parametrize("line", [["m", "--mod", "x"], ["m", "--hos", "x"], ["m", "--expl"], ["m", "--no-such-flag"]])
def test_a_flag_that_is_not_spelled_out_is_left_to_vllm(started, line):
    assert main(line) == 0
    assert started[0][-len(line) + 1 :] == line[1:]


@pytest.mark.parametrize("line", [[], ["--port", "8000"], ["--max-model-len", "64"], ["--config"]])
def test_a_model_must_be_named_somewhere(started, capsys, line):
    with pytest.raises(SystemExit) as error:
        main(line)
    assert error.value.code == 2 and "seamark worker MODEL" in capsys.readouterr().err and not started


def test_a_folder_that_is_not_there_is_said_before_vllm_looks_for_it_elsewhere(started, capsys, tmp_path):
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path / "none")])
    assert error.value.code == 2 and f"there is no {tmp_path}/none" in capsys.readouterr().err and not started


@pytest.mark.parametrize(
    ("line", "kernels"),
    [
        (["m", "--explain"], "here"),
        (["--explain", "m"], "here"),
        (["--explain", "--model", "m"], "here"),
        (["--explain", "gpu", "m"], "gpu"),
        (["m", "--max-model-len", "64", "--explain=gpu"], "gpu"),
    ],
    ids=str,
)
def test_what_is_only_explained(line, kernels):
    asked = read_command_line(line)
    assert (asked.model, asked.explain) == ("m", kernels) and asked.flags in ([], ["--max-model-len", "64"])


def test_a_config_file_of_vllm_names_the_model_and_its_flags_are_not_given_again(started, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text("model: m\nhost: 192.0.2.1\nenable_prefix_caching: false\n")
    assert main(["--config", str(file)]) == 0
    assert started[0][0] == "--enable-prompt-tokens-details" and started[0][-2:] == ["--config", str(file)]
    assert not {"--host", "--enable-prefix-caching", "m"} & set(started[0])


def test_a_model_before_the_config_file_is_the_one(started, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text("model: other\n")
    assert main(["m", "--config", str(file)]) == 0
    assert started[0][0] == "m"


@pytest.mark.parametrize(
    ("content", "reason"), [("- a\n", "flag: value"), ("a: [\n", "expected"), (None, "No such file")]
)
def test_a_config_file_that_cannot_be_used_is_named_with_the_reason(started, capsys, tmp_path, content, reason):
    file = tmp_path / "model.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit):
        main(["m", "--config", str(file)])
    told = capsys.readouterr().err
    assert f"--config {file}" in told and reason in told and not started


def test_the_model_of_a_config_file_decides_what_a_cpu_needs(started, monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "is_cpu_build", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    file = tmp_path / "model.yaml"
    file.write_text(f"model: {tmp_path}\nenforce-eager: true\n")
    assert main(["--config", str(file)]) == 0
    assert started[0][started[0].index("--dtype") + 1] == "bfloat16" and "--enforce-eager" not in started[0]


def test_the_server_is_vllms_own_command(monkeypatch):
    from vllm.entrypoints.cli import main as cli

    monkeypatch.setattr(cli, "importlib", cli.importlib)  # put back behind the test
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(cli, "main", lambda: None)
    assert serve(["m", "--port", "1"], "1") == 0
    assert sys.argv == ["vllm", "serve", "m", "--port", "1"]
    assert cli.importlib.metadata.version("vllm")


@pytest.mark.parametrize("error", [ImportError("libcudart.so.12"), OSError("libnuma.so.1")])
def test_a_vllm_that_cannot_be_imported_costs_a_line(monkeypatch, capsys, error):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(worker.importlib, "import_module", fail)
    assert serve(["m"], "8000") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark worker: the vLLM installed here cannot be imported: lib")


@pytest.mark.parametrize("spelt", [["--port", "{}"], ["--port=1", "--port={}"], ["--config", "{}"]])
def test_a_port_that_is_taken_is_named_with_what_holds_it(monkeypatch, capsys, tmp_path, spelt):
    from vllm.entrypoints.cli import main as cli

    monkeypatch.setattr(cli, "importlib", cli.importlib)
    monkeypatch.setattr(sys, "argv", ["python"])
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        monkeypatch.setattr(cli, "main", lambda: socket.create_server(("127.0.0.1", int(port))))
        (tmp_path / "vllm.yaml").write_text(f"port: {port}\n")
        value = tmp_path / "vllm.yaml" if spelt[0] == "--config" else port
        assert main(["m", *(part.format(value) for part in spelt)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"seamark worker: port {port} is held by process {os.getpid()} (")


def test_an_unknown_flag_is_reported_by_vllms_own_parser(tmp_path):
    command = [sys.executable, "-m", "engine_patches", "worker", str(tmp_path), "--no-such-flag"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "vllm: error: unrecognized arguments: --no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr


def test_a_model_that_cannot_be_had_costs_a_line():
    command = [sys.executable, "-m", "proxy.cli", "worker", "nobody/has-this-model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "seamark worker: the model is neither here nor to be had: " in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_a_cpu_gets_float32_and_no_compilation():
    arguments = vllm_arguments("model", [], for_cpu=cpu_flags("nemotron_h"))
    assert "--enforce-eager" in arguments and arguments[arguments.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_gated_delta_nets_on_a_cpu_get_bfloat16_and_a_state_that_is_not_rounded(model_type):
    arguments = vllm_arguments("model", [], for_cpu=cpu_flags(model_type))
    assert "--enforce-eager" in arguments and arguments[arguments.index("--dtype") + 1] == "bfloat16"
    assert arguments[arguments.index("--mamba-ssm-cache-dtype") + 1] == "float32"


def test_the_model_type_is_read_from_the_models_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    assert model_type_of(str(tmp_path)) == "qwen3_next"


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_config_without_a_model_type_is_left_to_vllm(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert model_type_of(str(tmp_path)) == ""


def test_a_model_that_is_not_there_is_left_to_vllm(tmp_path):
    assert model_type_of(str(tmp_path / "none")) == ""


def test_the_users_flags_win():
    extra = ["--dtype=bfloat16", "--no-enable_prefix_caching", "--max-model-len", "64"]
    arguments = vllm_arguments("model", extra, for_cpu=cpu_flags("qwen3_next"))
    assert "--dtype" not in arguments and "--enable-prefix-caching" not in arguments
    assert arguments[-4:] == extra


def test_the_plugin_joins_those_a_user_admits():
    assert vllm_environment({"VLLM_PLUGINS": "mine"}, on_cpu=False)["VLLM_PLUGINS"] == "mine,seamark"
    assert vllm_environment({"VLLM_PLUGINS": "seamark"}, on_cpu=False)["VLLM_PLUGINS"] == "seamark"
    assert "VLLM_PLUGINS" not in vllm_environment({}, on_cpu=False)


def test_cpu_settings_of_the_user_stay():
    assert vllm_environment({"VLLM_CPU_KVCACHE_SPACE": "4"}, on_cpu=True)["VLLM_CPU_KVCACHE_SPACE"] == "4"
