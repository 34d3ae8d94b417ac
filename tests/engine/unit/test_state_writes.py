"""What a step's output teaches, and how long it took in vLLM's own loop over a simulated GPU.

With one worker in the engine's process `execute_model` launches in the engine's thread. So the output of a decode is
asked for only when the prefill behind it has been launched; and an engine that is used offline leaves an empty step in
its queue that comes out in the midst of the next prefill. Both were seen on an H200.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from concurrent.futures import Future
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import ModelRunnerOutput

from engine_patches.scheduler import state_writes
from engine_patches.scheduler.state_writes import learn_step_time, note_late_output, write_after_scheduling
from engine_patches.scheduler.step_time import StepTime


def test_who_has_its_whole_answer_is_told_once_and_who_has_left_before_is_not():
    """In a step in which requests verify three drafts."""
    verified, over = [], []
    seamark = SimpleNamespace(
        step_time=SimpleNamespace(step_took=lambda *_, **__: None),
        states=None,
        step_ended=0.0,
        verified=4,
        verified_drafts=lambda request, accepted: verified.append((request.request_id, accepted)),
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
    assert verified == [("c", 1)] and over == ["c"]


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
            step_time=StepTime(), step_ended=0.0, states=None, last_planned=None, verified=1,
            writes_in_forward=False, pinning=(), begin_step=lambda requests: None,
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
    assert scheduler.seamark.step_time.token_seconds == pytest.approx(TOKEN, rel=0.5)
