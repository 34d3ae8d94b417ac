"""Whether hints are used beside the drafts of this engine: at once, never, or once its own answers have shown it.

With `SEAMARK_DRAFTS=auto` an engine whose kind of drafts can be right begins on trial. States are then kept for trial
prompts alone; all others have vLLM's own caching. The process that has the engine asks itself (`engine_patches.trial`),
and opens hints for as long as it runs, or closes them with a reason. What clients' requests show of the drafts behind
hits closes nothing: it makes the trial be repeated.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from engine_patches import settings, speculation
from engine_patches.footprint import OWN
from engine_patches.scheduler.draft_acceptance import AcceptedDrafts, LiveAcceptance
from engine_patches.scheduler.refusals import SPECULATIVE, Refusal, refused

NONE, ON, OFF, ON_TRIAL, OPEN, CLOSED = "", "on", "off", "trial", "open", "closed"

logger = logging.getLogger("vllm.seamark")


@dataclass
class DraftGate:
    """Of one scheduler."""

    state: str = NONE  # without drafts
    why: str = ""  # it is closed, in words
    figures: str = ""  # of the trial, in words
    live: LiveAcceptance = field(default_factory=LiveAcceptance)  # of clients' requests
    doubt: str = ""  # what those have shown where hints are open
    doubted: threading.Event = field(default_factory=threading.Event)  # that is to be looked at

    @classmethod
    def of(cls, vllm_config: Any, refusal: Refusal | None) -> DraftGate:
        """As an engine begins whose hints are refused for `refusal`."""
        if not speculation.drafting(vllm_config):
            return cls()
        if refusal is not None:
            return cls(OFF, why=refusal.cause)
        return cls(ON_TRIAL if settings.drafts() == settings.AUTO else ON)

    def admits(self, request: Any) -> bool:
        """Whether states may be kept for a vLLM `Request`, and the hint counts that it came with."""
        return self.state in (NONE, ON, OPEN) or is_trial(request)

    def count(self, drafted: AcceptedDrafts, *, is_hit: bool) -> None:
        """A client's request has its answer, with such drafts."""
        if self.state not in (ON, OPEN) or self.doubt or not self.live.add(drafted, is_hit=is_hit):
            return
        self.doubt = worse(self.live.hit.per_step, self.live.cold.per_step, "in clients' requests")
        self.live = LiveAcceptance()
        if self.state == ON:
            logger.error("seamark: %s; %s=%s keeps hints on", self.doubt, settings.DRAFTS, settings.AT_ONCE)
        self.doubted.set()

    @property
    def refusal(self) -> Refusal | None:
        """Why hints are refused since a trial; None if they are not."""
        return refused(SPECULATIVE, f"drafts: {self.why}") if self.state == CLOSED else None


def worse(hit: float, cold: float, where: str) -> str:
    """Drafts are accepted less often behind hits; tokens of a step."""
    return f"{where}, {hit:.2f} drafts a step are accepted behind hits, {cold:.2f} without"


def is_own(request: Any) -> bool:
    """Whether the engine asked a vLLM `Request` itself."""
    return getattr(request, OWN, None) is not None


def is_trial(request: Any) -> bool:
    """Whether hints beside drafts are tried by a vLLM `Request`."""
    return getattr(request, OWN, None) is True
