"""What `seamark bench gateway` measured: a row for each gateway and kind of traffic, judged beside vllm-router's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from proxy.bench.peers import VLLM_ROUTER
from proxy.bench.ratios import Pair, Spread, spread

DIRECT, SEAMARK = "direct", "seamark"
SMALL, LARGE = 2_000, 200_000  # bytes of a chat
ONE, MANY = 1, 16  # clients

PLAIN_LIMIT, STREAM_LIMIT = 2.5, 1.2  # times vllm-router's CPU time, 2 kB, many clients
ADDED_LIMIT = 0.7e-3  # seconds, p50, 2 kB plain, one client


@dataclass(frozen=True)
class Case:
    """A kind of traffic."""

    size: int  # bytes of a chat
    streamed: bool
    clients: int  # at once

    def __str__(self) -> str:
        kind = "stream" if self.streamed else "plain"
        return f"{self.size // 1000} kB, {kind}, {self.clients} client{'s' if self.clients > 1 else ''}"


CASES = tuple(Case(size, streamed, n) for size in (SMALL, LARGE) for streamed in (False, True) for n in (ONE, MANY))


class Batch(NamedTuple):
    """Requests that one gateway was sent in one round; seconds."""

    cpu: float | None  # of all its processes, for each request; None: there is no gateway
    p50: float  # from sent to the answer's end
    p99: float
    first: float  # to the first byte of the answer's body, median


@dataclass(frozen=True)
class Row:
    """One gateway, one kind of traffic; a batch for each round, those of the others from the same rounds."""

    gateway: str
    case: Case
    batches: tuple[Batch, ...]
    direct: tuple[Batch, ...]
    router: tuple[Batch, ...]  # of vllm-router; empty where it does not run

    @property
    def cpu(self) -> Spread | None:
        """CPU seconds for a request."""
        return spread([batch.cpu for batch in self.batches]) if self.batches[0].cpu is not None else None

    def added(self, figure: str) -> float:
        """Seconds added to that figure of a batch, median of the rounds."""
        pairs = zip(self.batches, self.direct, strict=True)
        return statistics.median(getattr(own, figure) - getattr(other, figure) for own, other in pairs)

    @property
    def ratio(self) -> Spread | None:
        """CPU time over vllm-router's, round by round."""
        if self.cpu is None or not self.router:
            return None
        pairs = zip(self.batches, self.router, strict=True)
        return spread([Pair(own.cpu, other.cpu).ratio for own, other in pairs])


@dataclass(frozen=True)
class Target:
    """A figure of ours, and what it may be."""

    name: str
    value: float | None  # None: it could not be taken
    limit: float
    unit: str = ""

    @property
    def held(self) -> bool:
        """Whether it is as good as it has to be."""
        return self.value is not None and self.value <= self.limit

    def told(self) -> str:
        """The verdict in words."""
        value = "not taken" if self.value is None else f"{self.value:.2f}{self.unit}"
        return f"{'held' if self.held else 'NOT HELD'}: {self.name}: {value}, at most {self.limit:g}{self.unit} wanted"


class Report(NamedTuple):
    """A whole run."""

    rows: tuple[Row, ...]
    missing: Mapping[str, str]  # why a gateway has no rows, by its name
    renders: float  # asked of the worker by Seamark during its batches
    requests: int  # of these batches


def targets(report: Report, with_router: bool) -> list[Target]:
    """Those of the gateway; `with_router`: those beside vllm-router too."""
    ours = {row.case: row for row in report.rows if row.gateway == SEAMARK}
    found = []
    for streamed, limit in ((False, PLAIN_LIMIT), (True, STREAM_LIMIT)):
        case = Case(SMALL, streamed, MANY)
        if with_router and case in ours:
            ratio = ours[case].ratio
            found.append(Target(f"CPU over {VLLM_ROUTER}, {case}", ratio.median if ratio else None, limit))
    if (row := ours.get(Case(SMALL, False, ONE))) is not None:
        found.append(Target(f"added p50, {row.case}", 1000 * row.added("p50"), 1000 * ADDED_LIMIT, " ms"))
    return found


def render(report: Report) -> str:
    """A block for each kind of traffic."""
    head = f"  {'gateway':<15}{'CPU us':>8}  {'quartiles':<16}{'added p50':>10}{'p99':>9}{'first byte':>12}  over "
    lines = []
    for case in dict.fromkeys(row.case for row in report.rows):
        lines += [f"{case} (latencies in ms, added to the worker's own)", head + VLLM_ROUTER]
        lines += [_line(row) for row in report.rows if row.case == case]
        lines += [f"  {name:<15} is missing: {why}" for name, why in report.missing.items()]
        lines.append("")
    lines.append(f"seamark asked for {report.renders:.0f} renders in {report.requests} requests")
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row.cpu is None:
        own = [statistics.median(getattr(batch, figure) for batch in row.batches) for figure in ("p50", "p99", "first")]
        p50, p99, first = (f"({1000 * seconds:.2f})" for seconds in own)
        return f"  {row.gateway:<15}{'':>8}  {'':<16}{p50:>10}{p99:>9}{first:>12}"
    lower, median, upper = (1e6 * seconds for seconds in row.cpu)
    added = [f"{1000 * row.added(figure):+.2f}" for figure in ("p50", "p99", "first")]
    ratio = f"{row.ratio.median:.2f}" if row.ratio is not None else ""
    quartiles = f"{lower:.0f}..{upper:.0f}"
    return f"  {row.gateway:<15}{median:>8.0f}  {quartiles:<16}{added[0]:>10}{added[1]:>9}{added[2]:>12}  {ratio}"


def as_json(report: Report, judged: Sequence[Target]) -> dict[str, Any]:
    """Everything measured, for machines; seconds."""
    return {
        "rows": [
            {
                "gateway": row.gateway,
                **asdict(row.case),
                "cpu_seconds": row.cpu._asdict() if row.cpu is not None else None,
                "added_seconds": {figure: row.added(figure) for figure in ("p50", "p99", "first")},
                "cpu_over_vllm_router": row.ratio._asdict() if row.ratio is not None else None,
                "rounds": [batch._asdict() for batch in row.batches],
            }
            for row in report.rows
        ],
        "missing": dict(report.missing),
        "renders": report.renders,
        "requests": report.requests,
        "targets": [{**asdict(target), "held": target.held} for target in judged],
    }
