"""Random traffic on cores whose every cache key is checked (`audited_core`), and the loop of all audits.

The audits beside a disk, between two engines, with adapters and with drafts have workers of their own
(`modelled_worker`); each says in `scenes` what traffic it gets.

Run as `python -m tests.harness.audit scheduler MODEL '{"seeds": [1], "chats": 9, "cores": [{}]}'` (or disk, transfer,
adapter, draft), since patching is per process. Prints JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import Request

from engine_patches import ledger
from engine_patches.patches import PATCHES
from tests.harness.audited_core import Core


def random_entry(draw: random.Random, tokens: Sequence[int], position: int) -> object:
    """A hint's entry that names `position`, or an occurrence of the same tokens elsewhere, or nothing."""
    pattern = ",".join(map(str, tokens[max(position - draw.randrange(1, 9), 0) : position]))
    return draw.choice(
        (
            position,
            position - len(tokens),
            f"first:{pattern}",
            f"last:{pattern}",
            f"last-{draw.randrange(3)}:{pattern}",
            "last:1000",
            "elsewhere",
        )
    )


def random_traffic(
    core: Core, seed: int, chats: int, outputs: Sequence[int] = (1, 3, 20), longest_turn: int = 0
) -> None:
    """Chats on a few heads, with hints at their seams, at random places, or none; some are aborted at any phase.

    `outputs`: numbers of tokens that may be generated. `longest_turn`: chats may go on from an earlier one with its
    answer, if both have at most so many tokens.
    """
    draw, draw_entry, draw_end = random.Random(seed), random.Random(seed), random.Random(seed)
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
            )
        )
        while len(core.scheduler.waiting) > 3:
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


def audit(scenes: Iterator[Scene], options: dict[str, Any]) -> dict[str, Any]:
    """What is wrong in any of the scenes, the plugin's settings at the end, and counts, so that idleness is seen."""
    errors, counts, plugin, played = [], Counter[str](), {}, None
    for scene in scenes:
        try:
            played = scene.play()
        except AssertionError as error:  # vLLM's own, of what no engine survives
            scene.cores[0].errors.append(f"the engine dies: {error}")
        for core in scene.cores:
            if core.blocks_in_use():
                core.errors.append(f"{core.blocks_in_use()} blocks are held without a request")
            core.worker.close()
            errors += [f"{scene.name}: {error}" for error in core.errors[:3]]
            core.counts["hit_tokens"] += sum(hit for name, hit in core.hits.items() if name not in core.worker.loaded)
            core.counts["written"] += sum(map(len, core.written.values()))
            counts.update(core.counts if scene.counted else {})
            plugin = core.plugin
    return {"core": options, "errors": errors, "played": played, **plugin, **counts}


def main(name: str, model: str, argument: str) -> None:
    """Print what the audit of a `name` finds with each of the `cores`, as JSON.

    `argument`: JSON with `cores`, whose arguments the audit knows, `without` (beginnings of the names of patches that
    are not applied), `planted` (names of the audit's defects) and what its scenes ask for: `seeds`, `chats`.
    """
    wanted, module = json.loads(argument), importlib.import_module(f"tests.harness.{name}_audit")
    logging.disable(logging.INFO)
    init_none_hash(sha256)
    ledger.apply([patch for patch in PATCHES if not patch.name.startswith(tuple(wanted.get("without", ())))])
    for defect in wanted.get("planted", ()):
        module.DEFECTS[defect]()
    print(json.dumps([audit(module.scenes(model, wanted, options), options) for options in wanted["cores"]]))


if __name__ == "__main__":
    main(*sys.argv[1:4])
