"""Random traffic on cores whose every cache key is checked (`audited_core`), and the loop of all audits.

The audits beside a disk, between two engines, with adapters and with drafts have workers of their own
(`modelled_worker`), and cores that do something else with a request; each says in `scenes` what traffic it gets.

Run as `python -m tests.harness.audit scheduler MODEL '{"seeds": [1], "chats": 9, "cores": [{}]}'` (or disk, transfer,
adapter, draft, situation, fan_out), since patching is per process; prints JSON. `audited`: in a test's own process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import vllm.plugins
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import Request

from engine_patches import ledger
from engine_patches.patches import PATCHES
from tests.harness.audited_core import Core


def random_entry(draw: random.Random, tokens: Sequence[int], position: int) -> object:
    """A hint's entry that names `position`, or an occurrence of the same tokens elsewhere, or nothing."""
    pattern = ",".join(map(str, tokens[max(position - draw.randrange(1, 9), 0) : position]))
    occurrences = (f"first:{pattern}", f"last:{pattern}", f"last-{draw.randrange(3)}:{pattern}")
    return draw.choice((position, position - len(tokens), *occurrences, "last:1000", "elsewhere"))


# What is of low priority may go before what follows it: that is found again, unannounced, once the former is computed.
KEEPS: Sequence[dict[str, str]] = [*[{}] * 5, {"seamark_keep": "no"}, {"seamark_keep": "low"}]


def random_traffic(
    core: Core, seed: int, chats: int, outputs: Sequence[int] = (1, 3, 20), longest_turn: int = 0
) -> None:
    """Chats on a few heads, with hints at their seams, at random places, or none; some are aborted at any phase.

    `outputs`: numbers of tokens that may be generated. `longest_turn`: chats may go on from an earlier one with its
    answer, if both have at most so many tokens.
    """
    draw, draw_entry, draw_end, draw_kept = (random.Random(seed) for _ in range(4))
    lengths = (20, 33, 64, 70, 100, 130, 163, 250, 300, 400)
    heads = [[draw.randrange(1000) for _ in range(draw.choice(lengths))] for _ in range(4)]
    begun: list[Request] = []
    for number in range(chats):
        tokens = list(draw.choice(heads))
        answered = [request for request in begun if request.is_finished() and request.num_tokens <= longest_turn]
        if answered and draw.random() < 0.5:
            tokens = list(draw.choice(answered).all_token_ids)
        if draw.random() < 0.3:
            tokens = tokens[: draw.randrange(10, len(tokens) + 1)]
        seams = [len(tokens)]
        for _ in range(draw.randrange(1, 4)):
            tokens += [draw.randrange(3) for _ in range(draw.randrange(1, 90))]
            seams.append(len(tokens))
        hint: object = sorted({seam for seam in seams if draw.random() < 0.7})
        if draw.random() < 0.2:
            hint = sorted(draw.sample(range(1, len(tokens) + 1), min(len(tokens), 5)))
        elif hint and draw_entry.random() < 0.5:
            hint = [random_entry(draw_entry, tokens, seam) for seam in seams]
        begun.append(
            core.request(
                f"{seed}-{number}",
                tokens,
                hint if hint and draw.random() < 0.8 else None,
                max_tokens=draw.choice(outputs),
                salt=draw.choice((None, None, "salt")),
                priority=draw.randrange(3),
                stop=draw_end.random() < 0.5,
                extra=draw_kept.choice(KEEPS if core.index is None else KEEPS[:-1]),
            )
        )
        while core.waiting > 3:
            core.step()
            for name in list(core.scheduler.requests):
                if draw.random() < 0.02:
                    core.abort(name)
    core.run()


class Scene(NamedTuple):
    """Traffic on new cores, after which they are judged."""

    name: str
    cores: Sequence[Core]
    play: Callable[[], object]
    counted: bool = True  # if False, so that others which do nothing are seen


Scenes = Callable[[str, dict[str, Any], dict[str, Any]], Iterator[Scene]]


def audit(scenes: Iterator[Scene], options: dict[str, Any]) -> dict[str, Any]:
    """What is wrong in any of the scenes, what each shows, the plugin's settings at the end, and counts of idleness."""
    errors, counts, plugin, played = [], Counter[str](), {}, {}
    for scene in scenes:
        try:
            played[scene.name] = scene.play()
        except AssertionError as error:  # vLLM's own, of what no engine survives
            scene.cores[0].errors.append(f"the engine dies: {error}")
        for core in scene.cores:
            if core.blocks_in_use():
                core.errors.append(f"{core.blocks_in_use()} blocks are held without a request")
            core.worker.close()
            errors += [f"{scene.name}: {error}" for error in core.errors[:3]]
            core.counts["hit_tokens"] += sum(hit for name, hit in core.hits.items() if name not in core.worker.loaded)
            core.counts["unkept_hits"] += sum(core.hits.get(name, 0) > 0 for name in core.unkept)
            core.counts["written"] += sum(map(len, core.written.values()))
            counts.update(core.counts if scene.counted else {})
            plugin = core.plugin
    return {"core": options, "errors": errors, "played": played, **plugin, **counts}


def results(name: str, model: str, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """What the audit of a `name` finds with each of the `cores`, in a process that is patched for nothing else.

    `wanted`: `cores`, whose arguments the audit knows, `without` (beginnings of the names of patches that are not
    applied), `planted` (names of the audit's defects) and what its scenes ask for: `seeds`, `chats`.
    """
    module = importlib.import_module(f"tests.harness.{name}_audit")
    logging.disable(logging.INFO)
    init_none_hash(sha256)
    ledger.apply([patch for patch in PATCHES if not patch.name.startswith(tuple(wanted.get("without", ())))])
    for defect in wanted.get("planted", ()):
        module.DEFECTS[defect]()
    return [audit(module.scenes(model, wanted, options), options) for options in wanted["cores"]]


@contextlib.contextmanager
def patched_vllm(*without: str) -> Iterator[None]:
    """All patches of modules that are imported, but those named, are in place in a test's own process, until the end.

    A scene takes milliseconds then. Tests of how patches are applied do it in processes of their own.
    """
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patched:
        patched.setenv("SEAMARK_ENGINE", "0")
        patched.setattr(vllm.plugins, "plugins_loaded", True)  # not by vLLM's own mechanism
        for name, fresh in {"_replaced": [], "_awaited": {}, "_live": False, "_relied_on": False}.items():
            patched.setattr(ledger, name, fresh)
        patched.setattr(ledger, "_hook", SimpleNamespace(install=lambda: None))
        init_none_hash(sha256)
        imported = [patch for patch in PATCHES if patch.target.partition(":")[0] in sys.modules]
        ledger.apply([patch for patch in imported if patch.name not in without])
        try:
            yield
        finally:
            ledger._put_back(0)


def audited(scenes: Scenes, model: Path | str, core: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    """What an audit of these `scenes` finds with a `core`, within `patched_vllm`; `wanted`: see `results`."""
    with mock.patch.dict(os.environ):  # settings of a scheduler are environment variables
        return audit(scenes(str(model), wanted, core), core)


if __name__ == "__main__":
    print(json.dumps(results(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
