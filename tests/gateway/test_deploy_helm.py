"""The files of deploy/ say what the code knows; what Helm renders of the chart is taken by Kubernetes."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

import pytest
import yaml

from engine_patches import plugin
from engine_patches import settings as engine_settings
from engine_patches.commands import worker
from proxy.settings import Settings
from tests.deploy.compose_files import BASE, DEPLOY, EVERY_WAY, example, read
from tests.harness import helm
from tests.harness.helm import complaints
from tests.harness.recording_worker import recording_worker

FILES = sorted({name for way in EVERY_WAY for name in way})

GATEWAYS = {f"SEAMARK_{name.upper()}" for name in Settings.model_fields} | {"SEAMARK_CONFIG"}

TEXTS = {value for value in vars(engine_settings).values() if isinstance(value, str)}

ENGINES = {text for text in TEXTS - {engine_settings.PREFIX} if text.startswith(engine_settings.PREFIX)}

ENGINES |= {plugin.MODE_VARIABLE}

# Where the container listens is fixed; what of it is published is not.
FIXED = {"SEAMARK_HOST", "SEAMARK_PORT", "SEAMARK_ADMIN_HOST", "SEAMARK_ADMIN_PORT"}

# Read by Compose itself.
COMPOSES = {"COMPOSE_FILE", "COMPOSE_PROFILES"}


def defaults_in(name: str) -> dict[str, str | None]:
    """Variables that a compose file interpolates, with their defaults; None if there is none."""
    found = re.findall(r"\$\{([A-Z0-9_]+)(?::([-?])([^}]*))?\}", (DEPLOY / name).read_text())
    return {variable: default if kind == "-" else None for variable, kind, default in reversed(found)}


def passed_through(name: str) -> set[str]:
    """Variables that a compose file hands to a container or a build as they are."""
    handed = set()
    for service in read(name)["services"].values():
        for values in (service.get("environment") or {}, (service.get("build") or {}).get("args") or {}):
            handed |= {variable for variable, value in values.items() if value is None}
    return handed


def test_every_variable_is_in_the_example_and_nothing_else_is():
    used = set(chain.from_iterable(set(defaults_in(name)) | passed_through(name) for name in FILES))
    assert set(example()) == used | GATEWAYS | ENGINES | COMPOSES


@pytest.mark.parametrize("name", FILES)
def test_the_example_shows_the_defaults_of_the_compose_files(name):
    shown = example()
    for variable, default in defaults_in(name).items():
        # An overlay may have another model, or another worker, in mind.
        if default is not None and not (variable == "MODEL_FILE" and name != BASE) and variable not in GATEWAYS:
            assert shown[variable] == default, variable


@pytest.mark.parametrize("field", Settings.model_fields)
def test_the_example_shows_the_defaults_of_the_gateway(field):
    shown, default = example()[f"SEAMARK_{field.upper()}"], Settings.model_fields[field].get_default()
    if shown == "":
        assert default in (None, ())
    else:
        settings = Settings(**{"worker": "http://a", field: shown})
        assert getattr(settings, field) == default


def test_each_half_is_given_its_own_settings_and_no_secrets_of_the_other():
    services = read(BASE)["services"]
    assert {name for name in services["worker"]["environment"] if name.startswith("SEAMARK_")} == ENGINES
    assert set(services["gateway"]["environment"]) == GATEWAYS
    assert {
        name for name, value in services["gateway"]["environment"].items() if value and "$" not in str(value)
    } == FIXED
    assert not any("env_file" in service for service in services.values())


def test_no_default_of_the_plugin_is_shown_wrong(monkeypatch):
    shown = example()
    for name in ENGINES:
        monkeypatch.delenv(name, raising=False)
    assert shown[engine_settings.FAN_OUT] == str(int(engine_settings.fan_out()))
    assert float(shown[engine_settings.STATE_SHARE]) == engine_settings.state_share()
    assert float(shown[engine_settings.PIN_SHARE]) == engine_settings.pin_share()
    assert shown[plugin.MODE_VARIABLE] == plugin.FULL and shown[engine_settings.CHUNK_ENDS] == ""


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_published_to_the_network_unasked(name):
    for service in read(name)["services"].values():
        for port in service.get("ports", ()):
            assert re.match(r"127\.0\.0\.1:|\$\{(BIND|WORKER_BIND):-127\.0\.0\.1\}:", port), port


def test_the_gateway_and_redis_can_do_little():
    services = read(BASE)["services"]
    for service in (services["gateway"], services["redis"]):
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and "tmpfs" in service
        assert service["security_opt"] == ["no-new-privileges:true"] and "privileged" not in service
    assert services["gateway"]["init"]  # as process 1 it would not end at a signal before it handles it
    assert "USER 65532:65532" in (DEPLOY / "gateway.Dockerfile").read_text()


@pytest.mark.parametrize("half", ["gateway", "worker"])
def test_an_image_is_built_from_its_half_alone(half):
    text = (DEPLOY / f"{half}.Dockerfile").read_text()
    other = {"gateway": "engine_patches", "worker": "proxy"}[half]
    assert not re.search(rf"^COPY.*\b{other}\b", text, re.MULTILINE)
    # A frontend named there would be fetched from a registry.
    assert "syntax=" not in text
    copied = set(" ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)).split())
    admitted = (DEPLOY / f"{half}.Dockerfile.dockerignore").read_text().splitlines()
    assert admitted[0] == "*" and copied <= {line[1:] for line in admitted if line.startswith("!")}


def test_the_systemd_unit_is_sound(tmp_path):
    unit = DEPLOY / "systemd" / "seamark-gateway.service"
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(unit)
    assert parser["Service"]["ExecStart"] == "/opt/seamark/bin/seamark serve"
    assert int(parser["Service"]["RestartPreventExitStatus"]) == 2  # wrong settings
    taken = [Settings.model_fields[name].get_default() for name in ("stop_delay", "drain_timeout")]
    assert int(parser["Service"]["TimeoutStopSec"]) > sum(taken)
    if shutil.which("systemd-analyze"):
        # It looks whether the program is there.
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace("/opt/seamark/bin/seamark", f'"{sys.executable}"'))
        verified = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
        assert verified.returncode == 0 and unit.name not in verified.stderr, verified.stderr


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
    wanted = [each for flags in ROWS.values() for each in rendered(*flags).values() if each["kind"] in helm.MODULES]
    assert {each["kind"] for each in wanted} == helm.MODULES.keys() == CUSTOM - {"InferencePool"}
    assert helm.complaints_of_their_makers(wanted) == [""] * len(wanted)


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


def test_users_are_the_clusters_if_it_chooses_them_and_a_label_of_a_series_is_its_own():
    users = [json.dumps([*rendered("--set", f"userIds={on}").values()]).count("runAsUser") for on in ("true", "false")]
    assert users == [2, 0]
    monitors = of_kind(rendered("--set", "serviceMonitor.enabled=true"), "ServiceMonitor").values()
    assert monitors and all(each["spec"]["endpoints"][0]["honorLabels"] for each in monitors)


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
        (("--set", "worker.modelFile=nowhere.yaml"), "deploy/models has no nowhere.yaml"),
        (("--set", "mode=sidecar,prefill.replicas=1"), "use mode gateway"),
        (("--set", "prefill.replicas=1,worker.checkpoints.storage=1Gi"), "one connector"),
        (("--set", "wroker.replicas=2"), "wroker"),
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


PROXIED = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}  # as Docker puts it into each container


def test_a_probe_asks_its_own_machine_whatever_proxy_is_in_the_environment():
    probes = [one["exec"]["command"] for one in container(rendered(*ROWS[SIDECAR]), "worker").values() if "exec" in one]
    services = (service for name in FILES for service in read(name)["services"].values())
    tests = (service.get("healthcheck", {}).get("test", ())[1:] for service in services)
    probes += [test for test in tests if test[:1] == ["python3"]]
    with recording_worker() as vllm:
        for *python, asks in probes:
            here, places = re.subn(r"http://[^/]+", vllm.url, asks)
            assert places == 1 and subprocess.run([*python, here], env=PROXIED, timeout=60).returncode == 0
    assert len(probes) > 5 and subprocess.run([*python, here], timeout=60, capture_output=True).returncode  # it is gone


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
        with subprocess.Popen([sys.executable, "-c", asks_it, "0"], env=PROXIED) as waiting:
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
