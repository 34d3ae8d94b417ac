"""`seamark setup RECIPE`: says what will hit, and writes the files to start how vLLM is run now with Seamark."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from proxy.commands.outlook import Outlook, outlook, version_of
from proxy.commands.parser import Parser
from proxy.commands.recipe import EVERYWHERE, GATEWAY_PORT, Recipe, RecipeKind
from proxy.commands.recipe_files import LIST, MOD, Places, RecipeFiles, files_of, script
from proxy.commands.recipe_reader import read_recipe
from proxy.commands.ways import docker_inspect
from proxy.config_files import LOOPBACK
from proxy.errors import SettingsError
from proxy.printable import printable
from proxy.version import DISTRIBUTION

SETTINGS = "seamark.toml"
EXIT_STATUSES = (
    "Exit status: 0: with these files requests will hit; 1: they will not, or that depends on what does not show from "
    "here; 2: the recipe cannot be read, or nothing can be written."
)

PYTHON = shlex.quote(sys.executable)
EDIT = re.compile(r"[\w./-]{0,99}(?:site-packages|dist-packages|patch)[\w./-]{0,99}")  # files put into vLLM
RUN, UNDO, GATEWAY, GATEWAY_LOG = "run.sh", "undo.sh", "gateway.sh", "gateway.log"


def main(argv: list[str]) -> int:
    what = "write the files to start Seamark with, and to undo that"
    parser = Parser(prog="seamark setup", description=what, epilog=EXIT_STATUSES)
    how = (
        "how vLLM is run now, taken as it is: a recipe of spark-vllm-docker, a compose file, a systemd unit, a script, "
        "a line with `vllm serve`, `docker run` or `docker compose` in quotes, or a container's name"
    )
    parser.add_argument("recipe", metavar="RECIPE", help=how)
    folder = "folder for the files (default %(default)s)"
    parser.add_argument("--out", type=Path, metavar="DIR", default="seamark-setup", help=folder)
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    parser.add_argument("--source", type=Path, metavar="DIR", help="a checkout of Seamark (default: what this is from)")
    checkout = "spark-vllm-docker (default %(default)s)"
    parser.add_argument("--spark", type=Path, metavar="DIR", default="~/spark-vllm-docker", help=checkout)
    args = parser.parse_args(argv)
    try:
        recipe = read_recipe(args.recipe, docker_inspect)
        seen = outlook(recipe, version_of(recipe))  # before anything is written: it may refuse the recipe
        out, spark = (given.expanduser().resolve() for given in (args.out, args.spark))
        places = Places(out, source_folder(args.source), spark, seen.image)
        after = outlook(replace(recipe, image=seen.image)) if seen.image else seen
        waits = after.hits is False or bool(seen.image and not after.hits)  # for a change that is the user's
        made = RecipeFiles({}) if waits or after.alone else files_of(recipe, places)
        files = gateway_files(recipe, made, places, shadow=waits) if seen.starts else {}
        if files:
            _write(places.out, files, args.force)
    except UnicodeEncodeError:
        parser.error("the recipe, or a folder, has a name that is no text in UTF-8; rename it")
    except (SettingsError, OSError, RuntimeError) as error:  # a home that nobody has is a RuntimeError
        print(f"seamark setup: {printable(str(error))}", file=sys.stderr)
        return 2
    seen = seen._replace(notes=[*seen.notes, *made.notes])
    print("\n".join(map(printable, summary(recipe, seen, after, places, list(files)))))
    return 0 if after.hits else 1


def source_folder(given: Path | None = None) -> Path:
    """`given`, or the checkout that this Seamark runs in or was installed from, as pip notes (PEP 610)."""
    folders = [given.expanduser().resolve() if given else Path(__file__).resolve().parents[2]]
    if given is None:
        with suppress(metadata.PackageNotFoundError, ValueError, KeyError):
            noted = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
            folders.append(Path(unquote(urlsplit(noted["url"]).path)))
    for folder in folders:
        if (folder / "deploy/compose.yaml").is_file():
            return folder
    raise SettingsError(f"--source: {folders[-1]} is no checkout of Seamark; give its folder")


def summary(recipe: Recipe, seen: Outlook, after: Outlook, places: Places, files: Sequence[str]) -> list[str]:
    """What will hit, what is to be changed for that, and the commands to go on and to undo all of it.

    `seen`: of the recipe as it is; `after`: with the files that were written.
    """
    host, notes = gateway_host(recipe), list(seen.notes)
    worker, base = url_at(recipe.host, recipe.port), url_at(host, recipe.gateway_port)
    if host not in LOOPBACK:
        where = f"where vLLM did ({host}), at port {recipe.gateway_port}"
        notes.append(f"the gateway listens {where}; `seamark key NAME` makes keys for it")
    elif recipe.gateway_port != GATEWAY_PORT:
        notes.append(f"the gateway listens at port {recipe.gateway_port}, since {GATEWAY_PORT} stands in the recipe")
    if recipe.has("--api-key") or "VLLM_API_KEY" in recipe.environment:
        notes.append("vLLM wants a key: write it into a file, and name that in seamark.toml (worker_api_key_file)")
    lines = [f"{recipe.kind.value[0].upper()}{recipe.kind.value[1:]} for {recipe.model}", *seen.lines]
    lines[1] = lines[1][0].upper() + lines[1][1:]
    if seen.image:
        lines.append(f"{'These files take it' if RUN in files else 'And with it'}: {after.verdict}")
        lines += [f"The next change: {after.change}"] if after.change else []
        if edit := EDIT.search(f"{recipe.text}{recipe.document}"):
            notes.append(f"{edit[0]} may edit vLLM, and is for another version: without it if vLLM does not start")
    lines += [f"Note: {note}" for note in notes]
    written = f"Written to {places.out}: {', '.join(files)}"
    if not files:
        return [*lines, "Nothing was written, since vLLM does not start without that change"]
    if RUN in files:
        lines += [f"More is said, also of its cache and whether vLLM will start, by: {after.explain}", written]
        what = "vLLM and the gateway (or each by its own script), and in a second terminal what hits, in figures"
        run, then = RUN, f"bench mine --base-url {base}"
    else:
        lines.append(f"{written}; nothing for vLLM, which stays as it is")
        shadow = "in shadow mode changes nothing, and counts what is lost"
        what = f"A gateway before it {'gives its page, keys and limits' if after.alone else shadow}"
        run, then = GATEWAY, f"doctor --worker {worker} --gateway {base}"
    text = f"""
{what}:
  sh {shlex.quote(str(places.out / run))}
  {PYTHON} -m proxy.cli {then}

