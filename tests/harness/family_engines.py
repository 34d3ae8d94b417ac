"""A whole engine of a narrow model of this season's families, with vLLM's own layers, in Triton's interpreter.

Run by `tests.harness.versions.interpreted` as `family_engines FAMILY WANTED`. WANTED is a file of JSON: `mode` (of the
plugin), `waves` (each a list of prompts asked at once: token ids, hint and salt), and what is not as usual, `tokens`
(of an answer) and `defect` (of `DEFECTS`). Prints JSON: for each prompt its tokens, their log probabilities and what it
found in the cache; the forward passes of each wave; facts of the engine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_patches.gpu_check.lanes import draw_in_place_of_loading
from tests.harness import started_engines, triton_interpreter
from tests.harness.engines import CPU_PROCESS
from tests.harness.gpu_choices import choose_kernels_of_a_gpu, take_runner_v2
from tests.harness.image_libraries import sitecustomize  # noqa: F401  # before transformers; text asks nothing of them

KDA, QWEN4, OLMO = "kda", "qwen4_exp", "olmo_hybrid"

KDA_OPS = "vllm.models.kimi_k3.nvidia.ops.third_party"

ANSWER = 4  # tokens

LONGEST = 6144  # tokens

# Of all of these models.
COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# Two gated delta nets with embeddings of n-grams around one layer of attention.
QWEN4_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "mtp_num_hidden_layers": 1,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 500,
    "split_ngram_parts": 1,
    "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "output_gate_type": "silu",
}

OLMO_CONFIG: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "model_type": "olmo_hybrid",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def prepare(family: str) -> dict[str, Any]:
    """Before an engine is made: the family's kernels in the interpreter, and the plugin's ways of a GPU. Its model."""
    triton_interpreter.admit_triton()
    from vllm import ModelRegistry

    if family == QWEN4:  # its gated delta nets run on vLLM's kernels for CPUs, its sparse attention as plain attention
        take_runner_v2()
        from vllm.models.qwen4_exp.nvidia import model

        ModelRegistry.register_model("Qwen4ExpForCausalLM", model.Qwen4ExpForCausalLM)
        return QWEN4_CONFIG
    choose_kernels_of_a_gpu()
    if family == OLMO:
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn  # noqa: F401

        triton_interpreter.bind_late()
        return OLMO_CONFIG
    import vllm.models.kimi_k3.nvidia.ops.third_party.kda  # noqa: F401
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn

    kimi_gdn_linear_attn.gather_initial_states = _gathered
    from tests.harness import toy_kda  # of vLLM's layers, which are to be imported now

    ModelRegistry.register_model(toy_kda.NAME, f"{toy_kda.__name__}:{toy_kda.NAME}")
    triton_interpreter.bind_late(KDA_OPS)
    return toy_kda.config()


def _gathered(state: Any, indices: Any, has_initial_state: Any) -> Any:
    """Stands for a kernel that asks for a GPU."""
    found = state[indices.long()].clone()
    found[~has_initial_state] = 0
    return found


def _window_a_token_late() -> None:
    import torch

    from engine_patches.forward import conv_states

    keep = conv_states.Windows.keep

    def late(self: Any, inputs: Any, *rest: Any) -> None:
        keep(self, torch.roll(inputs, 1, 0), *rest)

    conv_states.Windows.keep = late  # type: ignore[method-assign]


def _a_channel_missing() -> None:
    from engine_patches.forward import segments

    def damaged(self: Any, kv_cache: Any) -> None:
        if self.targets is not None:
            for state in kv_cache:
                state[self.targets] = state[self.sources]
                state[self.targets, ..., :1] = 0

    segments.Segment.keep_states = damaged  # type: ignore[method-assign]


def _a_stale_block() -> None:
    """States are said to be written, and the blocks that were reserved for them keep what they held."""
    from engine_patches.forward import conv_states, segments

    segments.Segment.keep_states = lambda self, kv_cache: None  # type: ignore[method-assign]
    conv_states.Windows.keep = lambda self, *_: None  # type: ignore[method-assign]


WINDOW, CHANNEL, STALE = "the window a token late", "a channel missing", "a stale block"

DEFECTS: dict[str, Callable[[], None]] = {
    WINDOW: _window_a_token_late,
    CHANNEL: _a_channel_missing,
    STALE: _a_stale_block,
}


def main(family: str, file: str) -> None:
    wanted = json.loads(Path(file).read_text())
    mode = wanted["mode"]
    os.environ |= {
        "SEAMARK_ENGINE": mode,
        "VLLM_USE_V2_MODEL_RUNNER": str(int(family == QWEN4)),
        **CPU_PROCESS,
        "VLLM_CPU_CI_ENV": "1",
    }
    del os.environ["VLLM_PLUGINS"]
    config = prepare(family)
    draw_in_place_of_loading()
    started_engines.note(family)
    from vllm import LLM, SamplingParams

    own: dict[str, Any] = {} if family == KDA else {"mamba_ssm_cache_dtype": "float32"}
    if family == QWEN4:
        own["engram_config"] = {"cpu_offload": False}
    with tempfile.TemporaryDirectory(prefix="seamark-toy-") as folder:
        Path(folder, "config.json").write_text(json.dumps(COMMON | config))
        engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
            max_num_seqs=4,
            max_num_batched_tokens=LONGEST,
            kv_cache_memory_bytes=1 << 28,
            enforce_eager=True,
            dtype="float32" if family == KDA else "bfloat16",
            load_format="dummy",
            enable_prefix_caching=mode != "reference",
            async_scheduling=False,
            **own,
        )
    if defect := wanted.get("defect"):
        DEFECTS[defect]()
    core = engine.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    run, passes = runner.execute_model, 0

    def counted(scheduled: Any, *args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += bool(scheduled.total_num_scheduled_tokens)
        return run(scheduled, *args, **options)

    runner.execute_model = counted
    answers: list[Any] = []
    passes_of_waves = []
    for wave in wanted["waves"]:
        before = passes
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=wanted.get("tokens", ANSWER),
                logprobs=1,
                ignore_eos=True,
                detokenize=False,
                extra_args={"seamark_boundaries": hint} if hint else None,
            )
            for _, hint, _ in wave
        ]
        prompts = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids, _, salt in wave]
        for request in engine.generate(prompts, parameters, use_tqdm=False):
            output = request.outputs[0]
            tokens = list(output.token_ids)
            logprobs = [of_step[token].logprob for of_step, token in zip(output.logprobs, tokens, strict=True)]
            answers.append({"tokens": tokens, "logprobs": logprobs, "cached": request.num_cached_tokens or 0})
        passes_of_waves.append(passes - before)
    checkpoints = getattr(scheduler, "seamark", None)
    states = checkpoints.states if checkpoints is not None else None
    found = {
        "answers": answers,
        "passes": passes_of_waves,
        "writes_in_forward": states is not None and states.in_pass,
        "refused": checkpoints.refusal.cause if checkpoints and checkpoints.refusal else None,
        "unit": scheduler.hash_block_size,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
