"""What a worker's `/metrics` says, as vLLM and the plugin write it."""

from __future__ import annotations

import pytest

from proxy.fleet.worker_metrics import EngineInfo, StepTimes, WorkerMetrics, read
from proxy.version import version

INFO = f'seamark_engine_info{{block_size="384",match_unit="16",version="{version()}",vllm="0.32.0"}}'


def test_all_that_a_patched_engine_says_is_read_and_nothing_else():
    text = (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
        "# TYPE process_start_time_seconds gauge\n"
        "process_start_time_seconds 1.76378925345e+09\n"
        f"{INFO} 1.0\n"
        "seamark_pass_seconds 0.5\n"
        "seamark_token_seconds 0.001\n"
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 9000.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1600.0\n'
        'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="4096",num_gpu_blocks="None"} 1.0\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 70.0\n'
    )
    engine = EngineInfo(version(), "0.32.0", 16, 384)
    assert read(text) == WorkerMetrics("1.76378925345e+09", engine, StepTimes(0.5, 0.001), 1600, 4096, 3)
    states = (("awake", 1, 0), ("discard_all", 0, 0), ("awake", 0, 1), ("odd", 1, 2))
    lines = (f'vllm:engine_sleep_state{{engine="{at}",sleep_state="{state}"}} {value}' for state, value, at in states)
    text = "\n".join([*lines, 'vllm:engine_sleep_state{sleep_state="weights_offloaded"} 1\n'])
    assert read(text).sleep_levels == (None, 0, 0, 1)


@pytest.mark.parametrize(
    "line",
    [
        f'seamark_engine_info{{version="{version()}"}} 1.0',
        INFO.replace('"16"', '"0"') + " 1.0",
        "vllm:prefix_cache_hits_total many",
    ],
)
def test_samples_that_are_not_what_they_are_named_are_refused(line):
    with pytest.raises((ValueError, KeyError)):
        read(line + "\n")


@pytest.mark.parametrize("other", ["0.0.9", "99.0", ""])
def test_a_plugin_of_another_release_is_not_used_and_the_sentence_says_update_the_plugin(other):
    found = read(f'seamark_engine_info{{version="{other}"}} 1.0\n')  # whatever else it says
    assert found.engine is None
    assert found.other_release == (
        f"its plugin is Seamark {other or 'of unknown version'}, this gateway {version()}: update the plugin"
    )
    own = ".".join(version().split(".")[:2])
    patch = read(INFO.replace(version(), f"{own}.99") + " 1.0\n")
    assert patch.engine is not None and not patch.other_release
