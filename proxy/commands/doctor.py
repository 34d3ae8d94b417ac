"""`seamark doctor`: whether requests to a worker will hit, in one line; then what is right and wrong, and the cures.

The cures are lines for the way in which vLLM is run: `cures` words them, `ways` finds the way out.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.chat.chat import CHAT, COMPLETIONS
from proxy.commands.cures import EVENTS_FLAG, TOOL_FLAG, Cures
from proxy.commands.outlook import outlook
from proxy.commands.parser import Parser
from proxy.commands.recipe import read_recipe
from proxy.commands.ways import DEFAULT_PORT, FoundWay, Way, find, image_version, surroundings
from proxy.config_files import LOOPBACK, base_url, read_secret, without_credentials
from proxy.errors import SettingsError
from proxy.fleet.probe import (
    MODELS,
    NO_HTTP,
    EngineAnswers,
    Frontend,
    Probe,
    Reports,
    Unwell,
    gateway_id,
    models_in,
    read_metrics,
)
from proxy.fleet.worker import CLOSED, OPEN, TRIAL
from proxy.fleet.worker_metrics import WorkerMetrics
from proxy.http.client import Broken, Silent, Unreachable, Upstream
from proxy.http.json_body import loads
from proxy.observability.shadow import CURED
from proxy.printable import printable, printable_lines
from proxy.routing.engine_events import PATH as EVENTS
from proxy.settings import Settings
from proxy.version import version

DEFAULTS = Settings.model_validate({})  # of a gateway

CONNECT_SECONDS, ANSWER_SECONDS, COMPLETION_SECONDS = 2.0, 10.0, 120.0

NO_ANSWER = (Unreachable, Broken)

STATUS = "/seamark/status"

SERVER, GATEWAY = "server", "gateway"  # what is asked

KEY_FLAG, GATEWAY_KEY_FLAG = "--worker-api-key-file FILE", "--gateway-key-file FILE"

EXIT_STATUSES = (
    "Exit status: 0: requests will hit and there is nothing to change; 1: they cannot, something is to be changed, "
    "or the worker or the gateway could not be asked; 2: the command line or a key file is wrong."
)

PIP = FoundWay(Way.PIP)


class Diagnosis(NamedTuple):
    """One line of the diagnosis."""

    fine: bool
    text: str
    cure: str | None = None
    last: bool = False  # the cure is printed at the very end
    fatal: str | None = None  # why there can be no hits, for the verdict


class Examination(NamedTuple):
    """What the doctor says of a worker."""

    verdict: str  # the first line
    diagnoses: list[Diagnosis]


class NotAnswering(Exception):
    """No usable answer; the message says why."""


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="seamark doctor", description="whether requests to a vLLM worker will hit", epilog=EXIT_STATUSES
    )
    parser.add_argument("--worker", metavar="URL", help="http:// and a /v1 at its end may be left out")
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="instead of a worker: what a recipe will do, as `seamark setup RECIPE` takes it; nothing is written",
    )
    parser.add_argument("--worker-api-key-file", type=Path, metavar="FILE", help="holds the worker's API key")
    parser.add_argument("--gateway", metavar="URL", help="a gateway before the worker: prints what it has seen lost")
    parser.add_argument("--gateway-key-file", type=Path, metavar="FILE", help="holds an admin's key of that gateway")
    parser.add_argument(
        "--runs-as",
        type=Way,
        choices=list(Way),
        metavar="|".join(Way),
        help="how vLLM is run, so that cures are worded for that; by default what can be seen from here, else pip",
    )
    args = parser.parse_args(argv)
    if bool(args.worker) == bool(args.recipe):
        parser.error("give --worker URL, or --recipe RECIPE before anything runs")
    if args.recipe:
        try:
            return _of_recipe(args.recipe)
        except SettingsError as error:
            parser.error(str(error))
    try:
        worker_key = _key("worker_api_key_file", args.worker_api_key_file)
        gateway_key = _key("gateway_key_file", args.gateway_key_file)
    except SettingsError as error:
        parser.error(str(error))
    url = address(args.worker)
    found, words = _way(url, args.runs_as)
    examination = examine(url, worker_key, found)
    diagnoses, verdict = examination.diagnoses, examination.verdict
    lost: list[str] = []
    if args.gateway:
        try:
            lost = read_shadow(address(args.gateway), gateway_key)
        except NotAnswering as error:
            diagnoses.append(Diagnosis(False, str(error)))
            if verdict.startswith("will hit"):
                verdict = f"not reachable: {error}"
    print(printable(verdict))
    for diagnosis in diagnoses:
        print(f"{'ok   ' if diagnosis.fine else 'WRONG'} {printable(diagnosis.text)}")
        if diagnosis.cure and not diagnosis.last:
            print(printable_lines(diagnosis.cure))
    for line in lost:
        print(printable(line))
    if any(diagnosis.cure for diagnosis in diagnoses):
        print(printable(words))
    for diagnosis in diagnoses:
        if diagnosis.last:
            print(f"\nthe cure:\n{printable_lines(diagnosis.cure)}")
    return 0 if all(diagnosis.fine for diagnosis in diagnoses) else 1


def _of_recipe(given: str) -> int:
    """Say what a recipe will do; 1 unless it will hit."""
    recipe = read_recipe(given, surroundings().inspect)
    seen = outlook(recipe, image_version(recipe.image) if recipe.image else "")
    print(printable(seen.verdict))
    if seen.change:
        print(f"WRONG the one change: {printable(seen.change)}")
    for note in seen.notes:
        print(f"ok    {printable(note)}")
    print(f"(seamark setup {shlex.quote(given)} writes the files)")
    return 0 if seen.hits else 1


def address(url: str) -> str:
    """The base URL that a user means: "spark:8000/v1" is http://spark:8000."""
    text = url.strip()
    return base_url(text if "://" in text else f"http://{text}")


