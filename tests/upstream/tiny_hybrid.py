"""A small random NemotronH (Mamba2, MLP, attention) in float32, so that a defect shows on any machine within seconds.

Usage: python tiny_hybrid.py DIR. Writes config and weights (18 MB) and no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import sys

VOCABULARY = 4096

# Matrices drawn with the usual 0.02 give almost flat logits: greedy decoding would hide a damaged state.
WEIGHT_STD = 0.08


def write_model(folder: str) -> None:
    """The same weights at every call: vLLM then pads a Mamba page to an attention page of 384 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, NemotronHConfig

    config = NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        layers_block_type=[
            "linear_attention",
            "mlp",
            "linear_attention",
            "full_attention",
            "mlp",
            "linear_attention",
            "full_attention",
            "mlp",
        ],
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=16,
        mamba_head_dim=32,
        ssm_state_size=64,
        n_groups=2,
        chunk_size=64,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, WEIGHT_STD)
    model.save_pretrained(folder)


if __name__ == "__main__":
    write_model(sys.argv[1])
