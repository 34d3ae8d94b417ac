"""Small draft heads for the generated models, with random weights, one for each kind that vLLM can draft with.

A head that nobody trained is hardly ever right. What it proposes depends on its rows all the same, if its attention
weighs: so queries and keys are drawn wide.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from engine_patches.commands.model import WEIGHT_STD
from proxy.bench.harness.servers import CACHE, NEMOTRON_H, generated_model

DFLASH, MIXED, DFLASH2, DSPARK, EAGLE3 = "dflash", "dflash-mixed", "dflash2", "dspark", "eagle3"

SLIDING, FULL = "sliding_attention", "full_attention"

DRAFTS = 3  # for each token

WINDOW = 100  # tokens

# Of the generated target.
HIDDEN, VOCABULARY, AUXILIARY_LAYERS = 256, 4096, (1, 4, 6)

HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE = 8, 2, 32, 512

TAPS, GROUP_SIZE = 3, 32  # of DFlash2's convolutions

RANK = 16  # of what is factored: DFlash2's selector, DSpark's Markov head

# vLLM's architecture, its method, and the attention of the head's layers.
KINDS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    DFLASH: ("DFlashDraftModel", "dflash", (SLIDING, SLIDING)),
    MIXED: ("DFlashDraftModel", "dflash", (SLIDING, FULL)),
    DFLASH2: ("DFlash2DraftModel", "dflash", (SLIDING, SLIDING)),
    DSPARK: ("Qwen3DSparkModel", "dspark", (SLIDING, SLIDING)),
    EAGLE3: ("Eagle3Qwen3ForCausalLM", "eagle3", (SLIDING,)),
}


def speculation(kind: str, window: int = WINDOW) -> dict[str, Any]:
    """vLLM's `speculative_config` with a head of `KINDS`; `window`: of its sliding layers, in tokens."""
    return {"method": KINDS[kind][1], "model": str(head(kind, window)), "num_speculative_tokens": DRAFTS}


def head(kind: str, window: int = WINDOW) -> Path:
    """The folder of a head of its own."""
    return _made(f"head-{kind}-{window}", partial(_write, kind=kind, window=window))


def mtp_model(family: str = NEMOTRON_H) -> Path:
    """The folder of the generated model of `family`, with a head for multi-token prediction."""
    model = generated_model(print, family)
    return _made(f"{model.name}-mtp", partial(_add_mtp, model))


def _made(name: str, write: Callable[[Path], None]) -> Path:
    """A folder of this name, written again whenever this module has changed."""
    folder = CACHE / f"{name}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="head-") as being_made:
            write(Path(being_made, "h"))
            with contextlib.suppress(OSError):  # another process was faster
                Path(being_made, "h").rename(folder)
    return folder.resolve()


def _add_mtp(model: Path, out: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out)
    file, generator = out / "model.safetensors", torch.Generator().manual_seed(1)
    weights, config = load_file(str(file)), json.loads((out / "config.json").read_text())
    is_mamba, dtype = config["model_type"] == NEMOTRON_H, next(iter(weights.values())).dtype
    for name, shape in (_nemotron_h_mtp(config) if is_mamba else _qwen3_next_mtp(config, weights)).items():
        drawn = torch.full(shape, float(is_mamba))  # of a norm: Qwen3-Next adds one
        drawn = drawn.normal_(0.0, WEIGHT_STD, generator=generator) if len(shape) > 1 else drawn
        weights[f"mtp.{name}.weight"] = drawn.to(dtype)
    save_file(weights, str(file), metadata={"format": "pt"})
    config |= {"num_nextn_predict_layers": 1} | ({"mtp_layers_block_type": ["full_attention"]} if is_mamba else {})
    (out / "config.json").write_text(json.dumps(config))


