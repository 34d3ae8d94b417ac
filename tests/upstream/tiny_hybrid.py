"""A small random NemotronH (Mamba2, MLP, attention) in float32, so that a defect shows on any machine within seconds;
and how the scripts beside it ask and judge.

Usage: python tiny_hybrid.py DIR. Writes config and weights (18 MB) and no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import os
import random
import sys

VOCABULARY = 4096

LAYERS = ("linear", "mlp", "linear", "full", "mlp", "linear", "full", "mlp")

# Matrices drawn with the usual 0.02 give almost flat logits: greedy decoding would hide a damaged state.
WEIGHT_STD = 0.08


def write_model(folder: str) -> None:
    """The same weights at every call: vLLM then pads a Mamba page to an attention page of 384 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, NemotronHConfig

    config = NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        layers_block_type=[f"{kind}_attention" if kind != "mlp" else kind for kind in LAYERS],
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


NEW = 24  # tokens of an answer

BOUND = 1e-3  # of a logprob

FLAGS = dict(
    dtype="float32",
    skip_tokenizer_init=True,
    enforce_eager=True,
    max_model_len=2048,
    max_num_seqs=4,
    kv_cache_memory_bytes=1 << 28,
)


def quiet() -> None:
    """Before vLLM is imported: one process, and no lines but errors."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def without_engine() -> None:
    """What an engine would do first: plugins, and the hash of nothing."""
    quiet()
    from vllm.plugins import load_general_plugins
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    load_general_plugins()
    init_none_hash(sha256)


def drawn(length: int, vocabulary: int = VOCABULARY) -> list[int]:
    """A prompt, the same each time."""
    draw = random.Random(0)
    return [draw.randrange(3, vocabulary) for _ in range(length)]


def answer(llm, prompt: list[int], **more) -> tuple[int, list[int], list[float]]:
    """Cached prompt tokens, greedy tokens, their logprobs."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
    (request,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False, **more)
    tokens = list(request.outputs[0].token_ids)
    logprobs = [step[token].logprob for step, token in zip(request.outputs[0].logprobs, tokens, strict=True)]
    return request.num_cached_tokens, tokens, logprobs


def is_right(what: str, found: tuple[int, list[int], list[float]], right: tuple[int, list[int], list[float]]) -> bool:
    """Whether an answer is the right one; prints how far it is."""
    cached, tokens, logprobs = found
    same = next((n for n in range(NEW) if tokens[n] != right[1][n]), NEW)
    error = max(abs(a - b) for a, b in zip(logprobs[: same + 1], right[2], strict=False))
    print(
        f"{what}, {cached} cached: expected the {NEW} tokens of an engine without prefix caching, "
        f"saw the first {same} of them, logprobs off by {error:.1e}"
    )
    return same == NEW and error < BOUND


BLOCK, UNIT = 64, 16  # tokens, of a scheduler without an engine
MAMBA, ATTENTION = 0, 1  # its cache groups


def request_of(name: str, tokens: list[int], **extra):
    """A request for one token."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    parameters = SamplingParams(max_tokens=1, extra_args=extra or None)
    return Request(name, tokens, parameters, None, block_hasher=get_request_block_hasher(UNIT, sha256))


def scheduler_of(model: str, recurrent: dict, **flags):
    """vLLM's scheduler without an engine, over one Mamba (`recurrent`: more of its spec) and one attention layer."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=True,
        block_size=BLOCK,
        prefix_match_unit=UNIT,
        **flags,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 100
    config.scheduler_config.async_scheduling = False
    mamba = dict(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align", **recurrent)
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["mamba"], MambaSpec(**mamba)), KVCacheGroupSpec(["attention"], attention)]
    return Scheduler(
        config,
        KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups),
        StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=UNIT,
    )


def verdict(cured: bool) -> int:
    """The script's last line and exit status."""
    print("no defect" if cured else "defect present")
    return 0 if cured else 1


if __name__ == "__main__":
    write_model(sys.argv[1])
