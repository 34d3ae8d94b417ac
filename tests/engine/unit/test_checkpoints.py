"""What is learnt of requests and of steps, what is kept of them and reported; and the check on a toy cache."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import ModelRunnerOutput

from engine_patches.scheduler import state_writes
from engine_patches.scheduler.cache_keys import HeldKeys
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.earlier_prompts import COLD, HINT_IGNORED, HIT, NO_BOUNDARY, NOT_WORTH_IT
from engine_patches.scheduler.hints import FIELD, PIN
from engine_patches.scheduler.hooks import preflight
from engine_patches.scheduler.planner import EXPECTED, HINTED, TAIL, CheckpointTarget, Grid, RequestState
from engine_patches.scheduler.refusals import MANAGERS
from engine_patches.scheduler.state_writes import learn_step_time, note_late_output, write_after_scheduling
from engine_patches.scheduler.states import States
from engine_patches.scheduler.step_time import StepTime
from tests.harness.versions import source_of

UNIT = 16

GRID = Grid(UNIT, UNIT)


def request(tokens, hint=None, salt="", name="r", **more) -> Any:
    """As much of a vLLM `Request` as is looked at."""
    ids = list(tokens)
    ends = range(UNIT, len(ids) + 1, UNIT)
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=ids,
        num_prompt_tokens=len(ids),
        num_tokens=len(ids),
        shared_prefix_boundary=0,
        sampling_params=SimpleNamespace(extra_args=None if hint is None else {FIELD: hint}),
        block_hashes=[repr((salt, ids[:end])).encode() for end in ends],
        **more,
    )


def own(number, length):
    return [number * 10_000 + index for index in range(length)]


HEAD = own(0, 200)


def made(*, in_pass: bool = False) -> Checkpoints:
    """Of a scheduler with one recurrent cache group."""
    init_none_hash(sha256)
    pool = BlockPool(64, enable_caching=True, hash_block_size=UNIT)
    recurrent = SimpleNamespace(kv_cache_group_id=0, block_size=512)
    return Checkpoints(GRID, 512, States(HeldKeys(pool, GRID, [recurrent], []), 0, in_pass))


@pytest.fixture
def checkpoints() -> Checkpoints:
    return made()


def prompt_of_600() -> Any:
    return request(own(1, 600), all_token_ids=own(1, 600))


def learn(checkpoints):
    """From now on a pass costs as much as 800 tokens, of half a millisecond each, and a state nothing."""
    checkpoints.step_time = StepTime()
    for tokens, wrote in itertools.product((1, 801), (0, 1, 2)):
        for _ in range(3):
            checkpoints.step_time.step_took(tokens, 0.0005 * (800 + tokens), states=wrote)


def test_bytes_are_those_of_counted_states_that_are_still_cached(checkpoints):
    checkpoints.states.num_bytes, pool, written = 100, checkpoints.states.keys.pool, prompt_of_600()
    blocks = [checkpoints.reserve(written, CheckpointTarget(position, TAIL))[0] for position in (160, 320)]
    assert checkpoints.states.bytes_held == 200
    checkpoints.states.release()
    pool.reset_prefix_cache()
    assert checkpoints.states.bytes_held == 0 and blocks[0].block_hash not in checkpoints.states.written


def test_a_state_of_a_prompt_that_is_pinned_is_written_whatever_it_saves(checkpoints):
    pinning, other = request(HEAD, [16], name="pins"), request(HEAD, [16], name="other")
    pinning.sampling_params.extra_args[PIN] = 1
    learn(checkpoints)
    for each in (pinning, other):
        target = CheckpointTarget(16, HINTED)
        assert checkpoints.worth_writing(checkpoints.state_of(each), target) is (each is pinning)


def test_an_admitted_request_reports_what_it_shares_and_what_its_entries_became(checkpoints):
    checkpoints.admitted(request(HEAD + own(1, 300), name="a"), 0)
    hint = ["last:199", "last:7,9", -300, 3]
    checkpoints.admitted(request(HEAD + own(2, 300), hint, name="b"), 0)
    checkpoints.admitted(request(HEAD + own(3, 300), ["last:199"], name="c"), 192)
    checkpoints.admitted(request(HEAD + own(4, 300), [200], name="d", skip_reading_prefix_cache=True), 0)
    assert list(map(msgspec.structs.astuple, checkpoints.counters.take().requests)) == [
        ("a", NO_BOUNDARY, 0, 0, ()),
        ("b", COLD, 0, 192, (200, 0, 200, 3)),
        ("c", HIT, 192, 192, (200,)),
        ("d", HINT_IGNORED, 0, 192, (200,)),
    ]


def ask(checkpoints, number: int, before=(), now=900.0) -> tuple[list[int], list[int]]:
    """The prompt of a new question behind one head, or `before`, and the positions of its states."""
    checkpoints.turn_value._clock = lambda: now
    prompt = [*(before or HEAD), *own(number, 120)]
    hint = [192, len(prompt) - 4]
    return prompt, [target.position for target in checkpoints.targets(request(prompt, hint, name=f"r{number}"))]


def test_the_ends_of_turns_are_kept_until_eight_were_asked_for_by_nobody_and_again_when_one_goes_on(checkpoints):
    for number in range(1, 9):
        assert ask(checkpoints, number, now=100.0 * number)[1] == [192, 304]  # by the next one its client is gone
    prompt, positions = ask(checkpoints, 9)
    assert positions == [192] and checkpoints.counters.counts.ignored == {"not_worth_it": 1}
    ask(checkpoints, 10, before=prompt)
    assert ask(checkpoints, 11)[1] == [192, 304]


def admit(checkpoints: Checkpoints, number: int, question: int, hit: int = 0, **more) -> list[CheckpointTarget]:
    """A question about a document of 640 tokens; the states that are kept of it."""
    asked = request(own(number, 640) + own(number + question, 60), name=f"{number}/{question}", **more)
    targets = checkpoints.targets(asked)
    checkpoints.admitted(asked, hit)
    return targets


def documents(**more) -> Checkpoints:
    """Before an engine that writes states inside a pass; it has seen three, each asked about twice."""
    checkpoints = made(in_pass=True)
    for number in (100, 110, 120):
        assert EXPECTED not in [kind for question in (1, 2) for _, kind in admit(checkpoints, number, question, **more)]
    return checkpoints


def test_what_one_salt_shows_is_nothing_to_another():
    writing = documents(salt="a", cache_salt="a")
    assert EXPECTED not in [kind for _, kind in admit(writing, 200, 1, salt="b", cache_salt="b")]
    assert CheckpointTarget(640, EXPECTED) in admit(writing, 200, 1, salt="a", cache_salt="a")


def test_an_expected_state_that_served_somebody_is_kept_as_shared_and_goes_on_to_count():
    writing = documents()
    retention = writing.states.retention
    for number in range(200, 200 + 10 * 80, 10):
        first = request(own(number, 640) + own(number + 1, 60), name="first", all_token_ids=own(number, 640))
        (target,) = [target for target in writing.targets(first) if target.kind == EXPECTED]
        (block,) = writing.reserve(first, target)
        writing.admitted(first, 0)
        writing.states.release()
        assert block.block_hash in retention._turns
        admit(writing, number, 2, hit=640)
        assert block.block_hash in retention._kept


@pytest.mark.parametrize(
    ("window", "heals", "hit", "reason"), [("held", 0, 192, HIT), ("healed", 192, 64, NOT_WORTH_IT)]
)
def test_what_became_of_a_heads_rows_is_told_with_the_hit(checkpoints, window, heals, hit, reason):
    checkpoints.state_of(request(HEAD))
    told: list[bytes] = []
    checkpoints.states.windows = SimpleNamespace(admitted=lambda state, name: told.append(name))
    again = request(HEAD + own(1, 50), [192], name="a")
    state = checkpoints.state_of(again)
    state.window, state.heals = window, heals
    checkpoints.admitted(again, hit)
    counts = checkpoints.counters.take()
    assert counts.windows == {window: 1} and counts.outcomes == {reason: 1}
    assert told == [checkpoints.states.keys.state_key(again, 192)]


def test_what_another_worker_has_computed_is_a_hit_that_saves_nothing_here(checkpoints):
    checkpoints.state_of(request(HEAD))
    loading = request(HEAD + own(1, 50), name="a")
    checkpoints.state_of(loading).loaded = 180
    checkpoints.admitted(loading, 64)
    counts = checkpoints.counters.take()
    assert counts.requests == [AdmittedRequest("a", HIT, 180, 192, ())] and counts.hits == 0
    assert checkpoints.state_of(loading).resumed_at == 180


@pytest.mark.parametrize(("loaded", "written", "hits"), [(0, False, 0), (0, True, 1), (32, False, 1)])
def test_a_hit_counts_as_one_on_a_state_that_was_counted_or_loaded(checkpoints, loaded, written, hits):
    again = request(HEAD, [192], name="a")
    if written:
        checkpoints.state_written(again, checkpoints.states.keys.state_key(again, 192), TAIL)
    offered: list[tuple[int, bool]] = []
    checkpoints.states.store = SimpleNamespace(offer=lambda request, *told: offered.append(told))
    learn(checkpoints)
    checkpoints.admitted(again, 192, loaded)
    counts = checkpoints.counters.take()
    assert (counts.hits, counts.hit_tokens) == (hits, 192 * hits)
    assert counts.saved_seconds == pytest.approx(192 * 0.0005, rel=0.01)
    assert offered == ([] if loaded else [(192, True)])  # what a disk has brought it has already


def test_a_step_begins_and_a_cache_is_emptied_with_the_blocks_of_the_last_step_given_back(checkpoints):
    told: list[Any] = []

    def part(name: str) -> SimpleNamespace:
        tell = {"clear": lambda: told.append(name), "close": lambda why: told.append(f"{name}: {why}")}
        return SimpleNamespace(drop_gone=told.append, **tell)

    states = checkpoints.states
    checkpoints.gate, states.store, states.windows = map(part, ("gate", "store", "rows"))
    (first,) = checkpoints.reserve(prompt_of_600(), CheckpointTarget(160, TAIL))
    states.unwritten[7] = 0
    checkpoints.begin_step({"a"})
    assert first.ref_cnt == 0 and not states.unwritten and told == [{"a"}]
    (second,) = checkpoints.reserve(prompt_of_600(), CheckpointTarget(320, TAIL))
    checkpoints.before_reset()
    assert second.ref_cnt == 0 and sorted(told[1:]) == ["gate", "rows", "store: the cache is emptied"]
    without_states = Checkpoints(GRID, 512)
    without_states.begin_step(set())
    without_states.before_reset()


def shorter(original: Callable[..., Any]) -> Any:
    """A lookup whose hits are shorter."""
    return classmethod(lambda cls, *args, **more: (lambda blocks, hit: (blocks, hit - 16))(*original(*args, **more)))


def doing(instead: Callable[..., Any]) -> Callable[..., Any]:
    return lambda original: instead


def evict(self: Any, blocks: Any) -> None:
    for each in blocks:
        self._maybe_evict_cached_block(each)


@pytest.mark.parametrize(
    ("owner", "method", "changed", "told"),
    [
        (BlockPool, "cache_partial_block", doing(lambda *args, **more: len(5)), "TypeError: object of type 'int'"),
        (BlockPool, "get_cached_block", doing(lambda self, block_hash, groups: None), ""),
        (MambaManager, "find_longest_cache_hit", shorter, "a state inside a block"),
        (FullAttentionManager, "find_longest_cache_hit", shorter, "attention rows inside a block"),
        (BlockPool, "cache_full_blocks", doing(lambda *args, **more: None), "the block of token"),
        (BlockPool, "free_blocks", doing(evict), "a freed state"),
        (SlidingWindowManager, "get_num_skipped_tokens", doing(lambda self, tokens: 0), "a window that is not held"),
        (SlidingWindowManager, "take_new_block_ids", doing(lambda self: []), "its blocks to zero"),
        (SlidingWindowManager, "take_pending_cow_copies", doing(lambda self: []), "a hit copies"),
    ],
)
def test_each_behaviour_that_is_relied_on_is_looked_at(monkeypatch, owner, method, changed, told):
    monkeypatch.setattr(owner, method, changed(getattr(owner, method)))
    of_windows = owner is SlidingWindowManager
    found = preflight(windows=of_windows)
    assert found and told in found
    if of_windows:
        assert not preflight()  # without a head that has any nobody asks


def managers_in(version: str | None) -> set[str]:
    """All classes of the module that derive from vLLM's base of managers, by their source; of the installed vLLM."""
    (installed,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    vllm = Path(installed) if version is None else source_of(version) / "vllm"
    module = ast.walk(ast.parse((vllm / "v1/core/single_type_kv_cache_manager.py").read_text()))
    bases = {node.name: {*map(ast.unparse, node.bases)} for node in module if isinstance(node, ast.ClassDef)}
    found = {"SingleTypeKVCacheManager"}
    while more := {name for name, of_class in bases.items() if of_class & found} - found:
        found |= more
    return found - {"SingleTypeKVCacheManager", "_HiSparseAuxiliaryManager"}  # no kind of their own


@pytest.mark.parametrize("version", [None, "0.33.0"])
def test_each_manager_of_the_installed_and_of_the_newest_vllm_is_named(version):
    assert len(found := managers_in(version)) > 9 and found <= MANAGERS.keys()


@pytest.mark.on_request
def test_each_manager_of_the_oldest_vllm_is_named_and_none_that_no_version_has():
    assert set().union(*map(managers_in, (None, "0.31.0", "0.33.0"))) == MANAGERS.keys()


def test_who_has_its_whole_answer_is_told_once_and_who_has_left_before_is_not():
    """In a step in which requests verify three drafts."""
    states: dict[str, RequestState] = {}
    over = []
    seamark = SimpleNamespace(
        step_time=SimpleNamespace(step_took=lambda *_, **__: None),
        states=None,
        own=None,
        step_ended=0.0,
        verified=4,
        state_of=lambda request: states.setdefault(request.request_id, RequestState()),
        finished=lambda request: over.append(request.request_id),
        last_planned=SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys("abc", 4),
            total_num_scheduled_tokens=12,
            scheduled_spec_decode_tokens=dict.fromkeys("abc", [-1] * 3),
            seamark_planned_at=1.0,
        ),
    )
    is_over = {"a": True}  # aborted, and still in the step
    requests = {
        name: SimpleNamespace(request_id=name, is_finished=lambda name=name: is_over.get(name, False)) for name in "ac"
    }

    def update(scheduler: Any, output: Any, answers: Any) -> str:
        is_over["c"] = True
        del requests["c"]
        return "outputs"

    scheduler = SimpleNamespace(seamark=seamark, requests=requests)
    answers = SimpleNamespace(sampled_token_ids=[[5, 6]] * 3, req_id_to_index={"a": 0, "b": 1, "c": 2})
    assert learn_step_time(update)(scheduler, seamark.last_planned, answers) == "outputs"
    assert [*states] == over == ["c"] and (states["c"].draft_steps, states["c"].accepted) == (1, 1)


