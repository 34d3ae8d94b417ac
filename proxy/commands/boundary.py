"""`seamark boundary`: where the shared part of a chat request ends, as a worker or a model folder renders it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from proxy.boundaries.boundary import Found, resolve, resolved_positions
from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.boundaries.template_facts import setting_of
from proxy.chat.reader import chat_request
from proxy.commands.parser import Parser
from proxy.commands.render_server import free_port
from proxy.config_files import base_url
from proxy.errors import BadRequest
from proxy.fleet.probe import Probe, Unwell
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import loads, parse_object
from proxy.printable import printable
from proxy.settings import Settings

RENDER_SECONDS, START_SECONDS = 60.0, 120.0
MEMORY_BYTES = 100_000
DEFAULTS = Settings.model_validate({})  # of a gateway


class NoBoundary(Exception):
    """No boundary can be found: why, and the exit status, 2 if the input is at fault, 1 if a server is."""


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark boundary", description="print where the shared part of a chat request ends")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--worker", metavar="URL", help="a running vLLM server")
    source.add_argument("--model", metavar="PATH", type=Path, help="a model folder with tokenizer and chat template")
    parser.add_argument("file", metavar="FILE", help="a chat request as JSON, - for standard input")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(asyncio.run(_find(args, _read(args.file)))))
    except NoBoundary as error:
        why, status = error.args
        print(f"seamark boundary: {printable(why)}", file=sys.stderr)
        return int(status)
    return 0


def _read(name: str) -> dict[str, Any]:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        body = parse_object(raw, *DEFAULTS.json_limits)
    except OSError as error:
        raise NoBoundary(f"FILE: {name} cannot be read ({error.strerror})", 2) from None
    except BadRequest as error:
        raise NoBoundary(f"FILE: {error}", 2) from None
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NoBoundary("messages: a list with at least one message is needed", 2)
    return body


async def _find(args: argparse.Namespace, body: dict[str, Any]) -> dict[str, Any]:
    upstream = Upstream(DEFAULTS.connect_timeout, DEFAULTS.max_header_bytes)
    try:
        if args.worker is not None:
            return await _ask(upstream, base_url(args.worker), body)
        async with _render_server(upstream, args.model, body.get("model")) as url:
            return await _ask(upstream, url, body)
    finally:
        await upstream.aclose()


async def _ask(upstream: Upstream, url: str, body: dict[str, Any]) -> dict[str, Any]:
    renderer = WorkerRenderer(upstream, url, RENDER_SECONDS)
    # The prompt itself is rendered first: the user reads why that failed.
    try:
        models = [entry["id"] for entry in await Probe(upstream, url, seconds=RENDER_SECONDS).models()]
        body = {**body, "model": body.get("model") or models[0]}
    except (Unreachable, Broken, Unwell, IndexError, ValueError):  # the last for what is no address
        raise NoBoundary(f"--worker: no vLLM server answers at {url}", 1) from None
    if body["model"] not in models:
        raise NoBoundary(f"model: {body['model']!r} is not served there, only {', '.join(models)}", 2)
    try:
        prompt = await renderer(body)
    except RenderFailed as error:
        raise NoBoundary(f"messages: the server does not render this chat: {_reason(error)}", 2) from None
    renderer_id = await identify_renderer(renderer, body["model"]) or b""
    learner = FactsLearner()
    setting = setting_of(body)
    await learner.learn(renderer, renderer_id, body["model"])
    await learner.learn(renderer, renderer_id, body["model"], setting)
    facts = learner.facts(renderer_id, setting)
    found = BoundaryFinder(PositionCache(MEMORY_BYTES)).find(chat_request(body), facts, renderer_id)
    return _as_json(found, prompt)


def _reason(error: RenderFailed) -> str:
    """The server's own message, if it sent one."""
    try:
        return str(loads(error.answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)


def _as_json(found: Found, ids: Sequence[int]) -> dict[str, Any]:
    entries = found.entries()
    positions = resolved_positions(entries, resolve(entries, ids))
    boundaries = [
        {"entry": boundary.entry, "tokens": positions[boundary.entry], "kind": boundary.kind}
        for boundary in found.boundaries
        if boundary.entry in positions
    ]
    return {
        "prompt_tokens": len(ids),
        "entries": list(entries),
        "boundaries": sorted(boundaries, key=lambda boundary: boundary["tokens"]),
        "key": found.layout.key.hex() if found.layout is not None else "",
    }


@contextlib.asynccontextmanager
async def _render_server(upstream: Upstream, model: Path, served_name: Any) -> AsyncIterator[str]:
    """The address of a render server of vLLM for `model`, which ends with the context."""
    if not (model / "config.json").is_file():
        raise NoBoundary(f"--model: {model} is not a model folder (no config.json)", 2)
    if importlib.util.find_spec("vllm") is None:
        raise NoBoundary("--model: vLLM renders it, and there is none in this environment; or ask a --worker URL", 1)
    port = free_port()
    command = [sys.executable, "-m", "proxy.commands.render_server", "--model", str(model), "--host", "127.0.0.1"]
    # Without a parser vLLM refuses chats that offer tools. Any parser will do, since nothing is generated.
    command += ["--port", str(port), "--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if isinstance(served_name, str) and served_name:
        command += ["--served-model-name", served_name]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "SEAMARK_ENGINE": "0", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not await _is_up(upstream, url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise NoBoundary(f"--model: vLLM's render server did not start: {lines[-1] if lines else ''}", 1)
                await asyncio.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait()


async def _is_up(upstream: Upstream, url: str) -> bool:
    try:
        status, _ = await upstream.fetch("GET", url + "/health", timeout=5.0)
    except (Unreachable, Broken):
        return False
    return status == 200
