"""Stand-ins for the programs that start a vLLM: each notes what it is told, and goes on as the real one would.

`stand_ins.py PROGRAM WORDS...`, which tests/harness/setups.py puts in the programs' places. A container's command, a
unit's and a recipe's are run here, so that at the end of each way stands the `vllm` that notes its words.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

NOTES, STATE = "/var/stand-ins/notes", Path("/var/stand-ins")
PROGRAMS = (
    "docker podman vllm systemctl sudo pip pip3 uv conda python python3 nvidia-smi curl wget sleep pgrep pkill killall "
    "journalctl huggingface-cli hf"
).split()
_PLAIN = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
_NOT_TOLD = ("PATH", "HOME", "USER", "LANG", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE", "STAND_IN")
_SWITCHES = "rm init detach interactive tty privileged read-only publish-all quiet no-healthcheck".split()
_WORKER = ["python3", "-m", "engine_patches", "worker"]


def note(**told: Any) -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    with Path(NOTES).open("a") as notes:
        notes.write(json.dumps(told) + "\n")


def play(program: str, words: list[str]) -> int:
    match [program, *words]:
        case ["sudo", *_]:
            while words[0].startswith("-"):
                del words[: 2 if words[0] in ("-u", "-g", "-p") else 1]
            os.execvp(words[0], words)
        case ["conda" | "uv", "run", *rest]:
            while rest[0].startswith("-"):
                del rest[: 2 if rest[0] in ("-n", "--with", "-p") else 1]
            os.execvp(rest[0], rest)
        case ["docker" | "podman", "compose", *rest]:
            return compose(rest)
        case ["docker" | "podman", *_]:
            return docker(words)
        case ["systemctl", *_]:
            return systemctl([word for word in words if not word.startswith("-") or word == "--now"])
        case ["run-recipe.sh", *_]:
            return recipe(words)
        case ["launch-cluster.sh", *_]:
            note(launcher=words)
            return started(words[words.index("exec") + 1 :], dict(os.environ)) if "exec" in words else 0
        case ["vllm", "serve", *rest]:
            return vllm(rest)
        case ["python" | "python3", "-m", "vllm.entrypoints.openai.api_server", *rest]:
            return vllm(rest)
        case ["python" | "python3", "-m", "engine_patches", "worker", *rest]:
            return vllm(rest)
        case ["python" | "python3", "-m", "proxy.cli", *rest]:
            note(gateway=rest)
        case ["python" | "python3", "-m", "pip" | "venv", *_] | ["pip" | "pip3" | "uv", *_]:
            note(installs=[program, *words])
            if "wheel" in words:
                (Path(words[words.index("--wheel-dir") + 1]) / "vllm_seamark-0-py3-none-any.whl").touch()
        case ["python" | "python3", "-c", "import engine_patches"]:
            pass  # the plugin has been installed, as the note says
        case ["python" | "python3", *_]:
            os.execv(sys.executable, [program, *words])
        case ["nvidia-smi", *_]:
            print("| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |")
        case ["pgrep", *_]:
            print(1)
        case _:
            note(program=[program, *words])
    return 0


def vllm(words: list[str]) -> int:
    if "--config" in words:  # a file's fields, as if they were flags
        at = words.index("--config")
        text = Path(words[at + 1]).read_text() if os.path.exists(words[at + 1]) else ""
        fields = [part for k, v in sorted((yaml.safe_load(text) or {}).items()) for part in (f"--{k}", str(v))]
        words = [*words[:at], *(fields or words[at : at + 2]), *words[at + 2 :]]
    told = json.loads(os.environ.get("STAND_IN", "{}"))
    note(vllm=words, env={k: v for k, v in os.environ.items() if k not in _NOT_TOLD}, **told)
    print("Application startup complete")
    return 0


def started(words: list[str], environment: Mapping[str, str], **told: Any) -> int:
    """A command inside of something, which `told` is about."""
    variables = {**_PLAIN, **environment, "STAND_IN": json.dumps(told)}
    try:
        return subprocess.run(words, env=variables, check=False).returncode
    except OSError:  # the image's own entrypoint, which is not known
        note(vllm=words, env=dict(environment), **told)
        return 0


def docker(words: list[str]) -> int:
    words = words[1:] if words[:1] in (["container"], ["image"]) and words[1:2] != ["inspect"] else words
    match words:
        case ["run" | "create", *rest]:
            return docker_run(rest)
        case ["build", *rest]:
            (STATE / "images").mkdir(parents=True, exist_ok=True)
            values = dict(zip(rest, rest[1:], strict=False))
            base = next((word.partition("=")[2] for word in rest if word.startswith("VLLM_IMAGE=")), "")
            (STATE / "images" / values.get("-t", "none").replace("/", "_")).write_text(base)
            note(build=rest)
        case ["ps", *rest]:
            wanted = [word.partition("label=")[2] for word in rest if word.startswith("label=")]
            for path in sorted((STATE / "containers").glob("*")):
                if all(label in path.read_text() for label in wanted):
                    print(path.name)
        case ["rm" | "rmi", *rest]:
            for name in rest:
                for kind in ("containers", "images"):
                    (STATE / kind / name.replace("/", "_")).unlink(missing_ok=True)
        case ["inspect", *_] | ["image", "inspect", *_]:
            return 1
        case _:
            note(docker=words)
    return 0


def docker_run(words: list[str]) -> int:
    at, options, environment, entrypoint, labels = 0, [], {}, None, []
    name = "unnamed"
    while words[at].startswith("-"):
        option, equals, value = words[at].partition("=")
        long = option.startswith("--")
        if not equals and (option[2:] not in _SWITCHES if long else len(option[1:].lstrip("ditPq")) == 1):
            at, value = at + 1, words[at + 1]
        elif not long and len(option[1:].lstrip("ditPq")) > 1:
            option, value = option[:2], words[at][2:]
        at += 1
        match option:
            case "-e" | "--env":
                key, given, told = value.partition("=")
                environment |= {key: told} if given else {key: os.environ[key]} if key in os.environ else {}
            case "--entrypoint":
                entrypoint = [value] if value else []
            case "--label":
                labels.append(value)
            case "--name":
                name = value
        if option not in ("--entrypoint", "--label"):
            options += [option, value] if value else [option]
    return container(name, words[at], entrypoint, words[at + 1 :], environment, options, labels)


def container(
    name: str, image: str, entrypoint: list[str] | None, command: list[str], environment: Mapping[str, str],
    options: object, labels: list[str],
) -> int:  # fmt: skip
    (STATE / "containers").mkdir(parents=True, exist_ok=True)
    (STATE / "containers" / name.replace("/", "_")).write_text(json.dumps(labels))
    built = STATE / "images" / image.replace("/", "_")
    own = "vllm-openai" in image or "vllm_openai" in image
    if built.exists():
        image, default = built.read_text(), _WORKER
    else:
        default = ["vllm", "serve"] if own else []
    whole = [*(default if entrypoint is None else entrypoint), *command]
    return started(whole, environment, image=image, options=options) if whole else 0


class _Tagged(yaml.SafeLoader):
    """Compose's two tags, as what they make of the value."""


