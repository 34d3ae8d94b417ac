"""Requests that an engine with drafts asks itself, on vLLM's own scheduler: no client sees them or waits for them."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from engine_patches import settings
from engine_patches.trial import own_requests
from engine_patches.trial.own_requests import OwnRequests, Sent
from engine_patches.trial.trial import NoAnswer, PromptEnded, TrialQuestion
from tests.harness.audit import patched_vllm
from tests.harness.audited_core import Core
from tests.harness.draft_audit import DraftWorker
from tests.harness.draft_heads import mtp_model


class Engine:
    """An engine core around an audited one, with its trial; what its frontends are told is kept."""

    def __init__(self, **options: Any) -> None:
        worker = DraftWorker()
        self.core = Core(str(mtp_model()), worker=worker, speculative=worker.speculative, **options)
        self.scheduler, self.input_queue = self.core.scheduler, queue.Queue[tuple[EngineCoreRequestType, Any]]()
        self.vllm_config, self.own, self.told = self.scheduler.vllm_config, OwnRequests(self), list[str]()
        self.scheduler.seamark.own, self.update = self.own, self.scheduler.update_from_output
        self.scheduler.update_from_output = self._update
        self.sleeps = self.engines_running = False
        self.is_running, self.is_sleeping = lambda: True, lambda: self.sleeps

    def preprocess_add_request(self, asked: Any) -> tuple[Any, int]:
        add, self.scheduler.add_request = self.scheduler.add_request, lambda request: None
        self.asked = asked
        hint = (asked.sampling_params.extra_args or {}).get("seamark_boundaries")
        try:
            more = {"max_tokens": asked.sampling_params.max_tokens, "salt": asked.cache_salt}
            return self.core.request(asked.request_id, asked.prompt_token_ids, hint, **more), asked.current_wave
        finally:
            self.scheduler.add_request = add

    def _update(self, *args: Any) -> Any:
        answers = self.update(*args)
        for step in answers.values():
            self.told += [output.request_id for output in step.outputs]
            assert not any(name.startswith(self.own._prefix) for name in step.finished_requests or ())
        return answers

    def step(self) -> None:
        """One turn of the engine's loop."""
        while not self.input_queue.empty():
            kind, what = self.input_queue.get()
            if kind is EngineCoreRequestType.ADD:
                self.scheduler.add_request(what[0])
            else:
                for name in what:
                    self.core.abort(name)
        if self.core.busy:
            planned = self.core.step().num_scheduled_tokens
            own = [name.startswith(self.own._prefix) for name in planned]
            assert self.own.beside or all(own) or not any(own)


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    with patched_vllm():
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Engine:
    monkeypatch.setenv(settings.DRAFTS, settings.AUTO)
    return Engine(**getattr(request, "param", {}))


def drawn(draw: random.Random) -> list[int]:
    return [draw.randrange(100, 4000) for _ in range(draw.choice((40, 163, 448)))]


@pytest.mark.parametrize("engine", [{}, {"overlap": True}], indirect=True, ids=str)
def test_whoever_comes_whenever_no_client_is_told_of_them_or_shares_a_step_with_them(engine: Engine):
    draw, clients, sent = random.Random(1), 0, list[Sent]()
    for _ in range(600):
        match draw.choice((*["ask"] * 6, "client", *["step"] * 12, "end", "reset", "beside")):
            case "ask":
                engine.own.begin()
                salt, hint = draw.choice(("", "", "salt")), draw.choice((0, 30))
                asked = TrialQuestion(drawn(draw), salt, hint, as_client=draw.random() < 0.3)
                sent.append(engine.own.send(asked._replace(tokens=draw.choice((1, 20)))))
            case "client" if clients < 40:
                clients += 1
                engine.core.request(f"client-{clients}", drawn(draw), [30], max_tokens=draw.choice((1, 20)))
            case "end":
                engine.own.end()
            case "reset":
                engine.core.reset()
            case "beside":
                engine.own.beside = not engine.own.beside
            case _:
                engine.step()
    while engine.core.busy or engine.input_queue.qsize():
        engine.step()
    for salt, kept in (("salt", {"salt"}), ("", set[str]())):
        engine.own.keep_only(salt)
        engine.own.make_way(engine.scheduler)
        assert {each.question.salt for each in sent if engine.core.keys(each.request, 0)} == kept
    assert engine.core.errors == [] and set(engine.told) == {f"client-{each}" for each in range(1, clients + 1)}
    answered = [each for each in sent if each.outputs and each.outputs[-1].finish_reason is not None]
    assert len(answered) > 20 and not engine.own._under_way and all(each.request.is_finished() for each in sent)
    for each in answered:
        assert sum(len(output.new_token_ids) for output in each.outputs) == each.question.tokens and each.done.is_set()


