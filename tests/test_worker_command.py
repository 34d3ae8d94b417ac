"""`seamark worker` adds what is needed and never overrules the user."""

from __future__ import annotations

from engine_patches.worker import vllm_arguments, vllm_environment


def test_the_needed_flags_are_added():
    arguments = vllm_arguments("model", "127.0.0.1", 8000, [], on_cpu=False)
    assert arguments[:6] == ["--model", "model", "--host", "127.0.0.1", "--port", "8000"]
    assert set(arguments[6:]) == {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"}


def test_a_cpu_gets_float32_and_no_compilation():
    arguments = vllm_arguments("model", "127.0.0.1", 8000, [], on_cpu=True)
    assert "--enforce-eager" in arguments and arguments[arguments.index("--dtype") + 1] == "float32"


def test_the_users_flags_win():
    extra = ["--dtype=bfloat16", "--no-enable-prefix-caching", "--max-model-len", "64"]
    arguments = vllm_arguments("model", "127.0.0.1", 8000, extra, on_cpu=True)
    assert "--dtype" not in arguments and "--enable-prefix-caching" not in arguments
    assert arguments[-4:] == extra


def test_the_plugin_joins_those_a_user_admits():
    assert vllm_environment({"VLLM_PLUGINS": "mine"}, on_cpu=False)["VLLM_PLUGINS"] == "mine,seamark"
    assert vllm_environment({"VLLM_PLUGINS": "seamark"}, on_cpu=False)["VLLM_PLUGINS"] == "seamark"
    assert "VLLM_PLUGINS" not in vllm_environment({}, on_cpu=False)


def test_cpu_settings_of_the_user_stay():
    assert vllm_environment({"VLLM_CPU_KVCACHE_SPACE": "4"}, on_cpu=True)["VLLM_CPU_KVCACHE_SPACE"] == "4"
