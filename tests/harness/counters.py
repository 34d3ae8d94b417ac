"""A server's own metrics, read from outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import httpx

from proxy.bench.harness.servers import Server
from proxy.fleet.worker_metrics import samples_in


async def samples_of(client: httpx.AsyncClient, server: Server) -> Mapping[str, float]:
    """By name, and by `name{label="value"}`, summed over all other labels; empty when the server does not answer."""
    found: defaultdict[str, float] = defaultdict(float)
    try:
        response = await client.get(server.url + "/metrics")
    except httpx.HTTPError:
        return found
    for sample in samples_in(response.text):
        found[sample.name] += sample.value
        for label, value in sample.labels.items():
            found[f'{sample.name}{{{label}="{value}"}}'] += sample.value
    return found
