"""What the test of the containers needs and a plain Debian has not: fetched from its mirror, unpacked, not installed;
and a container engine of its own, in namespaces of its own.

Nothing outside the given folder changes. Everything that needs a network happens here; the containers have none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ENGINE_PACKAGES = ("docker.io", "iptables", "iproute2", "mmdebstrap")

# Debian 12's own Compose is 1.29, which knows neither `name:` nor profiles as they are used today.
PLUGINS = ("docker-compose", "docker-buildx")

PLUGINS_SUITE = "trixie"

# The packages of one root file system that stands in for every base image.
ROOT_PACKAGES = ("python3", "python3-venv", "python3-pip", "libnuma1", "libgomp1", "redis-server", "prometheus")

SBOM_PROGRAM = "cyclonedx-bom==7.5.0"  # as release.yml installs it


class Failed(Exception):
    """A command failed; the text has the end of its complaint."""


class Unavailable(Exception):
    """No container engine can be had here; the text says why."""


def run(command: Sequence[str | Path], **options) -> str:
    """Standard output of a command. Raises `Failed`."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode:
        complaint = (done.stdout + done.stderr).strip()[-3000:]
        raise Failed(f"{' '.join(words)[-200:]} ended with {done.returncode}: {complaint}")
    return done.stdout


def check_machine() -> None:
    """Raises `Unavailable` if this machine cannot do it."""
    if sys.platform != "linux":
        raise Unavailable("needed is Linux")
    if os.geteuid() != 0:
        raise Unavailable("a container engine of its own, and its network, need root")
    for command in ("apt-get", "dpkg-deb", "unshare"):
        if shutil.which(command) is None:
            raise Unavailable(f"there is no {command}: this is no Debian")
    if not os.access("/sys/fs/cgroup", os.W_OK):
        raise Unavailable("/sys/fs/cgroup cannot be written")
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"]).returncode:
        raise Unavailable("no namespaces of its own are allowed here")


def suite_and_mirror() -> tuple[str, str]:
    """Debian's suite on this machine and the mirror it is set to use."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = release.get("VERSION_CODENAME", "").strip('"')
    targets = run(["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"])
    for target in targets.splitlines():
        name, _, uri = target.partition(" ")
        if name == suite:
            return suite, uri.rstrip("/")
    raise Unavailable(f"apt knows no mirror of Debian {suite!r}")


def unpack(into: Path) -> Path:
    """The engine's programs under `into`, with Compose and Buildx as plugins of its client. Returns their root."""
    root = into / "root"
    if (into / "complete").exists():
        return root
    shutil.rmtree(into, ignore_errors=True)
    packages = into / "packages"
    packages.mkdir(parents=True)
    suite, mirror = suite_and_mirror()
    flags = _apt(suite, mirror, into / "apt" / suite)
    # Whatever of it this machine has not, dependencies included.
    planned = run(["apt-get", *flags, "--simulate", "--no-install-recommends", "install", *ENGINE_PACKAGES])
    missing = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
    if missing:
        run(["apt-get", *flags, "download", *missing], cwd=packages)
    flags = _apt(PLUGINS_SUITE, mirror, into / "apt" / PLUGINS_SUITE)
    run(["apt-get", *flags, "download", *PLUGINS], cwd=packages)
    for package in sorted(packages.glob("*.deb")):
        run(["dpkg-deb", "--extract", package, root])
    for name in ("iptables", "ip6tables"):
        # Debian lets the machine choose when it installs; nothing is installed here.
        if (root / "usr/sbin" / f"{name}-nft").is_symlink():
            (root / "usr/sbin" / name).symlink_to(f"{name}-nft")
    plugins = into / "client" / "cli-plugins"
    plugins.mkdir(parents=True)
    for name in PLUGINS:
        found = [path for path in root.rglob(name) if path.is_file() and os.access(path, os.X_OK)]
        if not found:
            raise Unavailable(f"Debian's package of {name} holds no program of that name")
        (plugins / name).symlink_to(os.path.relpath(found[0], plugins))  # the folder may be moved
    shutil.rmtree(packages)
    shutil.rmtree(into / "apt")
    (into / "complete").touch()
    return root


