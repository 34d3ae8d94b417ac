"""One engine of `seamark gpu-check`: a vLLM in this process, asked offline, its forward passes counted.

It also takes wrong states on purpose: the planted defects show that the check can fail.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine_patches.gpu_check import drawn_models
from engine_patches.gpu_check.questions import EARLY_STATE, NEW_TOKENS, NO_ROWS, ROW_DEFECTS, Geometry, QuestionWave
from engine_patches.ledger import Function
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.hints import FIELD
from engine_patches.scheduler.step_time import StepTime

if TYPE_CHECKING:
    from engine_patches.scheduler.checkpoints import Checkpoints  # needs vLLM, which the command's process never loads


class CheckedAnswer(NamedTuple):
    """An engine's greedy answer to one question."""

    tokens: Sequence[int]
    top: Sequence[Mapping[int, float]]  # by step: the best tokens and their logprobs
    cached: int  # prompt tokens from the cache
    # Drafts that one row verified and how many of them were right, by how often, as vLLM's metrics count them.
    verified: Mapping[tuple[int, int], int] = {}


class LaneEngine:
    """A running `vllm.LLM`. Its plugin keeps every state that is asked for, until `serve_as_usual`."""

    def __init__(self, arguments: Mapping[str, Any], flags: Sequence[str] = ()) -> None:
        from vllm import LLM

        given = {**_arguments_in(flags), **arguments}
        if given.get("load_format") == "dummy":
            drawn_models.draw_in_place_of_loading()
        self._llm = LLM(**given)
        core = self._llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.config = self._llm.llm_engine.vllm_config
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.passes = 0  # forward passes so far
        core.model_executor.execute_model = self._counting(core.model_executor.execute_model)
        self._verified: dict[str, Counter[tuple[int, int]]] = {}  # by request, as in its answer
        self.scheduler.make_spec_decoding_stats = self._counting_drafts(self.scheduler.make_spec_decoding_stats)
        self.checkpoints: Checkpoints | None = getattr(self.scheduler, "seamark", None)
        self.step_time = StepTime()
        if self.checkpoints is not None:
            # Once the plugin knows the speed, no prefix of a tiny model is worth a state. So it learns elsewhere.
            learner: Any = self.checkpoints.step_time
            learner.step_took = self.step_time.step_took

    def serve_as_usual(self) -> None:
        """From now on the plugin knows the pace learnt so far, and decides by it what is worth a state or a wait."""
        if self.checkpoints is not None:
            learner = self.checkpoints.step_time
            del learner.step_took
            vars(learner).update(vars(self.step_time))
            self.step_time = learner

    def _counting(self, execute_model: Function) -> Function:
        def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.passes += scheduler_output.total_num_scheduled_tokens > 0
            return execute_model(scheduler_output, *args, **kwargs)

        return counted

    def _counting_drafts(self, make_stats: Function) -> Function:
        def counted(*args: Any, **kwargs: Any) -> Any:
            name = kwargs["request_id"]
            row = kwargs["num_draft_tokens"] - (kwargs["num_invalid_spec_tokens"] or {}).get(name, 0)
            self._verified.setdefault(_name_of(name), Counter())[row, kwargs["num_accepted_tokens"]] += 1
            return make_stats(*args, **kwargs)

        return counted

    def ask(self, wave: QuestionWave, new_tokens: int = NEW_TOKENS) -> list[CheckedAnswer]:
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
        self._verified.clear()
        for request in self._llm.generate(prompts, parameters, use_tqdm=False):
            output = request.outputs[0]
            top = [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs]
            verified = self._verified.get(_name_of(request.request_id), Counter())
            answers.append(CheckedAnswer(list(output.token_ids), top, request.num_cached_tokens or 0, verified))
        return answers

    @property
    def block(self) -> int:
        """Tokens of a cache block."""
        return int(self.config.cache_config.block_size)

    @property
    def budget(self) -> int:
        """Tokens that a step computes at most."""
        return int(self.scheduler.max_num_scheduled_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that leaves room for an answer."""
        return int(self.config.model_config.max_model_len) - NEW_TOKENS

    @property
    def geometry(self) -> Geometry:
        """The lengths that questions are made for."""
        if self.checkpoints is None:
            raise RuntimeError("this engine runs without the patches: it keeps no states to ask for")
        held = self.checkpoints
        return Geometry(held.block_size, held.grid.alignment, self.budget, held.grid.ahead, self.has_windows)

    @property
    def has_windows(self) -> bool:
        """Whether a draft head has a window in cache groups of its own, which the patches leave out of the lookup."""
        states = None if self.checkpoints is None else self.checkpoints.states
        return states is not None and states.windows is not None


def _name_of(request_id: str) -> str:
    """A request's name as its client knows it: inside the engine vLLM adds to it."""
    return request_id.partition("-")[0]


def _arguments_in(flags: Sequence[str]) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that flags of `vllm serve` stand for."""
    if not flags:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given, _ = parser.parse_known_args(list(flags))
    return {name: value for name, value in vars(given).items() if value != parser.get_default(name)}


@contextlib.contextmanager
def planted(scheduler: Any, defect: str) -> Iterator[None]:
    """Inside this context, requests that hit resume from a wrong recurrent state, if the cache has one; or their draft
    head from no rows or wrong ones."""
    manager = scheduler.kv_cache_manager
    original = manager.get_computed_blocks
    checkpoints: Checkpoints = scheduler.seamark

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:  # vLLM 0.33 bounds the hit here
        computed = original(request, *args, **kwargs)
        blocks, hit = computed[0], computed[1]
        if hit and defect in ROW_DEFECTS:
            _spoil_rows(manager.block_pool, checkpoints, request, blocks, hit, defect)
            return computed
        for group in scheduler.seamark.states.keys.recurrent if hit else ():
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
    unit = checkpoints.grid.unit
    cached = pool.cached_block_hash_to_block
    if defect == EARLY_STATE:
        early = hit - checkpoints.grid.alignment
        return cached.get_one_block(key_at(request, early, unit, group)) if early > 0 else None
    return _of_another(pool, request, group)


def _of_another(pool: Any, request: Any, group: int) -> Any:
    """A cached block of another prefix in a cache group; None if there is none."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    cached, own = pool.cached_block_hash_to_block, set(request.block_hashes)
    others = (key for key in cached._cache if get_group_id(key) == group and get_block_hash(key) not in own)
    return next((cached.get_one_block(key) for key in others), None)


def _spoil_rows(pool: Any, checkpoints: Checkpoints, request: Any, blocks: Any, hit: int, defect: str) -> None:
    """Take a draft head's rows before a hit away, or put another prefix's in their place."""
    if checkpoints.states is None or checkpoints.states.windows is None:
        return
    checkpoints.state_of(request).drafts_from = hit  # nobody else finds what it makes of them
    for group in checkpoints.states.windows.groups:
        other = _of_another(pool, request, group)
        taken = blocks.blocks[group]
        taken[:] = [] if defect == NO_ROWS or other is None else [b if b.is_null else other for b in taken]
