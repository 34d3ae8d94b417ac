"""The engine asks itself: requests beside those of its frontends, none of whom sees them, and when they are sent.

They come as a frontend's do, by the engine core's queue, and their outputs are taken away where the scheduler gives
them. Their ids are drawn here, so that no client can name one. A client's request ends them once the running step is
finished, unless they run beside clients by intention: where the engine is never idle, in a tenth of the time. They are
sent by a thread of their own; if it fails, hints are off for that reason.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from engine_patches import settings
from engine_patches.footprint import OWN
from engine_patches.ledger import CORE, POOL, SCHEDULER, Function, Shape, ours
from engine_patches.scheduler import hints
from engine_patches.scheduler.cache_keys import key_at
from engine_patches.scheduler.drafts import CLOSED, ON_TRIAL, OPEN, AcceptedDrafts, DraftGate, LiveAcceptance
from engine_patches.settings import logger
from engine_patches.trial.trial import (
    Facts,
    NoAnswer,
    PromptEnded,
    Trial,
    TrialAnswer,
    TrialQuestion,
    TrialVerdict,
    fresh_salt,
)

TOP = 5  # logprobs of each token
DEADLINE_SECONDS = 300.0  # for one answer
LOOK_SECONDS = 0.5  # between two looks whether a request that is awaited was ended by vLLM

WAVE = -1  # of data parallel engines: one that is over, so that the engine itself starts the next one

IDLE_SECONDS = 3.0  # without a client's request, before a prompt
POLL_SECONDS = 0.25

# An engine that is never idle is tried beside its clients from then on, one request at a time and in at most a tenth of
# the time: for each second of it there are so many of rest.
OVERDUE_SECONDS, REST_BESIDE = 600.0, 9.0

# After a prompt that got no answer, doubled with each further one.
AGAIN_SECONDS, MOST_AGAIN_SECONDS = 2.0, 300.0

# Trials of one boot in which too few prompts are found in the cache, as where clients evict them at once.
ATTEMPTS, REST_OF_ATTEMPT = 3, 60.0

LAST_SECONDS = 1.0  # after a trial, until all that is told of its requests was taken away
LOOKS_AFTER_DOUBT = 100_000  # steps of each kind before clients' requests are looked at once more


class Sent:
    def __init__(self, request: Any, question: TrialQuestion) -> None:
        self.request = request
        self.question = question
        self.until = time.monotonic() + DEADLINE_SECONDS
        self.outputs: list[Any] = []  # vLLM's `EngineCoreOutput`
        self.done = threading.Event()
        self.is_found_again = bool(question.salt)  # what it leaves in the cache


class OwnRequests:
    """Of one engine core, an `EngineCoreProc`. The trial's thread sends and waits; the rest is the engine's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._prefix = os.urandom(16).hex()
        self._count = 0
        self._under_way: dict[str, Sent] = {}
        self._leaving: list[Sent] = []  # what may be in the cache
        self._lock = threading.RLock()  # what is under way is in the engine's queue, in this order
        self.beside = False  # clients' requests do not end them
        self._interrupted = False
        self._busy_at = time.monotonic()

    @property
    def facts(self) -> Facts:
        config, checkpoints = self._engine.vllm_config, self._engine.scheduler.seamark
        model, grid = config.model_config, checkpoints.grid
        cached = getattr(config.cache_config, "kv_cache_size_tokens", None) or 0
        lengths = (cached, checkpoints.block_size, grid.alignment, grid.ahead)
        return Facts(model.get_vocab_size(), model.max_model_len, *lengths)

    @property
    def busy_at(self) -> float:
        """When a client's request was last there, or at another engine that this one steps together with."""
        if self._engine.engines_running and not self._under_way:
            self._busy_at = time.monotonic()
        return self._busy_at

    @property
    def may_ask(self) -> bool:
        """Whether the engine takes requests: it is neither paused, asleep nor about to end."""
        return bool(self._engine.is_running()) and not self._engine.is_sleeping()

    def begin(self) -> None:
        """Another prompt: what interrupted the last one is over."""
        self._interrupted = False

    def send(self, question: TrialQuestion) -> Sent:
        """Ask. Raises `NoAnswer` for what vLLM's frontends would refuse."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType

        config = self._engine.vllm_config
        most = config.model_config.max_logprobs
        top = TOP if most < 0 else min(TOP, most)
        params = SamplingParams(
            temperature=0,
            max_tokens=question.tokens,
            ignore_eos=True,
            logprobs=top,
            # With this switch vLLM has not all of them, and ends at the question.
            prompt_logprobs=top if question.scored and not config.cache_config.kv_sharing_fast_prefill else None,
            detokenize=False,
            extra_args={hints.FIELD: [question.hint]} if question.hint else None,
        )
        if len(question.prompt) + question.tokens > config.model_config.max_model_len:
            raise NoAnswer("the prompt is longer than the model takes")
        try:
            params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, None)
        except Exception as error:  # of vLLM's own classes
            raise NoAnswer(str(error)) from error
        self._count += 1
        asked = EngineCoreRequest(
            request_id=f"{self._prefix}-{self._count}",
            prompt_token_ids=list(question.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=question.salt or fresh_salt(),
            data_parallel_rank=None,
            current_wave=WAVE,
        )
        request, wave = self._engine.preprocess_add_request(asked)
        setattr(request, OWN, not question.as_client)
        with self._lock:
            if self._interrupted or not self.may_ask:
                raise PromptEnded
            sent = self._under_way[request.request_id] = Sent(request, question)
            self._leaving.append(sent)
            self._engine.input_queue.put_nowait((EngineCoreRequestType.ADD, (request, wave)))
        return sent

    def wait(self, sent: Sent) -> TrialAnswer:
        """The answer to what was sent. Raises `PromptEnded`, or `NoAnswer`."""
        while not sent.done.wait(LOOK_SECONDS):
            if self._interrupted or (self._is_gone(sent) and not sent.done.wait(LOOK_SECONDS) and self._is_gone(sent)):
                raise PromptEnded
            if time.monotonic() >= sent.until:
                raise NoAnswer(f"no answer in {DEADLINE_SECONDS:.0f} s")
        if self._interrupted:
            raise PromptEnded
        return _answer(sent)

    def _is_gone(self, sent: Sent) -> bool:
        """Whether vLLM has ended it, or refused it when it came out of the queue, of which nobody is told."""
        is_held = not self._engine.input_queue.empty() or sent.request.request_id in self._engine.scheduler.requests
        return bool(sent.request.is_finished()) or not is_held

    def end(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        with self._lock:
            if names := list(self._under_way):
                self._engine.input_queue.put_nowait((EngineCoreRequestType.ABORT, names))
                self._under_way.clear()

    def make_way(self, scheduler: Any) -> None:
        """A step is going to be planned: a client's request ends ours, and takes the blocks that ours have left."""
        self._leave(scheduler)
        under_way = sum(name in scheduler.requests for name in list(self._under_way))
        if len(scheduler.requests) > under_way:
            self._busy_at = time.monotonic()
            if not self.beside:
                self.give_up()

    def keep_only(self, salt: str) -> None:
        """What has been asked under any other salt is not found again."""
        with self._lock:
            for sent in self._leaving:
                sent.is_found_again = sent.question.salt == salt != ""

    def _leave(self, scheduler: Any) -> None:
        """Give up what nobody finds again, so that clients' prompts stay in the cache."""
        with self._lock:
            gone = [each for each in self._leaving if not each.is_found_again and self._is_gone(each)]
            self._leaving = [each for each in self._leaving if each not in gone]
        manager, checkpoints = scheduler.kv_cache_manager, scheduler.seamark
        pool, unit = manager.block_pool, checkpoints.grid.unit
        groups = [each.kv_cache_group_id for each in manager.coordinator.single_type_managers]
        for sent, group in itertools.product(gone, groups):
            for number in range(len(sent.request.block_hashes)):
                key = key_at(sent.request, (number + 1) * unit, unit, group)
                while (block := pool.cached_block_hash_to_block.get_one_block(key)) is not None:
                    pool.touch([block])
                    pool.evict_blocks({block.block_id})
                    pool.free_blocks([block])  # without a key it is the first to be taken
        if gone and checkpoints.states.retention is not None:
            checkpoints.states.retention.prune()

    def give_up(self) -> None:
        """What is being compared is asked anew, since a client has come or answers may be others from now on."""
        from vllm.v1.request import RequestStatus

        with self._lock:
            self._interrupted, under_way = True, dict(self._under_way)
            self.end()  # for what the engine has not taken out of its queue yet
        if under_way:
            self._engine.scheduler.finish_requests(list(under_way), RequestStatus.FINISHED_ABORTED)
            for sent in under_way.values():
                sent.done.set()

    def take(self, answers: dict[int, Any]) -> None:
        """Take the outputs of own requests away from those of a step, by client."""
        for client, step in list(answers.items()):
            mine = [output for output in step.outputs if output.request_id.startswith(self._prefix)]
            if mine:
                step.outputs = [output for output in step.outputs if not output.request_id.startswith(self._prefix)]
            if step.finished_requests:
                step.finished_requests = {
                    name for name in step.finished_requests if not name.startswith(self._prefix)
                } or None
            for output in mine:
                if (sent := self._under_way.get(output.request_id)) is not None:
                    sent.outputs.append(output)
                    if output.finish_reason is not None:
                        self._under_way.pop(output.request_id, None)
                        sent.done.set()
            if mine and not step.outputs and step.scheduler_stats is None and not step.finished_requests:
                del answers[client]


