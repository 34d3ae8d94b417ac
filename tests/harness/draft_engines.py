"""Small engines that draft tokens, on a CPU, one after the other: what each answers, finds in the cache, and drafts.

Run as `python -m tests.harness.draft_engines MODEL JSON`. The JSON is a list of `Engine`s as objects; those with an
`oracle` need the answers of an earlier one without drafts, by its name. vLLM is imported once, each engine has a
process of its own. Prints a list of what `_run` returns, in order.

Their drafts are those of an oracle (`draft_oracle`). With `cold`, an engine without a cache, a draft is right only
where the head also proposes what it proposed there, so that acceptance measures the head's rows.

Engines on a GPU's model runner (`v2`) have the asynchronous scheduler as well. They need Triton's interpreter
(`tests.harness.versions.interpreted`).
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.harness import started_engines, triton_interpreter
from tests.harness.draft_oracle import DRAFTS, Oracle
from tests.harness.engines import CPU_PROCESS

MTP = {"method": "mtp", "num_speculative_tokens": DRAFTS}

NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}

LENGTHS = (40, 163, 448, 800)  # tokens that prompts share

ANSWER = 16  # tokens

# `seamark worker` knows that a CPU lacks the kernels for drafts, and not that the tests bring stand-ins.
STARTED_ALL_THE_SAME = """
import sys
from engine_patches.commands import worker
worker.drafts = lambda flags: False
sys.exit(worker.main(sys.argv[1:]))
"""


@dataclass(frozen=True, eq=False)
class Engine:
    """One engine and its traffic."""

    name: str
    mode: str = "1"  # of the plugin
    opted_in: bool = True  # to hints beside drafts
    speculation: Mapping[str, Any] | None = None
    caching: bool = True
    hints: bool = True
    traffic: str = "pairs"
    answer: int = ANSWER  # tokens
    oracle: str | None = None  # name of the engine whose answers are right
    cold: str | None = None  # name of the engine with which the head's own drafts have to agree, too
    probability: float = 0.7
    v2: bool = False  # on model runner V2
    window: int | None = None  # tokens: of the MTP head, which then has its rows in a cache group of its own
    poisoned: bool = False  # its cache is full of NaN before the first request
    planted: str | None = None  # a defect
    flags: Mapping[str, Any] = field(default_factory=dict)  # of vLLM


Round = list[tuple[list[int], list[int]]]  # prompts that are asked at once, with their hints


Answers = Sequence[Mapping[str, Any]]  # up to now, in the order of the prompts


def pairs(draw: random.Random, answers: Answers) -> list[Round]:
    """Of each length: a prompt, another one that shares it, that one again, and two further ones."""
    rounds: list[Round] = []
    for length in LENGTHS:
        shared = _drawn(draw, length)
        second = shared + _drawn(draw, 53)
        further = [shared + _drawn(draw, more) for more in (37, 300, 5)]
        rounds += [[(prompt, [length])] for prompt in (further[0], second, second, *further[1:])]
    return rounds


def edges(draw: random.Random, answers: Answers) -> Iterator[Round]:
    """Prompts whose answers cross token 768, an edge of blocks of 384 tokens (Mamba2's here) and of 256 (the delta
    nets'), and two turns behind each that repeat all of it."""
    prompts = [_drawn(draw, length) for length in (747, 755, 760, 764, 765, 766, 767, 768, 769)]
    for prompt in prompts:
        hint = len(prompt) - 6
        yield [(prompt, [hint])]
        for more in (30, 40):
            said = answers[-1]["prompt"] + answers[-1]["tokens"]
            yield [(said + _drawn(draw, more), [hint, len(said)])]


def heads(draw: random.Random, answers: Answers) -> list[Round]:
    """Prompts on two heads, alone and several at once, that hit in the first block and behind it."""
    one, two = _drawn(draw, 163), _drawn(draw, 430)

    def on(head: Sequence[int], more: int) -> tuple[list[int], list[int]]:
        return [*head, *_drawn(draw, more)], [len(head)]

    return [
        [on(one, 20)],
        [on(one, 33)],
        [on(two, 9)],
        [on(two, 14), on(one, 40)],
        [on(one, 5), on(two, 60), on(one[:100], 30)],
        [on(one[:100], 9)],
    ]


TRAFFIC = {"pairs": pairs, "edges": edges, "heads": heads}


def _drawn(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(100, 4000) for _ in range(length)]


def _run(engine: Engine, model: str, oracle: Oracle) -> dict[str, Any]:
    """What an engine answers.

    `answers`: of each prompt, in order, its tokens, their log probabilities, tokens from the cache, its passes until
    its first token, and of each row that verified drafts how many were right. `accepted`: such rows of all prompts, by
    how many. `proposed`: the head's own drafts. `said`: the plugin's warnings. `ignored`: hint entries without effect,
    by reason. `groups`: of the cache, their specs and how many layers each has.
    """
    os.environ |= {
        "SEAMARK_ENGINE": engine.mode,
        "SEAMARK_DRAFTS": str(int(engine.opted_in)),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(engine.v2)),
    }
    said: list[str] = []
    # vLLM sets up its loggers anew for each engine, without what others have hung on them.
    logging.getLogger("vllm.seamark").warning = lambda text, *parts: said.append(text % parts)  # type: ignore[method-assign]
    delta = "qwen3_next" in model
    _prepare(engine, delta, oracle)
    started_engines.note(Path(model).name.rpartition("-")[0])
    from vllm import LLM, SamplingParams

    flags = {"max_model_len": 2048, "max_num_seqs": 8, **engine.flags}
    if delta:
        flags["mamba_ssm_cache_dtype"] = "float32"
    if engine.speculation:
        flags["speculative_config"] = dict(engine.speculation)
    if engine.v2:
        flags["async_scheduling"] = True
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=engine.caching,
        **flags,
    )
    steps: list[dict[str, int]] = []
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    if engine.poisoned:
        _poison(runner)
    schedule, take = core.scheduler.schedule, core.scheduler.update_from_output
    accepted: Counter[int] = Counter()
    rows: dict[str, list[int]] = {}  # of each request

    def watched_schedule(*args: Any, **options: Any) -> Any:
        output = schedule(*args, **options)
        output.seamark_planned_at = float("inf")  # no step's time is learnt: every state is worth writing, every wait
        if output.total_num_scheduled_tokens:
            steps.append(dict(output.num_scheduled_tokens))
        return output

    def watched_output(scheduled: Any, output: Any, *args: Any, **options: Any) -> Any:
        for name in scheduled.scheduled_spec_decode_tokens:
            right = len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
            accepted[right] += 1
            rows.setdefault(name.partition("-")[0], []).append(right)
        return take(scheduled, output, *args, **options)

    core.scheduler.schedule, core.scheduler.update_from_output = watched_schedule, watched_output
    answers: list[dict[str, Any]] = []

    def ask(round_: Round) -> None:
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=engine.answer,
                logprobs=1,
                ignore_eos=True,
                detokenize=False,
                extra_args={"seamark_boundaries": hint} if engine.hints else None,
            )
            for _, hint in round_
        ]
        steps.clear()
        rows.clear()
        found = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in round_], parameters, use_tqdm=False)
        own: dict[str, list[int]] = {}  # tokens of each request's steps
        for step in steps:
            for name, count in step.items():
                own.setdefault(name.partition("-")[0], []).append(count)
        for (prompt, _), request in zip(round_, found, strict=True):
            name = request.request_id.partition("-")[0]
            output = request.outputs[0]
            tokens, cached = list(output.token_ids), request.num_cached_tokens or 0
            logprobs = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
            passes, done = 0, cached
            while done < len(prompt):
                done += own[name][passes]
                passes += 1
            answers.append(
                {
                    "prompt": prompt,
                    "tokens": tokens,
                    "logprobs": logprobs,
                    "cached": cached,
                    "passes": passes,
                    "accepted": rows.get(name, []),
                }
            )

    if engine.oracle and engine.v2:
        oracle.install_on_v2(runner, core.scheduler.requests)
    for round_ in TRAFFIC[engine.traffic](random.Random(7), answers):
        ask(round_)
    checkpoints = getattr(core.scheduler, "seamark", None)
    manager = core.scheduler.kv_cache_manager
    pool = manager.block_pool
    return {
        "answers": answers,
        "accepted": {str(count): times for count, times in accepted.items()},
        "proposed": oracle.proposed,
        "held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "refused": checkpoints.refusal.reason if checkpoints is not None and checkpoints.refusal else None,
        "writes_in_forward": checkpoints.writes_in_forward if checkpoints is not None else False,
        "ahead": checkpoints.grid.ahead if checkpoints is not None else 0,
        "said": said,
        "ignored": dict(checkpoints.counters.counts.ignored) if checkpoints is not None else {},
        "groups": [
            (type(group.kv_cache_spec).__name__, len(group.layer_names))
            for group in manager.kv_cache_config.kv_cache_groups
        ],
        "runner": [each.__module__ for each in type(runner).__mro__],
        "speculator": type(getattr(runner, "speculator", None)).__name__,
        "scheduler": type(core.scheduler).__name__,
    }


