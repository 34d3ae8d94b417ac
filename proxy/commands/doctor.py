"""`seamark doctor`: whether requests to a worker will hit, in one line; then what is right and wrong, and the cures.

The cures are lines for the way in which vLLM is run: `cures` words them, `ways` finds the way out.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.chat.chat import CHAT, COMPLETIONS
from proxy.commands.cures import EVENTS_FLAG, TOOL_FLAG, Cures, release_line
from proxy.commands.outlook import outlook, version_of
from proxy.commands.parser import Parser
from proxy.commands.recipe_reader import read_recipe
from proxy.commands.versions import FORK, FORK_ALONE, SUPPORTED, is_fork, is_supported
from proxy.commands.ways import FoundWay, Way, docker_inspect, find
from proxy.config_files import base_url, read_secret, without_credentials
from proxy.errors import SettingsError
from proxy.fleet.probe import (
    MODELS,
    PROBE_TIMEOUT,
    EngineAnswers,
    Probe,
    Reports,
    Unwell,
    gateway_id,
    read_metrics,
    why_broken,
)
from proxy.fleet.worker import CLOSED, OPEN, TRIAL
from proxy.fleet.worker_metrics import WorkerMetrics
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import loads
from proxy.observability.shadow import shadow_lines
from proxy.printable import printable
from proxy.routing.engine_events import PATH as EVENTS
from proxy.settings import Settings
from proxy.version import version

DEFAULTS = Settings.model_validate({})  # of a gateway
CONNECT_SECONDS, COMPLETION_SECONDS = 2.0, 120.0
STATUS = "/seamark/status"
RELEASE = version().partition("+")[0]  # without a commit
KEYS = {
    "server": "--worker-api-key-file FILE, with vLLM's --api-key in it",
    "gateway": "--gateway-key-file FILE, with an admin's key in it",
}

EXIT_STATUSES = (
    "Exit status: 0: requests will hit and there is nothing to change; 1: they cannot, something is to be changed, "
    "or the worker or the gateway could not be asked; 2: the command line or a key file is wrong."
)

TOOL = {"type": "function", "function": {"name": "seamark", "parameters": {"type": "object", "properties": {}}}}

CANNOT = "cannot hit"


class Diagnosis(NamedTuple):
    fine: bool
    text: str
    cure: str = ""
    against: str = ""  # how the first line begins, if there can be no hits because of this: it says it


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="seamark doctor", description="whether requests to a vLLM worker will hit", epilog=EXIT_STATUSES
    )
    parser.add_argument("--worker", metavar="URL", help="http:// and a /v1 at its end may be left out")
    recipe = "instead of a worker: what a recipe will do, as `seamark setup RECIPE` takes it; nothing is written"
    parser.add_argument("--recipe", metavar="RECIPE", help=recipe)
    parser.add_argument("--worker-api-key-file", type=Path, metavar="FILE", help="holds the worker's API key")
    parser.add_argument("--gateway", metavar="URL", help="a gateway before the worker: prints what it has seen lost")
    parser.add_argument("--gateway-key-file", type=Path, metavar="FILE", help="holds an admin's key of that gateway")
    runs = "how vLLM is run, so that cures are worded for that; by default what can be seen from here, else pip"
    parser.add_argument("--runs-as", type=Way, choices=list(Way), metavar="|".join(Way), help=runs)
    args = parser.parse_args(argv)
    if bool(args.worker) == bool(args.recipe):
        parser.error("give --worker URL, or --recipe RECIPE before anything runs")
    try:
        if args.recipe:
            return _of_recipe(args.recipe)
        worker_key, gateway_key = (
            read_secret(setting, path) if (path := getattr(args, setting)) else None
            for setting in ("worker_api_key_file", "gateway_key_file")
        )
    except SettingsError as error:
        parser.error(str(error))
    url = address(args.worker)
    way = _way(url, args.runs_as)
    diagnoses, lost = list[Diagnosis](), list[str]()
    try:
        diagnoses += asyncio.run(examine(url, worker_key, Cures(way)))
        if args.gateway:
            lost = asyncio.run(read_shadow(address(args.gateway), gateway_key))
    except Unwell as error:
        diagnoses.append(Diagnosis(False, str(error), against="not reachable"))
    print("\n".join(map(printable, said(url, diagnoses, lost, way))))
    return 0 if all(each.fine for each in diagnoses) else 1


def said(url: str, diagnoses: Sequence[Diagnosis], lost: Sequence[str], way: FoundWay) -> Iterator[str]:
    """The first line is what keeps from hits, or that they will come; the last ones are the cure of what does."""
    stops = next((each for each in diagnoses if each.against), None)
    wrong = [each for each in diagnoses if not each.fine and each is not stops]
    if stops is not None:
        yield f"{stops.against}: {stops.text}"
    else:
        to_change = f"; {len(wrong)} to change, see WRONG below" if wrong else ""
        yield f"will hit: {without_credentials(url)[0]} {diagnoses[0].text}{to_change}"
    for each in (*(each for each in diagnoses if each.fine), *wrong):
        yield f"{'ok   ' if each.fine else 'WRONG'} {each.text}"
        yield from indent(each.cure, "    ").splitlines()
    yield from lost
    if any(each.cure for each in diagnoses):
        name = f" ({way.name})" if way.name else ""
        yield f"(cures for {way.way}{name}; if vLLM is run otherwise: --runs-as {'|'.join(Way)})"
    if stops is not None and stops.cure:
        yield "the cure:"
        yield from indent(stops.cure, "    ").splitlines()


def _of_recipe(given: str) -> int:
    """Say what a recipe will do; 1 unless it will hit."""
    recipe = read_recipe(given, docker_inspect)
    seen = outlook(recipe, version_of(recipe))
    lines = [*seen.lines, *(f"Note: {note}" for note in seen.notes)]
    if seen.explain != seen.ask:
        lines.append(f"What its cache holds, and whether vLLM will start: {seen.explain}")
    if seen.starts:
        lines.append(f"(seamark setup {shlex.quote(given)} writes the files)")
    print("\n".join(map(printable, lines)))
    return 0 if seen.hits else 1


def address(url: str) -> str:
    """The base URL that a user means: "spark:8000/v1" is http://spark:8000."""
    text = url.strip()
    return base_url(text if "://" in text else f"http://{text}")


