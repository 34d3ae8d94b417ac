"""What `--explain` says of figures, as lines of text. The figures of models are told by vLLM (`tests/engine/unit`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import families, settings
from engine_patches.commands import explain
from engine_patches.commands.explain import (
    GIB,
    MIB,
    StateCost,
    about,
    advice,
    drafts_of,
    head_slides,
    main,
    refusal_of,
    report,
)
from engine_patches.commands.model_layers import CannotExplain
from engine_patches.kv_connectors import decide_by
from engine_patches.scheduler import draft_windows, refusals
from engine_patches.scheduler.refusals import Refusal


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.DRAFTS, raising=False)


def cost(**changes: object) -> StateCost:
    figures: dict[str, Any] = {
        "model": "toy",
        "architecture": "ToyForCausalLM",
        "layers": {families.MAMBA2_MIXER: 4},
        "attention_layers": 2,
        "state_types": ("bfloat16", "float32"),
        "kv_type": "fp8",
        "state_bytes": 100 * MIB,
        "state_blocks": 2,
        "block_bytes": 60 * MIB,
        "block_tokens": 3200,
        "attention_groups": 1,
        "match_unit": 1600,
    }
    return StateCost(**figures | changes)


TWO_KINDS = {families.QWEN_GDN: 36, families.QWEN_NGRAM: 1}


def test_states_are_counted_in_whole_blocks_and_their_share_in_blocks_too():
    toy = cost(block_bytes=60, block_tokens=32, layers={**TWO_KINDS})
    assert toy.recurrent_layers == 37
    assert toy.bytes_in_cache == 120 and toy.displaced_tokens == 64
    assert toy.states_in(60 * 7 + 59) == 3 and toy.states_in(60 * 7, 0.5) == 1
    assert toy.states_in(60 * 4, 0.5) == 1 and toy.states_in(60 * 4 - 1, 0.5) == 0
    assert toy.tokens_in(60 * 7 + 59) == 7 * 32
    shared = cost(block_bytes=60, block_tokens=32, attention_groups=3)
    assert shared.tokens_in(60 * 7) == 2 * 32 and shared.displaced_tokens == 21


def rows(*lines: str) -> Mapping[str, str]:
    """What is said, by the name of its line."""
    return {line[2:20].strip(): line[20:] for line in lines if line.startswith("  ")}


@pytest.mark.parametrize(
    ("value", "hints"),
    [
        (None, "on trial at first, then beside the drafts (SEAMARK_DRAFTS=1: at once)"),
        ("1", None),
        ("0", None),
    ],
)
def test_drafts_are_told_with_their_trial(value, hints, monkeypatch):
    if value is not None:
        monkeypatch.setenv(settings.DRAFTS, value)
    said = rows(*report(cost(), None, 0.5, drafts="mtp, 2 tokens"))
    assert said["drafts"] == "mtp, 2 tokens" and said.get("hints") == hints


def test_a_refusal_of_hints_is_told_beside_drafts_or_not():
    refusal = Refusal("speculative", "a window")
    for drafts in ("", "mtp, 2 tokens"):
        assert rows(*report(cost(), None, 0.5, drafts=drafts, refusal=refusal))["hints"] == "refused: a window"


@pytest.mark.parametrize(
    ("changes", "layers", "states"),
    [
        ({"inside": False}, "4 recurrent (Mamba2), 2 attention", "cut: a pass for each (shown on an engine)"),
        (
            {"layers": TWO_KINDS},
            "36 recurrent (gated delta net), 1 recurrent (convolution of n-grams), 2 attention",
            "inside the pass (shown in the interpreter of a GPU's kernels)",
        ),
        (
            {"layers": {families.MAMBA_MIXER: 28}, "inside": False},
            "28 recurrent (Mamba1), 2 attention",
            "cut: a pass for each (read, and nothing ran)",
        ),
    ],
)
def test_it_is_told_how_states_are_written_and_how_that_was_shown(changes, layers, states):
    lines = list(report(cost(**changes), None, 0.5))
    assert (rows(*lines)["layers"], rows(*lines)["states"]) == (layers, states)
    assert any("cost a pass each" in line for line in lines) == states.startswith("cut")


@pytest.mark.parametrize(
    ("connector", "states", "said"),
    [
        ("Unheard", "cut: a pass for each", "a state costs a pass; beside NixlConnector it costs none"),
        ("LMCacheMPConnector", "inside the pass", "LMCacheMPConnector"),
        ("NixlConnector", "inside the pass", ""),
    ],
)
def test_a_connector_is_told_with_what_it_changes(connector, states, said):
    decision = decide_by({"kv_connector": connector})
    lines = list(report(cost(), None, 0.5, decision))
    assert rows(*lines)["KV connector"] == connector and rows(*lines)["states"].startswith(states)
    told = [line for line in lines if line.startswith("  * ")]
    assert len(told) == len(list(about(decision))) == bool(said) and said in "".join(told)


def test_what_the_numbers_leave_out_is_said_last():
    assert list(report(cost(notes=("more than this", "b")), None, 0.1))[-2:] == ["  * more than this", "  * b"]


@pytest.mark.parametrize(
    ("changes", "kept", "said"),
    [
        ({}, 16, ""),
        ({"state_types": ("float32", "bfloat16")}, 100, "in bfloat16 each one is rounded"),
        ({"layers": TWO_KINDS, "state_types": ("bfloat16", "bfloat16")}, 100, "--mamba-ssm-cache-dtype float32"),
        ({"layers": {families.SHORT_CONVOLUTION: 4}, "state_types": ("bfloat16",)}, 100, ""),  # inputs, not rounded
        ({"layers": {families.LINEAR_ATTENTION: 4}, "inside": False}, 100, "a pass each"),
        ({"state_types": ("bfloat16",), "inside": False}, 100, "a pass each"),
        ({}, 15, "room for 15 states is little"),
    ],
)
def test_the_advice_fits_the_family_and_the_types(changes, kept, said):
    lines = list(advice(cost(**changes), kept))
    assert len(lines) == bool(said) and said in "".join(lines)


def test_a_little_room_is_said_beside_what_the_types_cost():
    assert len(list(advice(cost(state_types=("bfloat16",)), 3))) == 2


def vllm_config(method: str = "", head: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """A `VllmConfig`, as far as it is read here; `head`: the text config of a draft head."""
    text = SimpleNamespace(**head) if head is not None else None
    draft = None if text is None else SimpleNamespace(hf_text_config=text)
    speculative = SimpleNamespace(method=method, draft_model_config=draft) if method else None
    return SimpleNamespace(speculative_config=speculative, num_speculative_tokens=3, **more)


@pytest.mark.parametrize(
    ("config", "slides"),
    [
        (vllm_config(), False),
        (vllm_config("ngram"), False),
        (vllm_config("mtp", {}), False),
        (vllm_config("mtp", {"layer_types": None, "dflash_config": None}), False),
        (vllm_config("mtp", {"layer_types": ["full_attention"]}), False),
        (vllm_config("mtp", {"layer_types": ["full_attention", "sliding_attention"]}), True),
        (vllm_config("dflash", {"dflash_config": {"use_swa": True}}), True),
        (vllm_config("dflash", {"dflash_config": {"use_swa": False}}), False),
    ],
)
def test_a_draft_head_with_a_window_is_known_by_its_config(config, slides):
    assert head_slides(config) is slides


def test_drafts_are_named_by_method_and_number():
    assert drafts_of(vllm_config()) == "" and drafts_of(vllm_config("mtp", {})) == "mtp, 3 tokens"


@pytest.mark.parametrize(
    ("layers", "inside", "drafts", "in_pass"),
    [
        ([families.MAMBA2_MIXER], True, False, True),
        ([families.MAMBA2_MIXER], True, True, True),
        ([families.MAMBA2_MIXER], False, False, False),
        ([families.SHORT_CONVOLUTION], True, False, True),
        ([families.SHORT_CONVOLUTION], True, True, False),
        ([families.MAMBA2_MIXER, families.SHORT_CONVOLUTION], True, True, False),
    ],
)
def test_hints_are_refused_by_the_configuration_and_by_what_the_layers_can(
    layers, inside, drafts, in_pass, monkeypatch
):
    asked: list[tuple[Any, bool]] = []

    def by_configuration(config: Any, *, in_pass: bool) -> Refusal:
        asked.append((config, in_pass))
        return Refusal("x", "why")

    monkeypatch.setattr(refusals, "by_configuration", by_configuration)
    config = vllm_config("mtp", {}) if drafts else vllm_config()
    assert refusal_of(config, cost(layers=dict.fromkeys(layers, 1), inside=inside)) == Refusal("x", "why")
    assert asked == [(config, in_pass)]


@pytest.mark.parametrize(
    ("can", "slides", "refused"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_window_of_the_head_is_refused_where_vllm_cannot_leave_it_out(can, slides, refused, monkeypatch):
    monkeypatch.setattr(draft_windows, "can_be_left_out", lambda: can)
    monkeypatch.setattr(refusals, "by_configuration", lambda config, *, in_pass: None)
    head = {"layer_types": ["sliding_attention"] if slides else []}
    said = refusal_of(vllm_config("mtp", head), cost())
    assert (said is not None) is refused and (not refused or "the draft head has a sliding window" in str(said))


@pytest.mark.parametrize(
    ("layers", "on_rocm", "whole", "inside"),
    [
        ([families.MAMBA2_MIXER, families.QWEN_GDN], False, True, True),
        ([families.MAMBA2_MIXER], True, True, True),
        ([families.MAMBA2_MIXER, families.QWEN_GDN], True, True, False),
        ([families.MAMBA_MIXER], False, True, False),
        ([families.MAMBA2_MIXER, families.MAMBA_MIXER], False, True, False),
        ([families.MAMBA2_MIXER], False, False, False),
    ],
)
def test_states_are_written_inside_where_every_layer_does_so_and_runs_whole_steps(
    layers, on_rocm, whole, inside, monkeypatch
):
    platforms: Any = SimpleNamespace(current_platform=SimpleNamespace(is_rocm=lambda: on_rocm))
    monkeypatch.setitem(explain.sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(explain.sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setattr(explain, "runs_whole_steps", lambda config: whole)
    assert explain._written_inside(layers, None) is inside


class Cache(SimpleNamespace):
    """vLLM's cache configuration."""

    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization = 0.5