def _answer(sent: Sent) -> TrialAnswer:
    tokens = [token for output in sent.outputs for token in output.new_token_ids]
    top = _ranked(output.new_logprobs for output in sent.outputs)
    if len(tokens) != sent.question.tokens or len(top) != len(tokens):
        raise NoAnswer(f"{len(tokens)} of {sent.question.tokens} tokens, {len(top)} logprobs")
    cached = next((each.prefill_stats.num_cached_tokens for each in sent.outputs if each.prefill_stats), 0)
    scores = _ranked(output.new_prompt_logprobs_tensors for output in sent.outputs)
    state = sent.request.seamark
    return TrialAnswer(tokens, top, cached, AcceptedDrafts(state.draft_steps, state.accepted), scores)


def _ranked(logprobs: Iterable[Any]) -> list[dict[int, float]]:
    """The likeliest tokens at each token, and their logprobs."""
    tables = [(each.logprob_token_ids.tolist(), each.logprobs.tolist()) for each in logprobs if each is not None]
    return [dict(zip(*row, strict=True)) for table in tables for row in zip(*table, strict=True)]


@ours(
    "own-trial",
    f"{CORE}Proc.process_input_sockets",
    why="an engine that drafts asks itself whether hits are right beside its drafts, before it gives any",
    mentions=("self.input_queue.put_nowait((request_type, request))", "self.preprocess_add_request(req)"),
    relies_on=(
        Shape(
            f"{CORE}Proc.__init__",
            mentions=("self.has_coordinator = ", "target=self.process_input_sockets", "self.engines_running = "),
        ),
        Shape(f"{POOL}.evict_blocks", "self, block_ids"),
        Shape(f"{POOL}.touch", "self, blocks"),
        Shape(
            f"{CORE}Proc._handle_client_request",
            mentions=("req, request_wave = request", "self.add_request(req, request_wave)", "self.abort_requests("),
        ),
        Shape(f"{CORE}.preprocess_add_request", mentions=("return req, request.current_wave",)),
        Shape(f"{CORE}Proc.is_running", "self"),
        Shape(f"{CORE}.is_sleeping", "self"),
        Shape(f"{SCHEDULER}.finish_requests", "self, request_ids, finished_status"),
    ),
)
def try_drafts(self: Any, *args: Any, original: Function, **kwargs: Any) -> None:
    """Replacement of `EngineCoreProc.process_input_sockets`, the thread that an engine core starts once it is made."""
    checkpoints = getattr(self.scheduler, "seamark", None)
    # Several engines that step together wait for one another: without a coordinator nobody wakes the others.
    can_step = self.has_coordinator or not hasattr(self, "dp_group")
    if checkpoints is not None and checkpoints.drafts.state == ON_TRIAL:
        turns = Turns(OwnRequests(self), checkpoints)
        if can_step:
            threading.Thread(target=turns.run, name="seamark-trial", daemon=True).start()
        else:
            turns.close("engines that step together are not tried without vLLM's coordinator")
    original(self, *args, **kwargs)


