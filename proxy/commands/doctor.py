"""`seamark doctor`: whether requests to a worker will hit, in one line; then what is right and wrong, and the cures.

The cures are lines for the way in which vLLM is run: `cures` words them, `ways` finds the way out.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from proxy.chat.chat import CHAT, COMPLETIONS
from proxy.commands.cures import EVENTS_FLAG, TOOL_FLAG, Cures
from proxy.commands.parser import Parser
from proxy.commands.ways import DEFAULT_PORT, LOOPBACK, Found, Way, find, surroundings
from proxy.config_files import base_url, read_secret, without_credentials
from proxy.errors import SettingsError
from proxy.fleet import worker_metrics
from proxy.fleet.sleep import EngineAnswers
from proxy.fleet.worker_metrics import ENTRIES_SINCE, EngineInfo, EngineSetup
from proxy.http.json_body import HINT, XARGS
from proxy.observability.shadow import CURED
from proxy.routing.engine_events import PATH as EVENTS

CONNECT_SECONDS, ANSWER_SECONDS, COMPLETION_SECONDS = 2.0, 10.0, 120.0

TIMEOUT = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)

REPORT_SECONDS = 2.0  # that an engine may take to count a refused hint, after its answer

NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL)

KEY_FLAG, GATEWAY_KEY_FLAG = "--worker-api-key-file FILE", "--gateway-key-file FILE"

EXIT_STATUSES = (
    "Exit status: 0: requests will hit and there is nothing to change; 1: they cannot, something is to be changed, "
    "or the worker or the gateway could not be asked; 2: the command line or a key file is wrong."
)

PIP = Found(Way.PIP)


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


class Unanswered(Exception):
    """No usable answer; the message says why."""


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="seamark doctor", description="whether requests to a vLLM worker will hit", epilog=EXIT_STATUSES
    )
    parser.add_argument("--worker", metavar="URL", required=True, help="http:// and a /v1 at its end may be left out")
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
        except Unanswered as error:
            diagnoses.append(Diagnosis(False, str(error)))
            if verdict.startswith("will hit"):
                verdict = f"not reachable: {error}"
    print(verdict)
    for diagnosis in diagnoses:
        print(f"{'ok   ' if diagnosis.fine else 'WRONG'} {diagnosis.text}")
        if diagnosis.cure and not diagnosis.last:
            print(diagnosis.cure)
    for line in lost:
        print(line)
    if any(diagnosis.cure for diagnosis in diagnoses):
        print(words)
    for diagnosis in diagnoses:
        if diagnosis.last:
            print(f"\nthe cure:\n{diagnosis.cure}")
    return 0 if all(diagnosis.fine for diagnosis in diagnoses) else 1


def address(url: str) -> str:
    """The base URL that a user means: "spark:8000/v1" is http://spark:8000."""
    text = url.strip()
    return base_url(text if "://" in text else f"http://{text}")


def _way(url: str, chosen: Way | None) -> tuple[Found, str]:
    """How vLLM is run, and what to tell of that."""
    try:
        seen = find(url, surroundings())
    except ValueError:  # no URL
        seen = None
    if chosen is not None:
        return (seen if seen is not None and seen.way is chosen else Found(chosen)), f"(cures for {chosen})"
    if seen is not None:
        name = f" ({seen.name})" if seen.name else ""
        return seen, f"(cures for {seen.way}{name}, as it looks from here; else --runs-as {'|'.join(Way)})"
    return PIP, f"(cures for {Way.PIP}; else --runs-as {'|'.join(way for way in Way if way != Way.PIP)})"


def _key(setting: str, path: Path | None) -> str | None:
    return read_secret(setting, path) if path else None


def _client(api_key: str | None) -> httpx.Client:
    """Without proxies of the environment: the gateway uses none, either."""
    headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
    return httpx.Client(headers=headers, timeout=TIMEOUT, trust_env=False)


def examine(url: str, api_key: str | None = None, found: Found = PIP) -> Examination:
    """What is right and wrong with the worker at `url`. Sends it one request for one token."""
    try:
        shown, _ = without_credentials(url)
        with _client(api_key) as client:
            return _examine(client, url, shown, api_key is not None, found)
    except ValueError:  # of urlsplit
        return _unreachable(_no_url(url))
    except Unanswered as error:
        return _unreachable(str(error))


def _no_url(url: str) -> str:
    return f"{'that' if '@' in url else url} is no URL"  # it may hold a password


def _unreachable(why: str) -> Examination:
    return Examination(f"not reachable: {why}", [Diagnosis(False, f"no vLLM could be asked: {why}")])


