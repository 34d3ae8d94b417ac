"""`seamark doctor`: whether requests to a worker will hit, in one line; then what is right and wrong, and the cures.

The cures are lines for the way in which vLLM is run: `cures` words them, `ways` finds the way out.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.chat.chat import CHAT, COMPLETIONS
from proxy.commands.cures import EVENTS_FLAG, TOOL_FLAG, Cures, indented
from proxy.commands.outlook import outlook, version_of
from proxy.commands.parser import Parser
from proxy.commands.recipe_reader import read_recipe
from proxy.commands.versions import FORK, SUPPORTED, fork_alone, is_fork, is_supported
from proxy.commands.ways import DEFAULT_PORT, FoundWay, Way, find, surroundings
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
RELEASE = version().partition("+")[0]  # without a commit

EXIT_STATUSES = (
    "Exit status: 0: requests will hit and there is nothing to change; 1: they cannot, something is to be changed, "
    "or the worker or the gateway could not be asked; 2: the command line or a key file is wrong."
)


class Diagnosis(NamedTuple):
    fine: bool
    text: str
    cure: str | None = None
    last: bool = False  # the cure is printed at the very end
    verdict: str = ""  # the first line, if there can be no hits because of this


class NotAnswering(Exception):
    """No usable answer; the message says why."""


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
    way = "how vLLM is run, so that cures are worded for that; by default what can be seen from here, else pip"
    parser.add_argument("--runs-as", type=Way, choices=list(Way), metavar="|".join(Way), help=way)
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
    found, words = _way(url, args.runs_as)
    diagnoses = asyncio.run(examine(url, worker_key, found))
    lost: list[str] = []
    if args.gateway:
        try:
            lost = asyncio.run(read_shadow(address(args.gateway), gateway_key))
        except NotAnswering as error:
            diagnoses.append(Diagnosis(False, str(error), verdict=f"not reachable: {error}"))
    print(printable(verdict(url, diagnoses)))
    for diagnosis in diagnoses:
        print(f"{'ok   ' if diagnosis.fine else 'WRONG'} {printable(diagnosis.text)}")
        if diagnosis.cure and not diagnosis.last:
            print(printable_lines(diagnosis.cure))
    if any(diagnosis.cure for diagnosis in diagnoses):
        lost.append(words)
    for line in lost:
        print(printable(line))
    for diagnosis in diagnoses:
        if diagnosis.last:
            print(f"\nthe cure:\n{printable_lines(diagnosis.cure)}")
    return 0 if all(diagnosis.fine for diagnosis in diagnoses) else 1


def _of_recipe(given: str) -> int:
    """Say what a recipe will do; 1 unless it will hit."""
    recipe = read_recipe(given, surroundings().inspect)
    seen = outlook(recipe, version_of(recipe))
    print(printable(seen.verdict))
    if seen.ask:
        print(f"ASK   {printable(seen.ask)}")
    if seen.change:
        print(f"{'ELSE ' if seen.ask else 'WRONG the one change:'} {printable(seen.change)}")
    for note in seen.notes:
        print(f"ok    {printable(note)}")
    if seen.starts:
        print(f"(seamark setup {shlex.quote(given)} writes the files)")
    return 0 if seen.hits else 1


def address(url: str) -> str:
    """The base URL that a user means: "spark:8000/v1" is http://spark:8000."""
    text = url.strip()
    return base_url(text if "://" in text else f"http://{text}")


def _way(url: str, chosen: Way | None) -> tuple[FoundWay, str]:
    """How vLLM is run, and what to tell of that."""
    seen = None
    with suppress(ValueError):  # no URL
        seen = find(url, surroundings())
    if chosen is not None:
        return (seen if seen is not None and seen.way is chosen else FoundWay(chosen)), f"(cures for {chosen})"
    if seen is not None:
        name = f" ({seen.name})" if seen.name else ""
        return seen, f"(cures for {seen.way}{name}, as it looks from here; else --runs-as {'|'.join(Way)})"
    return FoundWay(Way.PIP), f"(cures for {Way.PIP}; else --runs-as {'|'.join(way for way in Way if way != Way.PIP)})"


