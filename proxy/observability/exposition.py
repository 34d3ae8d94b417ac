"""Two expositions of metrics as one, in Prometheus' text format: a scraper reads the worker's figures beside ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric, generate_latest

from proxy.idle_work import Steps

_NAMED = re.compile(r"# (?:HELP|TYPE) (\S+)")


class _One(NamedTuple):
    """A registry of one family."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.family,)


def exposition(registry: CollectorRegistry) -> Steps[bytes]:
    """All families of a registry as text, one in each step: a thousand series take milliseconds."""
    parts = []
    for family in registry.collect():
        parts.append(generate_latest(_One(family)))
        yield
    return b"".join(parts)


def merged(first: str, second: str) -> str:
    """Both, each family once, as the format demands. A series that both have is the one of `first`."""
    families = _families(first)
    for name, lines in _families(second).items():
        known = families.setdefault(name, [])
        if not known:
            known += lines
            continue
        taken = {_series(line) for line in known}
        known += [line for line in lines if not line.startswith("#") and _series(line) not in taken]
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _families(text: str) -> dict[str, list[str]]:
    """Lines by the family under whose `# HELP` or `# TYPE` they stand."""
    families: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if (named := _NAMED.match(line)) is not None:
            lines = families.setdefault(named[1], [])
        elif line.startswith("#") or not line.strip():  # a comment, or OpenMetrics' end
            continue
        elif not families:  # a sample without a family
            lines = families.setdefault("", [])
        lines.append(line)
    return families


def _series(line: str) -> str:
    """Name and labels of a sample: all before its value, and before a time behind that."""
    end = line.rfind("}") + 1
    return line[:end] if end else line.split(" ", 1)[0]
