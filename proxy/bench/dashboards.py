"""The dashboards in `grafana/`: every query of every panel, as Grafana would send it to Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser

FOLDER = Path(__file__).parents[2] / "grafana"
# Grafana's own variables: names and what they stand for are its, see `filled_in`.
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


class Query(NamedTuple):
    """One query of a panel."""

    dashboard: str
    panel: str
    description: str
    unit: str  # Grafana's name of it
    legend: str
    expression: str  # with Grafana's variables
    over_time: bool  # a line, not a single value

    def filled_in(self, range_seconds: float, scrape_seconds: float) -> str:
        """As Grafana sends it for a time range, everything chosen of what there is to choose from."""
        values = {
            "__range": f"{max(1, round(range_seconds))}s",
            "__rate_interval": f"{4 * scrape_seconds:g}s",
            "model": ".+",
            "worker": ".+",
            "instance": ".+",
        }
        return _VARIABLE.sub(lambda match: values[match[1] or match[2]], self.expression)

    @property
    def tree(self) -> promql_parser.Expr:
        """The query, parsed."""
        return promql_parser.parse(self.filled_in(3600, 15))


def dashboards(folder: Path = FOLDER) -> Mapping[str, dict[str, Any]]:
    """Every dashboard by the name of its file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / "dashboards").glob("*.json"))}


def queries(folder: Path = FOLDER) -> Iterator[Query]:
    """Every query of every panel, in the order they are shown."""
    for name, dashboard in dashboards(folder).items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield Query(
                    name,
                    panel["title"],
                    panel["description"],
                    panel["fieldConfig"]["defaults"]["unit"],
                    target["legendFormat"],
                    target["expr"],
                    target["range"],
                )


def metrics_in(tree: promql_parser.Expr) -> set[str]:
    """Names of the series that a query reads."""
    found: set[str] = set()

    def look(node: Any) -> None:
        selector = node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        if isinstance(selector, promql_parser.VectorSelector):
            found.add(selector.name)

    promql_parser.walk(tree, look)
    return found


def family_of(series: str) -> str:
    """The metric that a series belongs to: histograms have three."""
    return re.sub(r"_(bucket|sum|count)$", "", series)
