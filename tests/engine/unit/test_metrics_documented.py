"""Code, dashboards, alert rules and documents name the same metrics, with the same labels."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.harness import dashboards
from tests.harness.dashboards import ENGINE, FOLDER, GATEWAY, Family, family_of, metrics_in, queries

ROOT = Path(__file__).parents[3]

TABLE = (FOLDER / "README.md").read_text()

DOCUMENTS = (
    *(ROOT / folder / "README.md" for folder in (".", "proxy", "engine_patches", "deploy", "grafana", "tests")),
    *(ROOT / folder / "HOW.md" for folder in ("proxy", "engine_patches")),
)

RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]

NO_METRICS = {"seamark_boundaries", "seamark_pin", "seamark_load", "seamark_stops"}  # begin alike: fields of requests


NAMES = {family.name for family in GATEWAY | ENGINE}


def documented(heading: str) -> dict[Family, set[str]]:
    """Rows of the table under `heading`, with what they say of where each is shown."""
    lines = TABLE.partition(f"\n| {heading} ")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        Family(name.strip("`"), tuple(filter(None, labels.split(", ")))): set(filter(None, shown.split(", ")))
        for name, labels, _, shown in rows
    }


def shown_in() -> dict[str, set[str]]:
    """Where each metric of ours is shown."""
    found: dict[str, set[str]] = {}
    read = [(query.dashboard, query.tree) for query in queries()]
    read += [("rules", promql_parser.parse(rule["expr"])) for group in RULES for rule in group["rules"]]
    for place, tree in read:
        for name in map(family_of, metrics_in(tree)):
            if name.startswith("seamark_"):
                found.setdefault(name, set()).add(place)
    return found


@pytest.mark.parametrize(("part", "families"), [("gateway", GATEWAY), ("engine", ENGINE)], ids=["gateway", "engine"])
def test_every_metric_is_documented_with_its_labels_and_no_other_is(part, families):
    assert set(documented(part)) == families


def test_the_table_says_where_each_metric_is_shown_and_dashboards_ask_for_nothing_else():
    told: dict[str, set[str]] = {}
    for family, places in (documented("gateway") | documented("engine")).items():
        told.setdefault(family.name, set()).update(places)
    assert {name: places for name, places in told.items() if places} == shown_in()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_no_metric_that_is_not_there(document):
    mentioned = set(re.findall(r"\b(seamark_[a-z_]+[a-z])\b", document.read_text())) - NO_METRICS
    assert {family_of(name) for name in mentioned} <= NAMES


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: f"{query.dashboard}-{query.panel}-{query.legend}")
def test_each_query_measures_what_its_panel_says(query):
    assert dashboards.dimension(query.tree) == dashboards.UNITS[query.unit]
    assert all(f"`{family_of(name)}`" in query.description for name in metrics_in(query.tree))
