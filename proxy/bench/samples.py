"""The figures on a server's /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from proxy.bench.engines import Server


async def samples_of(client: httpx.AsyncClient, server: Server) -> Mapping[str, float]:
    """By name, and by `name{label="value"}`, summed over all other labels; empty when the server does not answer."""
    found: Counter[str] = Counter()
    try:
        response = await client.get(server.url + "/metrics")
    except httpx.HTTPError:
        return found
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name] += sample.value
            for label, value in sample.labels.items():
                found[f'{sample.name}{{{label}="{value}"}}'] += sample.value
    return found