Clients:    base_url {base}/v1
Live page:  {base}/ui

Off again; it says what it leaves:
  sh {shlex.quote(str(places.out / UNDO))}"""
    return [*lines, *text.split("\n")]


def gateway_files(recipe: Recipe, made: RecipeFiles, places: Places, *, shadow: bool) -> dict[str, str]:
    """What was made of a recipe, what starts the gateway before it, and what undoes both."""
    worker, port, undo = url_at(recipe.host, recipe.port), recipe.gateway_port, list[str]()
    serve = f'exec {PYTHON} -m proxy.cli serve --config {shlex.quote(str(places.out / SETTINGS))} "$@"'
    purpose = "The gateway, in the environment that wrote this file."
    files = {
        **made.files,
        SETTINGS: gateway_toml(worker, gateway_host(recipe), port, shadow=shadow),
        GATEWAY: script(f"{purpose} A flag behind this script's name wins over {SETTINGS}.", serve),
    }
    if made.files:
        files[RUN] = made.run or run_script(places, [*made.files][-1])
        undo = [*made.undo, *left_behind(recipe, places)]
    return {**files, UNDO: undo_script(places, undo)}


def left_behind(recipe: Recipe, places: Places) -> list[str]:
    """Lines of `undo.sh` that say what stays of what vLLM ran with, and how to remove it."""
    built, docker = bool(recipe.image) and recipe.kind is not RecipeKind.SPARK, recipe.program
    mounts_cache = "/.cache/vllm" in f"{recipe.text}{recipe.document}"
    left = {
        f"what was cached while the image was built: {docker} builder prune": built,
        f"the image {places.image}: {docker} image rm {places.image}": places.image,
        "what vLLM compiled, which it makes anew: rm -r ~/.cache/vllm/torch_compile_cache": not built or mounts_cache,
    }
    return [f"echo {shlex.quote(f'It leaves {what}')}" for what, applies in left.items() if applies]


def gateway_host(recipe: Recipe) -> str:
    """Where the gateway listens: where vLLM did, so that who reached it reaches the gateway."""
    return "127.0.0.1" if recipe.host in LOOPBACK else recipe.host


def url_at(host: str, port: int) -> str:
    """The URL by which a program on this machine finds what listens there."""
    here = "127.0.0.1" if host in ("localhost", EVERYWHERE, "::") else host
    return f"http://{f'[{here}]' if ':' in here else here}:{port}"


def gateway_toml(worker: str, host: str, port: int = GATEWAY_PORT, *, shadow: bool = False) -> str:
    """The gateway's settings file. `worker`: URL of the vLLM; `host` and `port`: where the gateway listens."""
    return f"""\
# Settings of the gateway. Every flag of `seamark serve --help` can stand here, with _ in place of -.
# vLLM servers, one or several.
worker = {json.dumps([worker])}
# Where clients find the gateway. 0.0.0.0 opens it to the network; then give it keys (`seamark key NAME`, api_keys).
host = {json.dumps(host)}
port = {port}
# What would be saved, and nothing changed: true.
shadow = {json.dumps(shadow)}
# A file with the API key that vLLM wants, if it wants one.
#worker_api_key_file = "/path/to/key"
"""