def _examine(client: httpx.Client, url: str, shown: str, has_key: bool, found: Found) -> Examination:
    health = _get(client, url, "/health", shown)
    if is_gateway(health):
        return Examination(
            f"a gateway, not a worker: {shown}",
            [Diagnosis(False, f"{shown} is a Seamark gateway; ask {_workers_of(client, url)}")],
        )
    models = _get(client, url, "/v1/models", shown)
    if refusal := _why_refused(models, shown, has_key, KEY_FLAG, "vLLM's --api-key"):
        return _unreachable(refusal)
    if models.status_code >= 500:
        raise Unanswered(f"{shown} is not well: /v1/models answers {models.status_code}")
    try:
        entry = models.json()["data"][0]
        model = str(entry["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise Unanswered(f"{shown} is not vLLM: /v1/models lists no models (status {models.status_code})") from None
    parts = urlsplit(url)
    cures = Cures(found, str(entry.get("root") or model), parts.port or DEFAULT_PORT, parts.hostname in LOOPBACK)
    if why := _why_asleep(client, url, shown):
        return Examination(f"cannot hit: {shown} is {why}", [Diagnosis(False, f"{shown} is {why}")])
    details = _details(client, url, model, cures)  # first: an engine's metrics are certain once it has run a step
    try:
        text = _get(client, url, "/metrics", shown).text
        engine = worker_metrics.read(text).engine
        setup = worker_metrics.read_setup(text)
    except (ValueError, KeyError, TypeError):
        raise Unanswered(f"{shown} is not vLLM: its /metrics cannot be read") from None
    version = _version(client, url)
    diagnoses = [
        Diagnosis(True, f"serves {model}"),
        _vllm_version(version),
        *_engine(engine, setup, cures),
        *_caching(setup, cures),
        *_drafts(client, url, model, engine, setup, cures),
        *_connector(setup, cures),
        *([_events(client, url, cures)] if engine is not None else []),
        details,
        _render(client, url, model, cures),
        *_tools(client, url, model, cures),
    ]
    fatal = next((diagnosis.fatal for diagnosis in diagnoses if diagnosis.fatal), None)
    if fatal is not None:
        return Examination(f"cannot hit: {fatal}", diagnoses)
    wrong = sum(not diagnosis.fine for diagnosis in diagnoses)
    more = f"; {wrong} to change, see WRONG below" if wrong else ""
    return Examination(f"will hit: {shown} serves {model}{more}", diagnoses)


def _get(client: httpx.Client, url: str, path: str, shown: str) -> httpx.Response:
    """The answer. Raises `Unanswered`, whose words do not hold a password of the URL."""
    try:
        return client.get(url + path)
    except NO_ANSWER as error:
        raise Unanswered(f"no server answers at {shown}: {why_not(error)}{_port_hint(url, error)}") from None


def _port_hint(url: str, error: Exception) -> str:
    if not isinstance(error, httpx.ConnectError) or urlsplit(url).port is not None:
        return ""
    return f" (the URL has no port; vLLM's is {DEFAULT_PORT})"


def why_not(error: Exception) -> str:
    """Why a request got no answer, in the words of an operator."""
    if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol)):
        return "no URL of http:// or https://"
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_SECONDS:g} s: another address, or a firewall between"
    if isinstance(error, httpx.TimeoutException):
        return f"it takes the connection and says nothing for {ANSWER_SECONDS:g} s"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError):
            return "TLS fails: http:// instead of https://, or a certificate that is not trusted here"
        if isinstance(cause, socket.gaierror):
            return "its host name is not known here"
        if isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED:
            return "connection refused: nothing listens there, or not yet"
    if isinstance(error, httpx.RemoteProtocolError):
        return "what answers there does not speak HTTP: https:// instead of http://?"
    return str(error).lower() or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_gateway(health: httpx.Response) -> bool:
    """Whether this answer to /health is a Seamark gateway's; vLLM's is empty."""
    try:
        return "gateway" in health.json()
    except (ValueError, TypeError):
        return False


def _workers_of(client: httpx.Client, url: str) -> str:
    """What to ask in place of a gateway."""
    try:
        workers = client.get(url + "/seamark/status").json()["workers"]
        names = [without_credentials(str(worker["url"]))[0] for worker in workers]
    except (*NO_ANSWER, ValueError, KeyError, TypeError):
        names = []
    return ", ".join(f"--worker {name}" for name in names) or "the vLLM behind it, with --worker"


def _why_refused(answer: httpx.Response, shown: str, has_key: bool, flag: str, whose: str) -> str | None:
    if answer.status_code not in (401, 403):
        return None
    said = f"(status {answer.status_code})"
    if has_key:
        return f"{shown} refuses the key in {flag} {said}: it is not {whose}"
    return f"{shown} wants an API key {said}, and none was given: {flag}, with {whose} in it"


