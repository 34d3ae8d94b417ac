"""The files that `seamark setup` writes. What deploy/ of the source holds is taken from there, never written twice."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from textwrap import indent
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit, urlunsplit

from proxy.commands.cures import NEEDED
from proxy.commands.recipe_files import GATEWAY, MOD, make_mod, spark_checkout
from proxy.commands.ways import DEFAULT_PORT
from proxy.config_files import LOOPBACK
from proxy.errors import SettingsError

BASE_URL = "http://127.0.0.1:8080/v1"

# Where containers find what listens on their machine.
HOST_OF_CONTAINERS = "host.docker.internal"


class SetupWay(StrEnum):
    """A value of `--way`."""

    PIP = "pip"
    COMPOSE = "compose"
    BESIDE = "compose-beside"
    SPARK = "spark-vllm-docker"
    SYSTEMD = "systemd"
    KUBERNETES = "kubernetes"


class SetupPlan(NamedTuple):
    """What the user said."""

    way: SetupWay
    model: str  # a name, a folder, or a file of deploy/models; empty: a vLLM with one runs already
    workers: tuple[str, ...]  # URLs of vLLM servers that run already, or of those on other machines
    machines: int  # with a worker each
    out: Path  # absolute
    source: Path | None  # a checkout of Seamark; None: not found
    spark: Path  # a checkout of spark-vllm-docker
    registry: str  # of the images for Kubernetes
    cpu: bool


class WrittenFile(NamedTuple):
    """Texts of files by their names, and what the user does with them."""

    files: Mapping[str, str]
    go_on: tuple[str, str]  # commands
    off: Sequence[str]  # commands
    notes: Sequence[str] = ()
    base_url: str = BASE_URL


def files_for(plan: SetupPlan) -> WrittenFile:
    """Raises `SettingsError` naming the flag that is missing or cannot be."""
    return _WRITERS[plan.way](plan)


def _pip(plan: SetupPlan) -> WrittenFile:
    files = {"seamark.toml": gateway_toml(plan.workers), GATEWAY: gateway_script(plan.out)}
    if plan.workers:
        doctor = f"{this_python()} -m proxy.cli doctor --worker {shlex.quote(plan.workers[0])}"
        go_on = (_sh(plan, GATEWAY), doctor)
        return WrittenFile(
            files, go_on, ["Ctrl-C ends the gateway; point clients at vLLM again"], _STILL_WITHOUT_PLUGIN
        )
    files["worker.sh"], notes = _worker_script(plan)
    off = [
        "Ctrl-C ends either; point clients at vLLM again",
        "SEAMARK_ENGINE=0 or pip uninstall vllm-seamark      # in vLLM's environment: vLLM as it was",
    ]
    return WrittenFile(files, (_sh(plan, "worker.sh"), _sh(plan, GATEWAY)), off, notes)


def _worker_script(plan: SetupPlan) -> tuple[str, tuple[str, ...]]:
    """The text of worker.sh, and notes: if vLLM is not in this environment, it has to be in the one that is active."""
    notes: tuple[str, ...] = ()
    where, check, command = "that wrote this file", "", f"{this_python()} -m engine_patches"
    if importlib.util.find_spec("vllm") is None:
        source = shlex.quote(str(plan.source)) if plan.source else "/path/to/seamark"
        note = f"worker.sh wants vLLM's environment active, and the plugin in it, once: pip install --no-deps {source}"
        where, command, notes = "that vLLM is installed in, which has to be active", "seamark", (note,)
        check = f"command -v seamark >/dev/null || {{ echo {shlex.quote(note)} >&2; exit 1; }}\n"
    text = f"""\