DECODE = 0.0046  # seconds on the GPU

FLOOR, TOKEN = 0.06, 6e-6  # of a pass with a prompt


class Gpu:
    """The executor: what is launched runs in order, a prefill from its first kernel on."""

    def __init__(self, clock, launch_prefill, launch_decode):
        self.clock, self.launch, self.free = clock, (launch_decode, launch_prefill), 0.0

    def execute_model(self, output, non_block):
        tokens, prompt = output.total_num_scheduled_tokens, output.prompt
        if not tokens:
            nothing = Future()
            nothing.set_result(ModelRunnerOutput([], {}))
            return nothing
        began = max(self.free, self.clock.now)
        self.clock.now += self.launch[bool(prompt)]
        took = FLOOR + TOKEN * prompt if prompt else DECODE
        self.free = max(began + took, self.clock.now + 0.001)
        self.last = AsyncOutputFuture(self._output(self.free), single_value=True)
        return self.last

    def sample_tokens(self, grammar, non_block):
        return self.last

    def _output(self, done):
        def get_output():
            self.clock.now = max(self.clock.now, done)
            return ModelRunnerOutput([], {})

        event = SimpleNamespace(query=lambda: done <= self.clock.now)
        return SimpleNamespace(copy_event=event, get_output=get_output)


class Scheduler:
    """Prompts come one after the other, of which some tokens are asked, beside streams that never end."""

    def __init__(self, clock, streams, answer, at_once):
        draw = random.Random(1)
        self.clock, self.streams, self.answer, self.requests = clock, streams, answer, {}
        self.left, self.answered = 0, True  # tokens to be planned, and whether the last of them has come
        self.prompts = deque((100.5 + (0 if at_once else 0.5 * n), draw.randint(500, 4000)) for n in range(100))
        self.seamark = SimpleNamespace(
            step_time=StepTime(), step_ended=0.0, states=None, own=None, last_planned=None, verified=1,
            writes_in_forward=False, pinning=(), begin_step=lambda requests: None,
            long_prefills=SimpleNamespace(step_planned=lambda *step: None),
        )  # fmt: skip

    def comes(self):
        return bool(self.prompts and self.prompts[0][0] <= self.clock.now)

    def has_requests(self):
        return bool(self.streams or not self.answered or self.comes())

    def plan(self, *_):
        prompt = 0
        if self.answered and self.comes():
            self.left, self.answered, prompt = self.answer, False, self.prompts.popleft()[1]
        tokens = self.streams + (prompt or bool(self.left))
        is_last = self.left == 1
        self.left -= bool(self.left)
        return SimpleNamespace(
            total_num_scheduled_tokens=tokens, num_scheduled_tokens={}, prompt=prompt, scheduled_spec_decode_tokens={},
            pending_structured_output_tokens=False, is_last=is_last,
        )  # fmt: skip

    def take(self, output, answers):
        self.answered |= output.is_last
        return {}

    schedule = write_after_scheduling(plan)
    update_from_output = learn_step_time(take)

    def get_grammar_bitmask(self, output):
        return None


