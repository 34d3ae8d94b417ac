"""vLLM's own scheduler and cache on a simulated clock: a step takes a floor and a time for each of its tokens.

No model runs. The scheduler, its cache and Seamark's parts in it are real; what a step takes is computed from what it
holds, so that one process plays a Spark or an H200 in seconds.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from tests.harness.audit import Core, Worker

ANSWER = 7  # every token that is sampled


class Unjudged(Worker):
    """Nothing is computed, so there is nothing to judge."""

    judges_keys = False


class SimulatedCore(Core):
    """A core whose steps take `floor + token * tokens` seconds on a clock of its own, and are not audited."""

    now = 0.0  # seconds

    def __init__(self, model: str, floor: float, token: float, **core: Any) -> None:
        super().__init__(model, worker=Unjudged(), **core)
        self._floor, self._token = floor, token
        self.computed = 0  # tokens of prompts
        self.first_tokens: dict[str, float] = {}
        self.checkpoints = getattr(self.scheduler, "seamark", None)  # None of a vLLM that is not patched
        if self.checkpoints is not None:
            self.checkpoints.turn_value._clock = lambda: self.now
            if self.checkpoints.gate is not None:
                self.checkpoints.gate._clock = lambda: self.now
            for _ in range(8):
                for tokens in (1, 1000):
                    self.checkpoints.step_time.step_took(tokens, floor + token * tokens)

    def step(self) -> Any:
        """Plan a step, let its time pass, and report a token for each request whose prompt is computed."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.now += self._floor + self._token * output.total_num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            start = request.num_computed_tokens - output.num_scheduled_tokens[name]
            self.computed += max(0, min(request.num_computed_tokens, request.num_prompt_tokens) - start)
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([ANSWER] if done else [])
            if done:
                self.first_tokens.setdefault(name, self.now)
        output.seamark_planned_at = float("inf")  # the pace is given, not learnt
        index = {name: number for number, name in enumerate(names)}
        runner = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)
        self.scheduler.update_from_output(output, runner)
        return output