@asynccontextmanager
async def _asking(url: str, api_key: str | None, what: str, port: int | None = None) -> AsyncIterator[Probe]:
    """Questions to a worker or a gateway. Raises `NotAnswering`, also where one of the questions inside has no answer.

    The words do not hold a password of the URL. `port`: its usual one, if that is not HTTP's.
    """
    try:
        shown, userinfo = without_credentials(url)
        parts = urlsplit(shown)
        hint = f" (the URL has no port; vLLM's is {port})" if port and parts.port is None else ""
    except ValueError:
        raise NotAnswering(f"{'that' if '@' in url else url} is no URL") from None  # it may hold a password
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise NotAnswering(f"no {what} answers at {shown}: no URL of http:// or https://")
    upstream = Upstream(CONNECT_SECONDS, DEFAULTS.max_header_bytes, api_key)
    upstream.trust(shown, userinfo)
    try:
        yield Probe(upstream, shown, seconds=ANSWER_SECONDS)
    except (Unreachable, Broken) as error:
        raise NotAnswering(f"no {what} answers at {shown}: {_why_not(error, hint)}") from None
    except Unwell as error:
        raise NotAnswering(f"{shown} is {error}") from None
    finally:
        await upstream.aclose()


def _why_not(error: Unreachable | Broken, hint: str) -> str:
    """Why a question got no answer, with what a person at a prompt can try."""
    if isinstance(error, Silent):
        return f"it takes the connection and says nothing for {ANSWER_SECONDS:g} s"
    if isinstance(error, Broken):
        return NO_HTTP
    return f"{error}{': another address, or a firewall between' if isinstance(error.__cause__, TimeoutError) else hint}"


def verdict(url: str, diagnoses: Sequence[Diagnosis]) -> str:
    """The first line: what keeps from hits, or that they will come."""
    if against := next((diagnosis.verdict for diagnosis in diagnoses if diagnosis.verdict), ""):
        return against
    wrong = sum(not diagnosis.fine for diagnosis in diagnoses)
    more = f"; {wrong} to change, see WRONG below" if wrong else ""
    return f"will hit: {without_credentials(url)[0]} {diagnoses[0].text}{more}"


async def examine(url: str, api_key: str | None, found: FoundWay) -> list[Diagnosis]:
    """What is right and wrong with the worker at `url`. Sends it one request for one token."""
    try:
        async with _asking(url, api_key, "server", DEFAULT_PORT) as worker:
            return [diagnosis async for diagnosis in _diagnoses(worker, api_key is not None, found)]
    except NotAnswering as error:
        return [Diagnosis(False, f"no vLLM could be asked: {error}", verdict=f"not reachable: {error}")]


async def _diagnoses(worker: Probe, has_key: bool, found: FoundWay) -> AsyncIterator[Diagnosis]:
    shown = worker.url
    if gateway_id((await worker.get("/health"))[1]) is not None:
        text = f"{shown} is a Seamark gateway; ask {await _workers_of(worker)}"
        yield Diagnosis(False, text, verdict=f"a gateway, not a worker: {shown}")
        return
    status, answer = await worker.get(MODELS)
    _check_key(status, shown, has_key, "--worker-api-key-file FILE", "vLLM's --api-key")
    if status >= 500:
        raise NotAnswering(f"{shown} is not well: {MODELS} answers {status}")
    if not (models := models_in(answer)):
        raise NotAnswering(f"{shown} is not vLLM: {MODELS} lists no models (status {status})")
    model, parts = models[0]["id"], urlsplit(shown)
    root, is_local = printable(models[0].get("root") or model), parts.hostname in LOOPBACK
    cures = Cures(found, root, parts.port or DEFAULT_PORT, is_local)
    levels = read_metrics((await worker.metrics())[0]).sleep_levels
    if why := await worker.why_asleep(EngineAnswers(shown), levels, ANSWER_SECONDS):
        yield Diagnosis(False, f"{shown} is {why}", verdict=f"cannot hit: {shown} is {why}")
        return
    details = await _details(worker, model, cures)  # first: an engine's metrics are certain once it has run a step
    exposition, reports = await worker.all_metrics()
    metrics = read_metrics(exposition)
    vllm, frontend, is_read = await worker.version(), await worker.frontend(), metrics.engine or not reports.why_not
    yield Diagnosis(True, f"serves {model}")
    yield Diagnosis(bool(vllm), f"vLLM {vllm}" if vllm else "/version gives no vLLM version")
    engine = _engine(metrics, cures, vllm or "") if is_read else ()
    drafts, connector = _drafts(metrics, cures), _connector(metrics, cures)
    for diagnosis in chain(_frontend(frontend), engine, _caching(metrics, cures), drafts, connector):
        yield diagnosis
    if metrics.engine or reports.why_not:
        yield await _events(worker, reports, cures)
    yield details
    if not frontend.name:
        yield await _render(worker, model, cures)
    for diagnosis in await _tools(worker, model, cures):
        yield diagnosis


