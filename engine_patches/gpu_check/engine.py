"""One engine of `seamark gpu-check`: a vLLM in this process, asked offline, its forward passes counted.

It answers cold, each prompt in one piece, as well as from its cache; and it takes or makes wrong states on purpose: the
planted defects show that the check can fail. Each engine has a process of its own (`main`), because patches are applied
once per process and `SEAMARK_ENGINE` decides which.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from engine_patches import speculation
from engine_patches.footprint import WRITES
from engine_patches.gpu_check.lanes import (
    DEFECTS,
    EARLY_STATE,
    NEW_TOKENS,
    RESEND,
    SHARED_LENGTHS,
    SPOILED_STATE,
    TINY_IDS,
    Lane,
    Prompts,
    Question,
    QuestionWave,
    Sections,
    draw_in_place_of_loading,
    own_sections,
    sections,
)
from engine_patches.ledger import Function, patches_live
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.hints import FIELD
from engine_patches.scheduler.hooks import kernel_chunk, state_alignment, unit_of
from engine_patches.scheduler.planner import HINTED
from engine_patches.scheduler.step_time import StepTime
from engine_patches.version import DISTRIBUTION, version

if TYPE_CHECKING:
    from engine_patches.scheduler.checkpoints import Checkpoints  # needs vLLM, which the command's process never loads

BUDGET = 2048  # tokens that a step computes where prompts are not to be in one piece
ODD_BUDGET, OWN_ODD_BUDGET = 250, 1000  # no multiples of any chunk; the second for long prompts
ORDINARY_TOKENS = 1000  # ids that may be special tokens
COLD, WARM, FAN_OUT = "cold", "warm", "four at once"
COLD_LENGTHS, STATES = (500, 2000, 8000), (0, 1, 3, 8)  # tokens of cold prompts, and states that each of them leaves
OWN_TOKENS, DECODED = 32, 32  # tokens that a timed prompt does not share, and those whose decoding is timed
FAN = 4  # requests at once
REPEATS, LONG = 3, 2048  # the median of so many counts; cases that share more tokens are timed once


class CheckedAnswer(NamedTuple):
    tokens: Sequence[int]
    top: Sequence[Mapping[int, float]]  # by step: the best tokens and their logprobs
    cached: int  # prompt tokens from the cache


class LaneEngine:
    """A running `vllm.LLM`. Its plugin keeps every state that is asked for, but in `serving_as_usual`."""

    def __init__(self, arguments: Mapping[str, Any], flags: Sequence[str] = ()) -> None:
        from vllm import LLM

        given = {**_arguments_in(flags), **arguments}
        if given.get("load_format") == "dummy":
            draw_in_place_of_loading()
        self._llm = LLM(**given)
        core = self._llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.config = self._llm.llm_engine.vllm_config
        self.executor = core.model_executor
        self.runner = self.executor.driver_worker.worker.model_runner
        self.groups = self.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        self.recurrent = [g.kv_cache_spec for g in self.groups if hasattr(g.kv_cache_spec, "mamba_type")]
        self.longest = int(self.config.model_config.max_model_len) - NEW_TOKENS  # of a prompt, with room for an answer
        self.passes = self.states = 0  # forward passes, and states written inside them, so far
        self.executor.execute_model = self._counting(self.executor.execute_model)
        self._room = self.scheduler.max_num_scheduled_tokens
        self._cold = self._whole = False
        self._salts = itertools.count()
        self.checkpoints: Checkpoints | None = getattr(self.scheduler, "seamark", None)
        self.learnt = StepTime()
        # Once the plugin knows the pace, no prefix of a tiny model is worth a state. So another one learns it.
        self._plugins: dict[str, Any] = {} if self.checkpoints is None else vars(self.checkpoints.step_time)
        self._plugins["step_took"] = self.learnt.step_took

    def serving_as_usual(self) -> contextlib.AbstractContextManager[Any]:
        """In this context the plugin knows the pace, and decides by it what is worth a state or a wait."""
        return mock.patch.dict(self._plugins, vars(self.learnt))

    def writing_hinted_states(self) -> contextlib.AbstractContextManager[Any]:
        """In this context the plugin writes the states that are asked for, and none of its own accord."""
        owner: Any = self.checkpoints
        if owner is None:
            return contextlib.nullcontext()
        targets = owner.targets_in
        return mock.patch.object(owner, "targets_in", lambda *args: [t for t in targets(*args) if t.kind == HINTED])

    @contextlib.contextmanager
    def without_cache(self, budget: int | None = None) -> Iterator[None]:
        """Inside this context nothing is found in the cache, since each prompt has a salt of its own.

        A prompt is cut where a step of `budget` tokens ends and nowhere else; 0: where vLLM cuts it by itself; None:
        not at all, as far as a step has room for it, and nothing else is in that step.
        """
        cuts: dict[str, Any] = {"need_mamba_block_aligned_split": False}
        cuts["max_num_scheduled_tokens"] = budget or self._room
        self._cold, self._whole = True, budget is None
        with mock.patch.multiple(self.scheduler, **cuts) if budget != 0 else contextlib.nullcontext():
            yield
        self._cold = self._whole = False

    def _counting(self, execute_model: Function) -> Function:
        def counted(output: Any, *args: Any, **kwargs: Any) -> Any:
            self.passes += output.total_num_scheduled_tokens > 0
            self.states += sum(map(len, (getattr(output, WRITES, None) or {}).values()))
            return execute_model(output, *args, **kwargs)

        return counted

    def ask(self, *waves: QuestionWave, new_tokens: int = NEW_TOKENS) -> list[CheckedAnswer]:
        """Answers to the questions of waves, which are asked one after the other."""
        from vllm import SamplingParams

        answers = []
        for wave in ([question] for asked in waves for question in asked) if self._whole else waves:
            hints = [{FIELD: list(question.hints)} if question.hints else None for question in wave]
            greedy: dict[str, Any] = {"temperature": 0, "logprobs": 5, "ignore_eos": True, "detokenize": False}
            parameters = [SamplingParams(max_tokens=new_tokens, extra_args=hint, **greedy) for hint in hints]
            prompts: list[Any] = [{"prompt_token_ids": list(question.tokens)} for question in wave]
            for prompt in prompts if self._cold else ():
                prompt["cache_salt"] = f"{next(self._salts)}"
            for request in self._llm.generate(prompts, parameters, use_tqdm=False):
                output = request.outputs[0]
                top = [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs]
                answers.append(CheckedAnswer(list(output.token_ids), top, request.num_cached_tokens or 0))
        return answers

    @property
    def lengths(self) -> dict[str, int]:
        """Those that questions are made for, in tokens: as the plugin would have them, where it does not run."""
        unit, grid = unit_of(self.config), None if self.checkpoints is None else self.checkpoints.grid
        alignment = grid.alignment if grid else state_alignment(self.recurrent, self.config, unit)
        ahead = grid.ahead if grid else speculation.ahead(self.config, unit)  # past a state, that a prefix has to share
        found = {"block": self.scheduler.block_size, "budget": self.scheduler.max_num_scheduled_tokens}
        return {**found, "alignment": alignment, "ahead": ahead}

    def planted(self, defect: str) -> contextlib.AbstractContextManager[Any]:
        """In this context requests that hit resume from a wrong recurrent state, or cold ones go on from one."""
        if defect == SPOILED_STATE:
            return mock.patch.object(self.executor, "execute_model", self._spoiling(self.executor.execute_model))
        manager = self.scheduler.kv_cache_manager
        original = manager.get_computed_blocks

        def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:  # vLLM 0.33 bounds the hit here
            computed = original(request, *args, **kwargs)
            blocks, hit = computed[0], computed[1]
            for group in self.scheduler.seamark.states.keys.recurrent if hit else ():
                wrong = self._wrong_state(request, hit, group, defect)
                if wrong is not None:
                    blocks.blocks[group][-1] = wrong
            return computed

        return mock.patch.object(manager, "get_computed_blocks", get_computed_blocks)

    def _wrong_state(self, request: Any, hit: int, group: int, defect: str) -> Any:
        """The cached block of an earlier state of a prompt, or of another prompt's; None if there is none."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        grid, pool = self.scheduler.seamark.grid, self.scheduler.kv_cache_manager.block_pool
        cached = pool.cached_block_hash_to_block
        if defect == EARLY_STATE:
            early = hit - grid.alignment
            return cached.get_one_block(key_at(request, early, grid.unit, group)) if early > 0 else None
        own = set(request.block_hashes)
        others = (key for key in cached._cache if get_group_id(key) == group and get_block_hash(key) not in own)
        return next((cached.get_one_block(key) for key in others), None)

    def _spoiling(self, execute_model: Function) -> Function:
        def spoiled(output: Any, *args: Any, **kwargs: Any) -> Any:
            result = execute_model(output, *args, **kwargs)
            managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
            layers = self.config.compilation_config.static_forward_context
            for name, writes in (getattr(output, WRITES, None) or {}).items():
                last = self.scheduler.requests[name].num_computed_tokens - 1  # vLLM has counted the step already
                for group, written in writes[-1].blocks.items():
                    own = managers[group].req_to_blocks[name][last // managers[group].block_size].block_id
                    for layer in self.groups[group].layer_names:
                        for state in layers[layer].kv_cache:
                            state[own] = state[written]
            return result

        return spoiled


def _arguments_in(flags: Sequence[str]) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that flags of `vllm serve` stand for."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given, _ = parser.parse_known_args(list(flags))
    return {name: value for name, value in vars(given).items() if value != parser.get_default(name)}


def facts_of(engine: LaneEngine) -> dict[str, Any]:
    """What an engine finds out about itself and its machine, for the report; lengths in tokens, pages in bytes."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    config, checkpoints = engine.config, engine.checkpoints
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    prefill = {layer.gdn_prefill_backend for layer in layers if hasattr(layer, "gdn_prefill_backend")}
    compilation, cache = config.compilation_config, config.cache_config
    packages = ("transformers", "triton", "flashinfer-python")
    on_cpu, driver = current_platform.is_cpu(), Path("/proc/driver/nvidia/version")
    on_gpu = {} if on_cpu else {"capability": "sm_{}{}".format(*torch.cuda.get_device_capability())}
    if not on_cpu and driver.exists():
        on_gpu["driver"] = driver.read_text().partition("\n")[0]
    return {
        "packages": {each.name: each.version for each in metadata.distributions() if each.name in packages}
        | {DISTRIBUTION: version()},
        "device": "CPU" if on_cpu else torch.cuda.get_device_name(),
        **{"machine": platform.machine(), "python": platform.python_version(), "cuda": torch.version.cuda, **on_gpu},
        **{"torch": torch.__version__, "vllm": vllm.__version__, "backends": sorted(backends)},
        "runner": "V2" if type(engine.runner).__module__.startswith("vllm.v1.worker.gpu.") else "V1",
        "gdn_prefill": [] if on_cpu else sorted(prefill),  # a CPU has a kernel of its own
        "patches_live": patches_live() and checkpoints is not None,
        "writes_in_forward": checkpoints is not None and checkpoints.writes_in_forward,
        "compiled": str(getattr(compilation.mode, "name", compilation.mode)),
        "graphs": str(getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)),
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "dtype": str(config.model_config.dtype),
        "exact": on_cpu and config.model_config.dtype == torch.float32,
        **{"kv_dtype": str(cache.cache_dtype), "state_dtype": str(getattr(cache, "mamba_ssm_cache_dtype", None))},
        "drafts": config.speculative_config is not None,
        "hints_refused": checkpoints.refusal.cause if checkpoints is not None and checkpoints.refusal else None,
        "windows": getattr(getattr(checkpoints, "states", None), "windows", None) is not None,
        "match_unit": None if checkpoints is None else checkpoints.grid.unit,
        **{"recurrent": bool(engine.recurrent), "longest": config.model_config.max_model_len, **engine.lengths},
        "chunk": math.lcm(*(kernel_chunk(spec, config) for spec in engine.recurrent)),
    }


class LaneJob(NamedTuple):
    lane: Lane
    model: str
    # As vLLM alone has made them; None: this is vLLM alone, and answers without its cache, twice.
    sections: Sections | None = None
    seconds: float = float("inf")  # from the start; a part that has not begun by then is left out


class FirstTokens(NamedTuple):
    """One case of requests, until the last of them has its first token."""

    case: str
    tokens: int  # of the prompt, or those that are shared
    hints: int  # states asked for
    seconds: float  # median
    cached: int  # prompt tokens from the cache, of all requests of the case together
    passes: int
    states: int  # written


@dataclass
class LaneResult:
    """The result of a job, as far as it has come; written again whenever something was added."""

    facts: dict[str, Any] = field(default_factory=dict)
    sections: Sections = field(default_factory=dict)
    answers: dict[str, list[CheckedAnswer]] = field(default_factory=dict)  # by section, in the order of its questions
    # The same of vLLM alone in other batches and cuts, or, where it drafts, with its cache.
    answers_again: dict[str, list[CheckedAnswer]] = field(default_factory=dict)
    from_cache: list[CheckedAnswer] = field(default_factory=list)  # to resent prompts, of vLLM alone with its cache
    passes: list[FirstTokens] = field(default_factory=list)
    first_tokens: list[FirstTokens] = field(default_factory=list)
    # Seconds that decoding a token takes; of a pass, and of each of its tokens, as learnt: 0 while that is unknown.
    pace: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # parts for which there was no time


def run(job: LaneJob, save: Callable[[LaneResult], None]) -> None:
    """Do the job; `save` is called after each part of it."""
    began = time.monotonic()
    lane = job.lane
    engine = LaneEngine(lane.arguments(job.model), lane.flags)
    if not lane.own_model:
        engine.scheduler.max_num_scheduled_tokens = BUDGET
    result = LaneResult(facts=facts_of(engine))
    save(result)
    if not result.facts["recurrent"] or not (job.sections is None or result.facts["patches_live"]):
        return
    lengths = [shared for shared in SHARED_LENGTHS if shared + 2 * OWN_TOKENS <= engine.longest]
    ids = TINY_IDS
    if lane.own_model:  # the first ids of many vocabularies are special tokens, the last ones too
        vocabulary = engine.config.model_config.get_vocab_size()
        ids = range(min(ORDINARY_TOKENS, vocabulary // 4), vocabulary // 2)
    if job.sections is not None:
        result.sections = job.sections
    elif lane.own_model:  # states of a model that drafts are spoiled in its lane without drafts
        result.sections = own_sections(engine.lengths, lengths, ids, defects=not result.facts["drafts"])
    else:
        result.sections = sections(engine.lengths, few=not lane.timed)
    for number, (name, part) in enumerate(_parts(engine, job, result, lengths, ids)):
        if number and time.monotonic() - began > job.seconds:
            result.left_out.append(name)
        else:
            part()
        save(result)


def _parts(
    engine: LaneEngine, job: LaneJob, result: LaneResult, lengths: Sequence[int], ids: range
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The parts of the job by their names, the most valuable first."""

    def timing(measure: Callable[..., list[FirstTokens]], length: int, *more: Any) -> Callable[[], None]:
        return lambda: result.first_tokens.extend(measure(engine, length, ids, *more))

    first, *others = result.sections
    for name in (first, *(name for name in others if name in DEFECTS)):
        yield name, partial(_ask, engine, job, result, name)
    yield "forward passes", lambda: result.passes.extend(count_passes(engine, ids))
    if job.lane.timed:
        for length in (length for length in COLD_LENGTHS if length <= engine.longest):
            yield f"{length:,} cold tokens", timing(time_cold, length)
        for shared in lengths:
            yield f"behind {shared:,} tokens", timing(time_shared, shared, job.lane.own_model)
        yield "pace", lambda: setattr(result, "pace", measure_pace(engine, ids))
    for name in (name for name in others if name not in DEFECTS):
        yield name, partial(_ask, engine, job, result, name)


def _ask(engine: LaneEngine, job: LaneJob, result: LaneResult, name: str) -> None:
    waves, facts = result.sections[name], result.facts
    if job.sections is not None:
        result.answers[name] = engine.ask(*waves[: -1 if name in DEFECTS else None])
        if name in DEFECTS:
            with engine.planted(name):
                result.answers[name] += engine.ask(waves[-1])
        return
    with engine.without_cache():
        result.answers[name] = engine.ask(*waves)
    if name not in DEFECTS and facts["drafts"]:
        result.answers_again[name] = engine.ask(*waves)
    elif name not in DEFECTS and not facts["exact"]:
        odd = OWN_ODD_BUDGET if job.lane.own_model else ODD_BUDGET
        with engine.without_cache(odd if facts["alignment"] % facts["chunk"] else 0):
            result.answers_again[name] = engine.ask([question for wave in waves for question in wave])
    if name == RESEND and job.lane.block_copy:
        result.from_cache = engine.ask(*waves)


def count_passes(engine: LaneEngine, ids: range) -> list[FirstTokens]:
    """Prompts asked one at a time, cold and warm, shorter and longer than a block."""
    prompts, block, counted = Prompts(1, ids), engine.lengths["block"], []
    for shared in (block // 2, 2 * block):
        prefix, own = prompts.tokens(shared), block // 4
        for case in (COLD, WARM) if shared + own <= engine.longest else ():
            hints = [shared // 2, shared, shared + own - 1]
            counted.append(_timed(engine, case, shared + own, [[*prefix, *prompts.tokens(own)]], hints))
    return counted


def time_cold(engine: LaneEngine, length: int, ids: range) -> list[FirstTokens]:
    """Cold prompts with no, one and more states in turn, so that a machine that slows down slows all."""
    prompts = Prompts(length, ids)
    wanted = STATES if engine.checkpoints is not None else STATES[:1]
    hints = [[length * part // (count + 1) for part in range(1, count + 1)] for count in wanted]
    with engine.writing_hinted_states():
        rounds = [
            [_timed(engine, COLD, length, [prompts.tokens(length)], each) for each in hints] for _ in range(1 + REPEATS)
        ]
    return [_median(of_count) for of_count in zip(*rounds, strict=True)]


def time_shared(engine: LaneEngine, shared: int, ids: range, as_usual: bool) -> list[FirstTokens]:
    """Prompts behind a prefix that is known, and several at once behind one that is not.

    `as_usual`: as the plugin decides by the pace. No prefix of a tiny model is worth a state.
    """
    prompts, found = Prompts(shared + 1, ids), []
    known = prompts.tokens(shared)
    with engine.serving_as_usual() if as_usual else contextlib.nullcontext():
        _timed(engine, COLD, shared, [[*known, *prompts.tokens(OWN_TOKENS)]], [shared])
        for case, count in ((WARM, 1), (FAN_OUT, FAN)):
            rounds = []
            for _ in range(1 + (REPEATS if shared <= LONG else 1)):
                prefix = known if case == WARM else prompts.tokens(shared)
                asked = [[*prefix, *prompts.tokens(OWN_TOKENS)] for _ in range(count)]
                rounds.append(_timed(engine, case, shared, asked, [shared]))
            found.append(_median(rounds))
    return found


def _timed(
    engine: LaneEngine, case: str, tokens: int, prompts: Sequence[list[int]], hints: list[int], new_tokens: int = 1
) -> FirstTokens:
    passes, states, began = engine.passes, engine.states, time.perf_counter()
    answers = engine.ask([Question(case, prompt, hints, None) for prompt in prompts], new_tokens=new_tokens)
    seconds, cached = time.perf_counter() - began, sum(answer.cached for answer in answers)
    return FirstTokens(case, tokens, len(hints), seconds, cached, engine.passes - passes, engine.states - states)


def _median(rounds: Sequence[FirstTokens]) -> FirstTokens:
    # Kernels are compiled and tuned at their first use.
    return rounds[-1]._replace(seconds=statistics.median(each.seconds for each in rounds[1:]))


def measure_pace(engine: LaneEngine, ids: range) -> dict[str, float]:
    """What decoding a token takes, and what the plugin learnt of this engine's steps."""
    prompts, took, learnt = Prompts(4, ids), [], engine.learnt
    for _ in range(1 + REPEATS):
        one, more = (_timed(engine, "", 16, [prompts.tokens(16)], [], count).seconds for count in (1, DECODED + 1))
        took.append((more - one) / DECODED)
    return {"decode": statistics.median(took[1:]), "floor": learnt.pace.floor, "token": learnt.pace.token}


def main() -> None:
    """Do the job of a file, its result in another one: both pickles, named on the command line."""
    target = Path(sys.argv[2])

    def save(result: LaneResult) -> None:
        unfinished = target.with_suffix(".new")
        unfinished.write_bytes(pickle.dumps(result))
        unfinished.replace(target)

    run(pickle.loads(Path(sys.argv[1]).read_bytes()), save)