def _prepare(engine: Engine, delta: bool, oracle: Oracle) -> None:
    """Put stand-ins and defects into this process before its engine is made. `delta`: of gated delta nets."""
    from engine_patches.families import MAMBA2
    from tests.harness import draft_defects, draft_kernels, engine_plugins, float32_delta, gpu_choices

    if delta:
        float32_delta.register()
    parts = set(draft_kernels.ALL)
    if engine.v2:
        gpu_choices.take_runner_v2(MAMBA2)
        engine_plugins.async_scheduling()
        parts.discard(draft_kernels.COPIES)  # its own are kernels of Triton's
    draft_kernels.install(parts)
    if engine.window is not None:
        slide(engine.window)
    if engine.oracle and not engine.v2:
        oracle.install()
    if engine.planted:
        draft_defects.plant(engine.planted)


def slide(window: int) -> None:
    """Give the attention of nemotron_h's MTP head a window (tokens), as the heads of gemma4 and mimo_v2 have."""
    from vllm.model_executor.models.nemotron_h_mtp import NemotronHMTPAttentionDecoderLayer

    original = NemotronHMTPAttentionDecoderLayer.__init__

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        had = getattr(config, "sliding_window", None)
        config.sliding_window = window  # the target's configuration, too: its own layers must not see it
        try:
            original(self, config, *args, **options)
        finally:
            config.sliding_window = had

    NemotronHMTPAttentionDecoderLayer.__init__ = __init__