_Tagged.add_constructor("!reset", lambda loader, node: "!reset")
_Tagged.add_multi_constructor("!override", lambda loader, _, node: ("!override", _value(loader, node)))


def _value(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else node.value


def merged(under: Any, over: Any, name: str = "") -> Any:
    """As Compose merges a file over another."""
    if isinstance(over, tuple):
        return over[1]
    if name in ("environment", "labels"):
        under, over = (dict(each.partition("=")[::2] for each in value) if isinstance(value, list) else value or {}
                       for value in (under, over))  # fmt: skip
    if isinstance(under, dict) and isinstance(over, dict):
        both = {k: merged(under[k], v, k) if k in under else v for k, v in over.items()}
        return {k: v for k, v in {**under, **both}.items() if v != "!reset"}
    if isinstance(under, list) and isinstance(over, list) and name not in ("command", "entrypoint"):
        return [*under, *(each for each in over if each not in under)]
    return over


_VARIABLE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)(?:(:?[-+?])((?:[^{}]|\$\{[^{}]*\})*))?\})")


def filled(value: Any, known: Mapping[str, str]) -> Any:
    """As Compose fills variables in."""
    if isinstance(value, dict):
        return {k: filled(v, known) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(each, known) for each in value]

    def one(found: re.Match[str]) -> str:
        name, sign, other = found[1] or found[2], found[3] or "", filled(found[4] or "", known)
        if name is None:
            return "$"
        there = known.get(name, "") != "" if ":" in sign else name in known
        if "?" in sign and not there:
            sys.exit(f"required variable {name} is missing a value: {other}")
        return (
            (other if there else "") if "+" in sign else known[name] if there or not sign and name in known else other
        )

    return _VARIABLE.sub(one, value) if isinstance(value, str) else value


