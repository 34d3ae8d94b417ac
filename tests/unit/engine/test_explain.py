"""Which layers a model has by its config, and what `--explain` says of figures (told by vLLM: `tests/engine/unit`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import families
from engine_patches.commands import explain, model_layers
from engine_patches.commands.model_layers import CannotExplain, is_hybrid, layer_kinds, recurrent_layers
from engine_patches.kv_connectors import decide_by
from engine_patches.scheduler import draft_windows, refusals
from engine_patches.scheduler.refusals import Refusal

MAMBA2, GDN_AND_MORE = {families.MAMBA2_MIXER: 4}, {families.QWEN_GDN: 36, families.QWEN_NGRAM: 1}

TOY = explain.StateCost(
    model="toy",
    architecture="ToyForCausalLM",
    layers=MAMBA2,
    attention_layers=2,
    state_types=("bfloat16", "float32"),
    kv_type="fp8",
    state_bytes=100 * explain.MIB,
    state_blocks=2,
    block_bytes=60 * explain.MIB,
    block_tokens=3200,
    attention_groups=1,
    match_unit=1600,
)


def test_the_cost_is_told_line_by_line():
    assert (
        "\n".join(explain.report(replace(TOY, notes=("what is left out",)), (6000 * explain.MIB, "as configured"), 0.5))
        == """\
