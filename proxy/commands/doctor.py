"""`seamark doctor`: whether a worker's patches are live, its vLLM, its block and match unit, and what to change.

If they are not live, its last two lines are the cure.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from proxy.chat.chat import CHAT
from proxy.commands.parser import Parser
from proxy.config_files import base_url, read_secret
from proxy.errors import SettingsError
from proxy.fleet import worker_metrics
from proxy.fleet.worker_metrics import ENTRIES_SINCE, EngineInfo
from proxy.observability.shadow import CURED
from proxy.routing.engine_events import PATH as EVENTS

TIMEOUT = httpx.Timeout(10.0, connect=2.0)

NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL)

CURE_UNPATCHED = """\
    pip install --no-deps /path/to/seamark   # into the environment that runs vLLM; then start it with
    seamark worker --model {model}{host} --port {port} -- ...   # the flags it has now in place of the dots"""

CURE_OLD = "    pip install --no-deps /path/to/seamark   # {wanted} or later; then restart vLLM"

CURE_DETAILS = "    --enable-prompt-tokens-details       # without it, hits are never reported"

CURE_EVENTS = (
    "    --middleware engine_patches.reporting.events_api.EventsEndpoint   # without it, no evictions and no reasons"
)

CURE_KEY = "    --worker-api-key-file FILE   # with vLLM's --api-key in it, here and for seamark serve"

LOOPBACK = ("localhost", "127.0.0.1", "::1")

CURE_RENDER = "    --enable-scale-out                   # without it, the gateway falls back to /tokenize"


class Diagnosis(NamedTuple):
    """One line of the diagnosis."""

    fine: bool
    text: str
    cure: str | None = None
    last: bool = False  # the cure is printed at the very end


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark doctor", description="examine a vLLM worker")
    parser.add_argument("--worker", metavar="URL", required=True)
    parser.add_argument("--worker-api-key-file", type=Path, metavar="FILE", help="holds the worker's API key")
    parser.add_argument("--gateway", metavar="URL", help="a gateway before the worker: prints what it has seen lost")
    parser.add_argument("--gateway-key-file", type=Path, metavar="FILE", help="holds an admin's key of that gateway")
    args = parser.parse_args(argv)
    try:
        worker_key = _key("worker_api_key_file", args.worker_api_key_file)
        gateway_key = _key("gateway_key_file", args.gateway_key_file)
    except SettingsError as error:
        parser.error(str(error))
    diagnoses = examine(base_url(args.worker), worker_key)
    lost = read_shadow(base_url(args.gateway), gateway_key) if args.gateway else []
    for diagnosis in diagnoses:
        print(f"{'ok   ' if diagnosis.fine else 'WRONG'} {diagnosis.text}")
        if diagnosis.cure and not diagnosis.last:
            print(diagnosis.cure)
    for line in lost:
        print(line)
    for diagnosis in diagnoses:
        if diagnosis.last:
            print(f"\nthe cure:\n{diagnosis.cure}")
    return 0 if all(diagnosis.fine for diagnosis in diagnoses) else 1


def _key(setting: str, path: Path | None) -> str | None:
    return read_secret(setting, path) if path else None


def _client(api_key: str | None) -> httpx.Client:
    """Without proxies of the environment: the gateway uses none, either."""
    headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
    return httpx.Client(headers=headers, timeout=TIMEOUT, trust_env=False)


def examine(url: str, api_key: str | None = None) -> list[Diagnosis]:
    """What is right and wrong with the worker at `url`. Sends it one request for one token."""
    with _client(api_key) as client:
        status = None
        try:
            models = client.get(url + "/v1/models")
            status = models.status_code
            if status in (401, 403):
                return [Diagnosis(False, f"{url} wants an API key", CURE_KEY)]
            entry = models.json()["data"][0]
            model = entry["id"]
            metrics = client.get(url + "/metrics").content
        except NO_ANSWER:
            return [Diagnosis(False, f"no server answers at {url}", "    is it running, and is the port right?")]
        except (ValueError, KeyError, TypeError, IndexError):
            return [Diagnosis(False, f"{url} is not a vLLM server: /v1/models lists no models (status {status})")]
        engine = worker_metrics.read(metrics.decode(errors="replace")).engine
        return [
            Diagnosis(True, f"serves {model}"),
            _vllm_version(_version(client, url)),
            *_engine(engine, entry.get("root") or model, url),
            *([_events(client, url)] if engine is not None else []),
            _details(client, url, model),
            _render(client, url, model),
        ]


