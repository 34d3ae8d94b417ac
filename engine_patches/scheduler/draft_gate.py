"""Whether hints are used beside the drafts of this engine: at once, never, or once its own answers have shown it.

With `SEAMARK_DRAFTS=auto` an engine whose kind of drafts can be right begins on trial. States are then kept for trial
prompts alone; all others have vLLM's own caching. A gateway, or `seamark worker`'s own process without one, compares
what the engine recomputes with what it answers on hits and without drafts, and how many drafts are right on hits. It
opens hints for as long as this engine runs, or closes them with a reason. Such a command comes with a trial prompt, and
names the trial: one that was meant for the engine before a restart has no effect.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from engine_patches import settings, speculation
from engine_patches.scheduler.hints import arguments_of
from engine_patches.scheduler.refusals import SPECULATIVE, Refusal, refused

# Extra arguments of a request, from the gateway alone, which takes them out of what clients send.
TRIAL = "seamark_trial"  # 1: states are kept for it, on trial, too
COMMAND = "seamark_drafts"  # open:ID, or closed:ID:WHY

NONE, ON, OFF, ON_TRIAL, OPEN, CLOSED = "", "on", "off", "trial", "open", "closed"


@dataclass
class DraftGate:
    """Of one scheduler."""

    state: str = NONE  # without drafts
    name: str = ""  # of the trial
    why: str = ""  # it is closed, in words

    @classmethod
    def of(cls, vllm_config: Any, refusal: Refusal | None) -> DraftGate:
        """As an engine begins whose hints are refused for `refusal`."""
        if not speculation.drafting(vllm_config):
            return cls()
        if refusal is not None:
            return cls(OFF, why=refusal.cause)
        return cls(ON_TRIAL, uuid.uuid4().hex) if settings.drafts() == settings.AUTO else cls(ON)

    def admits(self, request: Any) -> bool:
        """Whether states may be kept for a vLLM `Request`, and the hint counts that it came with."""
        return self.state in (NONE, ON, OPEN) or is_trial(request)

    def obey(self, request: Any) -> bool:
        """Follow the command that a vLLM `Request` brings; whether it changes anything."""
        command = arguments_of(request).get(COMMAND)
        if not isinstance(command, str) or not is_trial(request) or not self.name:
            return False
        wish, _, rest = command.partition(":")
        name, _, why = rest.partition(":")
        if name != self.name or wish not in (OPEN, CLOSED):
            return False
        before = self.state, self.why
        self.state, self.why = wish, why.strip() if wish == CLOSED else ""
        return (self.state, self.why) != before

    @property
    def refusal(self) -> Refusal | None:
        """Why hints are refused since a trial; None if they are not."""
        return refused(SPECULATIVE, f"drafts: {self.why}") if self.state == CLOSED else None


def is_trial(request: Any) -> bool:
    """Whether hints beside drafts are tried by a vLLM `Request`."""
    return bool(arguments_of(request).get(TRIAL) == 1)