def _way(url: str, chosen: Way | None) -> FoundWay:
    """How vLLM is run, as it is told, or else as it looks from here."""
    with suppress(ValueError):  # no URL
        if (seen := find(url)) and chosen in (None, seen.way):
            return seen
    return FoundWay(chosen or Way.PIP)


@asynccontextmanager
async def _asking(url: str, api_key: str | None, what: str) -> AsyncIterator[Probe]:
    """Questions to `what` of `KEYS`. Raises `Unwell`, also where one of the questions inside has no answer.

    The words do not hold a password of the URL.
    """
    try:
        shown, userinfo = without_credentials(url)
        parts = urlsplit(shown)
        no_port = "" if parts.port else " (the URL has no port)"
    except ValueError:
        raise Unwell(f"{'that' if '@' in url else url} is no URL") from None  # it may hold a password
    silent = f"no {what} answers at {shown}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unwell(f"{silent}: no URL of http:// or https://")
    upstream = Upstream(CONNECT_SECONDS, DEFAULTS.max_header_bytes, api_key)
    upstream.trust(shown, userinfo)
    try:
        yield Probe(upstream, shown)
    except Broken as error:
        raise Unwell(f"{silent}: {why_broken(error, was_well=False)}") from None
    except Unreachable as error:
        raise Unwell(f"{silent}: {error}{no_port}") from None
    except Unwell as error:
        if error.status not in (401, 403):
            raise Unwell(f"{shown} is {error}") from None
        why = "refuses the key in this file" if api_key else "wants an API key"
        raise Unwell(f"{shown} {why} (status {error.status}): {KEYS[what]}") from None
    finally:
        await upstream.aclose()