async def _workers_of(gateway: Probe) -> str:
    """What to ask in place of a gateway."""
    try:
        workers = loads((await gateway.get(STATUS))[1])["workers"]
        names = [without_credentials(str(worker["url"]))[0] for worker in workers]
    except (*NO_ANSWER, ValueError, KeyError, TypeError):
        names = []
    return ", ".join(f"--worker {name}" for name in names) or "the vLLM behind it, with --worker"


def _check_key(status: int, shown: str, has_key: bool, flag: str, whose: str) -> None:
    """Raises `NotAnswering` if the answer's status says that a key is wanted, or another one."""
    if status in (401, 403) and has_key:
        raise NotAnswering(f"{shown} refuses the key in {flag} (status {status}): it is not {whose}")
    if status in (401, 403):
        missing = f"{shown} wants an API key (status {status}), and none was given"
        raise NotAnswering(f"{missing}: {flag}, with {whose} in it")


def _engine(metrics: WorkerMetrics, cures: Cures, vllm: str) -> Iterator[Diagnosis]:
    """`vllm`: its version, empty if it is not known."""
    if other := metrics.other_release:
        text = f"no hint counts: {other}"
        yield Diagnosis(False, text, cures.update(RELEASE), last=True, verdict=f"cannot hit: {other}")
        return
    if (info := metrics.engine) is None:
        missing = "patches are not live: a recurrent state is kept only where a request happens to stop"
        alone = f"; vLLM alone caches whole blocks of {metrics.block_size:,} tokens" if metrics.block_size else ""
        cure = cures.install()
        against = f"cannot hit: the plugin is not in this vLLM, or left it untouched (its log says why){alone}"
        if is_fork(f"{cures.found.image} {vllm}"):
            cure, against = cures.release(), f"no hits by Seamark: {FORK}"
            missing = (
                f"{fork_alone(cures.model)}; a gateway in shadow mode (`seamark serve --shadow`) counts what that loses"
            )
        elif not is_supported(vllm):
            cure = f"{cures.release()}\n{cure}"
            against = f"cannot hit: the plugin leaves vLLM {vllm} untouched, as it knows {SUPPORTED}{alone}"
        yield Diagnosis(False, missing, cure, last=True, verdict=against)
        return
    yield Diagnosis(True, f"patches are live, seamark {info.version}")
    if info.other_version:
        yield Diagnosis(False, info.other_version, cures.update(RELEASE))
    lengths = f"cache block {info.block_size} tokens, match unit {info.match_unit} tokens"
    if info.refused:  # with a finer unit, too
        yield Diagnosis(False, f"no hint counts: {info.refused}", verdict=f"cannot hit: {info.refused}")
        yield Diagnosis(True, lengths)
    elif metrics.attention_only:  # a unit below the block stops it
        yield Diagnosis(True, f"{lengths}; vLLM alone keeps all, since no layer is recurrent")
    elif info.match_unit <= 64:
        yield Diagnosis(True, lengths)
    else:
        cure = cures.flag("--prefix-match-unit 16", "or leave it out: the plugin sets it for hybrid models")
        yield Diagnosis(False, lengths, cure)


def _caching(metrics: WorkerMetrics, cures: Cures) -> Iterator[Diagnosis]:
    if metrics.prefix_caching is False:
        cure = cures.flag("--enable-prefix-caching", "and no --no-enable-prefix-caching")
        off = "prefix caching is off in this vLLM"
        yield Diagnosis(False, off, cure, verdict=f"cannot hit: {off}")