def run_script(places: Places, start: str) -> str:
    """vLLM by the script `start` and the gateway in one terminal, for as long as both run."""
    log = shlex.quote(str(places.out / GATEWAY_LOG))
    return script(
        f"vLLM, and the gateway beside it, whose lines go to {GATEWAY_LOG}. Ctrl-C ends both.",
        "# Behind this script's name: what the script that starts vLLM takes.",
        # Set first, or a signal right behind the gateway's start would leave it running. What it is sent before it is
        # the program that it becomes is lost: so it is told until it has ended.
        """trap 'while kill "${!-}" 2> /dev/null; do sleep .1; done' EXIT""",
        "trap 'exit 130' INT",
        "trap 'exit 143' TERM",
        f"sh {shlex.quote(str(places.out / GATEWAY))} > {log} 2>&1 &",
        f'{shlex.quote(str(places.out / start))} "$@"',
        f"echo 'vLLM was started in the background. The gateway runs until Ctrl-C; its lines: '{log}",
        'wait "$!"',
    )


def undo_script(places: Places, undo: Sequence[str]) -> str:
    """Runs `undo`, and removes the files that are as they were made, this script among them, and folders left empty."""
    commands = [f"{each} || true" if each.startswith(("docker", "podman")) else each for each in undo]
    return script(
        "As it was before `seamark setup`. First end what run.sh runs in a terminal (Ctrl-C); units are ended here.",
        f"# {LIST} says what was made, and how. What has changed since, or came from elsewhere, stays.",
        f"cd {shlex.quote(str(places.out))}",
        *commands,
        f"LC_ALL=C sha256sum -c {LIST} 2> /dev/null | sed -n 's/: OK$//p' | xargs rm -f",
        f"for left in $(sed -n 's/^[0-9a-f]*  //p' {LIST} | sort -u); do",
        '    [ ! -e "$left" ] || echo "$left stays: it is not as it was made"',
        "done",
        f"rm -f {LIST} {GATEWAY_LOG}",
        f"rmdir {MOD} mods {shlex.quote(str(places.out))} 2> /dev/null || true",
    )


def _write(out: Path, files: Mapping[str, str], force: bool) -> None:
    """For their owner alone, as what the user starts vLLM with may hold keys; and listed for `undo.sh`."""
    there = [name for name in (*files, LIST, MOD, GATEWAY_LOG) if os.path.lexists(out / name)]
    if there and not force:
        cure = "give another folder, or --force, which overwrites"
        raise SettingsError(f"--out: {out} has {', '.join(there)} already; nothing was written: {cure}")
    kept = (out / LIST).read_text() if LIST in there else ""
    digests = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in files.items()]
    for name, text in {**files, LIST: kept + "".join(digests)}.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link would lead elsewhere
        path.touch(mode=0o700 if name.endswith(".sh") else 0o600, exist_ok=False)
        path.write_bytes(text.encode())