toy
  architecture      ToyForCausalLM
  layers            4 recurrent (Mamba2), 2 attention
  states            inside the pass (shown on an engine)
  one state         100.0 MiB in bfloat16 and float32
  in the cache      120.0 MiB: 2 blocks of 60.0 MiB
  cache block       3,200 tokens of KV in fp8
  match unit        1,600 tokens
  a state displaces 6,400 tokens of KV
  cache             5.9 GiB (as configured)
  which holds       320,000 tokens of KV, or 50 states
  states may take   50% of it (SEAMARK_STATE_SHARE): 25 states
  * what is left out"""
    )


STARTS = replace(TOY, max_model_len=100_000, request_blocks=38, caching_blocks=4, max_num_seqs=100)


def test_the_pool_is_told_before_the_start():
    lines = list(explain.report(STARTS, (6000 * explain.MIB, "as configured"), 0.5))
    assert (
        "\n".join(lines[11:15])
        == """\
  at once           2.63 requests of 100,000 tokens: 38 of 100 blocks each
  stay warm         conversations with a state each: 19 of 8,192 tokens, 7 of 32,768 tokens
  --max-num-seqs    100 at most, since vLLM wants a block for each
  caching costs     12,800 tokens of context: each request holds 4 blocks more"""
    )


@pytest.mark.parametrize(
    ("changes", "blocks", "said"),
    [
        ({}, 100, ""),
        ({}, 39, "more than its blocks: give 39 or less"),
        ({"max_num_seqs": 0}, 39, ""),
        ({"max_num_seqs": 0}, 38, "wants 38 blocks, and 37 can be had: --max-model-len 99200 fits"),
        ({"max_num_seqs": 0}, 7, "wants 38 blocks, and 6 can be had: more memory"),
        ({"max_num_seqs": 0, "fits_itself": True}, 38, ""),
        ({"max_num_seqs": 0, "fits_itself": True}, 7, "more memory"),
    ],
)
def test_what_vllm_would_refuse_once_the_weights_are_loaded_is_told(changes, blocks, said):
    cost = replace(STARTS, **changes)
    stops = list(explain.will_not_start(cost, blocks))
    assert len(stops) == bool(said) and said in "".join(stops)
    fits = cost.longest(blocks)
    if fits < cost.max_model_len:  # and not a block more
        assert cost.request_blocks - (32 - fits // 3200) + 1 <= blocks or not fits
        assert cost.request_blocks - (32 - fits // 3200) + 2 > blocks
        own = replace(cost, fits_itself=True).of_its_own_length(blocks)
        assert (own.max_model_len, own.request_blocks) == ((fits, blocks - 1) if fits else (100_000, 38))


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, 0),
        ({"a.safetensors": "1234", "b.safetensors": "12", "c.bin": "1"}, 6),
        ({"a.safetensors": "1234", "model.safetensors.index.json": '{"metadata": {"total_size": 99}}'}, 99),
        ({"a.safetensors": "1234", "model.safetensors.index.json": '{"weight_map": {}}'}, 4),
    ],
)
def test_the_size_of_weights_is_that_of_the_index_or_of_the_files(files, size, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert explain.weights_in(str(tmp_path)) == size


TRIAL = "on trial at first, then beside the drafts (SEAMARK_DRAFTS=1: at once)"

CUT = "states of these layers cost a pass each: one is kept only if a hit on it is worth that"


ON_AN_ENGINE = "cut: a pass for each (shown on an engine)"

MAMBA1 = {"layers": {families.MAMBA_MIXER: 28}, "inside": False}


@pytest.mark.parametrize(
    ("changes", "more", "name", "said", "starred"),
    [
        ({}, {"drafts": "mtp, 2 tokens"}, "hints", TRIAL, ""),
        ({}, {"drafts": "mtp, 2 tokens", "refusal": Refusal("s", "a window")}, "hints", "refused: a window", ""),
        ({"inside": False}, {}, "states", ON_AN_ENGINE, CUT),
        (MAMBA1, {}, "states", "cut: a pass for each (read, and nothing ran)", CUT),
        ({"layers": GDN_AND_MORE}, {}, "states", "inside the pass (shown in the interpreter of a GPU's kernels)", ""),
        ({}, {"connector": "Unheard"}, "states", ON_AN_ENGINE, "a state costs a pass; beside NixlConnector"),
        ({}, {"connector": "LMCacheMPConnector"}, "KV connector", "LMCacheMPConnector", "knows caches of one kind"),
    ],
)
def test_what_differs_is_told(changes, more, name, said, starred):
    if "connector" in more:
        more = {"connector": decide_by({"kv_connector": more["connector"]})}
    lines = list(explain.report(replace(TOY, **changes), None, 0.5, **more))
    assert {line[2:20].strip(): line[20:] for line in lines if line.startswith("  ")}[name] == said
    stars = [line for line in lines if line.startswith("  * ")]
    assert len(stars) == bool(starred) and starred in "".join(stars)


def vllm_config(method: str = "", head: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """A `VllmConfig`, as far as it is read here; `head`: the text config of a draft head."""
    draft = None if head is None else SimpleNamespace(hf_text_config=SimpleNamespace(**head))
    speculative = SimpleNamespace(method=method, draft_model_config=draft) if method else None
    return SimpleNamespace(speculative_config=speculative, num_speculative_tokens=3, **more)


@pytest.mark.parametrize(
    ("config", "slides"),
    [
        (vllm_config(), False),
        (vllm_config("mtp", {"layer_types": None, "dflash_config": None}), False),
        (vllm_config("mtp", {"layer_types": ["full_attention", "sliding_attention"]}), True),
        (vllm_config("dflash", {"dflash_config": {"use_swa": True}}), True),
    ],
)
def test_a_draft_head_with_a_window_is_known_by_its_config_and_refused_unless_vllm_can_leave_it_out(
    config, slides, monkeypatch
):
    assert explain.head_slides(config) is slides
    monkeypatch.setattr(refusals, "by_configuration", lambda config, *, in_pass: None)
    for can in (True, False):
        monkeypatch.setattr(draft_windows, "can_be_left_out", lambda can=can: can)
        said = explain.refusal_of(config, TOY)
        assert (said is not None) is (slides and not can)
        assert said is None or "the draft head has a sliding window" in said.cause
    drafts = config.speculative_config
    assert explain.drafts_of(config) == (f"{drafts.method}, 3 tokens" if drafts else "")


def test_what_is_explained_is_printed_and_what_cannot_be_is_said_in_one_line(monkeypatch, capsys):
    def explained(arguments: list[str], kernels: str, gpu_memory: int | None) -> list[str]:
        if not arguments:
            raise CannotExplain("no hybrid")
        return [*arguments, kernels, f"registered {len(registered)}"]

    registered: list[bool] = []
    monkeypatch.setattr(explain.os, "environ", {})
    monkeypatch.setattr(explain.plugin, "register", lambda: registered.append(True))
    monkeypatch.setattr(explain, "explained", explained)
    assert explain.main(["a", "b"], "gpu") == 0 and capsys.readouterr().out == "a\nb\ngpu\nregistered 1\n"
    assert explain.os.environ == {"VLLM_LOGGING_LEVEL": "CRITICAL"}
    assert explain.main([], "here") == 1 and capsys.readouterr() == ("", "seamark worker: no hybrid\n")


KIMI = {"model_type": "kimi_linear"}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "qwen3_next"}, (families.QWEN_GDN,)),
        ({"model_type": "qwen4_exp_text"}, (families.QWEN_GDN, families.QWEN_NGRAM)),
        (KIMI, (families.KIMI_KDA,)),
        ({**KIMI, "linear_attn_config": {"use_full_rank_gate": True}}, (families.K3_KDA,)),
        ({"model_type": "of_somebody", "linear_attn_config": {"kda_layers": [1]}}, (families.KIMI_KDA,)),
        ({"model_type": "bailing", "short_conv_kernel_size": 4, "layer_group_size": 4}, (families.LING_KDA,)),
        ({"model_type": "bailing", "layer_group_size": 4}, (families.LINEAR_ATTENTION,)),
        ({"linear_num_value_heads": 4}, (families.QWEN_GDN,)),
        ({"conv_L_cache": 3}, (families.SHORT_CONVOLUTION,)),
        ({"mamba_dt_rank": 3}, (families.MAMBA_MIXER,)),
        ({"mamba_num_heads": 3}, (families.MAMBA2_MIXER,)),
        ({"model_type": "llama", "mamba_num_heads": 0}, ()),
    ],
)
def test_a_config_names_the_layers_by_its_type_or_by_what_only_their_kind_has(config, layers):
    assert families.layers_in(config) == layers == families.layers_in(SimpleNamespace(**config))
    assert families.kinds_in(config) == tuple(layer.kind for layer in layers) and families.compression_in(config) == 1


def config(model_type: str = "toy", **given: Any) -> SimpleNamespace:
    """A model's text config."""
    return SimpleNamespace(model_type=model_type, **given)


