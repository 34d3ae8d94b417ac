"""`make test-deploy`: the images built and the stack of compose.cpu.yaml up for real, asked, watched and torn down.

Real: the Dockerfiles, the compose files, dockerd, the generated model, vLLM on the CPU. Stand-ins, because no registry
is asked: the base images (one root file system of Debian packages), and vLLM in them (this project's .venv, mounted
read-only), so that the stage `vllm-cpu` is not built. Not here: Grafana, of which there is no package, and GPUs. Exits
with 2 if a container engine cannot run.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.deploy import story, tools
from tests.deploy.engine import Engine, machine_state, remove_cgroups, within_namespaces

PROJECT = Path(__file__).resolve().parents[2]

CACHE = PROJECT / ".cache" / "test-deploy"

CANNOT = 2


def say(text: str) -> None:
    print(f"test-deploy: {text}", flush=True)


def copy_of_project(into: Path) -> Path:
    """What git knows or would know of the project: what a clone has, and nothing of what was built in it."""
    names = tools.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=PROJECT)
    for name in filter(None, names.split("\0")):
        source, target = PROJECT / name, into / name
        if source.is_file() and not source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return into


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
    before = machine_state()
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
        status = within_namespaces("tests.deploy", ["--inside", str(work), str(tar)], environment)
    finally:
        # The engine's mounts ended with their namespace; what is left is files, and control groups.
        remove_cgroups(work.name)
        shutil.rmtree(work, ignore_errors=True)
    if (after := machine_state()) != before:
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
        story.tell(engine, work / "project", tar, say)
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
        return CANNOT
    except (AssertionError, tools.Failed) as error:
        say(f"WRONG: {error}")
        return 1


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(sys.argv[1:]))
