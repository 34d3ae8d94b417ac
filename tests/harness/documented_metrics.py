"""The metric families in the code, as the documents have to name them."""

from __future__ import annotations

from typing import NamedTuple

from engine_patches.reporting import header_fields
from engine_patches.reporting.metrics import families
from proxy.metrics import Metrics


class Family(NamedTuple):
    """One row of the documented table, or one metric in the code."""

    name: str
    labels: tuple[str, ...]


def in_code(collector) -> Family:
    name = collector._name + ("_total" if collector._type == "counter" else "")
    return Family(name, tuple(collector._labelnames))


GATEWAY = {in_code(each) for each in vars(Metrics()).values() if hasattr(each, "_labelnames")}
ENGINE = {in_code(each) for each in (*vars(families()).values(), header_fields.counted())}