def test_a_client_ends_them_before_the_next_step_and_who_waits_is_told(engine: Engine):
    sent = [engine.own.send(TrialQuestion(range(1000, 1163), hint=100)) for _ in range(2)]
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine.core.request("client", range(2000, 2163), [100], max_tokens=20)
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["client"]
    for each in sent:
        with pytest.raises(PromptEnded):
            engine.own.wait(each)
    with pytest.raises(PromptEnded):
        engine.own.send(TrialQuestion([1, 2]))
    engine.core.run()
    engine.own.begin()
    engine.engines_running = True  # for a client of another engine that this one steps together with
    assert engine.own.busy_at < engine.own.busy_at
    engine.own.send(TrialQuestion([1, 2]))
    assert engine.own.busy_at == engine.own.busy_at, "it may run for ours"
    engine.has_coordinator = engine.dp_group = False
    own_requests.try_drafts(lambda _: None)(engine)
    assert "without vLLM's coordinator" in engine.scheduler.seamark.refusal.cause


def test_what_a_frontend_would_refuse_and_what_gets_no_answer_is_unanswered(engine: Engine, monkeypatch):
    monkeypatch.setattr(own_requests, "LOOK_SECONDS", 0.01)
    with pytest.raises(NoAnswer, match="longer than the model takes"):
        engine.own.send(TrialQuestion(range(6140)))
    engine.vllm_config.model_config.max_logprobs = 3
    engine.own.send(TrialQuestion([1, 2]))
    assert engine.asked.sampling_params.logprobs == 3
    hung = engine.own.send(TrialQuestion([1, 2]))
    hung.until = 0.0
    with pytest.raises(NoAnswer, match="no answer in 300 s"):
        engine.own.wait(hung)
    ended = engine.own.send(TrialQuestion([1, 2]))
    engine.step()
    engine.core.abort(ended.request.request_id)  # as a pause does
    with pytest.raises(PromptEnded):
        engine.own.wait(ended)
    refused = engine.own.send(TrialQuestion([1, 2]))
    engine.input_queue.queue.clear()  # as after a pause or in a shutdown
    with pytest.raises(PromptEnded):
        engine.own.wait(refused)
    engine.sleeps = True
    with pytest.raises(PromptEnded):
        engine.own.send(TrialQuestion([1, 2]))
    engine.sleeps, engine.vllm_config.cache_config.kv_sharing_fast_prefill = False, True
    odd = engine.own.send(TrialQuestion([1, 2], tokens=1, scored=True))
    assert engine.asked.sampling_params.prompt_logprobs is None
    while not odd.done.is_set():
        engine.step()
    with pytest.raises(NoAnswer, match="1 of 1 tokens, 0 logprobs"):
        engine.own.wait(odd)


def test_an_answer_has_its_tokens_their_ranks_what_it_found_and_its_drafts():
    def ranked(*rows: dict[int, float]) -> Any:
        import numpy as np

        arrays = (np.array([[*each(row)] for row in rows]) for each in (dict.keys, dict.values))
        return SimpleNamespace(**dict(zip(("logprob_token_ids", "logprobs"), arrays, strict=True)))

    state = SimpleNamespace(draft_steps=2, accepted=3)
    sent = Sent(SimpleNamespace(seamark=state), TrialQuestion([1], tokens=3))
    stats, scores = SimpleNamespace(num_cached_tokens=16), ranked({5: -1.0, 6: -2.0})
    first = dict(new_token_ids=[7], new_logprobs=ranked({7: -0.5, 8: -1.0}), prefill_stats=stats)
    second = dict(
        new_token_ids=[8, 9], new_logprobs=ranked({8: -0.5, 7: -1.0}, {9: -0.25, 7: -2.0}), prefill_stats=None
    )
    sent.outputs = [
        SimpleNamespace(**first, new_prompt_logprobs_tensors=scores),
        SimpleNamespace(**second, new_prompt_logprobs_tensors=None),
    ]
    tops = [{7: -0.5, 8: -1.0}, {8: -0.5, 7: -1.0}, {9: -0.25, 7: -2.0}]
    assert own_requests._answer(sent) == ([7, 8, 9], tops, 16, (2, 3), [{5: -1.0, 6: -2.0}])
