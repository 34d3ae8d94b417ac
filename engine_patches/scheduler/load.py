"""What each gateway has an engine do, so that several of them learn of one another.

A gateway names itself in `vllm_xargs`, beside its hint: `seamark_load: "GATEWAY,PROMPT,LEFT"`, the prompt's tokens and
how many of them it expects to be computed. Requests that name none came past all gateways.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from engine_patches.footprint import SENDER
from engine_patches.scheduler.draft_gate import is_own
from engine_patches.scheduler.hints import arguments_of
from engine_patches.scheduler.state_events import only_generates

FIELD = "seamark_load"

NO_GATEWAY = ""

_LOAD = re.compile(r"([0-9a-f]{1,32}),(\d{1,8}),(\d{1,8})", re.ASCII)


class GatewayLoad(NamedTuple):
    """What there is to do."""

    requests: int  # under way
    prefill_tokens: int  # of their prompts, still to be computed


NO_LOAD = GatewayLoad(0, 0)


def of_gateways(requests: Iterable[Any]) -> dict[str, GatewayLoad]:
    """The load of each gateway that has any, by the vLLM `Request`s that are under way."""
    loads: dict[str, GatewayLoad] = {}
    for request in requests:
        if is_own(request):
            continue
        gateway, expected = getattr(request, SENDER, None) or _sender(request)
        left = max(0, request.num_prompt_tokens - request.num_computed_tokens)
        if not request.num_computed_tokens and expected is not None:  # the cache was not looked at yet
            left = min(left, expected)
        before = loads.get(gateway)
        loads[gateway] = (
            GatewayLoad(1, left) if before is None else GatewayLoad(before.requests + 1, before.prefill_tokens + left)
        )
    return loads


def may_have_changed(planned: Any) -> bool:
    """Whether any load may be another after the step `planned` (vLLM's `SchedulerOutput`; None: not known)."""
    return planned is None or bool(planned.scheduled_new_reqs) or not only_generates(planned)


def _sender(request: Any) -> tuple[str, int | None]:
    """The gateway that sent a request, and the tokens that it expects to be computed; None if it does not say."""
    told = arguments_of(request).get(FIELD)
    match = _LOAD.fullmatch(told) if isinstance(told, str) else None
    sender = (match[1], int(match[3])) if match is not None else (NO_GATEWAY, None)
    setattr(request, SENDER, sender)  # it is asked for with each step that computes any prompt
    return sender
