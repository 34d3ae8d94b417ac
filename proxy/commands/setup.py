"""`seamark setup`: asks how vLLM is run, looks at what answers here, and writes the files to start Seamark with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import httpx

from proxy.commands.outlook import Outlook, base_image, outlook
from proxy.commands.parser import Parser
from proxy.commands.recipe import EVERYWHERE, Recipe, is_recipe, read_recipe
from proxy.commands.recipe_files import (
    GATEWAY,
    GATEWAY_LOG,
    LIST,
    MOD,
    RUN,
    UNDO,
    Places,
    RecipeFiles,
    files_of,
    gateway_host,
    gateway_worker,
    listed,
    run_script,
    undo_script,
)
from proxy.commands.setup_files import (
    SetupPlan,
    SetupWay,
    WrittenFile,
    files_for,
    gateway_script,
    gateway_toml,
    this_python,
)
from proxy.commands.ways import DEFAULT_PORT, image_version, surroundings
from proxy.config_files import LOOPBACK, without_credentials, worker_url
from proxy.errors import SettingsError
from proxy.fleet.probe import models_in
from proxy.printable import printable, printable_lines
from proxy.version import DISTRIBUTION

PORTS = range(DEFAULT_PORT, DEFAULT_PORT + 4)

PROBE_SECONDS = 1.0

# What is written into scripts and files of settings as it is.
_REGISTRY = re.compile(r"[\w.:/-]*", re.ASCII)
_PLAIN_URL = re.compile(r"[\w.~:/\[\]%@-]+", re.ASCII)

Ask = Callable[[str, str], str]  # a question and its default: the answer


class RunningVllm(NamedTuple):
    """A server that answers as vLLM does."""

    url: str
    models: tuple[str, ...]  # empty: it wants a key, or serves none


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="seamark setup",
        description="write the files to start Seamark with; on a terminal, it asks for what is missing",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default="",
        metavar="RECIPE",
        help="how vLLM is run now: a recipe of spark-vllm-docker, a compose file, a script, a line with `vllm serve` "
        "or `docker run` in quotes, or a container's name; it is taken as it is, and nothing is asked",
    )
    parser.add_argument("--way", choices=list(map(str, SetupWay)), help="how vLLM is run, or shall be")
    parser.add_argument("--model", default="", help="name, folder, or a file of deploy/models")
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL",
        help=f"a vLLM that runs already; repeat for several (default: what answers on ports {PORTS[0]} to {PORTS[-1]})",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="how many vLLM servers (default: those named, or 1)")
    parser.add_argument("--cpu", action="store_true", help="with --way compose: no GPU, a small generated model")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files (default seamark-setup)")
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    parser.add_argument("--source", type=Path, metavar="DIR", help="a checkout of Seamark (default: what this is from)")
    parser.add_argument(
        "--spark",
        type=Path,
        metavar="DIR",
        default=Path("~/spark-vllm-docker"),
        help="spark-vllm-docker (default %(default)s)",
    )
    parser.add_argument("--registry", default="", metavar="PREFIX", help="for Kubernetes: where images are pushed")
    args = parser.parse_args(argv)
    ask = _ask if sys.stdin.isatty() and sys.stdout.isatty() else None
    try:
        if args.recipe:
            return _from_recipe(args)
        plan = _plan(args, ask)
        written = files_for(plan)
        _write(plan.out, written.files, args.force)
    except (SettingsError, OSError, RuntimeError) as error:  # a home that nobody has is a RuntimeError
        print(f"seamark setup: {printable(str(error))}", file=sys.stderr)
        return 2
    except EOFError:
        print("\nseamark setup: nothing was written", file=sys.stderr)
        return 2
    print(printable_lines(summary(plan, written)))
    return 0


def running(ports: Iterable[int]) -> list[RunningVllm]:
    """The servers on this machine that answer `/v1/models` as vLLM does, by port."""
    found = []
    with httpx.Client(timeout=PROBE_SECONDS, trust_env=False) as client:
        for port in ports:
            url = f"http://127.0.0.1:{port}"
            try:
                answer = client.get(f"{url}/v1/models")
                if answer.status_code == httpx.codes.UNAUTHORIZED:
                    found.append(RunningVllm(url, ()))
                elif answer.is_success and (models := models_in(answer.content)) is not None:
                    found.append(RunningVllm(url, tuple(model["id"] for model in models)))
            except httpx.HTTPError:
                continue
    return found


def source_folder() -> Path | None:
    """The checkout that this Seamark runs in or was installed from, as pip notes (PEP 610); None if none is there."""
    places = [Path(__file__).resolve().parents[2]]
    try:
        noted = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        places.append(Path(unquote(urlsplit(noted["url"]).path)))
    except (metadata.PackageNotFoundError, ValueError, KeyError):
        pass
    return next((place for place in places if (place / "deploy/compose.yaml").is_file()), None)


def summary(plan: SetupPlan, written: WrittenFile) -> str:
    """What was written, the two commands to go on, the clients' base_url, and how to switch it off."""
    pages = (
        "http://127.0.0.1:8081/ui" if plan.way in (SetupWay.COMPOSE, SetupWay.BESIDE) else "http://127.0.0.1:8080/ui"
    )
    if plan.way is SetupWay.KUBERNETES:
        pages = "kubectl -n seamark port-forward deployment/seamark-gateway 8081, then http://127.0.0.1:8081/ui"
    return "\n".join(
        [
            f"Written to {plan.out}: {', '.join(written.files)}",
            *(f"Note: {note}" for note in written.notes),
            "",
            "Go on, each in a terminal of its own:",
            *(f"  {command}" for command in written.go_on),
            "",
            f"Clients:    base_url {written.base_url}",
            f"Live page:  {pages}",
            "",
            "Off again:",
            *(f"  {command}" for command in written.off),
        ]
    )


