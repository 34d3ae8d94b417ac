"""`seamark doctor`: whether a worker's patches are live, its vLLM, its block and match unit, and what to change.

Where they are not live its last two lines are the cure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.chat.chat import CHAT
from proxy.config_files import base_url, read_secret
from proxy.errors import SettingsError
from proxy.fleet import worker_metrics
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.observability.shadow import CURED
from proxy.routing.engine_events import PATH as OUTCOMES

TIMEOUT = 10.0

CURE_UNPATCHED = """\
    pip install --no-deps /path/to/seamark   # into the environment that runs vLLM; then start it with
    seamark worker --model {model}{host} --port {port} -- ...   # the flags it has now in place of the dots"""

CURE_DETAILS = "    --enable-prompt-tokens-details       # without it, hits are never reported"

CURE_FEED = (
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
    last: bool = False  # the cure stands at the very end


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="seamark doctor", description="examine a vLLM worker")
    parser.add_argument("--worker", metavar="URL", required=True)
    parser.add_argument("--worker-api-key-file", type=Path, metavar="FILE", help="with the API key that it wants")
    parser.add_argument("--gateway", metavar="URL", help="a gateway before it, to tell what it has seen being lost")
    parser.add_argument("--gateway-key-file", type=Path, metavar="FILE", help="with an admin's key of that gateway")
    args = parser.parse_args(argv)
    try:
        keys = [
            file and read_secret(setting, file)
            for setting, file in (
                ("worker_api_key_file", args.worker_api_key_file),
                ("gateway_key_file", args.gateway_key_file),
            )
        ]
    except SettingsError as error:
        parser.error(str(error))
    findings, lost = asyncio.run(_both(base_url(args.worker), args.gateway and base_url(args.gateway), *keys))
    for finding in findings:
        print(f"{'ok   ' if finding.fine else 'WRONG'} {finding.text}")
        if finding.cure and not finding.last:
            print(finding.cure)
    for line in lost:
        print(line)
    for finding in findings:
        if finding.last:
            print(f"\nwhat cures it:\n{finding.cure}")
    return 0 if all(finding.fine for finding in findings) else 1


async def _both(
    worker: str, gateway: str | None, worker_key: str | None, gateway_key: str | None
) -> tuple[list[Diagnosis], list[str]]:
    upstream = Upstream(connect_timeout=2.0, api_key=gateway_key)
    try:
        return await examine(worker, worker_key), await read_shadow(upstream, gateway, TIMEOUT) if gateway else []
    finally:
        await upstream.aclose()


async def examine(url: str, api_key: str | None = None) -> list[Diagnosis]:
    """What is right and wrong with the worker at `url`. Sends it one request of a few tokens."""
    upstream = Upstream(connect_timeout=2.0, api_key=api_key)
    try:
        try:
            status, answer = await upstream.fetch("GET", url + "/v1/models", timeout=TIMEOUT)
            if status in (401, 403):
                return [Diagnosis(False, f"{url} wants an API key", CURE_KEY)]
            entry = json.loads(answer)["data"][0]
            model = entry["id"]
            _, metrics = await upstream.fetch("GET", url + "/metrics", timeout=TIMEOUT)
        except (Unreachable, Broken):
            return [Diagnosis(False, f"no server answers at {url}", "    is it running, and is the port right?")]
        except (ValueError, KeyError, TypeError, IndexError):
            return [Diagnosis(False, f"{url} is not a vLLM server: /v1/models gives no models (status {status})")]
        engine = worker_metrics.read(metrics.decode(errors="replace")).engine
        return [
            Diagnosis(True, f"serves {model}"),
            _vllm_version(await _version(upstream, url)),
            *_engine(engine, entry.get("root") or model, url),
            *([await _feed(upstream, url)] if engine is not None else []),
            await _details(upstream, url, model),
            await _render(upstream, url, model),
        ]
    finally:
        await upstream.aclose()


async def _version(upstream: Upstream, url: str) -> str | None:
    try:
        _, answer = await upstream.fetch("GET", url + "/version", timeout=TIMEOUT)
        return str(json.loads(answer)["version"])
    except (Unreachable, Broken, ValueError, KeyError, TypeError):
        return None