async def examine(url: str, api_key: str | None, cures: Cures) -> list[Diagnosis]:
    """What is right and wrong with the worker at `url`. Sends it requests for one token. Raises `Unwell`."""
    async with _asking(url, api_key, "server") as worker:
        shown = worker.url
        if gateway_id((await worker.get("/health"))[1]) is not None:
            text = f"{shown}; give --worker a vLLM behind it: {shown}/ui shows them"
            return [Diagnosis(False, text, against="a gateway, not a worker")]
        if not (models := await worker.models()):
            raise Unwell(f"not vLLM: {MODELS} lists no models")
        model = models[0]["id"]
        levels = read_metrics((await worker.metrics())[0]).sleep_levels
        if why := await worker.why_asleep(EngineAnswers(shown), levels, PROBE_TIMEOUT):
            return [Diagnosis(False, f"{shown} is {why}", against=CANNOT)]
        frontend = await worker.frontend()
        # First, since an engine's metrics are certain once it has run a step.
        answers = [each async for each in _requests(worker, model, cures, renders=not frontend.name)]
        exposition, reports = await worker.all_metrics()
        metrics, vllm = read_metrics(exposition), await worker.version()
        is_read = metrics.engine is not None or not reports.why_not
        found = [
            Diagnosis(True, f"serves {model}"),
            Diagnosis(bool(vllm), f"vLLM {vllm or 'of no version: /version gives none'}"),
            *(_engine(metrics, cures, vllm or "") if is_read else ()),
            *_pool(metrics, models[0].get("max_model_len"), cures),
            *_long_prefills(metrics, cures),
            *_drafts(metrics),
        ]
        if frontend.name:
            lacks = ", ".join((*frontend.lacks, "hints in a header"))
            found.append(Diagnosis(True, f"{frontend.name} serves; it lacks {lacks}"))
        if metrics.prefix_caching is False:
            cure = cures.flag("--enable-prefix-caching", "and no --no-enable-prefix-caching")
            found.append(Diagnosis(False, "prefix caching is off in this vLLM", cure, CANNOT))
        if metrics.connector:
            cure = cures.flag("--kv-transfer-config", "take it away: this connector measures decoding alone")
            text = f"KV connector {metrics.connector}: {LANES.get(metrics.lane, metrics.lane)}"
            found.append(_right(metrics.lane != "no_hints", text, cure, CANNOT))
        if metrics.engine or reports.why_not:
            found.append(await _events(worker, reports, cures))
        return [*found, *answers]


def _right(fine: bool, text: str, cure: str, against: str = "") -> Diagnosis:
    """With its cure only if it is not right."""
    return Diagnosis(fine, text) if fine else Diagnosis(fine, text, cure, against)


def _engine(metrics: WorkerMetrics, cures: Cures, vllm: str) -> Iterator[Diagnosis]:
    """`vllm`: its version, empty if it is not known."""
    info, alone = metrics.engine, ""
    if metrics.block_size:
        alone = f"; vLLM alone caches whole blocks of {metrics.block_size:,} tokens"
    if metrics.other_release:
        yield Diagnosis(False, metrics.other_release, cures.update(RELEASE), CANNOT)
    elif info is None and is_fork(f"{cures.found.image} {vllm}"):
        yield Diagnosis(False, FORK, release_line(cures.found, "python3"), "no hits by Seamark")
        yield Diagnosis(True, f"{FORK_ALONE}; a gateway in shadow mode (`seamark serve --shadow`) counts the loss")
    elif info is None and not is_supported(vllm):
        cure = "\n".join((release_line(cures.found, "python3"), cures.install()))
        yield Diagnosis(False, f"the plugin leaves vLLM {vllm} untouched, as it knows {SUPPORTED}{alone}", cure, CANNOT)
    elif info is None:
        text = f"patches are not live: the plugin is not in this vLLM, or left it untouched (its log says why){alone}"
        yield Diagnosis(False, text, cures.install(), CANNOT)
    else:
        yield Diagnosis(True, f"patches are live, seamark {info.version}")
        if info.other_version:
            yield Diagnosis(False, info.other_version, cures.update(RELEASE))
        lengths = f"cache block {info.block_size} tokens, match unit {info.match_unit} tokens"
        if info.refused:  # which says what to do
            yield Diagnosis(False, info.refused, against=CANNOT)
        if metrics.attention_only:
            lengths += "; vLLM alone keeps all, since no layer is recurrent"
        cure = cures.flag("--prefix-match-unit 16", "or leave it out: the plugin sets it for hybrid models")
        # A finer one does not help where hints are refused, and stops a model whose layers are all attention.
        yield _right(bool(info.refused) or metrics.attention_only or info.match_unit <= 64, lengths, cure)


def _pool(metrics: WorkerMetrics, longest: object, cures: Cures) -> Iterator[Diagnosis]:
    """`longest`: a context, in tokens, as the worker tells it."""
    if isinstance(longest, int) and metrics.blocks and metrics.at_once:
        text = f"the cache has {metrics.blocks:,} blocks: {metrics.at_once:.1f} requests of {longest:,} tokens at once"
        cure = cures.flag("--max-model-len N", "a smaller one: a prompt of that length is queued again for ever")
        # One block is never handed out.
        yield _right(round(metrics.blocks / metrics.at_once) < metrics.blocks, text, cure)


def _long_prefills(metrics: WorkerMetrics, cures: Cures) -> Iterator[Diagnosis]:
    if (bound := metrics.long_prefill_threshold) and metrics.long_prefill_waits >= 1:
        text = f"requests waited {metrics.long_prefill_waits:,.0f} s in all behind long prompts, which took whole steps"
        flag, but = f"--long-prefill-token-threshold {bound}", "long prompts then come later, others sooner"
        yield Diagnosis(True, text, cures.flag(flag, but))