#!/bin/sh
# vLLM with Seamark's plugin, in the environment {where}.
# vLLM's own flags: behind this script's name. Without the plugin: SEAMARK_ENGINE=0 before it.
set -eu
{check}exec {command} worker {shlex.quote(_wanted_model(plan))} --port {DEFAULT_PORT} "$@"
"""
    return text, notes


def this_python() -> str:
    return shlex.quote(sys.executable)


def _compose(plan: SetupPlan) -> WrittenFile:
    overlays = ["compose.yaml"]
    variables: list[tuple[str, str, str]] = []
    own: dict[str, str] = {}
    if plan.cpu:
        overlays.append("compose.cpu.yaml")  # it makes a small model of its own
    else:
        name, text = _model_file(plan)
        variables.append(("A file with the model and vLLM's flags for it.", "MODEL_FILE", name))
        if text is not None:
            own = {f"models/{name}": text, "compose.model.yaml": _own_model(plan)}
    notes: list[str] = []
    if plan.machines == 2 and not plan.cpu:
        if len(plan.workers) != 1:
            raise SettingsError(
                "--worker: name the second machine's address once, for example http://192.168.100.11:8000"
            )
        second = urlsplit(plan.workers[0]).hostname or ""
        if not _is_address(second):
            raise SettingsError(f"--worker: {second} is a name; containers need the second machine's IP address")
        overlays.append("compose.two-sparks.yaml")
        variables += [
            ("The second machine's address.", "SECOND_SPARK", second),
            ("Where a worker's port is published. On the second machine: its own address.", "WORKER_BIND", "127.0.0.1"),
        ]
        notes.append(
            f"on {second} first, with the same folders: WORKER_BIND={second} sh compose.sh up --build -d worker"
        )
    elif plan.machines > 1 or plan.workers:
        raise SettingsError(
            "--workers: Compose starts vLLM on one machine or, without --cpu, on two; more that run already: "
            "--way compose-beside"
        )
    return _compose_files(plan, overlays, own, variables, notes)


def _beside(plan: SetupPlan) -> WrittenFile:
    urls = ",".join(map(_from_container, _running(plan)))
    variables = [("The vLLM that runs already, as containers see it.", "SEAMARK_WORKER", urls)]
    notes = [
        "vLLM has to listen where containers reach it: --host 172.17.0.1 (docker0), or 0.0.0.0 behind a firewall",
        *_STILL_WITHOUT_PLUGIN,
    ]
    return _compose_files(plan, ["compose.yaml", "compose.beside.yaml"], {}, variables, notes)


def _compose_files(
    plan: SetupPlan,
    overlays: Sequence[str],
    own: Mapping[str, str],
    variables: Sequence[tuple[str, str, str]],
    notes: Sequence[str],
) -> WrittenFile:
    deploy = _source(plan) / "deploy"
    paths = [str(deploy / name) for name in overlays]
    paths += [str(plan.out / name) for name in own if name.startswith("compose.")]
    chosen = "".join(f"# {why}\n{name}={value}\n" for why, name, value in variables)
    given = " \\\n    ".join(f"-f {shlex.quote(path)}" for path in paths)
    files = {
        "seamark.env": f"""\
# What Compose puts into its files; {deploy}/.env.example has every other variable and its default.
{chosen}# monitoring: Prometheus and Grafana as well; empty: neither.
COMPOSE_PROFILES=monitoring
# What would be saved, and nothing changed: true.
SEAMARK_SHADOW=false
""",
        "compose.sh": f"""\
#!/bin/sh
# docker compose (2.24 or newer) with Seamark's own files, which stay where they are, and the variables of seamark.env.
set -eu
exec docker compose --env-file {shlex.quote(str(plan.out / "seamark.env"))} \\
    {given} "$@"
""",
        **own,
    }
    script = _sh(plan, "compose.sh")
    go_on = (f"{script} up --build -d", f"{script} logs -f gateway")
    off = [f"{script} down      # down -v: with downloaded models and all else it keeps"]
    return WrittenFile(files, go_on, off, notes)


def _own_model(plan: SetupPlan) -> str:
    models = json.dumps(str(plan.out / "models").replace("$", "$$"))
    return f"""\
# The worker reads its model from this folder's models/.
services:
  worker:
    volumes:
      - type: bind
        source: {models}
        target: /etc/seamark/models
        read_only: true
        bind: {{selinux: z}}
"""


def _spark(plan: SetupPlan) -> WrittenFile:
    source = _source(plan)
    model = _wanted_model(plan)
    recipes = source / "deploy/spark-vllm-docker/recipes"
    shipped = {path.stem: path.read_text() for path in recipes.glob("*.yaml")}
    # Of several recipes for one model the shorter name is the plainer.
    of_model = [name for name, text in shipped.items() if f"\nmodel: {model}\n" in text or name == f"seamark-{model}"]
    recipe = min(of_model, key=len, default="seamark-" + re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()))
    text = shipped.get(recipe) or _recipe(recipe, model)
    solo = "" if "\ncluster_only: true\n" in text else " --solo"
    files = {
        "seamark.toml": gateway_toml(plan.workers),
        GATEWAY: gateway_script(plan.out),
        f"{recipe}.yaml": text.replace(f"  - {MOD}\n", f"  - {json.dumps(str(plan.out / MOD))}\n"),
        "start.sh": f"""\