def _why_asleep(client: httpx.Client, url: str, shown: str) -> str:
    """Why its engine computes nothing, in words, as a gateway says it; empty if it does."""
    try:
        levels = worker_metrics.read(_get(client, url, "/metrics", shown).text).sleep_levels
    except (ValueError, KeyError, TypeError):
        return ""
    answers = EngineAnswers(url)
    for path in tuple(answers.said) if levels else ():
        try:
            answer = client.get(url + path)
        except NO_ANSWER:
            continue
        answers.take(path, answer.status_code, answer.content)
    return answers.why_asleep(levels)


def _version(client: httpx.Client, url: str) -> str | None:
    try:
        return str(client.get(url + "/version").json()["version"])
    except (*NO_ANSWER, ValueError, KeyError, TypeError):
        return None


def _vllm_version(version: str | None) -> Diagnosis:
    return Diagnosis(version is not None, f"vLLM {version}" if version else "/version gives no vLLM version")


def _engine(info: EngineInfo | None, setup: EngineSetup, cures: Cures) -> list[Diagnosis]:
    if info is None:
        missing = "patches are not live: a recurrent state is kept only where a request happens to stop"
        alone = f"; vLLM alone caches whole blocks of {setup.block_size:,} tokens" if setup.block_size else ""
        fatal = f"the plugin is not in this vLLM, or left it untouched (its log says why){alone}"
        return [Diagnosis(False, missing, cures.install(), last=True, fatal=fatal)]
    wanted = ".".join(map(str, ENTRIES_SINCE))
    live = [Diagnosis(True, f"patches are live, seamark {info.version}")]
    if not info.takes_entries:
        old = f"the plugin is older than {wanted}: it takes positions only, and so gets hints for known prompts alone"
        live.append(Diagnosis(False, old, cures.update(wanted)))
    lengths = f"cache block {info.block_size} tokens, match unit {info.match_unit} tokens"
    if info.refused:  # with a finer unit, too
        refused = Diagnosis(False, f"no hint counts: {info.refused}", fatal=info.refused)
        return [*live, refused, Diagnosis(True, lengths)]
    if setup.attention_only:  # a unit below the block stops it
        return [*live, Diagnosis(True, f"{lengths}; vLLM alone keeps all, since no layer is recurrent")]
    coarse = info.match_unit > 64
    cure = cures.flag("--prefix-match-unit 16", "or leave it out: the plugin sets it for hybrid models")
    return [*live, Diagnosis(not coarse, lengths, cure if coarse else None)]


def _caching(setup: EngineSetup, cures: Cures) -> list[Diagnosis]:
    if setup.prefix_caching is not False:
        return []
    cure = cures.flag("--enable-prefix-caching", "and no --no-enable-prefix-caching")
    off = "prefix caching is off in this vLLM"
    return [Diagnosis(False, off, cure, fatal=off)]


def _drafts(
    client: httpx.Client, url: str, model: str, info: EngineInfo | None, setup: EngineSetup, cures: Cures
) -> list[Diagnosis]:
    """Speculative decoding, and whether hints are used beside it."""
    if not setup.drafts:
        return []
    if info is None:
        text = "speculative decoding is on: the plugin, too, gives hints beside it only with SEAMARK_DRAFTS=1"
        return [Diagnosis(False, text, cures.drafts())]
    if info.ahead:
        return [Diagnosis(True, f"speculative decoding is on, with hints: they share {info.ahead} tokens past a state")]
    if info.refused:
        cure = cures.drafts() if "SEAMARK_DRAFTS" in info.refused else None
        return [Diagnosis(False, "speculative decoding is on, without hints", cure)]
    if setup.hints_refused or _refuses_hints(client, url, model):
        fatal = (
            "speculative decoding is on, and the plugin refuses hints beside it; SEAMARK_DRAFTS=1 in vLLM's "
            "environment makes it use them, unless its log names another reason"
        )
        return [Diagnosis(False, "speculative decoding is on, without hints", cures.drafts(), fatal=fatal)]
    return [Diagnosis(True, "speculative decoding is on, with hints")]


# How states are kept beside a KV connector, by the lane in `seamark_engine_info`.
LANES = {
    "inside_pass": "states are written inside a pass, as without one",
    "chunk_ends": "each state costs a pass; beside NixlConnector it costs none",
    "not_served": "vLLM cannot serve hybrid models through it",
}


def _connector(setup: EngineSetup, cures: Cures) -> list[Diagnosis]:
    """KV connectors, and how states are kept beside them."""
    if not setup.connector:
        return []
    name = f"KV connector {setup.connector}"
    if setup.lane == "no_hints":
        cure = cures.flag("--kv-transfer-config", "take it away: this connector measures decoding alone")
        fatal = f"{name} puts values into the cache that nobody has computed, and the plugin refuses hints beside it"
        return [Diagnosis(False, f"{name}: hints are refused", cure, fatal=fatal)]
    return [Diagnosis(True, f"{name}: {LANES.get(setup.lane, setup.lane)}")]