class Turns:
    def __init__(self, own: OwnRequests, checkpoints: Any) -> None:
        self._own, self._checkpoints = own, checkpoints
        self._gate: DraftGate = checkpoints.drafts

    def run(self) -> None:
        """Try drafts, and again whenever clients' requests raise a doubt, until hints are closed."""
        began = time.monotonic()
        try:
            while self._gate.state != CLOSED:
                self._checkpoints.own = self._own
                self._try()
                time.sleep(LAST_SECONDS)
                self._checkpoints.own = None
                if self._gate.state == OPEN:
                    self._gate.doubted.wait()
                    self._gate.doubted.clear()
        except Exception as error:  # no prompt of a client is in it
            logger.exception("seamark: the trial of drafts failed")
            self._settle(TrialVerdict("closed", f"their trial failed ({type(error).__name__})"), began)
            self._checkpoints.own = None

    def _try(self) -> None:
        began, failed, attempts, ended = time.monotonic(), 0, 1, False
        trial = Trial(self._own, self._own.facts)
        while True:
            self._own.beside = beside = not self._wait_for_turn(began, ended)
            self._own.begin()
            asked_at, verdict = time.monotonic(), None
            try:
                ended = False
                verdict = trial.ask(one_at_a_time=beside)
                failed = 0
            except PromptEnded:
                ended = True
            except NoAnswer as error:
                failed += 1
                logger.info("seamark: a trial prompt was not judged: %s", error)
                time.sleep(min(AGAIN_SECONDS * 2 ** min(failed, 16), MOST_AGAIN_SECONDS))
            finally:
                self._own.end()
            if beside:
                time.sleep(REST_BESIDE * (time.monotonic() - asked_at))
            self._gate.figures = trial.figures
            if verdict is None:
                continue
            if self._gate.doubt and verdict.result != "closed":
                logger.info("seamark: the same prompts do not show it: %s", trial.figures)
                self._gate.live, self._gate.doubt = LiveAcceptance(LOOKS_AFTER_DOUBT), ""
                return
            if verdict.result == "no_hits" and (attempts < ATTEMPTS or beside):  # clients evict what they like
                logger.info("seamark: %s; tried again later (%s)", verdict.why, trial.figures)
                time.sleep(min(REST_OF_ATTEMPT * attempts, MOST_AGAIN_SECONDS))
                trial, attempts = Trial(self._own, self._own.facts), attempts + 1
                continue
            self._settle(verdict, began)
            return

    def _wait_for_turn(self, began: float, ended: bool) -> bool:
        """Whether the engine is idle; if not, or where a client has `ended` the last prompt, it is overdue."""
        while True:
            now = time.monotonic()
            if self._own.may_ask:
                is_overdue = now - began >= OVERDUE_SECONDS
                if now - self._own.busy_at >= IDLE_SECONDS and not (is_overdue and ended):
                    return True
                if is_overdue:
                    return False
            time.sleep(POLL_SECONDS)

    def _settle(self, verdict: TrialVerdict, began: float) -> None:
        gate, took = self._gate, time.monotonic() - began
        if verdict.result == "open":
            gate.state = OPEN
            logger.info("seamark: hints are on beside drafts after %.0f s: %s", took, gate.figures)
        else:
            self.close(verdict.why)
        # What is reported goes out with a step.
        self._checkpoints.counters.report_soon()
        with contextlib.suppress(Exception):
            self._own.keep_only("")
            self._own.begin()
            self._own.wait(self._own.send(TrialQuestion([1, 2], tokens=1)))

    def close(self, why: str) -> None:
        gate = self._gate
        gate.why, gate.state = why, CLOSED
        self._checkpoints.refusal = gate.refusal
        logger.error(
            "seamark: hints are off beside drafts until this engine restarts: %s (%s). --speculative-config left out, "
            "or %s=%s, gives hints",
            gate.why,
            gate.figures or "nothing was asked",
            settings.DRAFTS,
            settings.AT_ONCE,
        )
