"""What a gateway knows of workers that nobody has asked."""

from __future__ import annotations

from typing import Any

from proxy.boundaries.facts_learner import FactsLearner
from proxy.fleet.part import Shelf
from proxy.fleet.pool import WorkerPool
from proxy.fleet.probe import Probed
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
from proxy.http.client import Upstream
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.settings import Settings


def probed(boot: str = "", engine: EngineInfo | None = None, *models: str, **metrics: Any) -> Probed:
    """As if it had been asked. `metrics`: fields of `WorkerMetrics`."""
    cards = [{"id": model} for model in models]
    return Probed(boot=boot, metrics=WorkerMetrics(engine=engine, **metrics), models=cards)


def pool_of(upstream: Upstream, *names: str, engine: EngineInfo | None = None) -> WorkerPool:
    """Of workers that are up, as if they had been asked; each one's boot is its name."""
    metrics = Metrics()
    settings = Settings(worker=tuple(f"http://{name}" for name in names))
    pool = WorkerPool(settings, upstream, metrics, FactsLearner(), IdleWork(), Shelf(metrics))
    for worker in pool.workers:
        worker.up = True
        worker.learn(probed(worker.name, engine, "m"))
        worker.renderer_ids["m"] = b"one"
    pool._reconcile()  # with them, it knows their names
    return pool
