"""The table of settings in proxy/README.md, written from the code: `python -m tests.harness.settings_table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.settings import Settings

DOCUMENT = Path(__file__).parents[2] / "proxy" / "README.md"

BEGIN = "<!-- settings: `python -m tests.harness.settings_table` writes this table from proxy/settings.py -->\n"
END = "<!-- /settings -->\n"


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


def committed() -> str:
    """The table as the document has it."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + begin + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