def _from_recipe(args: Namespace) -> int:
    """Write what makes a recipe hit; the exit status is 0 also if it has to be changed first, which is said."""
    for flag in ("way", "model", "worker", "workers", "cpu"):
        if getattr(args, flag):
            raise SettingsError(f"--{flag}: the recipe says it; leave the flag away")
    recipe = read_recipe(args.recipe, surroundings().inspect)
    version = image_version(recipe.image) if recipe.image else ""
    out = (args.out or Path("seamark-setup")).expanduser().resolve()
    source = _checkout(args.source)
    if source is None:
        raise SettingsError("--source: a recipe's files need a checkout of Seamark; give its folder")
    seen = outlook(recipe, version)  # before anything is written: it may refuse the recipe
    places = Places(out, source, args.spark.expanduser().resolve(), base_image(recipe, version))
    made = files_of(recipe, places)
    host = gateway_host(recipe)
    files = {
        **made.files,
        "seamark.toml": gateway_toml([gateway_worker(recipe)], host),
        GATEWAY: gateway_script(out),
        GATEWAY_LOG: "",
        RUN: run_script(places, [*made.files][-1]),
        UNDO: undo_script(places, made.undo),
    }
    _write(out, files, args.force, private=True)
    print("\n".join(map(printable, recipe_summary(recipe, seen, made, places))))
    return 0


def recipe_summary(recipe: Recipe, seen: Outlook, made: RecipeFiles, places: Places) -> list[str]:
    """What will hit, what is to be changed for that, and the commands to go on and to undo all of it."""
    host, notes = gateway_host(recipe), [*seen.notes, *made.notes]
    if host not in LOOPBACK:
        notes.append(f"the gateway listens where vLLM did ({host}), at port 8080; `seamark key NAME` makes keys for it")
    if recipe.has("--api-key") or "VLLM_API_KEY" in recipe.environment:
        notes.append("vLLM wants a key: write it into a file, and name that in seamark.toml (worker_api_key_file)")
    base = f"http://{'127.0.0.1' if host in (*LOOPBACK, EVERYWHERE) else host}:8080"
    return [
        f"{recipe.kind.value[0].upper()}{recipe.kind.value[1:]} for {recipe.model}",
        seen.verdict[0].upper() + seen.verdict[1:],
        *([f"The one change: {seen.change}{'; these files take it' if places.image else ''}"] if seen.change else []),
        *([f"With it: {outlook(replace(recipe, image=places.image)).verdict}"] if places.image else []),
        *(f"Note: {note}" for note in notes),
        "More is said where vLLM is installed: seamark worker MODEL FLAGS --explain gpu",
        f"Written to {places.out}: {', '.join([*made.files, 'seamark.toml', GATEWAY, RUN, UNDO])}",
        "",
        "vLLM and the gateway (or each by its own script), and in a second terminal what hits, in figures:",
        f"  sh {shlex.quote(str(places.out / RUN))}",
        f"  {this_python()} -m proxy.cli bench mine --base-url {base}",
        "",
        f"Clients:    base_url {base}/v1",
        f"Live page:  {base}/ui",
        "",
        "Off again, without a trace:",
        f"  sh {shlex.quote(str(places.out / UNDO))}",
    ]


def _checkout(given: Path | None) -> Path | None:
    source = given.expanduser().resolve() if given is not None else source_folder()
    if source is not None and not (source / "deploy/compose.yaml").is_file():
        raise SettingsError(f"--source: {source} is no checkout of Seamark")
    return source