LINEAR, ATTENTION = "linear_attention", "attention"


@pytest.mark.parametrize(
    ("of_model", "kinds"),
    [
        (config(layers_block_type=["mamba", "attention", "mlp"], layer_types=["conv"]), ["mamba", "attention", "mlp"]),
        (config(layer_types=["conv", "full_attention"]), ["conv", "full_attention"]),
        (config(linear_attn_config={"kda_layers": [1, 3], "full_attn_layers": [2]}), [LINEAR, ATTENTION, LINEAR]),
        (config(linear_attn_config={}, layer_types=["kda"]), ["kda"]),
        (config(layer_group_size=3, num_hidden_layers=8), [LINEAR, LINEAR, ATTENTION] * 2 + [ATTENTION] * 2),
        (config(layer_group_size=3, num_hidden_layers=3, layer_types=["hybrid"]), ["hybrid"]),
        *(
            (config(layer_types=[kind]), [kind])
            for kind in sorted(model_layers.RECURRENT | model_layers.ATTENTION | model_layers.WITHOUT_CACHE)
        ),
    ],
)
def test_the_kind_of_each_layer_is_told_in_the_words_of_its_family(of_model, kinds):
    assert list(layer_kinds(of_model)) == kinds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "the config of toy does not say which of its layers are recurrent"),
        ({"layer_types": []}, "does not say"),
        ({"layer_types": ["sliding_attention", "mamba", "a"]}, r"kind a, sliding_attention are not known here \(toy\)"),
        ({"layer_types": ["mamba", "attention"]}, "the recurrent layers of toy are of a kind that is not known here"),
    ],
)
def test_a_config_of_an_unknown_kind_is_refused_in_one_sentence(given, said):
    with pytest.raises(CannotExplain, match=said):
        recurrent_layers(config(), layer_kinds(config(**given)))


@pytest.mark.parametrize(
    ("of_model", "kinds", "layers"),
    [
        (config("kimi_linear"), [LINEAR] * 3 + [ATTENTION], {families.KIMI_KDA: 3}),
        (config("qwen4_exp_text", ple_layer_ids=[2]), [LINEAR, "moe"], {families.QWEN_GDN: 1, families.QWEN_NGRAM: 1}),
        (config("falcon_h1", mamba_n_heads=4), ["hybrid"] * 3, {families.MAMBA2_MIXER: 3}),
    ],
)
def test_layers_are_counted_by_their_class(of_model, kinds, layers):
    assert recurrent_layers(of_model, kinds) == layers


DENSE = {"model_type": "granitemoehybrid", "mamba_n_heads": 48, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("told", "hybrid"),
    [
        ({**DENSE, "layer_types": ["attention"] * 4}, False),
        ({**DENSE, "layer_types": ["mamba", "attention"]}, True),
        ({**DENSE, "layers_block_type": ["mamba", "attention"], "layer_types": ["attention"]}, True),
        ({"model_type": "gemma3", "text_config": {"layer_types": ["sliding_attention", "full_attention"]}}, False),
        ({"model_type": "qwen3_next", "layer_types": ["full_attention"]}, True),  # of nothing else
        ({"model_type": "qwen3_next", "text_config": {"model_type": "llama"}}, False),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, True),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-"}, False),
        ({"model_type": "x", "mamba_d_state": 16, "num_attention_heads": 16}, True),
        ({}, False),
    ],
)
def test_a_hybrid_has_recurrent_layers_beside_attention(told, hybrid):
    assert is_hybrid(told) is hybrid