def _version(client: httpx.Client, url: str) -> str | None:
    try:
        return str(client.get(url + "/version").json()["version"])
    except (*NO_ANSWER, ValueError, KeyError, TypeError):
        return None


def _vllm_version(version: str | None) -> Diagnosis:
    return Diagnosis(version is not None, f"vLLM {version}" if version else "/version gives no vLLM version")


def _engine(info: EngineInfo | None, model: str, url: str) -> list[Diagnosis]:
    if info is None:
        missing = "patches are not live: a recurrent state is kept only where a request happens to stop"
        at = urlsplit(url)
        host = "" if at.hostname in LOOPBACK else " --host 0.0.0.0"  # the doctor reached it from another machine
        cure = CURE_UNPATCHED.format(model=shlex.quote(str(model)), host=host, port=at.port or 8000)
        return [Diagnosis(False, missing, cure, last=True)]
    wanted = ".".join(map(str, ENTRIES_SINCE))
    live = [Diagnosis(True, f"patches are live, seamark {info.version}")]
    if not info.takes_entries:
        old = f"the plugin is older than {wanted}: it takes positions only, and so gets hints for known prompts alone"
        live.append(Diagnosis(False, old, CURE_OLD.format(wanted=wanted)))
    lengths = f"cache block {info.block_size} tokens, match unit {info.match_unit} tokens"
    coarse = info.match_unit > 64
    cure = "    --prefix-match-unit 16               # or leave it out: the plugin sets it for hybrid models"
    return [*live, Diagnosis(not coarse, lengths, cure if coarse else None)]


def _events(client: httpx.Client, url: str) -> Diagnosis:
    fine = _is_open(client, "GET", url + EVENTS)
    text = f"the engine's decisions are {'' if fine else 'not '}reported"
    return Diagnosis(fine, text, None if fine else CURE_EVENTS)


def _details(client: httpx.Client, url: str, model: str) -> Diagnosis:
    request = {"model": model, "prompt": "Seamark", "max_tokens": 1}
    try:
        answer = client.post(url + "/v1/completions", json=request, timeout=httpx.Timeout(None, connect=2.0)).json()
        reported = answer["usage"].get("prompt_tokens_details") is not None
    except (*NO_ANSWER, ValueError, KeyError, TypeError, AttributeError):
        return Diagnosis(False, "does not answer a completion of one token")
    text = f"cached tokens are {'' if reported else 'not '}reported"
    return Diagnosis(reported, text, None if reported else CURE_DETAILS)


def _render(client: httpx.Client, url: str, model: str) -> Diagnosis:
    request = {"model": model, "messages": [{"role": "user", "content": "Seamark"}]}
    opened = _is_open(client, "POST", url + CHAT + "/render", request)
    # /tokenize renders nearly everything alike, so a closed route is mentioned and is no error.
    return Diagnosis(True, f"render route {'open' if opened else 'closed'}", None if opened else CURE_RENDER)


def _is_open(client: httpx.Client, method: str, url: str, body: dict[str, Any] | None = None) -> bool:
    try:
        return client.request(method, url, json=body).status_code == 200
    except NO_ANSWER:
        return False


HOUR = 3600.0


def read_shadow(gateway: str, api_key: str | None = None) -> list[str]:
    """What a gateway in shadow mode has seen lost, as lines for people. If it cannot be read, a line says why."""
    try:
        with _client(api_key) as client:
            answer = client.get(gateway + "/seamark/status")
        if answer.status_code in (401, 403, 404):
            return [f"{gateway} does not show /seamark/status here: ask at its admin_port, or read its /metrics"]
        return shadow_lines(answer.json()["shadow"])
    except NO_ANSWER:
        return [f"no gateway answers at {gateway}"]
    except (ValueError, KeyError, TypeError):
        return [f"{gateway} is not a Seamark gateway"]


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
