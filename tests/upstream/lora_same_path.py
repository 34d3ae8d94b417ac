"""A LoRA adapter whose files are replaced at their path, and that is loaded again under its name, is answered from
blocks that its old weights have computed.

A small random Llama with one adapter, all written here. The answers of the new weights under a name that nothing is
cached for are the right ones.
Usage: python lora_same_path.py FOLDER, where the model goes. Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

RANK, HIDDEN, LAYERS = 8, 128, 2

PROMPT, NEW = 300, 16  # tokens

BOUND = 1e-3  # of a logprob


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


def answer(llm, prompt: list[int], lora) -> tuple[int, list[int], list[float]]:
    """Cached prompt tokens, greedy tokens, their logprobs."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False, lora_request=lora)
    tokens = list(request.outputs[0].token_ids)
    logprobs = [step[token].logprob for step, token in zip(request.outputs[0].logprobs, tokens, strict=True)]
    return request.num_cached_tokens, tokens, logprobs


def main(folder: Path) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    model, path = folder / "llama", folder / "adapter"
    write_model(model)
    write_adapter(path, seed=1)
    llm = LLM(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=True,
        enable_lora=True,
        max_lora_rank=RANK,
    )
    draw = random.Random(0)
    prompt = [draw.randrange(3, 1024) for _ in range(PROMPT)]
    llm.llm_engine.add_lora(LoRARequest("ada", 1, str(path)))
    answer(llm, prompt, LoRARequest("ada", 1, str(path)))
    again, _, _ = answer(llm, prompt, LoRARequest("ada", 1, str(path)))
    print(f"the same weights: {again} of {PROMPT} tokens cached")

    write_adapter(path, seed=2)
    cured = again > 0
    _, right, right_logprobs = answer(llm, prompt, LoRARequest("another name", 2, str(path)))
    for how, number in (("in place", 1), ("under another id, as after an unload", 3)):
        lora = LoRARequest("ada", number, str(path), load_inplace=number == 1)
        llm.llm_engine.add_lora(lora)
        cached, tokens, logprobs = answer(llm, prompt, LoRARequest("ada", number, str(path)))
        same = next((n for n in range(NEW) if tokens[n] != right[n]), NEW)
        error = max(abs(a - b) for a, b in zip(logprobs[: same + 1], right_logprobs, strict=False))
        print(
            f"other weights at its path, loaded {how}: expected the {NEW} tokens of the new weights, "
            f"saw the first {same} of them with {cached} tokens cached, logprobs off by {error:.1e}"
        )
        cured = cured and same == NEW and error < BOUND
    print("no defect" if cured else "defect present")
    return 0 if cured else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] + "-lora")))
