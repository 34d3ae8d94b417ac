"""The chart, rendered by Helm: Kubernetes takes every object, and they hold together in each combination of values."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from engine_patches.commands import worker
from proxy.settings import Settings
from tests.deploy.compose_files import DEPLOY
from tests.harness import custom_resources, helm
from tests.harness.kubernetes_schemas import complaints
from tests.harness.recording_worker import recording_worker

CHART = DEPLOY / "helm/seamark"


# The table of deploy/README.md: what somebody wants, and the flags for it.
ROWS: dict[str, tuple[str, ...]] = {
    name: tuple(shlex.split(flags.strip("`"))) if flags.startswith("`") else ()
    for name, flags in re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$",
        (DEPLOY / "README.md").read_text().partition("| you want | flags |\n|---|---|\n")[2].partition("\n\n")[0]
        + "\n",
        re.M,
    )
}

SIDECAR = "one gateway in each vLLM pod, behind a balancer that knows prefixes"

CUSTOM = {"HTTPRoute", "InferencePool", "ServiceMonitor", "PrometheusRule"}

Object = Mapping[str, Any]


@cache
def rendered(*flags: str) -> dict[tuple[str, str], Object]:
    """The objects by kind and name; no two of them have one name."""
    done = helm.render(CHART, flags)
    assert not done.error, done.error
    named = {(each["kind"], each["metadata"]["name"]): each for each in done.objects}
    assert len(named) == len(done.objects) > 0
    return named


# Each row, and for one of each mode each way for the plugin to come into the worker.
COMBINATIONS = [
    *((name, "image") for name in ROWS),
    *((name, plugin) for name in (next(iter(ROWS)), SIDECAR) for plugin in ("init", "wheel")),
]


@pytest.fixture(params=COMBINATIONS, ids=" / ".join)
def objects(request) -> dict[tuple[str, str], Object]:
    name, plugin = request.param
    flags = ROWS[name]
    if not any("plugin.from=" in flag for flag in flags):
        flags += ("--set", f"plugin.from={plugin}")
    return rendered(*flags)


def pods(objects: Mapping[tuple[str, str], Object]) -> dict[str, Object]:
    return {name: each for (kind, name), each in objects.items() if kind in ("Deployment", "StatefulSet")}


def of_kind(objects: Mapping[tuple[str, str], Object], kind: str) -> dict[str, Object]:
    return {name: each for (found, name), each in objects.items() if found == kind}


def containers(pod: Object) -> list[dict[str, Any]]:
    spec = pod["spec"]["template"]["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def container(objects: Mapping[tuple[str, str], Object], name: str) -> dict[str, Any]:
    (found,) = (each for pod in pods(objects).values() for each in containers(pod) if each["name"] == name)
    return found


def selected(objects: Mapping[tuple[str, str], Object], labels: Mapping[str, str]) -> list[Object]:
    assert labels
    return [each for each in pods(objects).values() if labels.items() <= labels_of(each).items()]


def labels_of(pod: Object) -> dict[str, str]:
    return pod["spec"]["template"]["metadata"]["labels"]


def given_to_gateway(objects: Mapping[tuple[str, str], Object]) -> dict[str, str]:
    return {
        each["name"].removeprefix("SEAMARK_").lower(): each["value"]
        for each in container(objects, "gateway")["env"]
        if each["name"].startswith("SEAMARK_")
    }


def test_kubernetes_takes_every_object_of_its_own_kinds(objects):
    found = {key: complaints(each) for key, each in objects.items() if key[0] not in CUSTOM}
    assert found == {key: [] for key in found} and found


@pytest.mark.on_request
def test_the_definitions_of_custom_resources_take_them():
    wanted = [
        each
        for flags in ROWS.values()
        for each in rendered(*flags).values()
        if each["kind"] in custom_resources.MODULES
    ]
    assert {each["kind"] for each in wanted} == custom_resources.MODULES.keys() == CUSTOM - {"InferencePool"}
    assert custom_resources.complaints(wanted) == [""] * len(wanted)


def test_every_selector_finds_pods_and_every_port_is_theirs(objects):
    assert {each["metadata"]["namespace"] for each in objects.values()} == {"seamark"}
    for pod in pods(objects).values():
        assert pod["spec"]["selector"]["matchLabels"] == labels_of(pod)
    for service in of_kind(objects, "Service").values():
        (pod,) = selected(objects, service["spec"]["selector"])
        ports = {port["name"]: port["containerPort"] for each in containers(pod) for port in each.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
        for port in service["spec"]["ports"]:  # a headless service leads to the pod's own port
            assert service["spec"].get("clusterIP") != "None" or ports[port["targetPort"]] == port["port"]
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        for each in of_kind(objects, kind).values():
            selector = each["spec"].get("podSelector") or each["spec"]["selector"]
            assert len(selected(objects, selector["matchLabels"])) == 1
    for monitor in of_kind(objects, "ServiceMonitor").values():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (
            each for each in of_kind(objects, "Service").values() if wanted <= each["metadata"]["labels"].items()
        )
        assert {each["port"] for each in monitor["spec"]["endpoints"]} == {
            each["name"] for each in service["spec"]["ports"]
        }


def test_a_container_has_its_volumes_and_its_probes_have_ports(objects):
    for pod in pods(objects).values():
        spec = pod["spec"]["template"]["spec"]
        there = {volume["name"] for volume in spec.get("volumes", ())}
        there |= {claim["metadata"]["name"] for claim in pod["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]} == there
        assert spec["enableServiceLinks"] is False and spec["automountServiceAccountToken"] is False
        for each in spec["containers"]:
            ports = {port["name"] for port in each.get("ports", ())}
            probes = [value for key, value in each.items() if key.endswith("Probe")]
            assert probes and {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports
    for name in of_kind(objects, "StatefulSet"):
        assert objects["StatefulSet", name]["spec"]["serviceName"] in of_kind(objects, "Service")


def test_the_gateways_variables_are_settings_and_lead_to_what_is_there(objects):
    given = given_to_gateway(objects)
    settings = Settings(**given)
    ports = {settings.port} if settings.admin_port is None else {settings.port, settings.admin_port}
    assert ports == {each["containerPort"] for each in container(objects, "gateway")["ports"]}
    assert {settings.host, settings.admin_host if settings.admin_port else settings.host} == {"0.0.0.0"}  # noqa: S104
    services = of_kind(objects, "Service")
    if settings.redis is not None and "seamark-redis" in settings.redis:
        assert settings.redis == "redis://seamark-redis:6379/0" and "seamark-redis" in services
    else:
        assert "seamark-redis" not in services
    if "seamark-worker" in pods(objects) and "sidecar" not in given and "workers_dns" not in given:
        replicas = pods(objects)["seamark-worker"]["spec"]["replicas"]
        assert settings.worker == tuple(f"http://seamark-worker-{n}.seamark-worker:8000" for n in range(replicas))
        assert services["seamark-worker"]["spec"]["publishNotReadyAddresses"] is True


def test_only_the_gateway_reaches_what_asks_for_no_key(objects):
    policies = of_kind(objects, "NetworkPolicy")
    assert policies.keys() == pods(objects).keys()
    front = container(objects, "gateway")
    settings = Settings(**given_to_gateway(objects))
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for name, policy in policies.items():
        first, *more = policy["spec"]["ingress"]
        pod = pods(objects)[name]
        if front in containers(pod):
            assert "from" not in first and [port["port"] for port in first["ports"]] == [settings.port]
            pages = {"from": [monitoring], "ports": [{"port": settings.admin_port or settings.port}]}
            assert more == [pages]
        else:
            gateways, *scrapers = first["from"]
            assert selected(objects, gateways["podSelector"]["matchLabels"]) == [pods(objects)["seamark-gateway"]]
            assert scrapers == ([] if name == "seamark-redis" else [monitoring])
            ports = {port["containerPort"] for each in containers(pod) for port in each.get("ports", ())}
            assert {port["port"] for port in first["ports"]} == ports
            assert all("from" in rule for rule in more)
    others = {"seamark-worker": "seamark-prefill", "seamark-prefill": "seamark-worker"}
    for name, other in others.items() if "seamark-prefill" in policies else ():
        *_, rule = policies[name]["spec"]["ingress"]
        (each,) = rule["from"]
        assert selected(objects, each["podSelector"]["matchLabels"]) == [pods(objects)[other]] and "ports" not in rule


def test_a_pod_can_do_little(objects):
    for name, pod in pods(objects).items():
        whole = pod["spec"]["template"]["spec"].get("securityContext", {})
        for each in containers(pod):
            if name in ("seamark-worker", "seamark-prefill") and each["name"] == "worker":
                continue  # vLLM's images run as root
            given = whole | each["securityContext"]
            assert (
                given["runAsNonRoot"] and given["readOnlyRootFilesystem"] and given["capabilities"] == {"drop": ["ALL"]}
            )
            assert given["allowPrivilegeEscalation"] is False
            assert given["seccompProfile"] == {"type": "RuntimeDefault"}


def test_beside_its_gateway_a_worker_listens_to_that_alone():
    objects = rendered(*ROWS[SIDECAR])
    assert pods(objects).keys() == {"seamark-worker"}
    given = given_to_gateway(objects)
    assert given["sidecar"] == "true" and given["worker"] == "http://127.0.0.1:8000" and "redis" not in given
    vllm = container(objects, "worker")
    assert "--host=127.0.0.1" in vllm["args"] and "ports" not in vllm
    assert all("exec" in probe for name, probe in vllm.items() if name.endswith("Probe"))
    # Its /metrics are where requests go: an endpoint picker asks there.
    assert "admin_port" not in given
    (port,) = objects["Service", "seamark"]["spec"]["ports"]
    assert port["targetPort"] == "http" and selected(objects, objects["Service", "seamark"]["spec"]["selector"])


def test_prefill_workers_are_servers_like_the_others_and_hand_over_what_they_compute(objects):
    if "seamark-prefill" not in pods(objects):
        assert "prefill_worker" not in given_to_gateway(objects)
        return
    both = [containers(pods(objects)[name])[-1] for name in ("seamark-worker", "seamark-prefill")]
    roles = [next(each for each in one["args"] if "kv_role" in each).partition("=")[2] for one in both]
    assert roles == ["kv_consumer", "kv_producer"]
    assert "--kv-transfer-config.kv_load_failure_policy=recompute" in both[0]["args"]
    for one in both:
        assert "--kv-transfer-config.kv_connector=NixlConnector" in one["args"]
        assert {
            "name": "VLLM_NIXL_SIDE_CHANNEL_HOST",
            "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
        } in one["env"]
    settings = Settings(**given_to_gateway(objects))
    assert settings.prefill_worker == tuple(f"http://seamark-prefill-{n}.seamark-prefill:8000" for n in range(2))
    assert pods(objects)["seamark-prefill"]["spec"]["replicas"] == 2 and len(settings.worker) == 4
    assert objects["Service", "seamark-prefill"]["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--set", "mode=sidecar,worker.enabled=false"), "worker.enabled has to be true"),
        (("--set", "inferencePool.enabled=true"), "use mode sidecar"),
        (("--set", "mode=sidecar,httpRoute.enabled=true"), "enable inferencePool"),
        (("--set", "gateway.settings.port=80"), "gateway.settings.port"),
        (("--set", "worker.modelFile=nowhere.yaml"), "deploy/models has no nowhere.yaml"),
        (("--set", "mode=sidecar,prefill.replicas=1"), "use mode gateway"),
        (("--set", "prefill.replicas=1,worker.checkpoints.storage=1Gi"), "one connector"),
        (("--set", "wroker.replicas=2"), "wroker"),
        (("--set", "worker.replicas=none"), "replicas"),
    ],
)
def test_what_would_serve_nothing_is_refused_with_its_cause(flags, said):
    done = helm.render(CHART, flags)
    assert not done.objects and said in done.error


def test_every_value_is_in_the_schema_and_helm_finds_nothing_to_complain_about():
    def names(values: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
        for name, value in values.items():
            known = schema["properties"].get(name)
            if known is None:
                yield f"{path}{name}"
            elif isinstance(value, dict) and "properties" in known:
                yield from names(value, known, f"{path}{name}.")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert list(names(values, json.loads((CHART / "values.schema.json").read_text()))) == []
    for flags in ROWS.values():
        assert helm.lint(CHART, flags) == ""


@pytest.mark.parametrize("flags", [(), ("--set", "mode=sidecar,plugin.from=wheel,worker.checkpoints.storage=64Gi")])
def test_the_workers_arguments_are_taken(flags, monkeypatch):
    monkeypatch.setattr(worker, "is_cpu_build", lambda: False)
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    started: list[list[str]] = []
    monkeypatch.setattr(worker, "serve", lambda arguments, port: started.append(arguments) or 0)
    arguments = container(rendered(*flags, "--set", "worker.args={--max-model-len=8192}"), "worker")["args"]
    here = [argument.replace("/etc/seamark/models", str(DEPLOY / "models")) for argument in arguments]
    assert worker.main(here) == 0
    (server,) = started
    assert "--max-model-len=8192" in server and f"{DEPLOY}/models/nemotron-3-nano.yaml" in server
    hosts = [server[at + 1] for at, word in enumerate(server) if word == "--host"]
    assert hosts == ["127.0.0.1" if flags else "0.0.0.0"]  # noqa: S104


def running(requests: int, waiting: int = 0) -> str:
    counts = {"running": requests, "waiting": waiting, "waiting_by_reason": 3}
    return "".join(f'vllm:num_requests_{kind}{{engine="0",a="b c"}} {n}.0\n' for kind, n in counts.items())


@pytest.mark.parametrize("mode", ["gateway", "sidecar"])
def test_a_vllm_ends_with_its_last_request_and_one_that_is_gone_holds_no_pod(mode):
    objects = rendered("--set", f"mode={mode}")
    command = container(objects, "worker")["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["python3", "-c"] and float(command[3]) > Settings.model_fields["stop_delay"].get_default()
    with recording_worker(more_metrics=running(1)) as vllm:
        asks_it = command[2].replace("127.0.0.1:8000", vllm.url.removeprefix("http://"))
        with subprocess.Popen([sys.executable, "-c", asks_it, "0"]) as waiting:
            for metrics in (running(1), running(0, waiting=1)):
                vllm.more_metrics = metrics
                with pytest.raises(subprocess.TimeoutExpired):
                    waiting.wait(1.2)
            vllm.more_metrics = running(0)
            assert waiting.wait(60) == 0
    assert subprocess.run([sys.executable, "-c", asks_it, "0"], timeout=60).returncode == 0  # nothing listens there
    taken = sum(Settings.model_fields[name].get_default() for name in ("stop_delay", "drain_timeout"))
    for pod in pods(objects).values():
        spec = pod["spec"]["template"]["spec"]
        if any(each["name"] in ("gateway", "worker") for each in spec["containers"]):
            assert spec["terminationGracePeriodSeconds"] > taken
