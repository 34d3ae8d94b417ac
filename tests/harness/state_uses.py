"""A vLLM plugin for test engines: how many of the states an engine writes are resumed from, kind by kind.

The engine keeps the counts in the file that `FILE_VARIABLE` names. With `WITHOUT_VARIABLE` it expects no junctions.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from proxy.bench.harness.planted import plugin_environment

FILE_VARIABLE = "SEAMARK_STATE_USES_FILE"

WITHOUT_VARIABLE = "SEAMARK_WITHOUT_EXPECTED_JUNCTIONS"


class Uses(NamedTuple):
    """Of the states of one kind."""

    written: int
    unused: int  # nobody has resumed from


def environment(folder: Path, *, expected: bool) -> Mapping[str, str]:
    """Environment of an engine that counts in `folder`; `expected`: as users have it, with expected junctions."""
    folder.mkdir()
    plugins = plugin_environment(folder, {"seamark_state_uses": f"{__name__}:register"})
    return {**plugins, FILE_VARIABLE: str(folder / "uses.json")} | ({} if expected else {WITHOUT_VARIABLE: "1"})


def uses_in(folder: Path) -> dict[str, Uses]:
    """By kind, what the engine started with `environment(folder)` has written so far."""
    try:
        counts = json.loads((folder / "uses.json").read_text())
    except FileNotFoundError:
        return {}
    return {kind: Uses(*pair) for kind, pair in counts.items()}


def register() -> None:
    """The plugin."""
    for plugin in entry_points(group="vllm.general_plugins", name="seamark"):
        plugin.load()()
    from engine_patches.scheduler.counters import Counters
    from engine_patches.scheduler.expected_junctions import ExpectedJunctions

    if os.environ.get(WITHOUT_VARIABLE):
        ExpectedJunctions.places = lambda *_: ()  # type: ignore[method-assign]
    if hasattr(Counters, "uses"):
        return
    file = Path(os.environ[FILE_VARIABLE])
    written: Counter[str] = Counter()
    unused: dict[bytes, list[str]] = {}  # the kind of each, by key; one that was evicted may be written again
    state_written, resumed = Counters.state_written, Counters.resumed

    def tell() -> None:
        left = Counter(kind for kinds in unused.values() for kind in kinds)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({kind: [count, left[kind]] for kind, count in written.items()}))
        new.rename(file)

    def count_written(self: Any, key: bytes, kind: str) -> None:
        state_written(self, key, kind)
        written[kind] += 1
        unused.setdefault(key, []).append(kind)
        tell()

    def count_resumed(self: Any, key: bytes, *args: Any) -> None:
        resumed(self, key, *args)
        if kinds := unused.pop(key, None):
            if kinds[:-1]:  # those that were evicted before anybody came
                unused[key + b" evicted"] = unused.get(key + b" evicted", []) + kinds[:-1]
            tell()

    Counters.state_written, Counters.resumed = count_written, count_resumed  # type: ignore[method-assign]
    Counters.uses = True  # type: ignore[attr-defined]
