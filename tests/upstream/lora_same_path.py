"""A LoRA adapter whose files are replaced at their path, and that is loaded again under its name, is answered from
blocks that its old weights have computed.

Usage: python lora_same_path.py FOLDER, where the model goes. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiny_hybrid import FLAGS, answer, drawn, is_right, quiet, verdict

RANK, HIDDEN, LAYERS = 8, 128, 2

PROMPT = 300  # tokens


def write_model(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def write_adapter(folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module in ("k_proj", "v_proj"):
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (HIDDEN, RANK))):
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.{part}.weight"
                tensors[name] = torch.randn(shape, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def main(folder: Path) -> int:
    quiet()
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    model, path = folder / "llama", folder / "adapter"
    write_model(model)
    write_adapter(path, seed=1)
    llm = LLM(str(model), enable_prefix_caching=True, enable_lora=True, max_lora_rank=RANK, **FLAGS)
    prompt = drawn(PROMPT, vocabulary=1024)
    ada = LoRARequest("ada", 1, str(path))
    llm.llm_engine.add_lora(ada)
    answer(llm, prompt, lora_request=ada)
    again, _, _ = answer(llm, prompt, lora_request=ada)
    print(f"the same weights: {again} of {PROMPT} tokens cached")

    write_adapter(path, seed=2)
    cured = again > 0
    right = answer(llm, prompt, lora_request=LoRARequest("another name", 2, str(path)))
    for how, number in (("in place", 1), ("under another id, as after an unload", 3)):
        llm.llm_engine.add_lora(LoRARequest("ada", number, str(path), load_inplace=number == 1))
        found = answer(llm, prompt, lora_request=LoRARequest("ada", number, str(path)))
        cured = is_right(f"other weights at its path, loaded {how}", found, right) and cured
    return verdict(cured)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] + "-lora")))
