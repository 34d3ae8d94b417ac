"""`seamark setup RECIPE`: says what will hit, and writes the files to start how vLLM is run now with Seamark."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from proxy.commands.outlook import Outlook, base_image, outlook
from proxy.commands.parser import Parser
from proxy.commands.recipe import EVERYWHERE, Recipe, read_recipe
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
from proxy.commands.ways import image_version, surroundings
from proxy.config_files import LOOPBACK
from proxy.errors import SettingsError
from proxy.printable import printable
from proxy.version import DISTRIBUTION

SETTINGS = "seamark.toml"


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark setup", description="write the files to start Seamark with, and to undo that")
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="how vLLM is run now: a recipe of spark-vllm-docker, a compose file, a script, a line with `vllm serve` "
        "or `docker run` in quotes, or a container's name; it is taken as it is, and nothing is asked",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default="seamark-setup", help="folder for the files (default %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    parser.add_argument("--source", type=Path, metavar="DIR", help="a checkout of Seamark (default: what this is from)")
    parser.add_argument(
        "--spark",
        type=Path,
        metavar="DIR",
        default="~/spark-vllm-docker",
        help="spark-vllm-docker (default %(default)s)",
    )
    args = parser.parse_args(argv)
    try:
        recipe = read_recipe(args.recipe, surroundings().inspect)
        version = image_version(recipe.image) if recipe.image else ""
        places = Places(
            args.out.expanduser().resolve(),
            _checkout(args.source),
            args.spark.expanduser().resolve(),
            base_image(recipe, version),
        )
        seen = outlook(recipe, version)  # before anything is written: it may refuse the recipe
        made = files_of(recipe, places)
        _write(places.out, {**made.files, **gateway_files(recipe, made, places)}, args.force)
    except (SettingsError, OSError, RuntimeError) as error:  # a home that nobody has is a RuntimeError
        print(f"seamark setup: {printable(str(error))}", file=sys.stderr)
        return 2
    print("\n".join(map(printable, summary(recipe, seen, made, places))))
    return 0


def source_folder() -> Path | None:
    """The checkout that this Seamark runs in or was installed from, as pip notes (PEP 610); None if none is there."""
    places = [Path(__file__).resolve().parents[2]]
    try:
        noted = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        places.append(Path(unquote(urlsplit(noted["url"]).path)))
    except (metadata.PackageNotFoundError, ValueError, KeyError):
        pass
    return next((place for place in places if (place / "deploy/compose.yaml").is_file()), None)


def summary(recipe: Recipe, seen: Outlook, made: RecipeFiles, places: Places) -> list[str]:
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
        f"Written to {places.out}: {', '.join([*made.files, SETTINGS, GATEWAY, RUN, UNDO])}",
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


def _checkout(given: Path | None) -> Path:
    source = given.expanduser().resolve() if given is not None else source_folder()
    if source is None:
        raise SettingsError("--source: a recipe's files need a checkout of Seamark; give its folder")
    if not (source / "deploy/compose.yaml").is_file():
        raise SettingsError(f"--source: {source} is no checkout of Seamark")
    return source


def gateway_files(recipe: Recipe, made: RecipeFiles, places: Places) -> dict[str, str]:
    """What starts the gateway before what was made of a recipe, and what undoes both."""
    return {
        SETTINGS: gateway_toml(gateway_worker(recipe), gateway_host(recipe)),
        GATEWAY: gateway_script(places.out),
        GATEWAY_LOG: "",
        RUN: run_script(places, [*made.files][-1]),
        UNDO: undo_script(places, made.undo),
    }


def gateway_toml(worker: str, host: str) -> str:
    """The gateway's settings file. `worker`: URL of the vLLM; `host`: where the gateway listens."""
    return f"""\
# Settings of the gateway. Every flag of `seamark serve --help` can stand here, with _ in place of -.
# vLLM servers, one or several.
worker = {json.dumps([worker])}
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
exec {this_python()} -m proxy.cli serve --config {shlex.quote(str(out / SETTINGS))} "$@"
"""


def this_python() -> str:
    return shlex.quote(sys.executable)


def _write(out: Path, files: Mapping[str, str], force: bool) -> None:
    """For their owner alone, as what the user starts vLLM with may hold keys; and listed for `undo.sh`."""
    try:
        contents = {name: text.encode() for name, text in files.items()}
    except UnicodeEncodeError:
        raise SettingsError("the recipe, or a folder, has a name that is no text in UTF-8; rename it") from None
    there = [name for name in (*files, LIST, MOD) if os.path.lexists(out / name)]
    if there and not force:
        raise SettingsError(
            f"--out: {out} has {', '.join(there)} already; nothing was written: give another folder, or --force, which "
            "overwrites"
        )
    kept = (out / LIST).read_bytes() if LIST in there else b""
    contents[LIST] = kept + b"".join(listed(name, content) for name, content in contents.items())
    for name, content in contents.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link would lead elsewhere
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(content)
        if name.endswith(".sh"):
            path.chmod(0o700)
