"""The engines that a run of tests starts, counted by family: the line `engines started` at its end.

Each place that makes an engine notes it in one file, whose name all processes of the run inherit: `Servers.engine` for
servers, and each job of the harness beside its `LLM(...)`.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proxy.bench.harness.servers import Server, Servers

FILE = "STARTED_ENGINES_FILE"  # an environment variable


def note(family: str) -> None:
    """An engine with such a model is about to start."""
    if name := os.environ.get(FILE):
        with open(name, "a") as file:  # a line is written at once
            file.write(f"{family}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Of the process that runs all others: begin to count, and count servers."""
    if not hasattr(config, "workerinput"):
        descriptor, os.environ[FILE] = tempfile.mkstemp(prefix="seamark-engines-")
        os.close(descriptor)
    start = Servers.engine

    def engine(self: Servers, name: str, model: Path, *args: Any, **options: Any) -> Server:
        note(Path(model).name.rpartition("-")[0])
        return start(self, name, model, *args, **options)

    Servers.engine = engine  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many it were, in the process that runs all others."""
    file = Path(os.environ.get(FILE, ""))
    if hasattr(config, "workerinput") or not file.is_file():
        return
    families = Counter(file.read_text().splitlines())
    file.unlink()
    told = ", ".join(f"{family} {count}" for family, count in families.most_common())
    if families:
        terminalreporter.write_line(f"engines started: {families.total()} ({told})")
