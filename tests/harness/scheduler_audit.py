"""The audit of vLLM's scheduler as it is: no connector, no adapters, no drafts."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from engine_patches.scheduler import cache_keys, hooks, state_writes
from engine_patches.scheduler.refusals import GroupRole, role_of
from tests.harness.audit import Scene, random_traffic
from tests.harness.audited_core import Core


def _take_rings_for_attention() -> None:
    """As their classes derive from each other."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    hooks.role_of = lambda each: GroupRole.ATTENTION if isinstance(each, FullAttentionManager) else role_of(each)


def _take_a_rank_for_all() -> None:
    """Keys inside an attention block are placed as if the rows of one rank were all that the block has."""
    keep = cache_keys.keep_attention_keys

    def keep_attention_keys(manager: Any, request: Any, positions: Iterable[int]) -> None:
        of_a_rank = copy.copy(manager)
        of_a_rank.block_size = manager.kv_cache_spec.block_size
        keep(of_a_rank, request, positions)

    cache_keys.keep_attention_keys = state_writes.keep_attention_keys = keep_attention_keys


DEFECTS = {"rings taken for attention": _take_rings_for_attention, "a rank taken for all": _take_a_rank_for_all}


def drawn(draw: random.Random, length: int) -> list[int]:
    """Tokens."""
    return [draw.randrange(1000) for _ in range(length)]


def deep_prompts(core: Core, depths: list[int]) -> dict[str, Any]:
    """A long prompt with a state at each depth, and one behind each of these; others take the whole cache; and again.

    What each found in the cache. The second long prompt is pinned.
    """
    draw = random.Random(3)

    def ask(tokens: list[int], hint: list[int] | None = None, pin: int | None = None) -> int:
        name = f"r{len(core.ever)}"
        core.request(name, tokens, hint, pin=pin)
        core.run()
        return core.hits[name]

    found: dict[str, Any] = {"names": 0}
    for kept, pin in (("held", None), ("pinned", 1)):
        head = drawn(draw, max(depths) + 5)
        ask(head, depths, pin)
        found["names"] += len(core.stored)
        found[kept] = [ask([*head[: depth + 3], *drawn(draw, 7)]) for depth in depths]
        for _ in range(12):
            ask(drawn(draw, max(depths)))
        found[f"{kept}, then"] = [ask([*head[: depth + 3], *drawn(draw, 7)]) for depth in depths]
    ask(head, depths, pin=0)
    return found


def tiny_prompts(core: Core, kept: bool) -> dict[str, Any]:
    """Prompts of 12 tokens between others that share a head, more at once than the cache has room for; one is pinned.

    Blocks that a tiny one holds alone; of each request the step that began it; what those with the head found.
    `kept`: states are written; if not, no block is ever taken for one.
    """
    if not kept:
        core.scheduler.seamark.states.reserve = lambda *_, **__: None
    draw = random.Random(5)
    began: dict[str, int] = {}
    head, held, step = drawn(draw, 40), 0, 0

    def go_on(until_idle: bool) -> None:
        nonlocal step, held
        while core.scheduler.has_unfinished_requests() if until_idle else core.scheduler.waiting:
            core.step()
            step += 1
            assert step < 2000, "stuck"
            running = core.scheduler.running
            began.update({request.request_id: step for request in running if request.request_id not in began})
            if [request.num_prompt_tokens for request in running] == [12]:
                held = max(held, core.blocks_in_use())

    for wave in range(6):
        for number in range(4):
            own = drawn(draw, 12)
            core.request(f"tiny {wave} {number}", own, max_tokens=3)
            pin = 1 if wave == 3 and number == 0 else None
            tokens = head + own[: draw.randrange(3, 12)]
            core.request(f"head {wave} {number}", tokens, [len(head)], max_tokens=2, pin=pin)
        go_on(until_idle=wave % 2 == 0)
    for number in range(6):
        go_on(until_idle=True)
        own = drawn(draw, 12)
        core.request(f"tiny alone {number}", own, max_tokens=3)
        go_on(until_idle=True)
        core.request(f"head alone {number}", head + own, [len(head)], max_tokens=2)
    go_on(until_idle=True)
    return {"held": held, "began": began, "hits": [hit for name, hit in core.hits.items() if name.startswith("head")]}


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: arguments of `Core`."""
    play = {f"seed {seed}": partial(random_traffic, seed=seed, chats=wanted["chats"]) for seed in wanted["seeds"]}
    if "depths" in wanted:
        play["deep prompts"] = partial(deep_prompts, depths=wanted["depths"])
    if "tiny" in wanted:
        play |= {name: partial(tiny_prompts, kept=name == "kept") for name in ("kept", "none")}
    for name, scene in play.items():
        core = Core(model, **options)
        yield Scene(name, [core], partial(scene, core))
