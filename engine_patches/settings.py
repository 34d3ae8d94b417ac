"""The plugin's settings, from the environment: all that the engine's processes share. And vLLM's own file of flags."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

PREFIX = "SEAMARK_"
MODE_VARIABLE = "SEAMARK_ENGINE"
FULL, REFERENCE, OFF = "1", "reference", "0"

# vLLMs that the patches fit, and where to find one of them.
SUPPORTED, IMAGE = "0.31 to 0.33", "vllm/vllm-openai:v0.33.0"

LOOPBACK = "127.0.0.1"
DEFAULT_SHARE = 0.5  # of all cache blocks
DEFAULT_PIN_SHARE = 0.1

# vLLM configures only its own tree of loggers; a line outside it would be lost.
logger = logging.getLogger("vllm.seamark")

# Variables, each with a function below that reads it.
FAN_OUT = "SEAMARK_FAN_OUT"  # 0: no request waits for another one's prefix
STATE_SHARE = "SEAMARK_STATE_SHARE"  # part of the cache's blocks that states may hold, 0..1
PIN_SHARE = "SEAMARK_PIN_SHARE"  # part of the cache's blocks that pinned prompts may hold, 0..1
CHUNK_ENDS = "SEAMARK_CHUNK_ENDS"  # 1: states only at the ends of a kernel's chunks; 0: on any match unit
HINTS_FROM = "SEAMARK_HINTS_FROM"  # addresses and networks whose header x-seamark-boundaries is read; *: all
DRAFTS = "SEAMARK_DRAFTS"  # hints beside speculative decoding: auto: after a trial; 1: at once; 0: never
REPORTS_AT = "SEAMARK_REPORTS_AT"  # HOST:PORT where gateways read what engines report; of this machine, and any, if not
RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"  # vLLM's: of variables, with commas between
KV_EVENTS = "SEAMARK_KV_EVENTS"  # what vLLM's KV events say of a hybrid; 0: what vLLM says

# Their values.
AUTO, AT_ONCE, NEVER = "auto", "1", "0"
UNITS, BLOCKS = "units", "blocks"  # attention blocks that lead to a state, as long as the match unit or a cache block


def take_along_to_ray() -> None:
    """Have vLLM give these settings to the processes that Ray starts for it, perhaps on another machine."""
    prefixes = [each for each in os.environ.get(RAY_PREFIXES, "").split(",") if each.strip()]
    if PREFIX not in map(str.strip, prefixes):
        os.environ[RAY_PREFIXES] = ",".join([*prefixes, PREFIX])


def drafts() -> str:
    return _choice(DRAFTS, AUTO, AT_ONCE, NEVER)


def rust_frontend() -> bool:
    """Whether vLLM's HTTP server is the one in Rust, which runs no Python."""
    return os.environ.get("VLLM_USE_RUST_FRONTEND", "").strip() == "1"


def reports_at() -> tuple[str, int]:
    """Host and port that reports are read at; port 0: any that is free, which vLLM's own routes tell."""
    value = os.environ.get(REPORTS_AT, "").strip()
    host, colon, port = value.rpartition(":")
    if value and not (colon and port.isascii() and port.isdecimal() and int(port) < 65536):
        logger.error("seamark: %s=%r is not HOST:PORT; any port of %s is used", REPORTS_AT, value, LOOPBACK)
        return LOOPBACK, 0
    return (host.strip("[]") or LOOPBACK, int(port)) if value else (LOOPBACK, 0)


def hints_from() -> tuple[IPv4Network | IPv6Network, ...]:
    found: list[IPv4Network | IPv6Network] = []
    for each in filter(None, map(str.strip, os.environ.get(HINTS_FROM, "").split(","))):
        try:
            found += map(ip_network, ("0.0.0.0/0", "::/0") if each == "*" else (each,))
        except ValueError:
            logger.error("seamark: %s: %r is no address or network, and is ignored", HINTS_FROM, each)
    return tuple(found)


def fan_out() -> bool:
    return _switch(FAN_OUT, True)


def chunk_ends(default: bool) -> bool:
    return _switch(CHUNK_ENDS, default)


def kv_events() -> str:
    """What KV events announce: `UNITS` or `BLOCKS` that lead to a held state, or all that vLLM does (`OFF`)."""
    return _choice(KV_EVENTS, UNITS, BLOCKS, OFF)


def state_share() -> float:
    return _share(STATE_SHARE, DEFAULT_SHARE, "(0, 1]", lambda share: 0 < share <= 1)


def pin_share() -> float:
    return _share(PIN_SHARE, DEFAULT_PIN_SHARE, "[0, 1)", lambda share: 0 <= share < 1)


def _choice(name: str, default: str, *others: str) -> str:
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", default, *others):
        logger.error("seamark: %s=%r is not one of %s; %s is used", name, value, ", ".join((default, *others)), default)
    return value if value in others else default


def _share(name: str, default: float, interval: str, is_in: Callable[[float], bool]) -> float:
    value = os.environ.get(name, "").strip()
    try:
        share = float(value) if value else default
    except ValueError:
        share = float("nan")
    if not is_in(share):
        logger.error("seamark: %s=%r is not a number in %s; %s is used", name, value, interval, default)
        return default
    return share


def _switch(name: str, default: bool) -> bool:
    return _choice(name, *(("1", "0") if default else ("0", "1"))) == "1"


def read_config(path: Path) -> dict[str, Any]:
    """The flags in a file of vLLM's `--config`, by name. Raises `ValueError` with the reason if it cannot be read."""
    import yaml  # vLLM brings it

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict):
        raise ValueError("it has no lines `flag: value`")
    return {str(name): value for name, value in content.items()}