# Hints with speculative decoding, by their state in `seamark_engine_info`: whether that is as it should be, in words,
# and the cure.
DRAFTS = {
    TRIAL: Diagnosis(
        False,
        ", and hints are on trial: nothing is kept for others before it is over",
        "# the engine tries them itself: it takes a minute without requests, or ten with some",
    ),
    CLOSED: Diagnosis(
        False,
        ", and hints with it did not pass their trial",
        "# vLLM's log has the figures. A restart of the worker tries again;\n"
        "# or no --speculative-config; or as it is: vLLM alone caches",
    ),
    OPEN: Diagnosis(True, ", with hints, which passed their trial: they share {ahead} tokens past a state"),
}


def _drafts(metrics: WorkerMetrics, cures: Cures) -> Iterator[Diagnosis]:
    fine, text, cure = True, ": the plugin tries hints with it at each start", None
    if (info := metrics.engine) is not None:
        if info.drafts in DRAFTS:
            fine, text, cure, *_ = DRAFTS[info.drafts]
            cure = cure and indented(cure)
        elif info.refused:
            fine, text, cure = False, ", without hints", cures.drafts() if "SEAMARK_DRAFTS" in info.refused else None
        else:
            text = ", with hints" + (": they share {ahead} tokens past a state" if info.ahead else "")
        text = text.format(ahead=info.ahead)
    if metrics.drafts:
        yield Diagnosis(fine, f"speculative decoding is on{text}", cure)


# How states are kept with a KV connector, by the lane in `seamark_engine_info`.
LANES = {
    "inside_pass": "states are written inside a pass, as without one",
    "chunk_ends": "each state costs a pass; with NixlConnector it costs none",
    "not_served": "vLLM cannot serve hybrid models through it",
}


def _connector(metrics: WorkerMetrics, cures: Cures) -> Iterator[Diagnosis]:
    name = f"KV connector {metrics.connector}"
    if metrics.connector and metrics.lane == "no_hints":
        cure = cures.flag("--kv-transfer-config", "take it away: this connector measures decoding alone")
        why = f"{name} puts values into the cache that nobody has computed, and the plugin refuses hints with it"
        yield Diagnosis(False, f"{name}: hints are refused", cure, verdict=f"cannot hit: {why}")
    elif metrics.connector:
        yield Diagnosis(True, f"{name}: {LANES.get(metrics.lane, metrics.lane)}")


def _frontend(frontend: Frontend) -> Iterator[Diagnosis]:
    """Which HTTP server answers, if it lacks what vLLM's other one has."""
    if frontend.name:
        lacking = [path for path in frontend.lacks if not path.endswith("/render")]  # the gateway does without that one
        lacks = f": it lacks {', '.join(lacking)} and answers with one choice alone (n=1)" if lacking else ""
        yield Diagnosis(True, f"{frontend.name} serves{lacks}; a hint in a header does not reach the engine")


async def _events(worker: Probe, reports: Reports, cures: Cures) -> Diagnosis:
    asked = Probe(worker.upstream, reports.url or worker.url, seconds=ANSWER_SECONDS)
    of_one = f"?engine={reports.ranks[0]}" if reports.ranks else ""
    fine = await _is_open(asked.get(EVENTS + of_one))
    if reports.why_not and not fine:
        text = f"the engine's reports cannot be read: {reports.why_not}"
        return Diagnosis(False, text, verdict=f"cannot hit: {reports.why_not}")
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
        text = f"does not answer a completion of one token ({status})"
        return Diagnosis(False, text, verdict=f"cannot hit: it {text}")
    cure = cures.flag("--enable-prompt-tokens-details", "without it, hits are never reported")
    return Diagnosis(reported, f"cached tokens are {'' if reported else 'not '}reported", None if reported else cure)


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


async def read_shadow(gateway: str, api_key: str | None) -> list[str]:
    """What a gateway warns of, and has seen lost, as lines for people. Raises `NotAnswering` if it cannot be asked."""
    async with _asking(gateway, api_key, "gateway") as asked:
        shown = asked.url
        status, answer = await asked.get(STATUS)
    _check_key(status, f"the gateway {shown}", api_key is not None, "--gateway-key-file FILE", "an admin's key")
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
    time = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
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
    others = sorted((result, count) for result, count in results.items() if result != "judged")
    return lines + [f"    {count:,} not judged: {result}{HINTS.get(result, '')}" for result, count in others]


HINTS = {
    "no_usage": " (neither the answers nor the worker's /metrics say what was cached)",
    "no_room": " (raise text_bytes)",
}
