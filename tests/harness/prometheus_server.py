"""A Prometheus server of one's own that scrapes real servers every second, and what it answers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port

SCRAPE_SECONDS = 1

START_SECONDS = 30.0


class Series(NamedTuple):
    """One line of an answer."""

    labels: Mapping[str, str]
    values: tuple[float, ...]  # over time; a single one where an instant was asked for


class Prometheus:
    """A running server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.started = time.time()
        self._client = httpx.Client(base_url=server.url + "/api/v1", timeout=30)

    def at(self, query: str) -> list[Series]:
        """What `query` is now."""
        found = self._ask("/query", query=query)
        return [Series(each["metric"], (float(each["value"][1]),)) for each in found]

    def over_time(self, query: str) -> list[Series]:
        """What `query` has been since the server was started, at every scrape."""
        found = self._ask("/query_range", query=query, start=self.started, end=time.time(), step=SCRAPE_SECONDS)
        return [Series(each["metric"], tuple(float(value) for _, value in each["values"])) for each in found]

    def _ask(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Raises `ValueError` with what the server says where it does not take the query."""
        answer = self._client.post(path, data=fields).json()
        if answer["status"] != "success":
            raise ValueError(f"{fields['query']}: {answer['error']}")
        return answer["data"]["result"]


def installed(program: str) -> str:
    """Path of `prometheus` or `promtool`. Raises `RuntimeError` where it is not installed."""
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"{program} is not installed (Debian's package prometheus)")
    return found


def prometheus(servers: Servers, folder: Path, jobs: Mapping[str, Sequence[Server]]) -> Prometheus:
    """Start one that scrapes each job's servers and keeps its data in `folder`; it ends with `servers`."""
    port = free_port()
    scraped = [
        {"job_name": job, "static_configs": [{"targets": [server.url.removeprefix("http://") for server in servers]}]}
        for job, servers in jobs.items()
    ]
    every = {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"}
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"global": every, "scrape_configs": scraped}))  # JSON is YAML
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = servers.start("prometheus", port, [installed("prometheus"), *options], {})
    server.wait_until_ready("/-/ready", START_SECONDS)
    return Prometheus(server)
