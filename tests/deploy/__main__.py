"""`make test-deploy`: the images built and the stack of compose.cpu.yaml up for real, asked, watched and torn down.

Real: the Dockerfiles, the compose files, dockerd, the generated model, vLLM on the CPU. Stand-ins, because no registry
is asked: the base images (one root file system of Debian packages), and vLLM in them (this project's .venv, mounted
read-only), so that the stage `vllm-cpu` is not built. Not here: Grafana, of which there is no package, and GPUs. Exits
with 2 if a container engine cannot run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.deploy import tools
from tests.deploy.compose_files import BASE, EVERY_WAY, OF_THE_USER, example
from tests.deploy.tools import Engine, compose, run
from tests.harness.waiting import wait_for

PROJECT = Path(__file__).resolve().parents[2]

CACHE = PROJECT / ".cache" / "test-deploy"


def say(text: str) -> None:
    print(f"test-deploy: {text}", flush=True)


def copy_of_project(into: Path) -> Path:
    """What git knows or would know of the project: what a clone has, and nothing of what was built in it."""
    names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=PROJECT)
    for name in filter(None, names.split("\0")):
        source, target = PROJECT / name, into / name
        if source.is_file() and not source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return into


GATEWAY, PAGES, PROMETHEUS = "http://127.0.0.1:8080", "http://127.0.0.1:8081", "http://127.0.0.1:9090"

GATEWAY_IMAGE, WORKER_IMAGE, PLUGIN_IMAGE = "seamark-gateway", "seamark-worker-cpu", "seamark-plugin"

SYSTEM = "You keep the log of a lighthouse. " * 60

# Base images, all of one root file system, as the compose files name them.
STAND_INS = {
    "python:3.12-slim": "",
    "redis:7": "",
    "prom/prometheus:v3.5.0": (
        'RUN mkdir /prometheus && chown 65534:65534 /prometheus\nUSER 65534\nENTRYPOINT ["/usr/bin/prometheus"]\n'
    ),
    # Where `stand-ins.yaml` mounts it, this Python finds vLLM.
    "vllm-stand-in": "RUN echo /opt/vllm > /usr/lib/python3/dist-packages/vllm.pth\n",
}


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int  # 0: no connection
    headers: dict[str, str]
    body: bytes


def ask(url: str, body: Any = None) -> Answer:
    """GET, or POST if there is a body. Any status is an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())
    except (OSError, urllib.error.URLError):
        return Answer(0, {}, b"")


def chat(question: str) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    asked = {"model": "generated", "messages": messages, "max_tokens": 4, "temperature": 0}
    return ask(f"{GATEWAY}/v1/chat/completions", asked)


def tell(engine: Engine, project: Path, tar: Path) -> None:
    """Raises `AssertionError` at the first claim that does not hold."""
    deploy = project / "deploy"
    (deploy / ".env").write_text((deploy / ".env.example").read_text())

    def composed(*files: str | Path, **variables: str) -> Callable[..., str]:
        words = ["docker", "compose", "--project-directory", deploy]
        return compose(engine, [*words, *(word for file in files for word in ("--file", deploy / file))], variables)

    everything = example() | OF_THE_USER  # so that all of it is interpolated
    everything = {name: value for name, value in everything.items() if value and not name.startswith("COMPOSE_")}
    for files in EVERY_WAY:
        # A profile that is not named goes unchecked.
        composed(*files, **everything)("--profile", "*", "config", "--quiet")
    say(f"compose takes all {len(EVERY_WAY)} sets of files, with every profile")

    engine.docker("import", tar, "debian-stand-in")
    for name, lines in STAND_INS.items():
        engine.docker("build", "--quiet", "--tag", name, "-", input=f"FROM debian-stand-in\n{lines}")
    overlay = project / "tests" / "deploy" / "stand-ins.yaml"
    stack = composed(BASE, "compose.cpu.yaml", overlay, CPU_VLLM_IMAGE="vllm-stand-in", PIP_NO_INDEX="1")
    stack("build")
    say("the images of the gateway and the worker are built, without a network")
    _look_into_the_images(engine)
    _images_of_the_wheel(engine, project)

    _the_mod_installs_into_a_plain_container(engine, project)
    say("the mod for spark-vllm-docker installs into a container without a network")

    # Without --wait, as a user would: the gateway has to do without the worker for a while.
    stack("up", "--detach", "--no-build", "worker", "gateway", "redis", "prometheus")  # all but Grafana
    try:
        _the_gateway_does_not_wait_for_the_worker()
        wait_for(lambda: ask(f"{GATEWAY}/ready").status == 200, 1200)
        _containers_are_as_confined_as_they_say(stack)
        cached = _the_second_chat_hits()
        _the_live_page_shows_it()
        _prometheus_sees_it(cached)
        wait_for(lambda: _unhealthy(stack) == [], 300)
    except BaseException:
        print(stack("logs", "--no-color", "--tail", "40"), flush=True)
        raise
    stack("--profile", "*", "down", "--volumes", "--timeout", "20")
    assert engine.docker("ps", "--all", "--quiet").split() == [], "containers are left"
    assert engine.docker("volume", "ls", "--quiet").split() == [], "volumes are left"
    say("down, no container and no volume left")


