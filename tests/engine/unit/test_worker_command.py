"""`seamark worker` adds what is needed and never overrules the user."""

from __future__ import annotations

import json

import pytest

from engine_patches.commands.worker import cpu_flags, main, model_type_of, vllm_arguments, vllm_environment


def test_the_needed_flags_are_added():
    arguments = vllm_arguments("model", "127.0.0.1", 8000, [])
    assert arguments[:6] == ["--model", "model", "--host", "127.0.0.1", "--port", "8000"]
    assert arguments[6:8] == ["--middleware", "engine_patches.reporting.events_api.EventsEndpoint"]
    flags = {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"}
    assert set(arguments[8:]) == {*flags, "--disable-access-log-for-endpoints", "/seamark/outcomes"}


def test_a_model_named_in_vllms_config_file_is_not_named_twice():
    arguments = vllm_arguments(None, "127.0.0.1", 8000, ["--config", "model.yaml"])
    assert "--model" not in arguments and arguments[-2:] == ["--config", "model.yaml"]


def test_a_model_must_be_named_somewhere(capsys):
    with pytest.raises(SystemExit):
        main(["--port", "8000"])
    assert "--model" in capsys.readouterr().err


def test_a_port_is_needed_unless_nothing_is_started(capsys):
    with pytest.raises(SystemExit):
        main(["--model", "m"])
    assert "--port" in capsys.readouterr().err


def test_a_cpu_gets_float32_and_no_compilation():
    arguments = vllm_arguments("model", "127.0.0.1", 8000, [], cpu_flags("nemotron_h"))
    assert "--enforce-eager" in arguments and arguments[arguments.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_gated_delta_nets_on_a_cpu_get_bfloat16_and_a_state_that_is_not_rounded(model_type):
    arguments = vllm_arguments("model", "127.0.0.1", 8000, [], cpu_flags(model_type))
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
    extra = ["--dtype=bfloat16", "--no-enable-prefix-caching", "--max-model-len", "64"]
    arguments = vllm_arguments("model", "127.0.0.1", 8000, extra, cpu_flags("qwen3_next"))
    assert "--dtype" not in arguments and "--enable-prefix-caching" not in arguments
    assert arguments[-4:] == extra


def test_the_plugin_joins_those_a_user_admits():
    assert vllm_environment({"VLLM_PLUGINS": "mine"}, on_cpu=False)["VLLM_PLUGINS"] == "mine,seamark"
    assert vllm_environment({"VLLM_PLUGINS": "seamark"}, on_cpu=False)["VLLM_PLUGINS"] == "seamark"
    assert "VLLM_PLUGINS" not in vllm_environment({}, on_cpu=False)


def test_cpu_settings_of_the_user_stay():
    assert vllm_environment({"VLLM_CPU_KVCACHE_SPACE": "4"}, on_cpu=True)["VLLM_CPU_KVCACHE_SPACE"] == "4"
