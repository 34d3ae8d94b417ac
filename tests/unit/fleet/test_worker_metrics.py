"""What a worker's `/metrics` says, as vLLM and the plugin write it."""

from __future__ import annotations

import pytest

from proxy.fleet.worker_metrics import (
    UNKNOWN,
    Accepted,
    EngineInfo,
    EngineSetup,
    StepTimes,
    WorkerMetrics,
    read,
    read_accepted,
    read_setup,
)
from proxy.version import version
from tests.harness.fake_engine import sleep_state

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


def test_how_far_past_a_state_a_prefix_has_to_be_shared():
    engine = read(INFO.replace("{", '{ahead="16",') + " 1.0\n").engine
    assert engine is not None and engine.ahead == 16


def test_why_no_hint_counts_is_one_short_line():
    engine = read(INFO.replace("{", '{refused="a \\n window' + "w" * 300 + '",') + " 1.0\n").engine
    assert engine is not None and engine.refused == "a window" + "w" * 192
    engine = read(f"{INFO} 1.0\n").engine  # an older plugin's
    assert engine is not None and engine.refused == ""


def test_at_which_level_each_engine_sleeps():
    text = sleep_state(None, 0, 2)
    assert read(text).sleep_levels == (None, 0, 2)


@pytest.mark.parametrize(("started", "count", "drafts"), [(True, 0, True), (False, 0, False), (False, 7, True)])
def test_a_counter_of_drafts_means_drafts_except_at_nought_where_a_frontend_in_rust_always_has_it(
    started, count, drafts
):
    text = "process_start_time_seconds 1.0\n" * started + f"vllm:spec_decode_num_drafts_total {count}\n"
    assert read(text).drafts is read_setup(text).drafts is drafts and not read("").drafts
    assert read(sleep_state(1)).sleep_levels == (1,)


def test_accepted_drafts_are_summed_over_engines_and_unknown_is_not_none():
    counted = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {count}.0\n'
        for engine in (0, 1)
        for name, count in (("drafts", 10), ("draft_tokens", 40), ("accepted_tokens", 15))
    )
    assert read_accepted('vllm:num_requests_running{engine="0"} 0.0\n' + counted) == Accepted(20, 30)
    assert read_accepted('vllm:num_requests_running{engine="0"} 0.0\n') == Accepted(0, 0)
    assert read_accepted("process_start_time_seconds 1.0\n") is None  # it counts nothing, or is not vLLM


def test_the_gate_of_hints_beside_drafts_is_read_and_an_older_plugin_has_none():
    engines = [read(line + " 1.0\n").engine for line in (INFO, INFO.replace("{", '{drafts="trial",'))]
    assert [engine.drafts for engine in engines if engine is not None] == ["", "trial"]


def test_what_is_not_said_is_unknown():
    assert read("") == read("vllm:x 1\n") == WorkerMetrics("", None, UNKNOWN, None, 0, 0)
    assert not UNKNOWN.known and read(f"{INFO} 0.0\n").engine is None
    assert read('vllm:cache_config_info{kv_cache_size_tokens="None"} 1.0\n').cache_tokens == 0


def test_counts_of_several_engines_in_one_server_are_summed():
    lines = [f'vllm:prefix_cache_hits_total{{engine="{engine}"}} {engine + 1}.0' for engine in (0, 1)]
    lines += [f'vllm:num_requests_running{{engine="{engine}"}} 2.0' for engine in (0, 1)]
    found = read("\n".join(lines))
    assert (found.hits, found.requests) == (3, 4)


def test_the_boot_is_spelled_as_workers_spell_it():
    """Gateways share it through Redis."""
    assert read("process_start_time_seconds 1.7e+09\n").boot == "1.7e+09"


@pytest.mark.parametrize(
    "line",
    [
        f'seamark_engine_info{{version="{version()}"}} 1.0',
        INFO.replace('"16"', '"0"') + " 1.0",
        INFO.replace('"16"', '"-16"') + " 1.0",
        "vllm:prefix_cache_hits_total many",
    ],
)
def test_samples_that_are_not_what_they_are_named_are_refused(line):
    with pytest.raises((ValueError, KeyError)):
        read(line + "\n")


def test_tokens_and_passes_take_seconds_at_known_step_times():
    assert StepTimes(0.5, 0.001).seconds(1000, passes=2) == pytest.approx(2.0)
    assert UNKNOWN.seconds(1000, passes=2) == 0


def test_step_times_are_known_once_a_token_takes_any_time():
    assert StepTimes(0.0, 1e-6).known and not StepTimes(0.5, 0.0).known


@pytest.mark.parametrize("other", ["0.0.9", "99.0", "0", "odd", ""])
def test_a_plugin_of_another_release_is_not_used_and_the_sentence_says_update_the_plugin(other):
    found = read(f'seamark_engine_info{{version="{other}"}} 1.0\n')  # whatever else it says
    assert found.engine is None
    assert found.other_release == (
        f"its plugin is Seamark {other or 'of unknown version'}, this gateway {version()}: update the plugin"
    )
    own = ".".join(version().split(".")[:2])
    patch = read(INFO.replace(version(), f"{own}.99") + " 1.0\n")
    assert patch.engine is not None and not patch.other_release


