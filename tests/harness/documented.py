"""What the documents say of settings and reasons, written from the code: `python -m tests.harness.documented`.

That is two tables in proxy/README.md, the gateway's settings in deploy/.env.example, and their names in
deploy/compose.yaml. A new one is written behind that which stands before it in the code.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from proxy import errors
from proxy.errors import GatewayError
from proxy.observability.reasons import REASON_TEXT
from proxy.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "proxy" / "README.md"
EXAMPLE = ROOT / "deploy" / ".env.example"
COMPOSE = ROOT / "deploy" / "compose.yaml"

# What only the example says: how the compose files set it.
IN_COMPOSE = {
    "worker": "In this file several are separated by commas. Compose: http://worker:8000, or what an overlay has. A "
    "vLLM that runs on this machine already, and listens to more than 127.0.0.1: http://host.docker.internal:8000",
    "redis": "Compose: redis://redis:6379/0",
}


# When a setting's limit is met: the errors that a client gets, one of them, and what happens besides, or instead.
LIMITS: tuple[tuple[str, tuple[type[GatewayError], ...], str], ...] = (
    ("max_header_bytes", (errors.HeadTooLarge,), "the connection is closed, too"),
    ("client_timeout", (errors.TooSlow,), "for a head the connection is closed, too"),
    ("min_body_rate", (errors.TooSlow,), ""),
    ("send_timeout", (), "the connection is closed, and the worker's slot is free"),
    ("keepalive_timeout", (), "the connection is closed"),
    ("max_connections", (errors.Overloaded,), "the newest are closed; `/health` and `/ready` are answered"),
    ("max_body_bytes", (errors.BodyTooLarge,), "before `100 Continue` if the length is announced"),
    ("max_bodies_bytes", (errors.Overloaded, errors.KeyBusy), ""),
    ("max_json_depth", (errors.TooComplex,), ""),
    ("max_json_values", (errors.TooComplex,), ""),
    ("max_boundary_values", (), "forwarded without a hint (reason `no_boundary`)"),
    ("max_inflight", (errors.Overloaded, errors.KeyBusy), "after waiting for `queue_timeout`"),
    ("max_queue", (errors.Overloaded, errors.KeyBusy), ""),
    ("queue_timeout", (errors.Overloaded, errors.KeyBusy), ""),
    ("connect_timeout", (errors.NoWorker,), "if no other worker can take the request"),
    ("silence_timeout", (errors.WorkerSilent,), "in a stream an event says so"),
    ("max_collected_bytes", (), "the answer comes without `x-seamark-cached` and `x-seamark-reason`"),
    ("drain_timeout", (errors.Stopping,), "in a stream an event says so"),
    ("memory_bytes", (), "the oldest is forgotten: a hit is lost"),
    ("response_cache", (), "the answer not asked for the longest goes; one above a quarter of it is not kept"),
    ("text_bytes", (), "the oldest is forgotten: a hit, a reason or a replay is lost"),
)


def when_met(refusals: tuple[type[GatewayError], ...], instead: str) -> str:
    """What a client gets."""
    told = " or ".join(f"{error.status} `{error.code}`" if error.code else f"{error.status}" for error in refusals)
    retry = f"`Retry-After` {refusals[-1].retry_after}" if told and refusals[-1].retry_after else ""
    return "; ".join(filter(None, (told, retry, instead)))


def shown(default: Any) -> str:
    """A default as a user would write it."""
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


def described(setting: str) -> str:
    """In one line."""
    return " ".join((Settings.model_fields[setting].description or "").split())


def settings() -> str:
    """One row for each setting, in the order of the code, with what a client gets when a limit is met."""
    met = {setting: f". *When met:* {when_met(refusals, instead)}" for setting, refusals, instead in LIMITS}
    rows = [
        f"| `{name}` | {shown(field.get_default())} "
        f"| {described(name).replace('|', chr(92) + '|')}{met.get(name, '')} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows, ""])


def reasons() -> str:
    """One row for each reason: what people read of it on the page, too."""
    rows = [f"| `{name}` | {said.long} | {said.action} |" for name, said in REASON_TEXT.items() if name != "hit"]
    return "\n".join(["| reason in `seamark_miss_total` | | what to do |", "|---|---|---|", *rows, ""])


def with_tables(text: str) -> str:
    """The document with the tables of the code."""
    written = ((reasons, "proxy/observability/reasons.py"), (settings, "proxy/settings.py"))
    for made, source in written:
        begin = f"<!-- {made.__name__}: `python -m tests.harness.documented` writes this table from {source} -->\n"
        before, _, rest = text.partition(begin)
        end = f"<!-- /{made.__name__} -->\n"
        if end not in rest:
            raise ValueError(f"{DOCUMENT.name}: there is no table of {made.__name__}")
        text = before + begin + made() + end + rest.partition(end)[2]
    return text


def with_settings(text: str) -> str:
    """The example with the settings of the code, and above each one what it is."""
    last = "WORKER"
    for name in Settings.model_fields:
        description = described(name)
        comment = ". ".join(filter(None, (description[:1].upper() + description[1:], IN_COMPOSE.get(name))))
        lines = textwrap.fill(comment, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        setting, default = name.upper(), Settings.model_fields[name].get_default()
        if not re.search(rf"^#?SEAMARK_{setting}=", text, re.M):
            line = f"#SEAMARK_{setting}={shown(default) if default is not None else ''}\n"
            text = re.sub(
                rf"^#?SEAMARK_{last}=.*\n", lambda found, line=line: f"{found[0]}# new\n{line}", text, flags=re.M
            )
        above = rf"(?:^# [^\n]*\n)+(?=^#?SEAMARK_{setting}=)"
        text, times = re.subn(above, lambda _, lines=lines: f"{lines}\n", text, flags=re.M)
        if times != 1:
            raise ValueError(f"{EXAMPLE.name}: SEAMARK_{setting} has no comment above it, or stands there twice")
        last = setting
    return text


def with_names(text: str) -> str:
    """The compose file, with all settings of the gateway passed to it."""
    last = "WORKER"
    for setting in map(str.upper, Settings.model_fields):
        if f"      SEAMARK_{setting}:" not in text:
            text = re.sub(rf"^      SEAMARK_{last}:.*\n", rf"\g<0>      SEAMARK_{setting}:\n", text, flags=re.M)
        last = setting
    return text


WRITTEN = {DOCUMENT: with_tables, EXAMPLE: with_settings, COMPOSE: with_names}


def main() -> None:
    for path, written in WRITTEN.items():
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