# Hints beside speculative decoding, by their state in `seamark_engine_info`: whether that is fine.
DRAFTS = {
    TRIAL: (False, "hints are on trial, for a minute without requests or ten with some: nothing is kept before"),
    CLOSED: (False, "hints did not pass their trial: vLLM's log says how; a restart of the worker tries again"),
    OPEN: (True, "hints passed their trial"),
}


def _drafts(metrics: WorkerMetrics) -> Iterator[Diagnosis]:
    if not metrics.drafts:
        return
    fine, text = True, "the plugin tries hints at each start"
    if (info := metrics.engine) is not None:
        fine, text = DRAFTS.get(info.drafts, (True, f"hints are {'not ' if info.refused else ''}used"))
        if info.ahead and fine and not info.refused:
            text += f", for prompts that share {info.ahead} tokens past a state"
    yield Diagnosis(fine, f"with speculative decoding {text}")


# How states are kept with a KV connector, by the lane in `seamark_engine_info`.
LANES = {
    "inside_pass": "states are written inside a pass, as without one",
    "chunk_ends": "each state costs a pass; with NixlConnector it costs none",
    "not_served": "vLLM cannot serve hybrid models through it",
    "no_hints": "hints are refused, since it puts values into the cache that nobody has computed",
}


async def _events(worker: Probe, reports: Reports, cures: Cures) -> Diagnosis:
    asked = Probe(worker.upstream, reports.url or worker.url)
    of_one = f"?engine={reports.ranks[0]}" if reports.ranks else ""
    fine = bool(await asked.page(EVENTS + of_one))
    if reports.why_not and not fine:
        return Diagnosis(False, f"the engine's reports cannot be read: {reports.why_not}", against=CANNOT)
    text = f"the engine's decisions are {'' if fine else 'not '}reported"
    return _right(fine, text, cures.flag(EVENTS_FLAG, "without it, no evictions and no reasons"))


async def _post(worker: Probe, path: str, **body: Any) -> tuple[int, bytes]:
    """Status and answer; 0: it gives none."""
    try:
        return await worker.post(path, body, COMPLETION_SECONDS if "max_tokens" in body else None)
    except (Unreachable, Broken):
        return 0, b""


async def _requests(worker: Probe, model: str, cures: Cures, *, renders: bool) -> AsyncIterator[Diagnosis]:
    """What becomes of a completion, of a chat that is rendered, if the server does that, and of one with tools."""
    status, answer = await _post(worker, COMPLETIONS, model=model, prompt="Seamark", max_tokens=1)
    try:
        fine = loads(answer if status == 200 else b"")["usage"].get("prompt_tokens_details") is not None
        cure = cures.flag("--enable-prompt-tokens-details", "without it, hits are never reported")
        yield _right(fine, f"cached tokens are {'' if fine else 'not '}reported", cure)
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"it does not answer a completion of one token (status {status or 'none'})"
        yield Diagnosis(False, text, against=CANNOT)
    chat = {"model": model, "messages": [{"role": "user", "content": "Seamark"}]}
    if renders:
        status, _ = await _post(worker, CHAT + "/render", **chat)
        # /tokenize renders nearly everything alike, so a closed route is no error.
        cure = cures.flag("--enable-scale-out", "without it, the gateway falls back to /tokenize")
        is_open = status == 200
        yield Diagnosis(True, f"render route {'open' if is_open else 'closed'}", "" if is_open else cure)
    status, answer = await _post(worker, CHAT, **chat, max_tokens=1, tools=[TOOL], tool_choice="auto")
    if status == 200:
        yield Diagnosis(True, "takes tools, as agents send them")
    elif status == 400 and TOOL_FLAG.encode() in answer:  # hits do not depend on it, so it is no error
        yield Diagnosis(True, "takes no tools: agents will get 400", cures.tools())


async def read_shadow(gateway: str, api_key: str | None) -> list[str]:
    """What a gateway warns of, and has seen lost, as lines for people. Raises `Unwell` if it cannot be asked."""
    async with _asking(gateway, api_key, "gateway") as asked:
        status, answer = await asked.get(STATUS)
        if status != 200:
            why = f"no Seamark gateway: {STATUS} answers {status}, and with admin_port is at that port"
            raise Unwell(why, STATUS, status)
    try:
        told = loads(answer)
        return [*told["warnings"], *shadow_lines(told["shadow"])]
    except (ValueError, KeyError, TypeError):
        raise Unwell(f"{asked.url} is not a Seamark gateway") from None
