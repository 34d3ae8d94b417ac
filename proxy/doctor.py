"""`seamark doctor`: whether a worker's patches are live, its vLLM, its block and match unit, and what to change.

Where they are not live its last two lines are the cure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from typing import NamedTuple
from urllib.parse import urlsplit

from proxy.chat import CHAT
from proxy.doctor_shadow import read_shadow
from proxy.upstream import Broken, Unreachable, Upstream, base_url
from proxy.workers import EngineInfo, read_metrics

TIMEOUT = 10.0

CURE_UNPATCHED = """\
    pip install --no-deps /path/to/seamark   # into the environment that runs vLLM; then start it with
    seamark worker --model {model} --port {port} -- ...   # the flags it has now in place of the dots"""
CURE_DETAILS = "    --enable-prompt-tokens-details       # without it, hits are never reported"
CURE_RENDER = "    --enable-scale-out                   # without it, the gateway falls back to /tokenize"


class Finding(NamedTuple):
    """One line of the diagnosis."""

    fine: bool
    text: str
    cure: str | None = None
    last: bool = False  # the cure stands at the very end


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="seamark doctor", description="examine a vLLM worker")
    parser.add_argument("--worker", metavar="URL", required=True)
    parser.add_argument("--gateway", metavar="URL", help="a gateway before it, to tell what it has seen being lost")
    args = parser.parse_args(argv)
    findings, lost = asyncio.run(_both(base_url(args.worker), args.gateway and base_url(args.gateway)))
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


async def _both(worker: str, gateway: str | None) -> tuple[list[Finding], list[str]]:
    upstream = Upstream(connect_timeout=2.0)
    try:
        return await examine(worker), await read_shadow(upstream, gateway, TIMEOUT) if gateway else []
    finally:
        await upstream.aclose()


async def examine(url: str) -> list[Finding]:
    """What is right and wrong with the worker at `url`. Sends it one request of a few tokens."""
    upstream = Upstream(connect_timeout=2.0)
    try:
        try:
            status, answer = await upstream.fetch("GET", url + "/v1/models", timeout=TIMEOUT)
            entry = json.loads(answer)["data"][0]
            model = entry["id"]
            _, metrics = await upstream.fetch("GET", url + "/metrics", timeout=TIMEOUT)
        except (Unreachable, Broken):
            return [Finding(False, f"no server answers at {url}", "    is it running, and is the port right?")]
        except (ValueError, KeyError, TypeError, IndexError):
            return [Finding(False, f"{url} is not a vLLM server: /v1/models gives no models (status {status})")]
        return [
            Finding(True, f"serves {model}"),
            _vllm_version(await _version(upstream, url)),
            *_engine(read_metrics(metrics.decode(errors="replace"))[1], entry.get("root") or model, url),
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


def _vllm_version(version: str | None) -> Finding:
    return Finding(version is not None, f"vLLM {version}" if version else "does not tell its vLLM version at /version")


def _engine(info: EngineInfo | None, model: str, url: str) -> list[Finding]:
    if info is None:
        missing = "patches are not live: a recurrent state is kept only where a request happens to stop"
        cure = CURE_UNPATCHED.format(model=shlex.quote(str(model)), port=urlsplit(url).port or 8000)
        return [Finding(False, missing, cure, last=True)]
    findings = [Finding(True, f"patches are live, seamark {info.version}")]
    lengths = f"cache block {info.block_size} tokens, match unit {info.match_unit} tokens"
    coarse = info.match_unit > 64
    cure = "    --prefix-match-unit 16               # or leave it away: the plugin sets it for hybrid models"
    return [*findings, Finding(not coarse, lengths, cure if coarse else None)]


async def _details(upstream: Upstream, url: str, model: str) -> Finding:
    request = {"model": model, "prompt": "Seamark", "max_tokens": 1}
    try:
        _, answer = await upstream.fetch("POST", url + "/v1/completions", json.dumps(request).encode(), timeout=None)
        reported = json.loads(answer)["usage"].get("prompt_tokens_details") is not None
    except (Unreachable, Broken, ValueError, KeyError, TypeError, AttributeError):
        return Finding(False, "does not answer a completion of one token")
    return Finding(
        reported, f"cached tokens are {'' if reported else 'not '}reported", None if reported else CURE_DETAILS
    )


async def _render(upstream: Upstream, url: str, model: str) -> Finding:
    request = {"model": model, "messages": [{"role": "user", "content": "Seamark"}]}
    try:
        status, _ = await upstream.fetch("POST", url + CHAT + "/render", json.dumps(request).encode(), timeout=TIMEOUT)
    except (Unreachable, Broken):
        status = 0
    # /tokenize renders nearly everything alike, so its use is worth a word and not an error.
    return Finding(
        True, f"render route {'open' if status == 200 else 'closed'}", None if status == 200 else CURE_RENDER
    )
