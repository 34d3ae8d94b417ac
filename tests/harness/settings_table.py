"""What the documents say of settings, written from the code: `python -m tests.harness.settings_table`.

That is the table in proxy/README.md, and the comments of the gateway's settings in deploy/.env.example.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from proxy.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "proxy" / "README.md"
EXAMPLE = ROOT / "deploy" / ".env.example"

BEGIN = "<!-- settings: `python -m tests.harness.settings_table` writes this table from proxy/settings.py -->\n"
END = "<!-- /settings -->\n"

# What only the example says: how the compose files set it.
IN_COMPOSE = {
    "worker": "In this file several are separated by commas. Compose: http://worker:8000, or what an overlay has. A "
    "vLLM that runs on this machine already, and listens to more than 127.0.0.1: http://host.docker.internal:8000",
    "redis": "Compose: redis://redis:6379/0",
}


def shown(default: Any) -> str:
    """A default as a user would write it."""
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


def table() -> str:
    """One row for each setting, in the order of the code."""
    rows = [
        f"| `{name}` | {shown(field.get_default())} | {(field.description or '').replace('|', chr(92) + '|')} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows, ""])


def with_table(text: str) -> str:
    """The document with the table of the code."""
    before, begin, rest = text.partition(BEGIN)
    return before + begin + table() + END + rest.partition(END)[2]


def with_comments(text: str) -> str:
    """The example with the comments of the code."""
    for name, field in Settings.model_fields.items():
        description = field.description or ""
        comment = ". ".join(filter(None, (description[:1].upper() + description[1:], IN_COMPOSE.get(name))))
        lines = textwrap.fill(comment, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        setting = rf"#?SEAMARK_{name.upper()}="
        text, times = re.subn(rf"(?:^# [^\n]*\n)+(?=^{setting})", lambda _, lines=lines: f"{lines}\n", text, flags=re.M)
        if times != 1:
            raise ValueError(f"{EXAMPLE.name}: SEAMARK_{name.upper()} has no comment above it, or stands there twice")
    return text


def main() -> None:
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
    EXAMPLE.write_text(with_comments(EXAMPLE.read_text()))


if __name__ == "__main__":
    main()
