"""`seamark model`: a small random hybrid model with tokenizer and chat template, made in seconds.

Its answers are noise, but every layer kind, cache path and block shape of a real hybrid is there, so that a CPU can
check what a GPU will rely on. The same seed gives the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.commands.worker import INSTALL

VOCABULARY = 4096

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Matrices drawn with the usual 0.02 give almost flat logits: greedy decoding would hide a damaged state.
WEIGHT_STD = 0.08

# Gated delta heads drawn the usual way forget within a token, so that a lost state would go unnoticed. These are the
# tokens that a head remembers at least and at most, by its decay alone.
MEMORY_TOKENS = (200.0, 3000.0)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and tools and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_bpe(vocabulary: int) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of `vocabulary` entries, trained on the English text Python carries."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return tokenizer


def train_tokenizer() -> Any:
    """A `transformers` fast tokenizer of `VOCABULARY` entries. Its end-of-turn token also ends the sequence."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(VOCABULARY),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


# Of each family's model.
SIZES: Mapping[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    pad_token_id=0,
    eos_token_id=2,
    tie_word_embeddings=False,
)


class Family(NamedTuple):
    config_class: str  # of transformers
    dtype: str  # of the weights; vLLM computes in it if the family leaves no choice
    slow_decay: bool  # redraw the decay of the recurrent heads, see `MEMORY_TOKENS`
    settings: Mapping[str, Any]  # of its configuration, beside `SIZES`

    def config(self) -> Any:
        import transformers

        return getattr(transformers, self.config_class)(**SIZES, **self.settings)


KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}

# The real family's layer pattern (Mamba2, MLP, attention) at 4.5 million parameters.
NEMOTRON_H = dict(
    layers_block_type=[KINDS[letter] for letter in "M-M*-M*-"],
    num_attention_heads=8,
    head_dim=32,
    mamba_num_heads=16,
    mamba_head_dim=32,
    ssm_state_size=64,
    n_groups=2,
    chunk_size=64,
    bos_token_id=None,
)

# The real pattern (three gated delta nets, one attention), twice, at 7 million parameters. The first layer has experts,
# because vLLM refuses the family without. It has one expert: between several, rounding alone would now and then send a
# token elsewhere and hide what a check looks for.
QWEN3_NEXT = dict(
    num_hidden_layers=8,
    num_attention_heads=4,
    head_dim=64,  # with it a cache block is 384 tokens: small, and whole chunks (64) of the recurrent kernels
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_experts=1,
    num_experts_per_tok=1,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    mlp_only_layers=list(range(1, 8)),
    initializer_range=WEIGHT_STD,  # for parameters that are no matrices: convolutions and experts
)

FAMILIES = {
    "nemotron_h": Family("NemotronHConfig", "float32", False, NEMOTRON_H),
    "qwen3_next": Family("Qwen3NextConfig", "bfloat16", True, QWEN3_NEXT),
}


def draw_weights(model: Any, seed: int, slow_decay: bool) -> None:
    """Redraw the parameters that the usual initialisation leaves too weak to be seen in the answers."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shortest, longest = (math.log(tokens) for tokens in MEMORY_TOKENS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, WEIGHT_STD, generator=generator)
            elif slow_decay and name.endswith(".A_log"):
                # A token's log decay is -exp(A_log) * softplus(gate + 1), where gates are drawn around 0.
                per_token = math.log1p(math.e)
                parameter.uniform_(shortest, longest, generator=generator).add_(math.log(per_token)).neg_()


def write_model(out: Path, family: str = "nemotron_h", seed: int = 0, *, endless: bool = True) -> Path:
    """Write weights, config, tokenizer and chat template into the folder `out` (under 20 MB).

    Its answers go on to their limit, or unless `endless` to their first full stop, some 50 tokens on the average.
    """
    import torch
    from transformers import AutoModelForCausalLM

    recipe = FAMILIES[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(recipe.config(), dtype=torch.float32)
    draw_weights(model, seed, recipe.slow_decay)
    out.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, recipe.dtype)).save_pretrained(out, safe_serialization=True)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors gives them to their owner alone; a worker may run as another user
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(out)
    stops = [] if endless else [token for token in range(VOCABULARY) if "." in tokenizer.decode([token])]
    # Greedy decoding is the comparison every check makes; the family's sampling defaults would undo it.
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *stops], "pad_token_id": 0}) + "\n")
    return out


def why_not(error: ModuleNotFoundError) -> str:
    """Why `write_model` fails in this environment, and the cure."""
    # transformers names no module if one of its own cannot be imported: mostly torchvision, built for CUDA.
    missing = f"{error.name} is not installed here" if error.name else f"transformers does not work here ({error})"
    return f"{missing}: {INSTALL}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="seamark model", description="write a small random hybrid model", allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="nemotron_h")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endless", action="store_true", help="answers go on to their limit: for comparisons")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: {args.out} is a file, a folder is needed")
    try:
        print(write_model(args.out, args.family, args.seed, endless=args.endless))
    except OSError as error:
        parser.error(f"--out: {args.out} cannot be written: {error}")
    except ModuleNotFoundError as error:
        print(f"seamark model: {why_not(error)}", file=sys.stderr)
        return 1
    return 0