def _refuses_hints(client: httpx.Client, url: str, model: str) -> bool:
    """Whether the engine counts a hint as refused. One that it takes has no effect: it is for a single token."""
    request = _one_token(model) | {XARGS: {HINT: [1]}}
    until = time.monotonic() + REPORT_SECONDS
    try:
        client.post(url + COMPLETIONS, json=request, timeout=_PATIENT)
        while time.monotonic() < until:
            if worker_metrics.read_setup(client.get(url + "/metrics").text).hints_refused:
                return True
            time.sleep(0.1)
    except (*NO_ANSWER, ValueError):
        pass
    return False


_PATIENT = httpx.Timeout(COMPLETION_SECONDS, connect=CONNECT_SECONDS)


def _one_token(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Seamark", "max_tokens": 1}


def _events(client: httpx.Client, url: str, cures: Cures) -> Diagnosis:
    fine = _is_open(client, "GET", url + EVENTS)
    text = f"the engine's decisions are {'' if fine else 'not '}reported"
    return Diagnosis(fine, text, None if fine else cures.flag(EVENTS_FLAG, "without it, no evictions and no reasons"))


def _details(client: httpx.Client, url: str, model: str, cures: Cures) -> Diagnosis:
    status = "no answer"
    try:
        answer = client.post(url + COMPLETIONS, json=_one_token(model), timeout=_PATIENT)
        status = f"status {answer.status_code}"
        answer.raise_for_status()
        reported = answer.json()["usage"].get("prompt_tokens_details") is not None
    except (*NO_ANSWER, ValueError, KeyError, TypeError, AttributeError):
        fatal = f"it does not answer a completion of one token ({status})"
        return Diagnosis(False, f"does not answer a completion of one token ({status})", fatal=fatal)
    text = f"cached tokens are {'' if reported else 'not '}reported"
    cure = cures.flag("--enable-prompt-tokens-details", "without it, hits are never reported")
    return Diagnosis(reported, text, None if reported else cure)


def _render(client: httpx.Client, url: str, model: str, cures: Cures) -> Diagnosis:
    request = {"model": model, "messages": [{"role": "user", "content": "Seamark"}]}
    opened = _is_open(client, "POST", url + CHAT + "/render", request)
    # /tokenize renders nearly everything alike, so a closed route is mentioned and is no error.
    cure = cures.flag("--enable-scale-out", "without it, the gateway falls back to /tokenize")
    return Diagnosis(True, f"render route {'open' if opened else 'closed'}", None if opened else cure)


def _tools(client: httpx.Client, url: str, model: str, cures: Cures) -> list[Diagnosis]:
    """Whether an agent's first request will be refused; nothing if that cannot be told."""
    tool = {"type": "function", "function": {"name": "seamark", "parameters": {"type": "object", "properties": {}}}}
    chat = {"messages": [{"role": "user", "content": "Seamark"}], "tools": [tool], "tool_choice": "auto"}
    try:
        answer = client.post(url + CHAT, json={"model": model, "max_tokens": 1, **chat}, timeout=_PATIENT)
    except NO_ANSWER:
        return []
    if answer.status_code == 200:
        return [Diagnosis(True, "takes tools, as agents send them")]
    if answer.status_code != 400 or TOOL_FLAG not in answer.text:
        return []
    # Hits do not depend on it, so it is mentioned and is no error.
    return [Diagnosis(True, "takes no tools: agents will get 400", cures.tools())]


def _is_open(client: httpx.Client, method: str, url: str, body: dict[str, Any] | None = None) -> bool:
    try:
        return client.request(method, url, json=body).status_code == 200
    except NO_ANSWER:
        return False


HOUR = 3600.0


def read_shadow(gateway: str, api_key: str | None = None) -> list[str]:
    """What a gateway has seen lost, as lines for people. Raises `Unanswered` if it cannot be asked."""
    try:
        shown, _ = without_credentials(gateway)
    except ValueError:
        raise Unanswered(_no_url(gateway)) from None
    try:
        with _client(api_key) as client:
            answer = client.get(gateway + "/seamark/status")
    except NO_ANSWER as error:
        raise Unanswered(f"no gateway answers at {shown}: {why_not(error)}") from None
    refusal = _why_refused(answer, f"the gateway {shown}", api_key is not None, GATEWAY_KEY_FLAG, "an admin's key")
    if refusal is not None:
        raise Unanswered(refusal)
    if answer.status_code == 404:
        raise Unanswered(f"{shown} does not show /seamark/status: a gateway with admin_port does so there; is it one?")
    try:
        return shadow_lines(answer.json()["shadow"])
    except (ValueError, KeyError, TypeError):
        raise Unanswered(f"{shown} is not a Seamark gateway") from None


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
