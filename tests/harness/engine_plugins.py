"""vLLM plugins for test engines only, by name: what a CPU's engines lack, and disks that decide otherwise."""

from __future__ import annotations

import functools
import itertools
from typing import Any

PLANS_AHEAD = "tests: AsyncScheduler plans the steps"  # in the log of an engine that schedules asynchronously


def async_scheduling() -> None:
    """Every GPU has it. Have the CPU platform leave the scheduler alone that the flag `--async-scheduling` asks for."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    original = CpuPlatform.check_and_update_config.__func__
    after_schedule = AsyncScheduler._update_after_schedule  # its own, not the base class's
    if getattr(original, "is_of_tests", False):
        return

    @functools.wraps(original)  # the plugin's ledger looks at vLLM's function
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    @functools.wraps(after_schedule)
    def say_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        print(PLANS_AHEAD, flush=True)
        AsyncScheduler._update_after_schedule = after_schedule
        return after_schedule(self, *args, **kwargs)

    check_and_update_config.is_of_tests = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    AsyncScheduler._update_after_schedule = say_once


def eager_stages() -> None:
    """Pipeline stages in eager mode, where vLLM ends at the first prompt on a CPU.

    A stage but the first copies what it receives into tensors that vLLM makes while it profiles or warms a model up. A
    CPU worker does neither in eager mode; so they are made where they are first needed.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(original, "is_of_tests", False):
        return

    @functools.wraps(original)
    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    sync_and_gather_intermediate_tensors.is_of_tests = True  # type: ignore[attr-defined]
    CPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


def loads_always_pay() -> None:
    """Let everything be loaded from disk that can be, however busy the machine."""
    from engine_patches.disk.files import LoadCost

    LoadCost.pays = lambda self, num_bytes, prefill_seconds: True


def every_other_load_pays() -> None:
    """Let one load be declined, the next one made, and so on."""
    from engine_patches.disk.files import LoadCost

    pays = itertools.cycle((False, True))
    LoadCost.pays = lambda self, num_bytes, prefill_seconds: next(pays)
