"""LoRA adapters for the small generated NemotronH, as PEFT saves them, with weights that change every answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

RANK = 8

HIDDEN = 256

# Of the generated model: a module, and how wide what it reads is. States and attention rows behind them differ, too.
MODULES = {
    "layers.0.mixer.out_proj": 512,
    "layers.2.mixer.out_proj": 512,
    "layers.3.mixer.o_proj": HIDDEN,
    "layers.6.mixer.o_proj": HIDDEN,
}

FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2")

ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def write_adapter(folder: Path, seed: int, std: float = 0.4) -> Path:
    """An adapter with weights drawn by `seed`, in place of what is in `folder`, each file replaced as a whole."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, width in MODULES.items():
        for part, shape in (("lora_A", (RANK, width)), ("lora_B", (HIDDEN, RANK))):
            name = f"base_model.model.backbone.{module}.{part}.weight"
            tensors[name] = torch.randn(shape, generator=draw) * std
    targets = sorted({module.rpartition(".")[2] for module in MODULES})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        new = folder / f"new-{name}"
        if name.endswith("json"):
            new.write_text(json.dumps(config))
        else:
            save_file(tensors, new)
        os.replace(new, folder / name)
    return folder