def _look_into_the_images(engine: Engine) -> None:
    """Each holds its half of the project, and the gateway's no torch."""
    within = ["run", "--rm", "--network", "none", "--entrypoint", "python3"]
    engine.docker(*within, "seamark-gateway", "-c", "import proxy.server.app")
    for module in ("engine_patches", "torch", "vllm", "pip"):
        engine.fails(*within, "seamark-gateway", "-c", f"import {module}")
    engine.docker(*within, "seamark-worker-cpu", "-c", "import engine_patches.plugin")
    engine.fails(*within, "seamark-worker-cpu", "-c", "import proxy")
    user = engine.docker("image", "inspect", "--format", "{{.Config.User}}", "seamark-gateway").strip()
    assert user == "65532:65532", f"the gateway's image runs as {user!r}"


def _images_of_the_wheel(engine: Engine, project: Path) -> None:
    """The images that a release makes, of the wheel: they take the names of those of the source, which end here."""
    (wheel,) = (project / "deploy" / "wheels").glob("vllm_seamark-*.whl")
    version = wheel.name.split("-")[1]
    for image, file, extra, options in (
        (GATEWAY_IMAGE, "gateway", "[tracing]", ()),
        (WORKER_IMAGE, "worker", "", ("--build-arg", "VLLM_IMAGE=vllm-stand-in")),
        (PLUGIN_IMAGE, "worker", "", ("--target", "wheel")),
    ):
        given = ("--build-arg", f"SEAMARK=vllm-seamark{extra}=={version}", "--build-arg", "PIP_NO_INDEX=1", *options)
        engine.docker("build", "--file", project / f"deploy/{file}.Dockerfile", "--tag", image, *given, project)
        inside = _sbom(engine, project, image)
        assert inside.get("vllm-seamark") == version, f"{image}: {inside}"
        assert not inside.keys() & {"pytest", "torch", "vllm"}, f"{image}: {inside}"
    for image in (GATEWAY_IMAGE, WORKER_IMAGE):
        engine.docker(*_within(image), "-c", "import proxy, engine_patches")
        engine.fails(*_within(image), "-c", "import tests")
    say("those of the wheel hold it and no tests")


def _within(image: str) -> list[str]:
    """`docker run` of an image's Python with no more rights than it needs."""
    confined = ["--network", "none", "--read-only", "--cap-drop", "ALL", "--user", "65532:65532"]
    return ["run", "--rm", *confined, "--entrypoint", "python3", image]


def _sbom(engine: Engine, project: Path, image: str) -> dict[str, str]:
    """Versions by distribution, of the SBOM that a release attaches."""
    script = [project / "deploy" / "sbom.sh", image, project.parent / "sbom-tools"]
    sbom = json.loads(run(["sh", *script], env={**os.environ, **engine.variables}))
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6"), sbom
    assert "cyclonedx-bom" not in {each["name"] for each in sbom["components"]}, "the SBOM has what made it"
    return {each["name"]: each["version"] for each in sbom["components"]}


def _the_mod_installs_into_a_plain_container(engine: Engine, project: Path) -> None:
    checkout = project.parent / "spark-vllm-docker"
    for folder in ("mods", "recipes"):
        (checkout / folder).mkdir(parents=True)
    script = project / "deploy" / "spark-vllm-docker" / "make-mod.sh"
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "deploy" / "wheels")}
    run(["bash", script, checkout], env={**os.environ, **pip})
    mod = f"{checkout}/mods/seamark:/mods/seamark:ro"
    install = "/mods/seamark/run.sh && cd / && python3 -c 'import engine_patches.plugin'"
    engine.docker("run", "--rm", "--network", "none", "--volume", mod, "vllm-stand-in", "bash", "-c", install)


def _the_gateway_does_not_wait_for_the_worker() -> None:
    wait_for(lambda: ask(f"{GATEWAY}/health").status == 200)
    early = chat("Is anybody there?")
    assert early.status == 503 and "retry-after" in early.headers, f"before the worker was ready: {early}"
    say("before a worker is ready: the gateway is healthy, /v1 answers 503 with Retry-After")


def _containers_are_as_confined_as_they_say(stack: Callable[..., str]) -> None:
    for service in ("gateway", "worker"):
        written = stack("exec", "-T", service, "python3", "-c", _TRY_TO_WRITE).strip()
        assert written == "/tmp", f"the {service} can write to {written!r}, not to /tmp alone"
        status = stack("exec", "-T", service, "cat", "/proc/1/status")
        process = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        assert (
            process["CapBnd"].strip() == "0" * 16
            and process["NoNewPrivs"].strip() == "1"
            and process["Uid"].split()[0] == "65532"
        ), f"{service}: {status}"


_TRY_TO_WRITE = """
import pathlib, sys
def writable(folder):
    try:
        (pathlib.Path(folder) / "probe").write_text("x")
    except OSError:
        return False
    return True
folders = ("/", "/opt/seamark", "/etc/seamark", "/model", "/var/tmp", "/tmp")
print(",".join(folder for folder in folders if writable(folder)))
"""


