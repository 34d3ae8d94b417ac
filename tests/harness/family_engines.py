"""A whole engine of a narrow model of this season's families, with vLLM's own layers, in Triton's interpreter.

Run by `tests.harness.versions.interpreted` as `family_engines FAMILY WANTED`, on vLLM's newest source. WANTED is a file
of JSON: `mode` (of the plugin), `waves` (each a list of prompts asked at once: token ids, hint and salt), and what is
not as usual: `tokens` (of an answer), `budget` (tokens of a step), `blocks` (of the cache), `preempt` (steps after
which all that runs is preempted, and the cache emptied), `defect` (one of `DEFECTS`), `right` (pairs of a prompt and
what an engine without drafts has answered: this one then drafts, and an oracle makes some drafts right), `dtype`,
`kernels` (whether gated delta nets run on a GPU's, too). Prints JSON: for each prompt its tokens, their log
probabilities and what it found in the cache; the forward passes of each wave; the states that were announced; how many
rows had how many right drafts, and the steps that wrote states beside such rows; facts of the engine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from engine_patches.footprint import WRITES
from engine_patches.gpu_check.lanes import draw_in_place_of_loading
from tests.harness import kernel_engine, toy_qwen4, triton_interpreter
from tests.harness.draft_oracle import Oracle
from tests.harness.engines import CPU_PROCESS
from tests.harness.image_libraries import sitecustomize  # noqa: F401  # before transformers; text asks nothing of them

KDA, QWEN4, QWEN4_RINGS, OLMO = "kda", "qwen4_exp", "qwen4_exp with its index", "olmo_hybrid"

KDA_OPS = "vllm.models.kimi_k3.nvidia.ops.third_party"

ANSWER = 4  # tokens

DRAFTS = 3  # for each token

RIGHT = 0.7  # of the drafts, each

LONGEST = 6144  # tokens


def config_of(family: str) -> dict[str, Any]:
    if family == KDA:
        from tests.harness import toy_kda

        return toy_kda.config()
    if family == OLMO:
        return {
            "architectures": ["OlmoHybridForCausalLM"],
            "model_type": "olmo_hybrid",
            "vocab_size": 4096,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        }
    return toy_qwen4.config(rings=family == QWEN4_RINGS)


def prepare(family: str, dtype: str, *, delta_nets_of_a_gpu: bool = False) -> None:
    """Before an engine is made: the family's kernels in the interpreter, and the plugin's ways of a GPU.

    `delta_nets_of_a_gpu`: also Flash-Next's gated delta nets, which else run on vLLM's kernels for CPUs. Those are not
    right where rows verify drafts beside a prompt.
    """
    triton_interpreter.admit_triton()
    if family in (QWEN4, QWEN4_RINGS):
        if delta_nets_of_a_gpu:
            kernel_engine.choose_kernels_of_a_gpu()
            from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn  # noqa: F401

            triton_interpreter.bind_late()
        _on_runner_v2()
        toy_qwen4.prepare(rings=family == QWEN4_RINGS, dtype=dtype)
        return
    kernel_engine.choose_kernels_of_a_gpu()
    if family == OLMO:
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn  # noqa: F401
    else:
        import vllm.models.kimi_k3.nvidia.ops.third_party.kda  # noqa: F401
        from vllm import ModelRegistry
        from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn

        kimi_gdn_linear_attn.gather_initial_states = _gathered
        from tests.harness import toy_kda  # of vLLM's layers, which are to be imported now

        ModelRegistry.register_model(toy_kda.NAME, f"{toy_kda.__name__}:{toy_kda.NAME}")
    triton_interpreter.bind_late(KDA_OPS)


def _gathered(state: Any, indices: Any, has_initial_state: Any) -> Any:
    """Stands for a kernel that asks for a GPU."""
    found = state[indices.long()].clone()
    found[~has_initial_state] = 0
    return found


def _on_runner_v2() -> None:
    from engine_patches import patches
    from engine_patches.forward import layers

    for row in patches.PATCHES:
        if row.name in {"worker-steps-v2", "worker-batch-v2"}:
            object.__setattr__(row, "on", None)  # frozen
    layers._is_configured = lambda known, config: True


def _speculation(family: str) -> dict[str, Any]:
    """The head of the family, where a CPU runs one."""
    if family in (QWEN4, QWEN4_RINGS):
        return {"method": "mtp", "num_speculative_tokens": DRAFTS}
    return {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}


def _oracle(core: Any, right: Sequence[Any]) -> AbstractContextManager[None]:
    if not right:
        return nullcontext()
    runner = core.model_executor.driver_worker.worker.model_runner
    if not hasattr(runner, "speculator"):
        _draft_at_each_token(runner)
    return Oracle({tuple(prompt): answer for prompt, answer in right}, RIGHT).speaks(runner, core.scheduler.requests)


def _draft_at_each_token(runner: Any) -> None:
    """n-grams are found in few places of what is drawn; an oracle replaces drafts, and adds none."""
    propose = runner.propose_draft_token_ids

    def proposed(scheduled: Any, sampled: Any, *args: Any, **more: Any) -> Any:
        drafts = propose(scheduled, sampled, *args, **more)
        return [([*own, *[0] * DRAFTS][:DRAFTS] if told else []) for own, told in zip(drafts, sampled, strict=True)]

    runner.propose_draft_token_ids = proposed


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


def _accepted_ignored() -> None:
    """In a step that is cut, rows that verify drafts go on from their first token."""
    import torch

    from engine_patches.forward import segments

    of_rows = segments._of_rows

    def ignoring(*args: Any) -> dict[str, Any]:
        options = of_rows(*args)
        accepted = options.get("num_accepted_tokens")
        return options if accepted is None else {**options, "num_accepted_tokens": torch.ones_like(accepted)}

    segments._of_rows = ignoring


def _a_stale_column() -> None:
    """In a step that is cut, rows that verify drafts take the column beside theirs."""
    import dataclasses

    from engine_patches.forward import segments

    with_drafting_rows = segments._with_drafting_rows

    def stale(*args: Any) -> Any:
        made = with_drafting_rows(*args)
        columns = made.spec_state_indices_tensor
        return made if columns is None else dataclasses.replace(made, spec_state_indices_tensor=columns.roll(1, 1))

    segments._with_drafting_rows = stale


WINDOW, CHANNEL, STALE = "the window a token late", "a channel missing", "a stale block"

ACCEPTED, COLUMN = "accepted counts ignored", "a stale column"

DEFECTS: dict[str, Callable[[], None]] = {
    WINDOW: _window_a_token_late,
    CHANNEL: _a_channel_missing,
    STALE: _a_stale_block,
    ACCEPTED: _accepted_ignored,
    COLUMN: _a_stale_column,
}


def main(family: str, file: str) -> None:
    wanted = json.loads(Path(file).read_text())
    mode, right = wanted["mode"], wanted.get("right", [])
    on_v2 = family in (QWEN4, QWEN4_RINGS)
    os.environ |= {
        "SEAMARK_ENGINE": mode,
        "SEAMARK_DRAFTS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(on_v2)),
        **CPU_PROCESS,
        "VLLM_CPU_CI_ENV": "1",
    }
    del os.environ["VLLM_PLUGINS"]
    dtype = wanted.get("dtype", "float32" if family == KDA else "bfloat16")
    prepare(family, dtype, delta_nets_of_a_gpu=wanted.get("kernels", False))
    draw_in_place_of_loading()
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory(prefix="seamark-toy-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(family)))
        engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
            max_num_seqs=4,
            max_num_batched_tokens=wanted.get("budget", LONGEST),
            **(
                {"num_gpu_blocks_override": wanted["blocks"]}
                if "blocks" in wanted
                else {"kv_cache_memory_bytes": 1 << 28}
            ),
            enforce_eager=True,
            dtype=dtype,
            load_format="dummy",
            enable_prefix_caching=mode != "reference",
            async_scheduling=False,
            speculative_config=_speculation(family) if right else None,
            **({} if family == KDA else {"mamba_ssm_cache_dtype": "float32"}),
            **({"engram_config": {"cpu_offload": False}} if on_v2 else {}),
        )
    if defect := wanted.get("defect"):
        DEFECTS[defect]()
    core = engine.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    passes, beside, preempted = 0, 0, False
    run, take = runner.execute_model, scheduler.update_from_output
    accepted: Counter[int] = Counter()

    def counted(scheduled: Any, *args: Any, **options: Any) -> Any:
        nonlocal passes, beside
        beside += bool(getattr(scheduled, WRITES, None)) and bool(scheduled.scheduled_spec_decode_tokens)
        passes += bool(scheduled.total_num_scheduled_tokens)
        if passes == wanted.get("preempt"):
            # Between two steps, as an operator's call would come.
            core.step_fn = preempting
        return run(scheduled, *args, **options)

    step = core.step_fn

    def preempting() -> Any:
        nonlocal preempted
        core.step_fn, preempted = step, True
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        return step()

    def watched(scheduled: Any, output: Any, *args: Any, **options: Any) -> Any:
        for name in scheduled.scheduled_spec_decode_tokens:
            accepted[len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1] += 1
        return take(scheduled, output, *args, **options)

    runner.execute_model, scheduler.update_from_output = counted, watched
    checkpoints = getattr(scheduler, "seamark", None)
    states = checkpoints.states if checkpoints is not None else None
    answers: list[Any] = []
    passes_of_waves = []

    def ask(wave: Any) -> None:
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

    with _oracle(core, right):
        for wave in wanted["waves"]:
            before = passes
            ask(wave)
            passes_of_waves.append(passes - before)
    groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    events = [event for _, event in states.events.take()] if states is not None else []
    print(
        json.dumps(
            {
                "answers": answers,
                "passes": passes_of_waves,
                "preempted": preempted,
                "accepted": {str(count): rows for count, rows in accepted.items()},
                "beside": beside,
                "writes_in_forward": states is not None and states.in_pass,
                "refused": checkpoints.refusal.cause if checkpoints and checkpoints.refusal else None,
                "announced": [event.states for event in events if hasattr(event, "states")],
                "unit": scheduler.hash_block_size,
                "block": scheduler.block_size,
                "groups": [type(group.kv_cache_spec).__name__ for group in groups],
                "attention": [each.group for each in states.keys.attention] if states is not None else [],
                "runner": type(runner).__module__,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