@pytest.mark.parametrize(("launch_prefill", "launch_decode"), [(0.063, 0.002), (0.063, 0.004), (0.020, 0.002)])
@pytest.mark.parametrize(
    ("streams", "answer", "at_once"), [(0, 9, False), (0, 9, True), (1, 1, False), (1, 9, False), (16, 9, True)]
)
def test_a_prefill_is_seen_as_long_as_it_takes(monkeypatch, streams, answer, at_once, launch_prefill, launch_decode):
    """In vLLM's own loop.

    With one worker in the engine's process `execute_model` launches in the engine's thread. So the output of a decode
    is asked for only when the prefill behind it has been launched; and an engine that is used offline leaves an empty
    step in its queue that comes out in the midst of the next prefill. Both were seen on an H200.
    """
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(state_writes, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(state_writes, "only_generates", lambda output: not output.prompt)
    monkeypatch.setattr(AsyncOutputFuture, "result", note_late_output(AsyncOutputFuture.result))
    scheduler = Scheduler(clock, streams, answer, at_once)
    core = SimpleNamespace(
        batch_queue=deque(maxlen=2), batch_queue_size=2, scheduler=scheduler,
        model_executor=Gpu(clock, launch_prefill, launch_decode), is_pooling_model=False, is_mm_encoder_only=False,
        check_for_draft_tokens=False, _should_throttle_prefills=lambda: False, _process_aborts_queue=lambda: None,
        _attach_iteration_details=lambda *_: None, _attach_weight_version=lambda *_: None,
        log_error_detail=lambda *_: contextlib.nullcontext(),
        capture_iteration_details=lambda *_: contextlib.nullcontext(),
        log_iteration_details=lambda *_: contextlib.nullcontext(),
    )  # fmt: skip
    step = MethodType(EngineCore.step_with_batch_queue, core)
    while scheduler.prompts:
        if not scheduler.has_requests():  # an empty step stays in the queue
            clock.now = max(clock.now, scheduler.prompts[0][0])
        step()
    # A step that is being launched while the one before it still runs is seen as long as both together.
    launch_ahead = DECODE + launch_decode if streams or answer > 1 else 0
    assert scheduler.seamark.step_time.seconds(2000, 1) == pytest.approx(0.072, rel=0.15, abs=launch_ahead)
    assert scheduler.seamark.step_time.pace.token == pytest.approx(TOKEN, rel=0.5)
