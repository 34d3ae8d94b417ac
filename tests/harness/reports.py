"""What an engine core reports, made as it makes it and read as the collecting process reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from engine_patches.reporting.metrics import CollectedMetrics
from engine_patches.reporting.report import EngineReport, constants, report_of
from engine_patches.scheduler.checkpoints import Checkpoints


def scheduler_of(checkpoints: Checkpoints, *, rank: int = 0, ranks: int = 1, transfer: Any = None) -> SimpleNamespace:
    """As much of a vLLM scheduler as a report reads."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_index=rank, data_parallel_rank=rank, data_parallel_size=ranks, data_parallel_external_lb=False
        ),
        cache_config=SimpleNamespace(kv_cache_size_tokens=9_000),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=transfer,
    )
    return SimpleNamespace(seamark=checkpoints, vllm_config=config, requests={}, get_request_counts=lambda: (2, 1))


def sent(scheduler: Any, loads: Any = None) -> EngineReport:
    """A report, after its way."""
    report = report_of(scheduler, constants(scheduler.vllm_config), loads or {})
    return msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=EngineReport)


def collect(checkpoints: Checkpoints) -> None:
    """Have this process add up what an engine reports now."""
    CollectedMetrics("", beside_vllms=True).take(sent(scheduler_of(checkpoints)))
