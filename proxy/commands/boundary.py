"""`seamark boundary`: where the shared part of a chat request ends, as a worker renders it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from proxy.boundaries.boundary import resolve, resolved_positions
from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.boundaries.template_facts import setting_of
from proxy.chat.reader import chat_request
from proxy.commands.parser import Parser
from proxy.config_files import base_url
from proxy.errors import BadRequest, SettingsError
from proxy.fleet.probe import Probe, Unwell
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import parse_object, words_in
from proxy.printable import printable
from proxy.settings import Settings

RENDER_SECONDS = 60.0
MEMORY_BYTES = 100_000
DEFAULTS = Settings.model_validate({})  # of a gateway


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark boundary", description="print where the shared part of a chat request ends")
    what = "a running vLLM server, or `vllm launch render MODEL --enable-scale-out`, which loads no weights"
    parser.add_argument("--worker", metavar="URL", required=True, help=what)
    parser.add_argument("file", metavar="FILE", help="a chat request as JSON, - for standard input")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(asyncio.run(_ask(base_url(args.worker), _read(args.file)))))
    except (SettingsError, Unwell) as error:  # the input is at fault, or a server
        print(f"seamark boundary: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


def _read(name: str) -> dict[str, Any]:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        body = parse_object(raw, *DEFAULTS.json_limits)
    except (OSError, BadRequest) as error:
        raise SettingsError(f"FILE: {error}") from None
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise SettingsError("messages: a list with at least one message is needed")
    return body


async def _ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with contextlib.aclosing(Upstream(DEFAULTS.connect_timeout, DEFAULTS.max_header_bytes)) as upstream:
        return await _found(upstream, url, body)


async def _found(upstream: Upstream, url: str, body: dict[str, Any]) -> dict[str, Any]:
    renderer = WorkerRenderer(upstream, url, RENDER_SECONDS)
    # The prompt itself is rendered first: the user reads why that failed.
    try:
        models = [entry["id"] for entry in await Probe(upstream, url, seconds=RENDER_SECONDS).models()]
        body = {**body, "model": body.get("model") or models[0]}
    except (Unreachable, Broken, Unwell, IndexError, ValueError):  # the last for what is no address
        raise Unwell(f"--worker: no vLLM server answers at {url}") from None
    if body["model"] not in models:
        raise SettingsError(f"model: {body['model']!r} is not served there, only {', '.join(models)}")
    try:
        prompt = await renderer(body)
    except RenderFailed as error:
        why = words_in(error.answer) or error
        raise SettingsError(f"messages: the server does not render this chat: {why}") from None
    renderer_id = await identify_renderer(renderer, body["model"]) or b""
    learner, setting = FactsLearner(), setting_of(body)
    await learner.learn(renderer, renderer_id, body["model"])
    await learner.learn(renderer, renderer_id, body["model"], setting)
    facts = learner.facts(renderer_id, setting)
    found = BoundaryFinder(PositionCache(MEMORY_BYTES)).find(chat_request(body), facts, renderer_id)
    entries = found.entries()
    positions = resolved_positions(entries, resolve(entries, prompt))
    placed = [(positions[each.entry], each) for each in found.boundaries if each.entry in positions]
    placed.sort(key=lambda place: place[0])
    return {
        "prompt_tokens": len(prompt),
        "entries": list(entries),
        "boundaries": [{"entry": each.entry, "tokens": tokens, "kind": each.kind} for tokens, each in placed],
        "key": found.layout.key.hex() if found.layout is not None else "",
    }
