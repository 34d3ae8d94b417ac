"""A vLLM plugin for test engines only: asynchronous scheduling, which every GPU has and vLLM's CPU platform refuses."""

from __future__ import annotations

import functools
from typing import Any

PLANS_AHEAD = "tests: AsyncScheduler plans the steps"  # in the log of an engine that schedules asynchronously


def register() -> None:
    """Have the CPU platform leave the scheduler alone that the flag `--async-scheduling` asks for."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if getattr(original, "keeps_async", False):
        return

    @functools.wraps(original)  # the plugin's ledger looks at vLLM's function
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    check_and_update_config.keeps_async = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    _say_which_scheduler()


def _say_which_scheduler() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    after_schedule = AsyncScheduler._update_after_schedule  # its own, not the base class's

    @functools.wraps(after_schedule)
    def say_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        print(PLANS_AHEAD, flush=True)
        AsyncScheduler._update_after_schedule = after_schedule
        return after_schedule(self, *args, **kwargs)

    AsyncScheduler._update_after_schedule = say_once
