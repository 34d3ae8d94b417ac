"""A whole engine whose recurrent layers run on vLLM's kernels for CUDA, in Triton's interpreter on a CPU.

Run by `tests.harness.versions.interpreted` as `kernel_engine FAMILY MODE WANTED`: a narrow model in bfloat16, its
recurrent states in float32, `SEAMARK_ENGINE=MODE`. WANTED is a file of JSON: `prompts` (pairs of token ids and a hint,
asked one after the other), `warm` (the same, asked before), `tokens` (of each answer), `options` (of `LLM`),
`environment`. Convolution, scan, delta rule and decoding are the kernels of a GPU, and the plugin goes the ways it has
there; attention, projections and norms are the CPU's, and the runner is V1.
Prints JSON: for each answer its tokens, the log probability of the first one, and the tokens that it found in the
cache; whether the plugin writes states inside a pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_patches.commands import model as generator
from proxy.bench.harness.servers import CACHE, NEMOTRON_H, QWEN3_NEXT
from tests.harness import triton_interpreter
from tests.harness.engines import CPU_PROCESS

CHUNK = 128  # tokens of a chunk of Mamba2's kernels, as in Nemotron-H

# Modules that choose by the platform between kernels, and are to choose those of a GPU.
CHOOSE_KERNELS = (
    "vllm.model_executor.layers.mamba.",
    "engine_patches.forward.scan_states",
)

# Cures of what vLLM's kernels for CPUs lack.
OF_CPU_KERNELS = {
    "cpu-checkpoint-scan",
    "cpu-checkpoint-kernel",
    "cpu-checkpoint-store",
    "gdn-core-cpu",
    "gdn-core-cpu-drafts",
}

# Kernels that have to have run, by family: of prompts, and of single tokens.
KERNELS = {
    NEMOTRON_H: ("_causal_conv1d_fwd_kernel", "_chunk_scan_fwd_kernel", "_selective_scan_update_kernel"),
    QWEN3_NEXT: ("_causal_conv1d_fwd_kernel", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "recurrent"),
}


def narrow_nemotron_h() -> Any:
    """Two Mamba2 layers of four heads, and one of attention."""
    from transformers import NemotronHConfig

    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    return NemotronHConfig(
        vocab_size=generator.VOCABULARY,
        hidden_size=64,
        layers_block_type=kinds,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=CHUNK,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


def narrow_qwen3_next() -> Any:
    """Two gated delta nets of two heads, and one layer of attention."""
    config = generator.qwen3_next_config(layer_of_experts=2)
    config.update(
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [0, 1],
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "max_position_embeddings": 2048,
        }
    )
    return config


CONFIGS: dict[str, Callable[[], Any]] = {NEMOTRON_H: narrow_nemotron_h, QWEN3_NEXT: narrow_qwen3_next}

WEIGHT_STD = 0.12  # of so narrow a model: with the usual one its logits are flat


def version() -> str:
    """Of what an answer depends on here."""
    sources = [generator.__file__, triton_interpreter.__file__, __file__]
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:12]


def narrow_model(family: str) -> Path:
    """The folder of the model, made once."""
    folder = (CACHE / f"narrow-{family}-{version()}").resolve()
    if not folder.exists():
        generator.WEIGHT_STD = WEIGHT_STD
        generator.FAMILIES[family] = generator.FAMILIES[family]._replace(config=CONFIGS[family])  # type: ignore[index]
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="model-") as being_made:
            generator.write_model(Path(being_made, "m"), family).rename(folder)
    return folder


def choose_kernels_of_a_gpu() -> None:
    """Have the modules of `CHOOSE_KERNELS` take this machine for no CPU. Before they are imported."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    of_class = type(current_platform)

    def is_cpu(self: Any) -> bool:
        asking: str = sys._getframe(1).f_globals["__name__"]
        return not asking.startswith(CHOOSE_KERNELS)

    of_class.is_cpu = is_cpu
    from engine_patches import patches

    # With it, weights of convolutions are put into the order of the CPU's kernels.
    if hasattr(_custom_ops, "causal_conv1d_weight_pack"):
        del _custom_ops.causal_conv1d_weight_pack
    rows = [row for row in patches.PATCHES if row.name in OF_CPU_KERNELS]
    assert {row.name for row in rows} == OF_CPU_KERNELS
    for row in rows:
        object.__setattr__(row, "applies", lambda: False)  # frozen


def count_launches() -> Counter[str]:
    """How often each kernel is started in the interpreter, from now on."""
    from triton.runtime import interpreter

    ran: Counter[str] = Counter()
    call = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        ran[self.fn.__name__] += 1
        return call(self, *args, **options)

    interpreter.GridExecutor.__call__ = counted
    return ran


def main(family: str, mode: str, file: str) -> None:
    wanted = json.loads(Path(file).read_text())
    os.environ |= {
        **wanted["environment"],
        "SEAMARK_ENGINE": mode,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        **CPU_PROCESS,
        "VLLM_CPU_CI_ENV": "1",
    }
    del os.environ["VLLM_PLUGINS"]
    model = narrow_model(family)
    triton_interpreter.admit_triton()
    choose_kernels_of_a_gpu()
    if family == QWEN3_NEXT:
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn  # noqa: F401

        triton_interpreter.bind_late()
    ran = count_launches()
    from vllm import LLM, SamplingParams

    options = {"max_num_batched_tokens": 1024, **wanted["options"]}
    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        dtype="bfloat16",
        mamba_ssm_cache_dtype="float32",
        **options,
    )
    answers: list[Any] = []

    def ask(prompt: list[int], hint: list[int], tokens: int) -> None:
        parameters = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            extra_args={"seamark_boundaries": hint} if hint else None,
        )
        (request,) = engine.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        output = request.outputs[0]
        first = output.logprobs[0][output.token_ids[0]].logprob
        answers.append([list(output.token_ids), first, request.num_cached_tokens or 0])

    for prompt, hint in wanted["warm"]:
        ask(prompt, hint, 1)
    answers.clear()
    for prompt, hint in wanted["prompts"]:
        ask(prompt, hint, wanted["tokens"])
    for part in KERNELS[family]:
        assert any(part in name for name in ran), f"{part} has not run: {ran}"
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    checkpoints = getattr(scheduler, "seamark", None)
    inside = mode != "reference" and checkpoints is not None and checkpoints.writes_in_forward
    print(json.dumps({"answers": answers, "writes_in_forward": inside}))


if __name__ == "__main__":
    main(*sys.argv[1:])
