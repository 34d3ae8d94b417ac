"""One engine of `seamark gpu-check`: a vLLM in this process, asked offline, its forward passes counted.

`python -m engine_patches.gpu_check.engine JOB RESULT` (pickles). Each engine has a process of its own, because patches
are applied once per process and `SEAMARK_ENGINE` decides which. Besides answers and passes, an engine reports the facts
of its machine, and takes wrong states on purpose: the planted defects show that the check can fail.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine_patches.gpu_check.questions import (
    DEFECTS,
    EARLY_STATE,
    NEW_TOKENS,
    Geometry,
    Prompts,
    Question,
    Wave,
    sections,
)
from engine_patches.ledger import Function, patches_live
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.hints import FIELD
from engine_patches.scheduler.match_unit import kernel_chunk

if TYPE_CHECKING:
    from engine_patches.scheduler.checkpoints import Checkpoints  # needs vLLM, which the command's process never loads

ODD_BUDGET = 250  # tokens, no multiple of any chunk

TIMED_STATES = 8  # states whose writing is timed together


class Job(NamedTuple):
    """What one engine has to do."""

    arguments: Mapping[str, Any]  # of `vllm.LLM`
    sections: Mapping[str, Sequence[Wave]] | None = None  # the questions; None: made for the engine's own geometry
    quick: bool = False  # makes fewer of them
    budget: int | None = None  # tokens of a step; None: as many as vLLM was given room for
    again: bool = False  # answer everything a second time, in other batches
    odd_steps: bool = False  # the second time, prefill in steps of `ODD_BUDGET`, cut inside the kernels' chunks
    timed: bool = False
    longest: int | None = None  # tokens of the longest prompt whose passes are counted


class Answer(NamedTuple):
    """An engine's greedy answer to one question."""

    tokens: Sequence[int]
    top: Sequence[Mapping[int, float]]  # by step: the best tokens and their logprobs
    cached: int  # prompt tokens from the cache


class Passes(NamedTuple):
    """Forward passes that one prompt took until its first token."""

    case: str
    prompt: int  # tokens
    cached: int  # tokens
    passes: int


class Timing(NamedTuple):
    """Seconds, medians of a few requests that run alone."""

    decode_pass: float  # a pass that computes one token
    prompt_token: float  # each further token of a prompt
    prompt: int  # tokens of the next two
    first_token_cold: float
    first_token_warm: float
    state: float  # each further state written inside a pass, all recurrent layers


@dataclass
class Result:
    """The result of a job, as far as it has come; written again whenever something was added."""

    facts: dict[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Sequence[Wave]] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)  # by section, in the order of its questions
    answers_again: dict[str, list[Answer]] = field(default_factory=dict)
    passes: list[Passes] = field(default_factory=list)
    timing: Timing | None = None


class Engine:
    """A running `vllm.LLM`."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        core = self._llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.config = self._llm.llm_engine.vllm_config
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.passes = 0  # forward passes so far
        core.model_executor.execute_model = self._counting(core.model_executor.execute_model)
        self.checkpoints: Checkpoints | None = getattr(self.scheduler, "seamark", None)
        if self.checkpoints is not None:
            # Once an engine has learnt its own speed, no prefix of a model this small is worth a state.
            step_time: Any = self.checkpoints.step_time
            step_time.step_took = lambda *_, **__: None

    def _counting(self, execute_model: Function) -> Function:
        def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.passes += scheduler_output.total_num_scheduled_tokens > 0
            return execute_model(scheduler_output, *args, **kwargs)

        return counted

    def ask(self, wave: Wave, new_tokens: int = NEW_TOKENS) -> list[Answer]:
        """Answers to questions asked at once."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=new_tokens,
                logprobs=5,
                ignore_eos=True,
                detokenize=False,
                extra_args={FIELD: list(question.hints)} if question.hints else None,
            )
            for question in wave
        ]
        prompts = [{"prompt_token_ids": list(question.tokens)} for question in wave]
        answers = []
        for request in self._llm.generate(prompts, parameters, use_tqdm=False):
            output = request.outputs[0]
            top = [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs]
            answers.append(Answer(list(output.token_ids), top, request.num_cached_tokens or 0))
        return answers

    @property
    def geometry(self) -> Geometry:
        """The lengths that questions are made for."""
        if self.checkpoints is None:
            raise RuntimeError("this engine runs without the patches: it keeps no states to ask for")
        checkpoints, budget = self.checkpoints, self.scheduler.max_num_scheduled_tokens
        return Geometry(checkpoints.block_size, checkpoints.alignment, budget)