def _way(url: str, chosen: Way | None) -> tuple[FoundWay, str]:
    """How vLLM is run, and what to tell of that."""
    try:
        seen = find(url, surroundings())
    except ValueError:  # no URL
        seen = None
    if chosen is not None:
        return (seen if seen is not None and seen.way is chosen else FoundWay(chosen)), f"(cures for {chosen})"
    if seen is not None:
        name = f" ({seen.name})" if seen.name else ""
        return seen, f"(cures for {seen.way}{name}, as it looks from here; else --runs-as {'|'.join(Way)})"
    return PIP, f"(cures for {Way.PIP}; else --runs-as {'|'.join(way for way in Way if way != Way.PIP)})"


def _key(setting: str, path: Path | None) -> str | None:
    return read_secret(setting, path) if path else None


@asynccontextmanager
async def _asking(url: str, api_key: str | None, what: str) -> AsyncIterator[Probe]:
    """Questions to a worker or a gateway. Raises `NotAnswering`, also where one of the questions inside has no answer.

    The words do not hold a password of the URL.
    """
    try:
        shown, userinfo = without_credentials(url)
        parts = urlsplit(shown)
        lacks_port = parts.port is None and what == SERVER
    except ValueError:
        raise NotAnswering(f"{'that' if '@' in url else url} is no URL") from None  # it may hold a password
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise NotAnswering(f"no {what} answers at {shown}: no URL of http:// or https://")
    upstream = Upstream(CONNECT_SECONDS, DEFAULTS.max_header_bytes, api_key)
    upstream.trust(shown, userinfo)
    try:
        yield Probe(upstream, shown, seconds=ANSWER_SECONDS)
    except (Unreachable, Broken) as error:
        raise NotAnswering(f"no {what} answers at {shown}: {_why_not(error, lacks_port)}") from None
    except Unwell as error:
        raise NotAnswering(f"{shown} is {error}") from None
    finally:
        await upstream.aclose()


def examine(url: str, api_key: str | None = None, found: FoundWay = PIP) -> Examination:
    """What is right and wrong with the worker at `url`. Sends it one request for one token."""

    async def examination() -> Examination:
        async with _asking(url, api_key, SERVER) as worker:
            return await _examine(worker, api_key is not None, found)

    try:
        return asyncio.run(examination())
    except NotAnswering as error:
        return _unreachable(str(error))


def _unreachable(why: str) -> Examination:
    return Examination(f"not reachable: {why}", [Diagnosis(False, f"no vLLM could be asked: {why}")])


