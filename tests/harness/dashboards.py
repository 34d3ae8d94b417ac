"""The metrics in the code, and every query of every panel in `grafana/` as Grafana would send it to Prometheus.

`python -m tests.harness.dashboards` writes the table of metrics in grafana/README.md: a row keeps what it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml

from engine_patches.reporting import header_fields
from engine_patches.reporting.metrics import families
from proxy.metrics import Metrics

FOLDER = Path(__file__).parents[2] / "grafana"

# Grafana's own variables: names and what they stand for are its, see `filled_in`.
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")

Dimension = Mapping[str, int]  # exponents; {} is a mere number

SECONDS, BYTES, TOKENS, THINGS = "s", "B", "tok", "n"

RATIO: Dimension = {}
RATE_OF_THINGS: Dimension = {THINGS: 1, SECONDS: -1}

# Grafana's units, and those that the dashboards spell out.
UNITS: Mapping[str, Dimension] = {
    "s": {SECONDS: 1},
    "bytes": {BYTES: 1},
    "short": {THINGS: 1},
    "percentunit": RATIO,
    "reqps": RATE_OF_THINGS,
    "binBps": {BYTES: 1, SECONDS: -1},
    "suffix: s/s": RATIO,
    "suffix: min/h": RATIO,
    "suffix: tok": {TOKENS: 1},
    "suffix: tok/s": {TOKENS: 1, SECONDS: -1},
    **{f"suffix: {things}/s": RATE_OF_THINGS for things in ("states", "entries", "files", "passes", "preemptions")},
}

# By the metric's name, the first that fits: Prometheus' naming rules, and vLLM's names that name no unit.
_NAMES: tuple[tuple[str, Dimension], ...] = (
    (r"_count$", {THINGS: 1}),
    (r"_seconds(_saved|_spent)?(_total|_sum|_bucket)?$", {SECONDS: 1}),
    (r"_bytes(_written_total)?$", {BYTES: 1}),
    (
        r"_tokens(_total|_sum|_bucket)?$|^vllm:((external_)?prefix_cache_(hits|queries)|iteration_tokens)_total",
        {TOKENS: 1},
    ),
    (r"_perc$", RATIO),
    (r"", {THINGS: 1}),
)


class Family(NamedTuple):
    """One row of the documented table, or one metric in the code."""

    name: str
    labels: tuple[str, ...]


def _in_code(collector: Any) -> Family:
    name = collector._name + ("_total" if collector._type == "counter" else "")
    return Family(name, tuple(collector._labelnames))


_OF_GATEWAY = [each for each in vars(Metrics()).values() if hasattr(each, "_labelnames")]
_INFO, _COUNTERS, _GAUGES = families()
_OF_ENGINE = [_INFO, *_COUNTERS.values(), *_GAUGES.values(), header_fields.counted()]

GATEWAY, ENGINE = set(map(_in_code, _OF_GATEWAY)), set(map(_in_code, _OF_ENGINE))


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
            "key": ".+",
        }
        return _VARIABLE.sub(lambda match: values[match[1] or match[2]], self.expression)

    @property
    def tree(self) -> promql_parser.Expr:
        """The query, parsed."""
        return promql_parser.parse(self.filled_in(3600, 15))


class Incommensurable(ValueError):
    """An expression adds or compares what cannot be; the message is the expression."""


def dashboards() -> Mapping[str, dict[str, Any]]:
    """Every dashboard by the name of its file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*.json"))}


def queries() -> Iterator[Query]:
    """Every query of every panel, in the order they are shown."""
    for name, dashboard in dashboards().items():
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

    def visit(node: Any) -> None:
        selector = node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        if isinstance(selector, promql_parser.VectorSelector):
            found.add(selector.name)

    promql_parser.walk(tree, visit)
    return found


def family_of(series: str) -> str:
    """The metric that a series belongs to: histograms have three."""
    return re.sub(r"_(bucket|sum|count)$", "", series)


def shown_in() -> dict[str, set[str]]:
    """Where each metric of ours is shown."""
    found: dict[str, set[str]] = {}
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    read = [(query.dashboard, query.tree) for query in queries()]
    read += [("rules", promql_parser.parse(rule["expr"])) for group in rules["groups"] for rule in group["rules"]]
    for place, tree in read:
        for name in map(family_of, metrics_in(tree)):
            if name.startswith("seamark_"):
                found.setdefault(name, set()).add(place)
    return found


def with_metrics(text: str) -> str:
    """The document with a row for each metric of the code; one that has none yet is said in the code's words."""
    said = dict(re.findall(r"^\| `(seamark_\w+)` \| (?:[^|]* )?\| (.*) \| [^|]*\|$", text, re.M))
    shown = shown_in()
    for heading, collectors in (("gateway", _OF_GATEWAY), ("engine", _OF_ENGINE)):
        before, head, rest = re.split(rf"(\n\| {heading} .*\n.*\n)", text, maxsplit=1)
        for each in collectors:
            name, labels = _in_code(each)
            places = [place for place in (*dashboards(), "rules") if place in shown.get(name, ())]
            cells = f"`{name}`", ", ".join(labels), said.get(name, each._documentation), ", ".join(places)
            head += "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"
        text = before + head + rest[rest.find("\n\n") + 1 :] if "\n\n" in rest else before + head
    return text


def dimension(tree: promql_parser.Expr) -> Dimension:
    """The dimension of a query's values. Raises `Incommensurable`; `NotImplementedError` for what no dashboard uses."""
    match tree:
        case promql_parser.ParenExpr() | promql_parser.AggregateExpr():
            return dimension(tree.expr)
        case promql_parser.VectorSelector():
            return next(found for pattern, found in _NAMES if re.search(pattern, tree.name))
        case promql_parser.MatrixSelector():
            return dimension(tree.vector_selector)
        case promql_parser.NumberLiteral():
            return RATIO
        case promql_parser.Call():
            return _of_call(tree)
        case promql_parser.BinaryExpr():
            return _of_pair(tree)
    raise NotImplementedError(tree.prettify())


def _of_call(tree: promql_parser.Call) -> Dimension:
    match tree.func.name:
        case "histogram_quantile":
            return dimension(tree.args[1])
        case "rate" if not tree.args[0].vector_selector.name.endswith("_bucket"):
            return _times(dimension(tree.args[0]), {SECONDS: -1})
        case "rate" | "increase":  # of buckets only a quantile is taken, whatever their rate
            return dimension(tree.args[0])
    raise NotImplementedError(tree.func.name)


def _of_pair(tree: promql_parser.BinaryExpr) -> Dimension:
    left, right = dimension(tree.lhs), dimension(tree.rhs)
    operator = str(tree.op)
    if operator in ("*", "/"):
        return _times(left, right if operator == "*" else {unit: -power for unit, power in right.items()})
    if isinstance(tree.rhs, promql_parser.NumberLiteral) and operator in (">", "<", "==", "!=", ">=", "<="):
        return left
    if operator != "and" and left != right:
        raise Incommensurable(tree.prettify())
    return left


def _times(left: Dimension, right: Dimension) -> Dimension:
    powers = {unit: left.get(unit, 0) + right.get(unit, 0) for unit in {*left, *right}}
    return {unit: power for unit, power in powers.items() if power}


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(with_metrics((FOLDER / "README.md").read_text()))