@pytest.mark.parametrize(
    ("labels", "loads"),
    [
        ("", False),
        ('reports="h:1",lane="inside_pass",connector="NixlConnector",', True),
        ('lane="inside_pass",connector="OffloadingConnector+NixlPullConnector",', True),
        ('lane="inside_pass",connector="OffloadingConnector",', False),
        ('lane="outside",connector="NixlConnector",', False),
    ],
)
def test_what_an_engine_takes_over_follows_from_what_it_says(labels, loads):
    engine = read(INFO.replace("{", "{" + labels) + " 1.0\n").engine
    assert engine is not None and engine.loads_prefills == loads


@pytest.mark.parametrize(
    ("unit", "block", "ahead", "is_read"),
    [
        (1, 1, 0, True),
        (0, 384, 0, False),
        (16, 0, 0, False),
        (16, 384, -1, False),
        (2**31 - 1, 2**31 - 1, 2**31 - 1, True),
        (2**31, 384, 0, False),
        (16, 2**31, 0, False),
        (16, 384, 2**31, False),
    ],
)
def test_lengths_that_no_engine_has_are_refused(unit, block, ahead, is_read):
    lengths = f'match_unit="{unit}",block_size="{block}",ahead="{ahead}"'
    line = f'seamark_engine_info{{{lengths},version="{version()}",vllm=""}} 1.0\n'
    if not is_read:
        with pytest.raises(ValueError, match="no length is endless"):
            read(line)
        return
    assert read(line).engine == EngineInfo(version(), "", unit, block, ahead)


def test_of_several_samples_the_last_one_that_holds_counts_and_sizes_of_caches_are_summed():
    older, newer = INFO.replace("384", "16"), INFO.replace("384", "512")
    sizes = "".join(f'vllm:cache_config_info{{kv_cache_size_tokens="{size}"}} 1.0\n' for size in (100, "None", 20))
    found = read(f"{older} 1.0\n{newer} 1.0\n{INFO} 0.0\n{sizes}seamark_token_seconds 1.0\nseamark_token_seconds 2.0\n")
    assert found.engine is not None and found.engine.block_size == 512
    assert (found.cache_tokens, found.step_times.token_seconds) == (120, 2.0)


def test_an_engine_in_no_state_that_is_known_sleeps_at_the_first_level_of_all():
    text = "".join(
        f'vllm:engine_sleep_state{{engine="{engine}",sleep_state="{state}"}} {value}\n'
        for engine, state, value in ((0, "awake", 1), (0, "discard_all", 0), (1, "awake", 0), (2, "odd", 1))
    )
    assert read(text + 'vllm:engine_sleep_state{sleep_state="weights_offloaded"} 1\n').sleep_levels == (None, 0, 0, 1)


CACHE = 'vllm:cache_config_info{enable_prefix_caching="True",block_size="384",mamba_block_size="384"} 1.0\n'


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("", EngineSetup(None, None, False, False)),
        (CACHE, EngineSetup(True, 384, False, False)),
        (CACHE.replace("True", "False"), EngineSetup(False, 384, False, False)),
        (CACHE.replace("True", "odd").replace('"384",m', '"None",m'), EngineSetup(None, None, False, False)),
        (
            CACHE.replace('mamba_block_size="384"', 'mamba_block_size="None"'),
            EngineSetup(True, 384, False, False, "", "", True),
        ),
        (
            INFO.replace("{", '{connector="A+B",lane="inside_pass",') + " 1.0\n",
            EngineSetup(None, None, False, False, "A+B", "inside_pass"),
        ),
        (INFO.replace("{", '{connector="A",') + " 0.0\n", EngineSetup(None, None, False, False)),
        ("vllm:spec_decode_num_drafts_total 2.0\n", EngineSetup(None, None, True, False)),
        ('seamark_hints_ignored_total{reason="speculative"} 1.0\n', EngineSetup(None, None, False, True)),
        ('seamark_hints_ignored_total{reason="speculative"} 0.0\n', EngineSetup(None, None, False, False)),
        ('seamark_hints_ignored_total{reason="other"} 1.0\n', EngineSetup(None, None, False, False)),
        (
            'seamark_hints_ignored_total{reason="speculative"} 1.0\nseamark_hints_ignored_total{reason="other"} 1.0\n',
            EngineSetup(None, None, False, True),
        ),
        ("vllm:spec_decode_num_accepted_tokens_total 2.0\n", EngineSetup(None, None, False, False)),
    ],
)
def test_how_a_worker_was_started_shows_in_its_metrics(text, setup):
    assert read_setup(text) == setup


def test_drafts_of_requests_are_added_up():
    whole = sum((Accepted(2, 3), Accepted(4, 9)), Accepted())
    assert (whole, whole.per_step, Accepted().per_step) == (Accepted(6, 12), 2.0, 0.0)
    with pytest.raises(TypeError):
        Accepted(1, 1) + 1