@pytest.mark.parametrize(
    ("given", "weights", "on_cpu", "total", "expected"),
    [
        (7, [1], True, 0, (7, "as configured")),
        (None, [], False, 4 * GIB, None),
        (None, [1], True, 4 * GIB, None),
        (
            None,
            [300, 700],
            False,
            4 * GIB,
            (2 * GIB - 500, "50% of 4.0 GiB without the weights; activations need some"),
        ),
        (None, [3000], False, 1000, (0, "50% of 0.0 MiB without the weights; activations need some")),
    ],
)
def test_memory_for_the_cache_is_what_weights_leave(given, weights, on_cpu, total, expected, monkeypatch, tmp_path):
    platform = SimpleNamespace(is_cpu=lambda: on_cpu, get_device_total_memory=lambda: total)
    platforms: Any = SimpleNamespace(current_platform=platform)
    monkeypatch.setitem(explain.sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(explain.sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    for number, size in enumerate(weights):
        (tmp_path / f"{number}.safetensors").write_bytes(b"0" * size)
    config = SimpleNamespace(
        cache_config=Cache(kv_cache_memory_bytes=given),
        model_config=SimpleNamespace(model=str(tmp_path)),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    assert explain.memory_for_cache(config) == expected
    if expected is not None and given is None:  # memory that is shared with the CPU, which NVML does not tell

        def untold() -> int:
            raise RuntimeError

        platform.get_device_total_memory = untold
        monkeypatch.setattr(explain.os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": total // 4}.__getitem__)
        assert explain.memory_for_cache(config) == expected


def test_a_cpu_does_not_draft_for_a_hybrid_and_that_is_said(monkeypatch):
    config = vllm_config("mtp", {}, device_config=SimpleNamespace(device_type="cpu"))
    asked: list[list[str]] = []
    monkeypatch.setattr(explain, "configure", lambda arguments: asked.append(arguments) or config)
    monkeypatch.setattr(explain, "cost_of", lambda config: cost())
    monkeypatch.setattr(explain, "memory_for_cache", lambda config: None)
    monkeypatch.setattr(explain, "refusal_of", lambda config, cost: None)
    monkeypatch.setattr(explain.kv_connectors, "decide", lambda config: decide_by({}))
    lines = explain.explained(["m"], explain.HERE)
    assert asked == [["m"]] and lines[-1].startswith("  * on a CPU vLLM drafts for no hybrid")
    assert rows(*lines)["drafts"] == "mtp, 3 tokens"
    config.device_config.device_type = "cuda"
    assert "CPU" not in explain.explained(["m"], explain.HERE)[-1]
    config.speculative_config, config.device_config.device_type = None, "cpu"
    assert "CPU" not in explain.explained(["m"], explain.HERE)[-1]


def test_what_is_explained_is_printed_and_what_cannot_be_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(explain.os, "environ", {})
    registered: list[bool] = []
    monkeypatch.setattr(explain.plugin, "register", lambda: registered.append(True))
    monkeypatch.setattr(explain, "explained", lambda arguments, kernels: [*arguments, kernels])
    assert main(["a", "b"], "gpu") == 0 and capsys.readouterr().out == "a\nb\ngpu\n"
    assert registered == [True] and explain.os.environ == {"VLLM_LOGGING_LEVEL": "CRITICAL"}

    def cannot(arguments: Any, kernels: Any) -> list[str]:
        raise CannotExplain("no hybrid")

    monkeypatch.setattr(explain, "explained", cannot)
    assert main([], "here") == 1
    assert capsys.readouterr() == ("", "seamark worker: no hybrid\n")