#!/bin/sh
# Makes the mod with Seamark's plugin in this folder, and has spark-vllm-docker start the recipe with it.
set -eu
{make_mod(source, plan.out)}
cd {shlex.quote(str(spark_checkout(plan.spark)))}
exec ./run-recipe.sh {shlex.quote(str(plan.out / recipe))}.yaml{solo}
""",
    }
    off = [
        "Ctrl-C ends the gateway; point clients at vLLM again",
        f"nothing was put anywhere but into {plan.out}",
    ]
    return WrittenFile(files, (_sh(plan, "start.sh"), _sh(plan, GATEWAY)), off)


def _recipe(recipe: str, model: str) -> str:
    needed = " \\\n".join(f"    {flag}" for flag in NEEDED)
    return f"""\
# A recipe of spark-vllm-docker: ./run-recipe.sh {recipe} --solo
# The last four flags are those by which Seamark's gateway sees and explains hits; add your model's own.
# Beside --speculative-config hints are on trial at each start.
recipe_version: "1"
name: {json.dumps("Seamark " + model)}
description: vLLM with Seamark's plugin
model: {json.dumps(model)}
container: vllm-node
solo_only: true
mods:
  - mods/seamark
defaults:
  port: {DEFAULT_PORT}
  host: 127.0.0.1 # the container has the network of the machine, and vLLM asks nobody for a key
  gpu_memory_utilization: 0.8 # memory is unified: more can hang the machine
command: |
  vllm serve {shlex.quote(model)} \\
    --host {{host}} \\
    --port {{port}} \\
    --gpu-memory-utilization {{gpu_memory_utilization}} \\
{needed}
"""


def _systemd(plan: SetupPlan) -> WrittenFile:
    workers = ",".join(_running(plan))
    source = _source(plan)
    unit = "seamark-gateway.service"
    here, root = (shlex.quote(str(path)) for path in (plan.out, source))
    files = {
        unit: (source / "deploy/systemd" / unit).read_text(),
        "seamark.env": f"""\
# Settings of the gateway; {source}/deploy/.env.example has every other one and its default.
# No quotes, and no comment behind a value: systemd reads this file.
SEAMARK_WORKER={workers}
# What would be saved, and nothing changed: true.
SEAMARK_SHADOW=false
""",
        "install.sh": f"""\