async def _examine(worker: Probe, has_key: bool, found: FoundWay) -> Examination:
    shown = worker.url
    if gateway_id((await worker.get("/health"))[1]) is not None:
        return Examination(
            f"a gateway, not a worker: {shown}",
            [Diagnosis(False, f"{shown} is a Seamark gateway; ask {await _workers_of(worker)}")],
        )
    status, answer = await worker.get(MODELS)
    if refusal := _why_refused(status, shown, has_key, KEY_FLAG, "vLLM's --api-key"):
        raise NotAnswering(refusal)
    if status >= 500:
        raise NotAnswering(f"{shown} is not well: {MODELS} answers {status}")
    if not (models := models_in(answer)):
        raise NotAnswering(f"{shown} is not vLLM: {MODELS} lists no models (status {status})")
    model, parts = models[0]["id"], urlsplit(shown)
    cures = Cures(
        found, printable(models[0].get("root") or model), parts.port or DEFAULT_PORT, parts.hostname in LOOPBACK
    )
    levels = read_metrics((await worker.metrics())[0]).sleep_levels
    if why := await worker.why_asleep(EngineAnswers(shown), levels, ANSWER_SECONDS):
        return Examination(f"cannot hit: {shown} is {why}", [Diagnosis(False, f"{shown} is {why}")])
    details = await _details(worker, model, cures)  # first: an engine's metrics are certain once it has run a step
    text, reports = await worker.all_metrics()
    metrics = read_metrics(text)
    engine = metrics.engine
    frontend = await worker.frontend()
    diagnoses = [
        Diagnosis(True, f"serves {model}"),
        _vllm_version(await worker.version()),
        *_frontend(frontend),
        *(_engine(metrics, cures) if engine is not None or not reports.why_not else []),
        *_caching(metrics, cures),
        *_drafts(metrics, cures),
        *_connector(metrics, cures),
        *([await _events(worker, reports, cures)] if engine is not None or reports.why_not else []),
        details,
        *([] if frontend.name else [await _render(worker, model, cures)]),
        *await _tools(worker, model, cures),
    ]
    fatal = next((diagnosis.fatal for diagnosis in diagnoses if diagnosis.fatal), None)
    if fatal is not None:
        return Examination(f"cannot hit: {fatal}", diagnoses)
    wrong = sum(not diagnosis.fine for diagnosis in diagnoses)
    more = f"; {wrong} to change, see WRONG below" if wrong else ""
    return Examination(f"will hit: {shown} serves {model}{more}", diagnoses)


def _why_not(error: Unreachable | Broken, lacks_port: bool) -> str:
    """Why a question got no answer, with what a person at a prompt can try."""
    if isinstance(error, Silent):
        return f"it takes the connection and says nothing for {ANSWER_SECONDS:g} s"
    if isinstance(error, Broken):
        return NO_HTTP
    if isinstance(error.__cause__, TimeoutError):
        return f"{error}: another address, or a firewall between"
    return f"{error} (the URL has no port; vLLM's is {DEFAULT_PORT})" if lacks_port else str(error)


async def _workers_of(gateway: Probe) -> str:
    """What to ask in place of a gateway."""
    try:
        workers = loads((await gateway.get(STATUS))[1])["workers"]
        names = [without_credentials(str(worker["url"]))[0] for worker in workers]
    except (*NO_ANSWER, ValueError, KeyError, TypeError):
        names = []
    return ", ".join(f"--worker {name}" for name in names) or "the vLLM behind it, with --worker"


def _why_refused(status: int, shown: str, has_key: bool, flag: str, whose: str) -> str | None:
    if status not in (401, 403):
        return None
    said = f"(status {status})"
    if has_key:
        return f"{shown} refuses the key in {flag} {said}: it is not {whose}"
    return f"{shown} wants an API key {said}, and none was given: {flag}, with {whose} in it"


def _vllm_version(version: str) -> Diagnosis:
    return Diagnosis(bool(version), f"vLLM {version}" if version else "/version gives no vLLM version")


def _engine(metrics: WorkerMetrics, cures: Cures) -> list[Diagnosis]:
    if other := metrics.other_release:
        return [Diagnosis(False, f"no hint counts: {other}", cures.update(version()), last=True, fatal=other)]
    if (info := metrics.engine) is None:
        missing = "patches are not live: a recurrent state is kept only where a request happens to stop"
        alone = f"; vLLM alone caches whole blocks of {metrics.block_size:,} tokens" if metrics.block_size else ""
        fatal = f"the plugin is not in this vLLM, or left it untouched (its log says why){alone}"
        return [Diagnosis(False, missing, cures.install(), last=True, fatal=fatal)]
    live = [Diagnosis(True, f"patches are live, seamark {info.version}")]
    lengths = f"cache block {info.block_size} tokens, match unit {info.match_unit} tokens"
    if info.refused:  # with a finer unit, too
        refused = Diagnosis(False, f"no hint counts: {info.refused}", fatal=info.refused)
        return [*live, refused, Diagnosis(True, lengths)]
    if metrics.attention_only:  # a unit below the block stops it
        return [*live, Diagnosis(True, f"{lengths}; vLLM alone keeps all, since no layer is recurrent")]
    coarse = info.match_unit > 64
    cure = cures.flag("--prefix-match-unit 16", "or leave it out: the plugin sets it for hybrid models")
    return [*live, Diagnosis(not coarse, lengths, cure if coarse else None)]