def _nemotron_h_mtp(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of one attention layer, by vLLM's names."""
    hidden = config["hidden_size"]
    mixer = {f"mixer.{name}": shape for name, shape in _attention(config).items()}
    norms = dict.fromkeys(("enorm", "hnorm", "norm", "final_layernorm"), (hidden,))
    return {f"layers.0.{name}": shape for name, shape in {"eh_proj": (hidden, 2 * hidden), **mixer, **norms}.items()}


def _qwen3_next_mtp(config: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The same. vLLM takes the head's layer, which has experts, for the model's first one."""
    hidden, norm, first = config["hidden_size"], (config["head_dim"],), "model.layers.0."
    attention = {**_attention(config, gates=True), "q_norm": norm, "k_norm": norm}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "layers.0.input_layernorm")
    experts = {name.removesuffix(".weight"): each for name, each in weights.items() if name.startswith(f"{first}mlp.")}
    return {
        "fc": (hidden, 2 * hidden),
        **{f"layers.0.self_attn.{name}": shape for name, shape in attention.items()},
        **dict.fromkeys((*norms, "layers.0.post_attention_layernorm"), (hidden,)),
        **{f"layers.0.{name.removeprefix(first)}": tuple(each.shape) for name, each in experts.items()},
    }


def _attention(config: Mapping[str, Any], gates: bool = False) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    rows = {"q_proj": queries * (1 + gates), "k_proj": keys, "v_proj": keys}
    return {**{name: (many, hidden) for name, many in rows.items()}, "o_proj": (hidden, queries)}


def _write(out: Path, kind: str, window: int) -> None:
    from safetensors.torch import save_file

    out.mkdir()
    (out / "config.json").write_text(json.dumps(_config(kind, window), indent=1) + "\n")
    save_file(_weights(kind), str(out / "model.safetensors"))


def _config(kind: str, window: int) -> dict[str, Any]:
    architecture, _, layers = KINDS[kind]
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "head_dim": HEAD_SIZE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": len(layers),
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "layer_types": layers,
        "sliding_window": window,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "rope_theta": 10000.0,
        "attention_bias": False,
        **({"markov_rank": RANK} if kind == DSPARK else {}),
        **_of_method(kind, window),
    }


def _of_method(kind: str, window: int) -> dict[str, Any]:
    if kind == EAGLE3:
        return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in AUXILIARY_LAYERS]}}
    own: dict[str, Any] = {
        "mask_token_id": VOCABULARY - 6,
        "target_layer_ids": AUXILIARY_LAYERS,
        "causal": True,  # vLLM's attention for CPUs knows no other
        "swa_window_size": window,
    }
    if kind == DFLASH2:
        own |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP_SIZE}
        own |= {"selector_rank": RANK, "selector_top_k": 8}
    return {"block_size": 1 + DRAFTS, "dflash_config": own}


def _weights(kind: str) -> dict[str, Any]:
    """All tensors of a head, by their names in its file: the same kind, the same weights."""
    import torch

    eagle, layers = KINDS[kind][1] == "eagle3", len(KINDS[kind][2])
    generator = torch.Generator().manual_seed(5)
    found: dict[str, Any] = {}

    def draw(name: str, *shape: int, wide: float = 0.05) -> None:
        found[name] = torch.randn(*shape, generator=generator) * wide

    def fill(*names: str, size: int = HIDDEN, value: float = 1.0) -> None:
        found.update({name: torch.full((size,), value) for name in names})

    for number in range(layers):
        prefix, inputs = f"layers.{number}.", 2 * HIDDEN if eagle and not number else HIDDEN
        for name, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            draw(f"{prefix}self_attn.{name}.weight", rows * HEAD_SIZE, inputs, wide=0.2)
        draw(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_SIZE, wide=0.2)
        fill(*(f"{prefix}self_attn.{name}_norm.weight" for name in "qk"), size=HEAD_SIZE, value=2.0)
        for name in ("gate_proj", "up_proj"):
            draw(f"{prefix}mlp.{name}.weight", INTERMEDIATE, HIDDEN)
        draw(f"{prefix}mlp.down_proj.weight", HIDDEN, INTERMEDIATE)
        fill(f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight")
    draw("fc.weight", HIDDEN, len(AUXILIARY_LAYERS) * HIDDEN)
    fill("norm.weight", "layers.0.hidden_norm.weight" if eagle else "hidden_norm.weight")
    if kind == DFLASH2:
        for number in range(layers):
            for place in ("attention_conv", "mlp_conv"):
                draw(f"layers.{number}.{place}.base_kernel", 2, TAPS, HIDDEN, wide=0.5)
                rows = 2 * TAPS * HIDDEN // GROUP_SIZE
                draw(f"layers.{number}.{place}.kernel_projection.weight", rows, HIDDEN)
        for table in ("predecessor_codebook", "successor_codebook"):
            draw(f"candidate_selector.{table}", VOCABULARY, RANK)
        draw("candidate_selector.hidden_projection.weight", RANK, HIDDEN)
    elif kind == DSPARK:
        for number in (1, 2):
            draw(f"markov_head.markov_w{number}.weight", VOCABULARY, RANK)
    return found
