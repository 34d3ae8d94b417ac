"""Workers found by name: all addresses of a service, looked up again and again, so that an autoscaler works.

The system's resolver is asked (`getaddrinfo`): it knows /etc/hosts, the search domains that Kubernetes sets, and IPv6.
It tells no times to live, so the pace is a setting. What a name had stays for a while when it cannot be resolved;
whether those workers answer is for health checks to say.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.fleet.part import Part
from proxy.fleet.worker import Worker
from proxy.metrics import Metrics

logger = logging.getLogger("seamark.discovery")

# Seconds that a round waits for a resolver. A question that takes longer is not asked a second time meanwhile.
ANSWER_SECONDS = 5.0


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """All addresses of `host`, IPv4 and IPv6. Raises `OSError` if there are none, or none is told."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass
class _Service:
    url: str  # as the settings have it
    workers: frozenset[str] = frozenset()  # base URLs
    told_at: float = 0.0  # time.monotonic()
    failing: bool = False
    asking: asyncio.Future[Sequence[str]] | None = None

    def count(self) -> int:
        return len(self.workers)

    @property
    def name(self) -> str:
        return self.url.split("://", 1)[-1]


@dataclass(eq=False)
class Discovery(Part):
    """Looks names up at a set pace. Use inside a running event loop."""

    name = "discovery"

    _names: Sequence[str]  # base URLs whose hosts are looked up
    _interval: float  # seconds, as the next
    _keep: float
    _metrics: Metrics
    _changed: Callable[[tuple[str, ...]], None]  # is called with the base URLs of all workers found when these change
    _found: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._services = [_Service(name) for name in self._names]
        for service in self._services:
            self._metrics.discovered.labels(service.name).set_function(service.count)

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Look all names up once; a name that is not answered for in time counts as not resolved."""
        await asyncio.gather(*map(self._look_up, self._services))
        found = tuple(sorted({worker for service in self._services for worker in service.workers}))
        if found != self._found:
            self._found = found
            self._changed(found)

    async def _look_up(self, service: _Service) -> None:
        parts = urlsplit(service.url)
        port = parts.port or 80
        if service.asking is None:
            service.asking = asyncio.ensure_future(addresses_of(parts.hostname or "", port))
        done, _ = await asyncio.wait((service.asking,), timeout=ANSWER_SECONDS)
        if not done:
            self._failed(service, f"no answer within {ANSWER_SECONDS:g} s")
            return
        asked, service.asking = service.asking, None
        try:
            addresses = asked.result()
        except (OSError, UnicodeError) as error:
            self._failed(service, getattr(error, "strerror", None) or "not resolved")
            return
        service.told_at, service.failing = time.monotonic(), False
        # A link-local address means something on one interface only.
        hosts = [f"[{each}]" if ":" in each else each for each in addresses if "%" not in each]
        workers = frozenset(f"{parts.scheme}://{host}:{port}{parts.path}" for host in hosts)
        if workers != service.workers:
            logger.info("%s has %d addresses, %d before", service.name, len(workers), len(service.workers))
            service.workers = workers

    def _failed(self, service: _Service, why: str) -> None:
        self._metrics.discovery_failures.labels(service.name).inc()
        if not service.failing:
            service.failing = True
            kept = f"; its {len(service.workers)} workers stay for {self._keep:g} s" if service.workers else ""
            logger.warning("%s cannot be resolved: %s%s", service.name, why, kept)
        if service.workers and time.monotonic() - service.told_at >= self._keep:
            logger.warning("%s was not resolved for %g s: its workers are removed", service.name, self._keep)
            service.workers = frozenset()


def is_other_family(url: str, found: Sequence[str], up: Sequence[Worker]) -> bool:
    """Whether `url` was `found` by name and workers of the other family are up, as where one server has both addresses
    and listens in one.
    """
    others = {worker.url for worker in up if ("[" in worker.url) is not ("[" in url)}
    return url in found and not others.isdisjoint(found)