def _caching(metrics: WorkerMetrics, cures: Cures) -> list[Diagnosis]:
    if metrics.prefix_caching is not False:
        return []
    cure = cures.flag("--enable-prefix-caching", "and no --no-enable-prefix-caching")
    off = "prefix caching is off in this vLLM"
    return [Diagnosis(False, off, cure, fatal=off)]


def _drafts(metrics: WorkerMetrics, cures: Cures) -> list[Diagnosis]:
    """Speculative decoding, and whether hints are used beside it."""
    if not metrics.drafts:
        return []
    if (info := metrics.engine) is None:
        return [Diagnosis(True, "speculative decoding is on: the plugin tries hints beside it at each start")]
    if info.drafts == TRIAL:
        text = "speculative decoding is on, and hints are on trial: nothing is kept for others before it is over"
        return [Diagnosis(False, text, cures.trial())]
    if info.drafts == CLOSED:
        text = "speculative decoding is on, and hints beside it did not stand their trial"
        return [Diagnosis(False, text, cures.closed())]
    if info.drafts == OPEN:
        ahead = f"they share {info.ahead} tokens past a state"
        return [Diagnosis(True, f"speculative decoding is on, with hints, which stood their trial: {ahead}")]
    if info.refused:
        cure = cures.drafts() if "SEAMARK_DRAFTS" in info.refused else None
        return [Diagnosis(False, "speculative decoding is on, without hints", cure)]
    ahead = f": they share {info.ahead} tokens past a state" if info.ahead else ""
    return [Diagnosis(True, f"speculative decoding is on, with hints{ahead}")]


# How states are kept beside a KV connector, by the lane in `seamark_engine_info`.
LANES = {
    "inside_pass": "states are written inside a pass, as without one",
    "chunk_ends": "each state costs a pass; beside NixlConnector it costs none",
    "not_served": "vLLM cannot serve hybrid models through it",
}


def _connector(metrics: WorkerMetrics, cures: Cures) -> list[Diagnosis]:
    """KV connectors, and how states are kept beside them."""
    if not metrics.connector:
        return []
    name = f"KV connector {metrics.connector}"
    if metrics.lane == "no_hints":
        cure = cures.flag("--kv-transfer-config", "take it away: this connector measures decoding alone")
        fatal = f"{name} puts values into the cache that nobody has computed, and the plugin refuses hints beside it"
        return [Diagnosis(False, f"{name}: hints are refused", cure, fatal=fatal)]
    return [Diagnosis(True, f"{name}: {LANES.get(metrics.lane, metrics.lane)}")]


def _frontend(frontend: Frontend) -> list[Diagnosis]:
    """Which HTTP server answers, if it lacks what vLLM's other one has."""
    if not frontend.name:
        return []
    lacking = [path for path in frontend.lacks if not path.endswith("/render")]  # the gateway does without that one
    lacks = f": it lacks {', '.join(lacking)} and answers with one choice alone (n=1)" if lacking else ""
    return [Diagnosis(True, f"{frontend.name} serves{lacks}; a hint in a header does not reach the engine")]


async def _events(worker: Probe, reports: Reports, cures: Cures) -> Diagnosis:
    asked = Probe(worker.upstream, reports.url or worker.url, seconds=ANSWER_SECONDS)
    of_one = f"?engine={reports.ranks[0]}" if reports.ranks else ""
    fine = await _is_open(asked.get(EVENTS + of_one))
    if reports.why_not and not fine:
        return Diagnosis(False, f"the engine's reports cannot be read: {reports.why_not}", fatal=reports.why_not)
    text = f"the engine's decisions are {'' if fine else 'not '}reported"
    return Diagnosis(fine, text, None if fine else cures.flag(EVENTS_FLAG, "without it, no evictions and no reasons"))


async def _details(worker: Probe, model: str, cures: Cures) -> Diagnosis:
    status = "no answer"
    try:
        request = {"model": model, "prompt": "Seamark", "max_tokens": 1}
        code, answer = await worker.post(COMPLETIONS, request, COMPLETION_SECONDS)
        status = f"status {code}"
        if code // 100 != 2:
            raise ValueError(status)
        reported = loads(answer)["usage"].get("prompt_tokens_details") is not None
    except (*NO_ANSWER, ValueError, KeyError, TypeError, AttributeError):
        fatal = f"it does not answer a completion of one token ({status})"
        return Diagnosis(False, f"does not answer a completion of one token ({status})", fatal=fatal)
    text = f"cached tokens are {'' if reported else 'not '}reported"
    cure = cures.flag("--enable-prompt-tokens-details", "without it, hits are never reported")
    return Diagnosis(reported, text, None if reported else cure)