def run(job: Job, save: Callable[[Result], None]) -> None:
    """Do the job; `save` is called after each part of it."""
    engine = Engine(job.arguments)
    if job.budget is not None:
        engine.scheduler.max_num_scheduled_tokens = job.budget
    result = Result(facts=facts_of(engine))
    save(result)
    if job.sections is not None:
        result.sections = job.sections
    elif result.facts["patches_live"]:
        result.sections = sections(engine.geometry, job.quick)
    for name, waves in result.sections.items():
        result.answers[name] = _ask_section(engine, name, waves)
        save(result)
    result.passes = count_passes(engine, job.longest)
    save(result)
    if job.again:
        if job.odd_steps:
            engine.scheduler.max_num_scheduled_tokens = ODD_BUDGET
        for name, waves in result.sections.items():
            result.answers_again[name] = engine.ask([question for wave in waves for question in wave])
        save(result)
    if job.timed:
        result.timing = time_passes(engine, repeats=1 if job.quick else 5)
    save(result)


def _ask_section(engine: Engine, name: str, waves: Sequence[Wave]) -> list[Answer]:
    answers: list[Answer] = []
    for wave in waves:
        # Only an engine with checkpoints can resume from a wrong one; the reference answers as always.
        spoiled = name in DEFECTS and wave is waves[-1] and engine.checkpoints is not None
        with planted(engine.scheduler, name) if spoiled else contextlib.nullcontext():
            answers += engine.ask(wave)
    return answers


