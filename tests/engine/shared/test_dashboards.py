"""The dashboards and alerts, tried: on a real Prometheus that scraped a real run, and by Grafana's own schema."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from proxy.bench.harness.servers import MODEL_NAME, Servers
from tests.harness.dashboards import ENGINE, FOLDER, GATEWAY, dashboards
from tests.harness.engines import SharedServers
from tests.harness.panels import Prometheus, Row, installed, prometheus, proved, started


class Run(NamedTuple):
    """What is left of it."""

    rows: list[Row]
    prometheus: Prometheus
    worker: str  # the patched one, as metrics name it


def alert_rules() -> list[dict[str, Any]]:
    return list(yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"])


@pytest.fixture(scope="module")
def run(servers: SharedServers, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("dashboards")
    with Servers(folder) as fleet, started(fleet, servers, model, folder) as rig:
        server = prometheus(fleet, folder, rig.scraped)
        yield Run(proved(server, rig, print), server, servers.tight.url.removeprefix("http://"))


@pytest.mark.thorough
def test_every_query_of_every_panel_yields_something_in_its_unit_and_every_alert_can_be_evaluated(run: Run):
    assert [row for row in run.rows if row.problem is not None] == []
    for rule in alert_rules():
        run.prometheus.at(rule["expr"])


@pytest.mark.thorough
def test_whatever_is_scraped_is_documented_and_its_labels_are_bounded(run: Run):
    """The traffic names a new model each round, and hints at will."""
    labels = {
        "gateway": {name: {*labels, "le"} for name, labels in GATEWAY},
        "engine": {name: set(labels) for name, labels in ENGINE},
    }
    for each in run.prometheus.at('{__name__=~"seamark_.+"}'):
        told = dict(each.labels)
        name, job = told.pop("__name__"), told.pop("job")
        del told["instance"]
        documented = labels["gateway" if job == "seamark" else "engine"]
        family = name if name in documented else name.rpartition("_")[0]
        assert told.keys() <= documented[family], name
        assert told.get("model", MODEL_NAME) in (MODEL_NAME, "unknown")
        assert told.get("worker", "") == "" or told["worker"].startswith("127.0.0.1:")


@pytest.mark.thorough
def test_seconds_saved_as_gateways_and_engine_count_them_agree(run: Run):
    """The engine gets all its hits of this run through two gateways, whose pace is a look old at most.

    On a busy machine the engine's pace changes between two looks: by as much the two may differ.
    """
    gateways = run.prometheus.at(f'sum(increase(seamark_seconds_saved_total{{worker="{run.worker}"}}[1h]))')
    engine = run.prometheus.at(f'sum(increase(seamark_seconds_saved_total{{worker="", instance="{run.worker}"}}[1h]))')
    paces = f'(seamark_token_seconds{{instance="{run.worker}"}} > 0)[1h:1s]'
    slowest, fastest = (run.prometheus.at(f"{of}_over_time({paces})")[0].values[0] for of in ("max", "min"))
    ratio = gateways[0].values[0] / engine[0].values[0]
    print(f"gateways over engine {ratio:.2f}, slowest pace over fastest {slowest / fastest:.2f}")
    assert 0.5 * fastest / slowest < ratio < 1.5 * slowest / fastest


def test_alert_rules_are_valid_and_fire_when_they_should():
    promtool = installed("promtool")
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "rules.test.yml"]):
        done = subprocess.run([promtool, *command], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tried = yaml.safe_load((FOLDER / "rules.test.yml").read_text())["tests"]
    fired = {test["alertname"] for each in tried for test in each["alert_rule_test"] if test["exp_alerts"]}
    silent = {test["alertname"] for each in tried for test in each["alert_rule_test"] if not test["exp_alerts"]}
    assert fired == silent == {rule["alert"] for rule in alert_rules()}


def test_every_alert_leads_to_what_to_do_about_it():
    headings = re.findall(r"^### (\w+)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    leads = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in alert_rules()}
    assert leads == {name: f"grafana/README.md#{name.lower()}" for name in headings}


def lost(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """What of `given` is not in `kept`: paths of fields that a schema does not know."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            if name not in kept:
                yield f"{where}.{name}"
            else:
                yield from lost(value, kept[name], f"{where}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{where}[{number}]")
    elif given != kept:
        yield where


@pytest.mark.parametrize("name", dashboards())
def test_grafanas_own_schema_knows_every_field(name):
    """Read by Grafana's published models and written again: what they do not know would be lost."""
    register_default_plugins()
    given = dashboards()[name]
    kept = json.loads(json.dumps(Dashboard.from_json(given), cls=JSONEncoder))
    assert list(lost(given, kept)) == []


@pytest.mark.parametrize("name", dashboards())
def test_dashboards_keep_to_the_conventions(name):
    """Any datasource can be chosen, empty panels say so, panels do not overlap, ids are there once."""
    dashboard = dashboards()[name]
    source = dashboard["templating"]["list"][0]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    shown = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    for panel in shown:
        assert panel["fieldConfig"]["defaults"]["noValue"] and panel["description"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_what_is_provisioned_fits_together():
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    for dashboard in dashboards().values():
        assert dashboard["templating"]["list"][0]["current"]["value"] == source["uid"]
    assert source["jsonData"]["timeInterval"].removesuffix("s").isdigit()
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/seamark.yml").read_text())["providers"]
    assert Path(provider["options"]["path"]).name == "dashboards"
