"""The manifests hold together: who selects whom, which port is whose, and settings that exist."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from engine_patches.commands import worker
from proxy.settings import Settings
from tests.deploy.compose_files import DEPLOY
from tests.harness.kubernetes_schemas import complaints

FOLDER = DEPLOY / "kubernetes"

OBJECTS: list[dict[str, Any]] = [
    manifest for path in sorted(FOLDER.glob("*.yaml")) for manifest in yaml.safe_load_all(path.read_text())
]

PODS = {
    manifest["metadata"]["name"]: manifest for manifest in OBJECTS if manifest["kind"] in ("Deployment", "StatefulSet")
}

SERVICES = {manifest["metadata"]["name"]: manifest for manifest in OBJECTS if manifest["kind"] == "Service"}

POLICIES = [manifest for manifest in OBJECTS if manifest["kind"] == "NetworkPolicy"]


def container(name: str) -> dict[str, Any]:
    return PODS[name]["spec"]["template"]["spec"]["containers"][0]


def labels(pod: dict[str, Any]) -> dict[str, str]:
    return pod["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_kubernetes_takes_every_manifest_and_would_refuse_a_misspelt_field(manifest):
    assert complaints(manifest) == []
    (part,) = manifest.keys() - {"apiVersion", "kind", "metadata"}
    (wrong,) = complaints({**manifest, part: {**manifest[part], "replcias": 2}})
    assert "replcias" in wrong


def test_everything_lives_in_one_namespace():
    assert {manifest["metadata"]["namespace"] for manifest in OBJECTS} == {"seamark"}


@pytest.mark.parametrize("name", PODS)
def test_a_controller_selects_the_pods_it_makes(name):
    assert PODS[name]["spec"]["selector"]["matchLabels"] == labels(PODS[name])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_leads_to_a_port_of_a_pod(name):
    pods = [pod for pod in PODS.values() if labels(pod) == SERVICES[name]["spec"]["selector"]]
    assert len(pods) == 1
    names = {port["name"] for port in pods[0]["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in SERVICES[name]["spec"]["ports"]} <= names


@pytest.mark.parametrize("name", PODS)
def test_a_probe_asks_a_port_that_is_there(name):
    ports = {port["name"] for port in container(name)["ports"]}
    probes = [value for key, value in container(name).items() if key.endswith("Probe")]
    assert probes and {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports


@pytest.mark.parametrize("name", PODS)
def test_a_mount_has_its_volume(name):
    spec = PODS[name]["spec"]["template"]["spec"]
    there = {volume["name"] for volume in spec["volumes"]}
    there |= {claim["metadata"]["name"] for claim in PODS[name]["spec"].get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in container(name)["volumeMounts"]} == there


def test_the_gateways_environment_is_a_valid_configuration():
    given = {
        entry["name"].removeprefix("SEAMARK_").lower(): entry["value"] for entry in container("seamark-gateway")["env"]
    }
    settings = Settings(**given)
    assert {settings.port, settings.admin_port} == {
        port["containerPort"] for port in container("seamark-gateway")["ports"]
    }
    pod, _, service = settings.worker[0].removeprefix("http://").removesuffix(":8000").partition(".")
    assert pod == f"{PODS['seamark-worker']['metadata']['name']}-0" and SERVICES[service]["spec"]["clusterIP"] == "None"
    assert settings.redis is not None and settings.redis.split("/")[2].split(":")[0] in SERVICES


@pytest.mark.parametrize("name", PODS)
def test_kubernetes_adds_no_settings_of_its_own(name):
    """For a service `seamark` it would set SEAMARK_PORT=tcp://... in every pod."""
    assert PODS[name]["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ["seamark-gateway", "seamark-redis"])
def test_a_pod_can_do_little(name):
    spec = PODS[name]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    assert container(name)["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_gateway_gets_the_time_it_takes_to_stop():
    seconds = PODS["seamark-gateway"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    taken = [Settings.model_fields[name].get_default() for name in ("stop_delay", "drain_timeout")]
    assert seconds > sum(taken)


def test_what_asks_for_no_key_is_reached_by_the_gateway_alone():
    guarded = {policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]: policy for policy in POLICIES}
    assert guarded.keys() == {"seamark-worker", "seamark-redis", "seamark-gateway"}
    everybodys, pages = guarded.pop("seamark-gateway")["spec"]["ingress"]
    assert "from" not in everybodys and [port["port"] for port in everybodys["ports"]] == [8080]
    assert pages["from"] and [port["port"] for port in pages["ports"]] == [8081]
    for policy in guarded.values():
        (rule,) = policy["spec"]["ingress"]
        ports = {port["port"] for port in rule["ports"]}
        pod = PODS[policy["metadata"]["name"]]
        assert ports == {port["containerPort"] for port in pod["spec"]["template"]["spec"]["containers"][0]["ports"]}
        assert rule["from"][0]["podSelector"]["matchLabels"] == labels(PODS["seamark-gateway"])


def test_the_workers_arguments_are_taken(monkeypatch):
    monkeypatch.setattr(worker, "is_cpu_build", lambda: False)
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    started: list[list[str]] = []
    monkeypatch.setattr(worker, "serve", lambda arguments, _: started.append(arguments) or 0)
    arguments = container("seamark-worker")["args"]
    here = [argument.replace("/etc/seamark/models", str(DEPLOY / "models")) for argument in arguments]
    assert worker.main(here) == 0
    (server,) = started
    assert "127.0.0.1" not in server and server[-4:-1] == ["--config", here[-1], "--host"]
