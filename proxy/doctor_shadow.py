"""What `seamark doctor --gateway URL` reads there: the loss that a gateway has seen at workers without the plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proxy.shadow import CURED
from proxy.upstream import Broken, Unreachable, Upstream

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