def count_passes(engine: Engine, longest: int | None = None) -> list[Passes]:
    """Passes to the first token of prompts asked one at a time, cold and warm, shorter and longer than a block."""
    prompts, block = Prompts(seed=1), engine.config.cache_config.block_size
    counted = []
    for name, shared in (("shorter than a block", block // 2), ("longer than a block", 2 * block)):
        prefix = prompts.tokens(shared)
        for case in ("cold", "warm"):
            whole = [*prefix, *prompts.tokens(block // 4)]
            if longest is not None and len(whole) > longest:
                continue
            before = engine.passes
            (answer,) = engine.ask([Question(case, whole, [shared // 2, shared, len(whole) - 1], None)], new_tokens=1)
            counted.append(Passes(f"{case}, {name}", len(whole), answer.cached, engine.passes - before))
    return counted


def time_passes(engine: Engine, repeats: int) -> Timing:
    """How long passes take on this machine, and how much a cached prefix and a written state change that."""
    prompts = Prompts(seed=2)
    short, long = engine.config.cache_config.block_size, engine.scheduler.max_num_scheduled_tokens - 64

    def seconds(tokens: list[int], hints: Sequence[int], new_tokens: int = 1) -> float:
        began = time.perf_counter()
        engine.ask([Question("timed", tokens, hints, None)], new_tokens)
        return time.perf_counter() - began

    def median(one: Callable[[], float]) -> float:
        one()  # kernels are compiled and tuned at their first use
        return statistics.median(one() for _ in range(repeats))

    few = [long - 16]
    many = [long * part // (TIMED_STATES + 1) for part in range(1, TIMED_STATES + 1)] + few
    prefix = prompts.tokens(long - 32)
    cold = median(lambda: seconds(prompts.tokens(long), few))
    cold_short = median(lambda: seconds(prompts.tokens(short), [short - 16]))
    seconds([*prefix, *prompts.tokens(32)], [len(prefix)])
    return Timing(
        decode_pass=median(lambda: seconds(prompts.tokens(16), [], 33) - seconds(prompts.tokens(16), [])) / 32,
        prompt_token=(cold - cold_short) / (long - short),
        prompt=long,
        first_token_cold=cold,
        first_token_warm=median(lambda: seconds([*prefix, *prompts.tokens(32)], [len(prefix)])),
        # Back to back, so that a machine that slows down slows both.
        state=median(lambda: seconds(prompts.tokens(long), many) - seconds(prompts.tokens(long), few)) / TIMED_STATES,
    )


def facts_of(engine: Engine) -> dict[str, Any]:
    """Facts of an engine and the machine it runs on; lengths in tokens, pages in bytes."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    layers = engine.config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    prefill = {layer.gdn_prefill_backend for layer in layers if hasattr(layer, "gdn_prefill_backend")}
    specs = (group.kv_cache_spec for group in engine.runner.kv_cache_config.kv_cache_groups)
    on_cpu = current_platform.is_cpu()
    checkpoints = engine.checkpoints
    return {
        "device": "CPU" if on_cpu else torch.cuda.get_device_name(),
        "machine": platform.machine(),
        "capability": None if on_cpu else "sm_{}{}".format(*torch.cuda.get_device_capability()),
        "driver": None if on_cpu else _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "runner": "V2" if type(engine.runner).__module__.startswith("vllm.v1.worker.gpu.") else "V1",
        "backends": sorted(backends),
        "gdn_prefill": [] if on_cpu else sorted(prefill),  # a CPU has a kernel of its own
        "patches_live": patches_live() and checkpoints is not None,
        "writes_in_forward": checkpoints is not None and checkpoints.writes_in_forward,
        "block": engine.config.cache_config.block_size,
        "match_unit": None if checkpoints is None else checkpoints.match_unit,
        "alignment": None if checkpoints is None else checkpoints.alignment,
        "chunk": math.lcm(*(kernel_chunk(spec, engine.config) for spec in specs if hasattr(spec, "mamba_type"))),
        "pages_at_one_address": _pages_at_one_address(engine.runner),
    }


def _pages_at_one_address(runner: Any) -> list[int]:
    """Sizes of the pages of caches that start at one address but differ in them; empty if there are none."""
    pages: dict[int, set[int]] = {}
    for entry in runner.kv_caches:
        for cache in entry if isinstance(entry, list | tuple) else [entry]:
            pages.setdefault(cache.data_ptr(), set()).add(cache.nbytes // runner.kv_cache_config.num_blocks)
    return sorted(max((sizes for sizes in pages.values() if len(sizes) > 1), key=len, default=()))


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.partition("\n")[0].strip() or None


@contextlib.contextmanager
def planted(scheduler: Any, defect: str) -> Iterator[None]:
    """Inside this context, requests that hit resume from a wrong recurrent state, if the cache has one."""
    manager = scheduler.kv_cache_manager
    original = manager.get_computed_blocks
    checkpoints: Checkpoints = scheduler.seamark

    def get_computed_blocks(request: Any) -> Any:
        computed = original(request)
        blocks, hit = computed[0], computed[1]
        for group in checkpoints.recurrent_groups if hit else ():
            wrong = _wrong_state(manager.block_pool, checkpoints, request, hit, group, defect)
            if wrong is not None:
                blocks.blocks[group][-1] = wrong
        return computed

    manager.get_computed_blocks = get_computed_blocks
    try:
        yield
    finally:
        del manager.get_computed_blocks


def _wrong_state(pool: Any, checkpoints: Checkpoints, request: Any, hit: int, group: int, defect: str) -> Any:
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    unit = checkpoints.match_unit
    cached = pool.cached_block_hash_to_block
    if defect == EARLY_STATE:
        early = hit - checkpoints.alignment
        return cached.get_one_block(key_at(request, early, unit, group)) if early > 0 else None
    own = set(request.block_hashes)
    others = (key for key in cached._cache if get_group_id(key) == group and get_block_hash(key) not in own)
    return next((cached.get_one_block(key) for key in others), None)


def main(argv: list[str]) -> int:
    job = pickle.loads(Path(argv[0]).read_bytes())
    target = Path(argv[1])

    def save(result: Result) -> None:
        unfinished = target.with_suffix(".new")
        unfinished.write_bytes(pickle.dumps(result))
        unfinished.replace(target)

    run(job, save)
    return 0


if __name__ == "__main__":
    # Under its own name, so that what is pickled here can be read elsewhere.
    from engine_patches.gpu_check import engine

    sys.exit(engine.main(sys.argv[1:]))