def compose(words: list[str]) -> int:
    files, profiles, known = [], [], {}
    while words and words[0].startswith("-"):
        option, value = words.pop(0), words.pop(0)
        {"-f": files, "--profile": profiles}.get(option, []).append(value)
    files = (
        files or [each for each in ("compose.yaml", "compose.yml", "docker-compose.yml") if os.path.exists(each)][:1]
    )
    base = Path(files[0]).resolve().parent
    if (base / ".env").exists():
        pairs = (line.split("=", 1) for line in (base / ".env").read_text().splitlines() if re.match(r"\w+=", line))
        known = {k: v.strip("\"'") for k, v in pairs}
    document: Any = {}
    for path in map(Path, files):
        text = yaml.load(path.read_text(), _Tagged)  # noqa: S506  # a safe one
        for other in text.get("include") or ():
            document = merged(document, yaml.load((path.parent / other).read_text(), _Tagged))  # noqa: S506
        document = merged(document, text)
    document = filled(document, {**known, **os.environ})
    services = document["services"]
    match words:
        case ["up", *rest]:
            chosen = [word for word in rest if not word.startswith("-")]
            for name, service in services.items():
                if (
                    name in chosen
                    or not chosen
                    and set(service.get("profiles") or profiles[:1] or [1]) & {*profiles, 1}
                ):
                    up(name, service, files)
        case ["run", *rest]:
            given: dict[str, str] = {}
            while rest[0].startswith("-"):
                option = rest.pop(0)
                if option in ("-e", "--name", "-p"):
                    given |= dict([rest.pop(0).split("=", 1)]) if option == "-e" else {}
            up(
                rest[0],
                merged(
                    services[rest[0]], {"command": rest[1:] or services[rest[0]].get("command"), "environment": given}
                ),
                files,
            )
        case ["config", *_]:
            print(yaml.safe_dump(document))
        case _:
            note(compose=[*files, *words])
    return 0


def up(name: str, service: dict[str, Any], files: list[str]) -> None:
    told = dict(service)
    image, build, labels = told.pop("image", "none"), told.pop("build", None), told.pop("labels", None)
    if build and isinstance(build, dict) and "worker.Dockerfile" in build.get("dockerfile", ""):
        docker(["build", "-t", image, "--build-arg", f"VLLM_IMAGE={build['args']['VLLM_IMAGE']}"])
    variables = told.pop("environment", None) or {}
    if isinstance(variables, list):
        pairs = (each.partition("=") for each in variables)
        variables = {k: v if sign else os.environ.get(k) for k, sign, v in pairs}
    for each in [told.get("env_file")] if isinstance(told.get("env_file"), str) else told.get("env_file") or ():
        path = Path(files[0]).parent / (each["path"] if isinstance(each, dict) else each)
        variables = {**dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line), **variables}
    lists = [told.pop(part, None) for part in ("entrypoint", "command")]
    entrypoint, command = (shlex.split(each) if isinstance(each, str) else each for each in lists)
    environment = {k: str(v) for k, v in variables.items() if v is not None}
    container(name, image, entrypoint, list(map(str, command or ())), environment, told, [json.dumps(labels)])


def recipe(words: list[str]) -> int:
    """As spark-vllm-docker's run-recipe.sh."""
    document = yaml.safe_load(Path(words[0]).read_text())
    told = {k: document.get(k) for k in ("container", "build_args", "pull_image", "solo_only", "cluster_only")}
    told["mods"] = [each for each in document.get("mods") or () if not each.endswith("seamark-setup/mods/seamark")]
    environment = {k: str(v) for k, v in (document.get("env") or {}).items()}
    command = document["command"].format(**document.get("defaults") or {})
    return started(["bash", "-c", command], environment, options={**told, "words": words[1:]})


def unit_lines(name: str) -> Iterator[tuple[str, str]]:
    for folder in ("/etc/systemd/system", os.path.expanduser("~/.config/systemd/user")):
        paths = [Path(folder, name), *sorted(Path(folder, f"{name}.d").glob("*.conf"))]
        for path in [path for path in paths if path.exists()]:
            section = ""
            for line in path.read_text().replace("\\\n", " ").splitlines():
                section = line if line.startswith("[") else section
                key, equals, value = line.partition("=")
                if section == "[Service]" and equals and not line.lstrip().startswith(("#", ";")):
                    yield key.strip(), value.strip()


def systemctl(words: list[str]) -> int:
    note(systemctl=words)
    if words[:1] not in (["start"], ["restart"]) and not (words[:1] == ["enable"] and "--now" in words):
        return 0
    status = 0
    for name in words[1:]:
        environment: dict[str, str] = {}
        commands: list[str] = []
        for key, value in unit_lines(name if "." in name else f"{name}.service"):
            if key == "Environment":
                environment |= dict(each.split("=", 1) for each in shlex.split(value))
            if key == "EnvironmentFile" and os.path.exists(value.lstrip("-")):
                lines = Path(value.lstrip("-")).read_text().splitlines()
                environment |= dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
            if key == "ExecStart":
                commands = [*commands, value] if value else []
        for command in commands:
            parts = [re.sub(r"\$\{(\w+)\}", lambda found: environment.get(found[1], ""), each)
                     for each in shlex.split(command.lstrip("@-:+!"))]  # fmt: skip
            expanded = [
                (environment.get(each[1:], "").split() if re.fullmatch(r"\$\w+", each) else [each]) for each in parts
            ]
            status |= started([part for each in expanded for part in each], environment)
    return status


if __name__ == "__main__":
    sys.exit(play(sys.argv[1], sys.argv[2:]))