def _vllm_version(version: str | None) -> Diagnosis:
    return Diagnosis(
        version is not None, f"vLLM {version}" if version else "does not tell its vLLM version at /version"
    )


def _engine(info: EngineInfo | None, model: str, url: str) -> list[Diagnosis]:
    if info is None:
        missing = "patches are not live: a recurrent state is kept only where a request happens to stop"
        at = urlsplit(url)
        host = "" if at.hostname in LOOPBACK else " --host 0.0.0.0"  # it is asked for from elsewhere
        cure = CURE_UNPATCHED.format(model=shlex.quote(str(model)), host=host, port=at.port or 8000)
        return [Diagnosis(False, missing, cure, last=True)]
    findings = [Diagnosis(True, f"patches are live, seamark {info.version}")]
    lengths = f"cache block {info.block_size} tokens, match unit {info.match_unit} tokens"
    coarse = info.match_unit > 64
    cure = "    --prefix-match-unit 16               # or leave it away: the plugin sets it for hybrid models"
    return [*findings, Diagnosis(not coarse, lengths, cure if coarse else None)]


async def _feed(upstream: Upstream, url: str) -> Diagnosis:
    fine = await _is_open(upstream, "GET", url + OUTCOMES)
    return Diagnosis(fine, f"what the engine decides is {'' if fine else 'not '}told", None if fine else CURE_FEED)


async def _details(upstream: Upstream, url: str, model: str) -> Diagnosis:
    request = {"model": model, "prompt": "Seamark", "max_tokens": 1}
    try:
        _, answer = await upstream.fetch("POST", url + "/v1/completions", json.dumps(request).encode(), timeout=None)
        reported = json.loads(answer)["usage"].get("prompt_tokens_details") is not None
    except (Unreachable, Broken, ValueError, KeyError, TypeError, AttributeError):
        return Diagnosis(False, "does not answer a completion of one token")
    return Diagnosis(
        reported, f"cached tokens are {'' if reported else 'not '}reported", None if reported else CURE_DETAILS
    )


async def _render(upstream: Upstream, url: str, model: str) -> Diagnosis:
    request = {"model": model, "messages": [{"role": "user", "content": "Seamark"}]}
    opened = await _is_open(upstream, "POST", url + CHAT + "/render", json.dumps(request).encode())
    # /tokenize renders nearly everything alike, so its use is worth a word and not an error.
    return Diagnosis(True, f"render route {'open' if opened else 'closed'}", None if opened else CURE_RENDER)


async def _is_open(upstream: Upstream, method: str, url: str, body: bytes = b"") -> bool:
    try:
        status, _ = await upstream.fetch(method, url, body, timeout=TIMEOUT)
    except (Unreachable, Broken):
        return False
    return status == 200


HOUR = 3600.0


async def read_shadow(upstream: Upstream, gateway: str, timeout: float) -> list[str]:
    """Lines for people; `timeout` in seconds. Never raises for what a gateway does: a line says what is wrong."""
    try:
        status, answer = await upstream.fetch("GET", gateway + "/seamark/status", timeout=timeout)
        if status in (401, 403, 404):
            return [f"{gateway} does not show /seamark/status here: ask at its admin_port, or read its /metrics"]
        return tell_shadow(json.loads(answer)["shadow"])
    except (Unreachable, Broken):
        return [f"no gateway answers at {gateway}"]
    except (ValueError, KeyError, TypeError):
        return [f"{gateway} is not a Seamark gateway"]


def tell_shadow(shadow: Mapping[str, Any]) -> list[str]:
    """Its part of `/seamark/status` in words. Raises `KeyError` or `TypeError` for anything else."""
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
    if untold := shadow["cached_not_told"]:
        lines.append(f"    {untold:,} answers did not say what was cached: the worker's own total of hits was used")
    for result, count in sorted(results.items()):
        if result != "judged":
            lines.append(f"    {count:,} not judged: {result}{HINTS.get(result, '')}")
    return lines


HINTS = {
    "no_usage": " (neither the answers nor the worker's /metrics say what was cached)",
    "no_room": " (raise text_bytes)",
}