#!/bin/sh
# As root: the gateway into an environment of its own, its settings, its unit; then it starts.
set -eu
for each in /etc/seamark/seamark.env /etc/systemd/system/{unit}; do
    [ ! -e $each ] || cmp -s {here}/${{each##*/}} $each || {{ echo "move $each away first: another" >&2; exit 1; }}
done
python3 -m venv /opt/seamark
/opt/seamark/bin/pip install {root}
install -D -m 600 {here}/seamark.env /etc/seamark/seamark.env
install -m 644 {here}/{unit} /etc/systemd/system/
systemctl daemon-reload
systemctl enable seamark-gateway
systemctl restart seamark-gateway
""",
        "remove.sh": f"""\
#!/bin/sh
# As root: everything that install.sh did, undone. What has changed in /etc, and keys and secrets there, stay.
set -eu
systemctl disable --now seamark-gateway
for each in /etc/seamark/seamark.env /etc/systemd/system/{unit}; do
    if cmp -s {here}/${{each##*/}} $each; then rm $each; fi
done
systemctl daemon-reload
rm -rf /opt/seamark
""",
    }
    go_on = (
        f"sudo {_sh(plan, 'install.sh')}",
        f"/opt/seamark/bin/seamark doctor --worker {shlex.quote(plan.workers[0])}",
    )
    return WrittenFile(files, go_on, [f"sudo {_sh(plan, 'remove.sh')}"], _STILL_WITHOUT_PLUGIN)


def _kubernetes(plan: SetupPlan) -> WrittenFile:
    root = shlex.quote(str(_source(plan)))
    if local := [url for url in plan.workers if urlsplit(url).hostname in LOOPBACK]:
        raise SettingsError(f"--worker: in a pod {local[0]} is the pod itself; give a service or an address")
    built, notes = ["gateway"], ["kubectl -n seamark port-forward service/seamark 8080:80      # until you publish it"]
    if plan.workers:
        values = f"worker:\n  enabled: false\ngateway:\n  settings:\n    worker: {json.dumps(list(plan.workers))}\n"
    else:
        built.append("worker")
        name, text = _model_file(plan)
        model = f"modelFile: {name}\n" if text is None else "modelConfig: |\n" + indent(text, "    ")
        values = f"{_GATED_MODEL}worker:\n  replicas: {plan.machines}\n  {model}"
    prefix = plan.registry.rstrip("/") + "/" if plan.registry else ""
    if not prefix:
        notes.append("without --registry the images have to be on the nodes already")
    files = {
        "values.yaml": f"""\
# Values of the chart deploy/helm/seamark; its own values.yaml has all others, and their defaults.
images:
  registry: {json.dumps(plan.registry)}
{values}""",
        "images.sh": "#!/bin/sh\n# Builds the images"
        + (" and pushes them where your nodes find them.\n" if prefix else "; with --registry it pushes them, too.\n")
        + "set -eu\n"
        + "".join(
            f"docker build -f {root}/deploy/{half}.Dockerfile -t {prefix}seamark-{half} {root}\n"
            + (f"docker push {prefix}seamark-{half}\n" if prefix else "")
            for half in built
        ),
    }
    install = f"helm upgrade --install seamark {root}/deploy/helm/seamark --namespace seamark --create-namespace"
    go_on = (_sh(plan, "images.sh"), f"{install} --values {shlex.quote(str(plan.out / 'values.yaml'))}")
    off = [
        "helm uninstall seamark --namespace seamark",
        "kubectl delete namespace seamark      # the volumes with models, and your secrets, too",
    ]
    return WrittenFile(files, go_on, off, notes)


_GATED_MODEL = """\
# For a gated model, before Helm is run:
#   kubectl create namespace seamark
#   kubectl -n seamark create secret generic seamark-huggingface --from-literal=token=...
"""


def gateway_toml(urls: Sequence[str], host: str = "127.0.0.1") -> str:
    """The gateway's settings file. `urls`: of the workers; none: the one that is yet to be started here."""
    workers = json.dumps(list(urls) or [f"http://127.0.0.1:{DEFAULT_PORT}"])
    return f"""\
# Settings of the gateway. Every flag of `seamark serve --help` can stand here, with _ in place of -.
# vLLM servers, one or several.
worker = {workers}
# Where clients find the gateway. 0.0.0.0 opens it to the network; then give it keys (`seamark key NAME`, api_keys).
host = {json.dumps(host)}
port = 8080
# What would be saved, and nothing changed: true.
shadow = false
# A file with the API key that vLLM wants, if it wants one.
#worker_api_key_file = "/path/to/key"
"""


def gateway_script(out: Path) -> str:
    """Starts the gateway with the settings file in `out`."""
    return f"""\
#!/bin/sh
# The gateway, in the environment that wrote this file. A flag behind this script's name wins over seamark.toml.
set -eu
exec {this_python()} -m proxy.cli serve --config {shlex.quote(str(out / "seamark.toml"))} "$@"
"""


def _model_file(plan: SetupPlan) -> tuple[str, str | None]:
    """Name of vLLM's configuration file for the model, and its text unless deploy/models holds it."""
    model = _wanted_model(plan)
    # Of two files for one model the shorter name is the plainer: that of Nemotron-3-Super without MTP.
    for path in sorted((_source(plan) / "deploy/models").glob("*.yaml"), key=lambda path: len(path.name)):
        if model in (path.name, path.stem) or f"\nmodel: {model}\n" in path.read_text():
            return path.name, None
    return (
        "model.yaml",
        f"""\
# vLLM's own configuration: any flag of `vllm serve`, without its dashes.
model: {json.dumps(model)}
# On a Spark memory is unified: more can hang the machine.
gpu-memory-utilization: 0.8
""",
    )


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _from_container(url: str) -> str:
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK:
        return url
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit(parts._replace(netloc=HOST_OF_CONTAINERS + port))


def _wanted_model(plan: SetupPlan) -> str:
    return plan.model or _wants("--model: which model shall vLLM serve?")


def _running(plan: SetupPlan) -> tuple[str, ...]:
    return plan.workers or _wants(f"--worker: --way {plan.way} goes before a vLLM that runs already; give its URL")


def _source(plan: SetupPlan) -> Path:
    return plan.source or _wants(f"--source: --way {plan.way} needs a checkout of Seamark; give its folder")


def _wants(what: str) -> NoReturn:
    raise SettingsError(what)


def _sh(plan: SetupPlan, script: str) -> str:
    return f"sh {shlex.quote(str(plan.out / script))}"


_STILL_WITHOUT_PLUGIN = ("hits need the plugin in that vLLM; `seamark doctor --worker URL` says whether it has it",)

_WRITERS: dict[SetupWay, Callable[[SetupPlan], WrittenFile]] = {
    SetupWay.PIP: _pip,
    SetupWay.COMPOSE: _compose,
    SetupWay.BESIDE: _beside,
    SetupWay.SPARK: _spark,
    SetupWay.SYSTEMD: _systemd,
    SetupWay.KUBERNETES: _kubernetes,
}