def _apt(suite: str, mirror: str, state: Path) -> list[str]:
    """Options by which apt knows that suite alone, in lists of its own: the machine's stay as they are."""
    for folder in ("lists/partial", "cache/archives/partial", "preferences.d", "sources.list.d"):
        (state / folder).mkdir(parents=True)
    (state / "sources.list").write_text(f"deb {mirror} {suite} main\n")
    options = {
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": state / "sources.list.d",
        "Dir::Etc::PreferencesParts": state / "preferences.d",
        "Dir::State::Lists": state / "lists",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    run(["apt-get", *flags, "--quiet", "update"])
    return flags


def environment(tools: Path) -> dict[str, str]:
    """The environment in which the unpacked programs find each other."""
    root = tools / "root"
    libraries = [*root.glob("usr/lib/*-linux-gnu"), *root.glob("lib/*-linux-gnu")]
    programs = [root / folder for folder in ("usr/local/sbin", "usr/sbin", "usr/bin", "sbin", "bin")]
    return {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "XTABLES_LIBDIR": str(next((path / "xtables" for path in libraries if (path / "xtables").is_dir()), "")),
        "DOCKER_CONFIG": str(tools / "client"),
    }


def root_file_system(tools: Path, target: Path) -> Path:
    """A tar file of Debian with `ROOT_PACKAGES`, made once."""
    if not target.exists():
        suite, mirror = suite_and_mirror()
        partial = target.with_name("partial.tar")
        command = ["mmdebstrap", "--variant=minbase", "--mode=root", f"--include={','.join(ROOT_PACKAGES)}"]
        run([*command, suite, partial, mirror], env=environment(tools))
        partial.rename(target)
    return target


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def wheels(project: Path, into: Path) -> None:
    """Fetch what the gateway stands on, and what builds it, at the locked versions, and make Seamark's own."""
    with (project / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)
    names = [*needed["project"]["dependencies"], *needed["project"]["optional-dependencies"]["tracing"]]
    names += [*needed["build-system"]["requires"], "wheel"]
    names.append("async-timeout")  # redis asks for it on a Python older than 3.11.3, such as Debian 12's
    lock = project / "requirements.lock"
    run([*PIP, "download", "--only-binary", ":all:", "--dest", into, "--constraint", lock, *names])
    run([*PIP, "wheel", "--no-deps", "--wheel-dir", into, project])


def sbom_tools(into: Path) -> Path:
    """The folder with what `deploy/sbom.sh` needs, made once. Its Python is this one's version, as the images' is."""
    if not into.exists():
        partial = into.with_name("partial-sbom")
        shutil.rmtree(partial, ignore_errors=True)
        run([*PIP, "install", "--target", partial, SBOM_PROGRAM])
        partial.rename(into)
    return into


START_SECONDS = 300.0

# What the namespaces keep from the machine, looked at before and after.
WATCHED = ("/proc/sys/net/ipv4/ip_forward", "/proc/net/dev", "/proc/net/route", "/proc/net/ip_tables_names")


def machine_state() -> dict[str, object]:
    """What a container engine would change of this machine: forwarding, interfaces, routes, firewall tables."""
    state: dict[str, object] = {}
    for name in WATCHED:
        path = Path(name)
        lines = path.read_text().splitlines() if path.exists() else []
        state[name] = sorted(line.split(":")[0].strip() if name.endswith("dev") else line for line in lines)
    state["cgroups"] = sorted(str(group) for root in _cgroup_roots() for group in root.glob("seamark-deploy-*"))
    return state


def _cgroup_roots() -> list[Path]:
    """Where hierarchies of control groups begin: one place, or one for each controller."""
    top = Path("/sys/fs/cgroup")
    return [top, *(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())]


def remove_cgroups(name: str) -> None:
    """Control groups are no part of a namespace, and a daemon leaves them behind, empty."""
    for group in (root / name for root in _cgroup_roots()):
        if group.is_dir():
            for inner in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                inner.rmdir()
            group.rmdir()


def within_namespaces(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `python -m module arguments` with its own network, mounts and process ids; all of it ends when that does."""
    spaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.run([*spaces, sys.executable, "-m", module, *arguments], env=dict(environment)).returncode


class Engine:
    """A dockerd and its client. Only inside the namespaces of `within_namespaces`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = f"unix://{folder}/docker.sock"
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises `Unavailable` with the end of its log if it does not come up."""
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        log = self._folder / "dockerd.log"
        command = ["dockerd", "--host", self._host, "--pidfile", str(self._folder / "docker.pid")]
        command += ["--cgroup-parent", f"/{self._folder.name}"]
        command += ["--data-root", str(self._folder / "data"), "--exec-root", str(self._folder / "exec")]
        with log.open("wb") as output:
            self._daemon = subprocess.Popen(command, stdout=output, stderr=output)
        end = time.monotonic() + START_SECONDS
        while subprocess.run(self._docker("version"), capture_output=True).returncode:
            if self._daemon.poll() is not None or time.monotonic() > end:
                raise Unavailable(f"dockerd does not run here: {log.read_text(errors='replace')[-900:]}")
            time.sleep(0.3)

    def stop(self) -> None:
        """End the daemon and wait for it."""
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(300)

    def _docker(self, *words: str | Path) -> list[str]:
        return ["docker", "--host", self._host, *map(str, words)]

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment in which a client asks this engine."""
        return {"DOCKER_HOST": self._host}

    def docker(self, *words: str | Path, **options) -> str:
        """Output of a command of the client. Raises `Failed`."""
        return run(self._docker(*words), **options)

    def fails(self, *words: str | Path) -> str:
        """The complaint of a command that has to fail. Raises `AssertionError` if it succeeds."""
        done = subprocess.run(self._docker(*words), capture_output=True, text=True)
        assert done.returncode, f"it should have failed: {' '.join(map(str, words))}"
        return done.stderr + done.stdout


def compose(engine: Engine, words: Sequence[str | Path], environment: Mapping[str, str] = {}) -> Callable[..., str]:
    """What runs Compose by `words` with more words behind, and returns its output. That raises `Failed`."""
    known = {**os.environ, **engine.variables, **environment}
    return lambda *more: run([*words, *more], env=known)