def _poison(runner: Any) -> None:
    """Fill all of the cache with the bits of NaN."""
    for cache in runner.kv_caches:
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def main(model: str, engines: str) -> None:
    os.environ |= {"VLLM_PLUGINS": "seamark", **CPU_PROCESS, "VLLM_CPU_CI_ENV": "1"}
    if os.environ.get("TRITON_INTERPRET"):
        triton_interpreter.admit_triton()
    import torch
    import transformers  # noqa: F401  # imported once for all
    from vllm import LLM  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for wanted in json.loads(engines):
        engine = Engine(**wanted)
        right = [each["prompt"] + each["tokens"] for each in found[engine.oracle]["answers"]] if engine.oracle else []
        cold = found[engine.cold]["proposed"] if engine.cold else None
        found[engine.name] = _apart(engine, model, Oracle(right, engine.probability, cold))
    print(json.dumps(list(found.values())))


def _apart(engine: Engine, model: str, oracle: Oracle) -> dict[str, Any]:
    """Run an engine in a process of its own; `{"error": ...}` if it dies."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        child = os.fork()
        if not child:
            code = 1
            try:
                file.write_text(json.dumps(_run(engine, model, oracle)))
                code = 0
            except BaseException:
                file.write_text(json.dumps({"error": traceback.format_exc()[-3000:]}))
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.waitpid(child, 0)
        return dict(json.loads(file.read_text())) if file.exists() else {"error": "it was killed"}


def wanted(*engines: Engine) -> str:
    """The JSON for these engines."""
    return json.dumps([asdict(engine) for engine in engines])


if __name__ == "__main__":
    main(*sys.argv[1:3])