async def _render(worker: Probe, model: str, cures: Cures) -> Diagnosis:
    request = {"model": model, "messages": [{"role": "user", "content": "Seamark"}]}
    opened = await _is_open(worker.post(CHAT + "/render", request))
    # /tokenize renders nearly everything alike, so a closed route is mentioned and is no error.
    cure = cures.flag("--enable-scale-out", "without it, the gateway falls back to /tokenize")
    return Diagnosis(True, f"render route {'open' if opened else 'closed'}", None if opened else cure)


async def _tools(worker: Probe, model: str, cures: Cures) -> list[Diagnosis]:
    """Whether an agent's first request will be refused; nothing if that cannot be told."""
    tool = {"type": "function", "function": {"name": "seamark", "parameters": {"type": "object", "properties": {}}}}
    chat = {"messages": [{"role": "user", "content": "Seamark"}], "tools": [tool], "tool_choice": "auto"}
    try:
        status, answer = await worker.post(CHAT, {"model": model, "max_tokens": 1, **chat}, COMPLETION_SECONDS)
    except NO_ANSWER:
        return []
    if status == 200:
        return [Diagnosis(True, "takes tools, as agents send them")]
    if status != 400 or TOOL_FLAG.encode() not in answer:
        return []
    # Hits do not depend on it, so it is mentioned and is no error.
    return [Diagnosis(True, "takes no tools: agents will get 400", cures.tools())]


async def _is_open(asked: Awaitable[tuple[int, bytes]]) -> bool:
    try:
        return (await asked)[0] == 200
    except NO_ANSWER:
        return False


HOUR = 3600.0


def read_shadow(gateway: str, api_key: str | None = None) -> list[str]:
    """What a gateway warns of, and has seen lost, as lines for people. Raises `NotAnswering` if it cannot be asked."""

    async def ask() -> tuple[str, int, bytes]:
        async with _asking(gateway, api_key, GATEWAY) as asked:
            return asked.url, *await asked.get(STATUS)

    shown, status, answer = asyncio.run(ask())
    refusal = _why_refused(status, f"the gateway {shown}", api_key is not None, GATEWAY_KEY_FLAG, "an admin's key")
    if refusal is not None:
        raise NotAnswering(refusal)
    if status == 404:
        raise NotAnswering(f"{shown} does not show {STATUS}: a gateway with admin_port does so there; is it one?")
    try:
        told = loads(answer)
        return [*told["warnings"], *shadow_lines(told["shadow"])]
    except (ValueError, KeyError, TypeError):
        raise NotAnswering(f"{shown} is not a Seamark gateway") from None


def shadow_lines(shadow: Mapping[str, Any]) -> list[str]:
    """The part `shadow` of `/seamark/status` in words. Raises `KeyError` or `TypeError` for anything else."""
    results, lost = shadow["requests"], shadow["lost"]
    judged = results.get("judged", 0)
    seconds = shadow["watched_seconds"]
    time = f"{seconds / HOUR:.1f} hours" if seconds >= HOUR else f"{seconds / 60:.0f} minutes"
    left = f" ({waiting:,} still to be)" if (waiting := shadow["waiting"]) else ""
    lines = [f"lost in {time}, {judged:,} requests judged{left}:"]
    for reason, loss in sorted(lost.items(), key=lambda item: -item[1]["tokens"]):
        cured = "   the plugin saves these" if reason == CURED else ""
        lines.append(f"    {loss['tokens']:>12,} tokens {loss['seconds']:>10.1f} s   {reason}{cured}")
    if not lost:
        lines.append("    nothing so far")
    if left := shadow["tokens_without_seconds"]:
        lines.append(f"    {left:,} of these tokens have no seconds yet: too few streams to learn from")
    if unreported := shadow["cached_not_told"]:
        lines.append(f"    {unreported:,} answers did not say what was cached: the worker's own total of hits was used")
    for result, count in sorted(results.items()):
        if result != "judged":
            lines.append(f"    {count:,} not judged: {result}{HINTS.get(result, '')}")
    return lines


HINTS = {
    "no_usage": " (neither the answers nor the worker's /metrics say what was cached)",
    "no_room": " (raise text_bytes)",
}