def _the_second_chat_hits() -> int:
    """Tokens from the cache."""
    first, second = chat("What was seen at dawn?"), chat("Who came ashore last night?")
    cached = [int(answer.headers.get("x-seamark-cached", -1)) for answer in (first, second)]
    assert (first.status, second.status) == (200, 200), f"{first} {second}"
    assert cached[0] == 0 and cached[1] > 0, f"x-seamark-cached is {cached}"
    say(f"the second chat hits: x-seamark-cached {cached[1]}")
    return cached[1]


def _the_live_page_shows_it() -> None:
    page, live = ask(f"{PAGES}/ui"), json.loads(ask(f"{PAGES}/seamark/live").body)
    assert page.status == 200 and b"<title>Seamark</title>" in page.body, f"{page}"
    assert live["alarms"] == [] and live["sums"]["hour"]["delivered"] > 0, f"{live}"
    assert ask(f"{GATEWAY}/ui").status == 404, "the gateway's pages are where its API is"
    say("the live page shows it, on the port of its own")


def _prometheus_sees_it(cached: int) -> None:
    """`cached`: tokens of all prompts so far that came from the worker's cache."""
    seen = {}
    for query in (
        'up{job="seamark-gateway"}',
        'up{job="seamark-worker"}',
        "sum(seamark_cached_tokens_total)",
        "sum(seamark_checkpoints_written_total)",
        "seamark_worker_up",
        "seamark_engine_patched",
        "seamark_redis_up",
    ):
        wait_for(lambda query=query: _value(query) > 0, 60)
        seen[query] = _value(query)
    counted = seen["sum(seamark_cached_tokens_total)"]
    assert counted == cached, f"counted {counted} tokens from the cache, and the answers say {cached}"
    say(f"Prometheus sees gateway and worker: {seen}")
    rules = json.loads(ask(f"{PROMETHEUS}/api/v1/rules").body)["data"]["groups"]
    assert sum(len(group["rules"]) for group in rules) > 0, "Prometheus has no alert rules"


def _value(query: str) -> float:
    answer = ask(f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    result = json.loads(answer.body)["data"]["result"] if answer.status == 200 else []
    return min((float(series["value"][1]) for series in result), default=0.0)


def _unhealthy(stack: Callable[..., str]) -> list[str]:
    rows = [json.loads(line) for line in stack("ps", "--format", "json").splitlines()]
    return [row["Service"] for row in rows if row["Health"] not in ("healthy", "")]


def outside() -> int:
    """Fetch what is needed, then go on inside namespaces, and see that they left nothing behind."""
    tools.check_machine()
    suite, _ = tools.suite_and_mirror()
    CACHE.mkdir(parents=True, exist_ok=True)
    say(f"tools of Debian {suite} (kept in {CACHE.relative_to(PROJECT)})")
    try:
        tools.unpack(CACHE / suite)
        say("a root file system of Debian packages, which stands in for all base images")
        tar = tools.root_file_system(CACHE / suite, CACHE / f"{suite}.tar")
        sbom_tools = tools.sbom_tools(CACHE / tools.SBOM_PROGRAM)
    except tools.Failed as error:
        raise tools.Unavailable(str(error)) from None
    # On a disk and not on another engine's overlay; a short path, because a socket's has to be.
    work = Path(tempfile.mkdtemp(prefix="seamark-deploy-", dir="/var/tmp"))
    before = tools.machine_state()
    try:
        project = copy_of_project(work / "project")
        say("wheels for the gateway's image, at the locked versions")
        tools.wheels(project, project / "deploy" / "wheels")
        shutil.copytree(sbom_tools, work / "sbom-tools")
        environment = {
            **tools.environment(CACHE / suite),
            "PYTHONPATH": str(project),
            "SITE_PACKAGES": sysconfig.get_path("purelib"),
            "DOCKER_BUILDKIT": "1",
            "BUILDKIT_PROGRESS": "plain",
        }
        status = tools.within_namespaces("tests.deploy", ["--inside", str(work), str(tar)], environment)
    finally:
        # The engine's mounts ended with their namespace; what is left is files, and control groups.
        tools.remove_cgroups(work.name)
        shutil.rmtree(work, ignore_errors=True)
    if (after := tools.machine_state()) != before:
        say(f"WRONG: this machine's network was {before} and is {after}")
        return 1
    say("torn down; forwarding, interfaces, routes and firewall tables are as they were")
    return status


def inside(work: Path, tar: Path) -> int:
    """The story, on a container engine that nobody else sees."""
    engine = Engine(work)
    try:
        engine.start()
        say("dockerd runs")
        tell(engine, work / "project", tar)
    finally:
        engine.stop()
    return 0


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["--inside"]:
            return inside(Path(arguments[1]), Path(arguments[2]))
        return outside()
    except tools.Unavailable as error:
        say(f"no container engine here, nothing was tested: {error}")
        return 2
    except (AssertionError, TimeoutError, tools.Failed) as error:
        say(f"WRONG: {error}")
        return 1


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(sys.argv[1:]))
