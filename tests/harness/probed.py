"""What a gateway knows of a worker that nobody has asked."""

from __future__ import annotations

from typing import Any

from proxy.fleet.probe import Probed
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics


def probed(boot: str = "", engine: EngineInfo | None = None, *models: str, **metrics: Any) -> Probed:
    """As if it had been asked. `metrics`: fields of `WorkerMetrics`."""
    cards = [{"id": model} for model in models]
    return Probed(boot=boot, metrics=WorkerMetrics(engine=engine, **metrics), models=cards)
