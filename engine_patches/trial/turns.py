"""When the engine asks itself: once it is idle, or in a tenth of the time where it never is; in a thread of its own.

Nothing of it reaches a client: if the thread fails, hints are off for that reason.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from engine_patches import settings
from engine_patches.scheduler.drafts import CLOSED, ON_TRIAL, OPEN, DraftGate, LiveAcceptance
from engine_patches.trial.own_requests import OwnRequests
from engine_patches.trial.trial import NoAnswer, PromptEnded, Trial, TrialQuestion, TrialVerdict

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

logger = logging.getLogger("vllm.seamark")


def try_drafts(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement of `EngineCoreProc.process_input_sockets`, the thread that an engine core starts once it is made."""

    def process_input_sockets(self: Any, *args: Any, **kwargs: Any) -> None:
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

    return process_input_sockets


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
        """Hints are off from now on."""
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