def _plan(args: Namespace, ask: Ask | None) -> SetupPlan:
    given = vars(args)
    if is_recipe(given["model"]):
        raise SettingsError(f"--model: {given['model']} is a recipe and no model: seamark setup {given['model']}")
    if given["way"] is not None:
        way = SetupWay(given["way"])
    elif ask is not None:
        way = _asked_way(ask)
    else:
        raise SettingsError(f"--way: how do you run vLLM? {', '.join(SetupWay)}")
    workers = tuple(map(_checked_url, given["worker"]))
    model = given["model"]
    # Compose and spark-vllm-docker start vLLM themselves, and pods cannot reach a loopback.
    if not workers and way in (SetupWay.PIP, SetupWay.BESIDE, SetupWay.SYSTEMD):
        workers = _found(running(PORTS), model)
    if not workers and ask is not None and way in (SetupWay.BESIDE, SetupWay.SYSTEMD):
        workers = (_checked_url(ask("Where does vLLM run", f"http://127.0.0.1:{DEFAULT_PORT}")),)
    starts = way in (SetupWay.COMPOSE, SetupWay.SPARK) or (way in (SetupWay.PIP, SetupWay.KUBERNETES) and not workers)
    if starts and not model and not given["cpu"] and ask is not None:
        model = ask("Which model", "")
    if ask is not None and not workers and not given["cpu"] and given["workers"] is None:
        workers, given["workers"] = _several(way, ask)
    if not model.isprintable():
        raise SettingsError("--model: not a name or a folder")
    if not _REGISTRY.fullmatch(given["registry"]):
        raise SettingsError("--registry: not the name of one, as registry.example:5000/us")
    # With Compose the worker that is named runs on the second machine.
    machines = len(workers) + (way is SetupWay.COMPOSE)
    if given["workers"] is not None:
        machines = given["workers"]
        if machines < 1:
            raise SettingsError(f"--workers: {machines} is less than one")
        several = machines > 1 and way not in (SetupWay.COMPOSE, SetupWay.KUBERNETES)
        if (several or (way is SetupWay.KUBERNETES and workers)) and len(workers) != machines:
            raise SettingsError(f"--workers: name all {machines} with --worker URL; {len(workers)} are named")
    out = given["out"] or Path(ask("Folder for the files", "seamark-setup") if ask is not None else "seamark-setup")
    out, spark = out.expanduser().resolve(), given["spark"].expanduser().resolve()
    source = _checkout(given["source"])
    for flag, folder in (("out", out), ("source", source or ""), ("spark", spark)):
        if not str(folder).isprintable():
            raise SettingsError(f"--{flag}: a folder whose name can be written into a script is needed")
    return SetupPlan(
        way=way,
        model=model,
        workers=workers,
        machines=max(machines, 1),
        out=out,
        source=source,
        spark=spark,
        registry=given["registry"],
        cpu=given["cpu"],
    )


def _several(way: SetupWay, ask: Ask) -> tuple[tuple[str, ...], int | None]:
    """The second machine's worker for Compose, or the number of workers for Kubernetes; else neither."""
    if way is SetupWay.COMPOSE and (address := ask("The second machine's IP address, if there are two", "")):
        return (_checked_url(f"http://{address}:{DEFAULT_PORT}"),), None
    if way is SetupWay.KUBERNETES:
        number = ask("How many vLLM servers", "1")
        if not re.fullmatch(r"\d{1,4}", number, re.ASCII):
            raise SettingsError(f"--workers: {number!r} is not a number of servers")
        return (), int(number)
    return (), None


def _found(servers: list[RunningVllm], model: str) -> tuple[str, ...]:
    for server in servers:
        print(f"Found: {server.url} serves {', '.join(server.models) or 'what it tells only with a key'}")
    return tuple(server.url for server in servers if not (model and server.models) or model in server.models)


def _checked_url(text: str) -> str:
    try:
        url = worker_url(text)
    except ValueError as error:
        raise SettingsError(f"--worker: {error}") from None
    if not _PLAIN_URL.fullmatch(url):
        raise SettingsError(
            "--worker: it has characters that mean something in a file of settings; use a plain address"
        )
    if without_credentials(url)[1] is not None:
        raise SettingsError("--worker: no password in the URL; the setting worker_api_key_file takes a key from a file")
    return url


def _ask(question: str, default: str) -> str:
    return input(f"{question}{f' [{default}]' if default else ''}? ").strip() or default


def _asked_way(ask: Ask) -> SetupWay:
    ways = list(map(str, SetupWay))
    while (answer := ask(f"How do you run vLLM ({', '.join(ways)})", ways[0])) not in ways:
        print(f"One of: {', '.join(ways)}")
    return SetupWay(answer)


def _write(out: Path, files: Mapping[str, str], force: bool, *, private: bool = False) -> None:
    """`private`: for their owner alone, as what the user starts vLLM with may hold keys; and listed for `undo.sh`."""
    try:
        contents = {name: text.encode() for name, text in files.items()}
    except UnicodeEncodeError:
        raise SettingsError("the recipe, or a folder, has a name that is no text in UTF-8; rename it") from None
    there = [name for name in (*files, *((LIST, MOD) if private else ())) if os.path.lexists(out / name)]
    if there and not force:
        raise SettingsError(
            f"--out: {out} has {', '.join(there)} already; nothing was written: give another folder, or --force, which "
            "overwrites"
        )
    if private:
        kept = (out / LIST).read_bytes() if LIST in there else b""
        contents[LIST] = kept + b"".join(listed(name, content) for name, content in contents.items())
    for name, content in contents.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link would lead elsewhere
        path.touch(mode=0o600 if private else 0o666, exist_ok=False)
        path.write_bytes(content)
        if name.endswith(".sh"):
            path.chmod(0o700 if private else 0o755)
