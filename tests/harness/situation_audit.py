"""The situations a scheduler can be in, one small scene each, on vLLM's own scheduler and cache manager.

What each shows: chunk ends, positions written, cache keys. What it has to be: `tests/data/situations.yaml`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from vllm.utils.math_utils import cdiv

from engine_patches.scheduler.cache_keys import key_at
from tests.harness.audit import Scene
from tests.harness.audited_core import Core
from tests.harness.modelled_worker import UNIT

SITUATIONS: dict[str, tuple[Callable[[Core], dict[str, Any]], dict[str, Any]]] = {}  # and options of their cores

HEAD = list(range(1000, 1400))  # a shared prefix to cut from


def situation(name: str = "", **options: Any) -> Callable:
    """Register a scene under a name, its own unless it is given; it gets a fresh core made with `options`."""

    def register(scene: Callable[[Core], dict[str, Any]]) -> Callable[[Core], dict[str, Any]]:
        SITUATIONS[name or scene.__name__.replace("_", " ")] = scene, options
        return scene

    return register


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """All of them. `options`: `index`, of `Core`; it has twice as many cache groups then, beside one null block."""
    for name, (scene, own_options) in SITUATIONS.items():
        given = {**own_options, **options}
        if options.get("index") and "blocks" in given:
            given["blocks"] = 2 * given["blocks"] - 1
        core = Core(model, **given)
        yield Scene(name, [core], partial(_to_the_end, scene, core))


def _to_the_end(scene: Callable[[Core], dict[str, Any]], core: Core) -> dict[str, Any]:
    found = scene(core)
    core.run()
    return found


def own(number: int, length: int) -> list[int]:
    return [number * 10_000 + index for index in range(length)]


def evict(core: Core, request: Any, position: int, group: int) -> None:
    """Take the block that carries a cache group's key of the first `position` tokens out of the cache."""
    block = core.pool.cached_block_hash_to_block.get_one_block(key_at(request, position, UNIT, group))
    core.scheduler.kv_cache_manager.evict_blocks({block.block_id})


def shown(core: Core, *requests: Any) -> dict[str, Any]:
    """What each request shows: tokens it found, ends of its chunks (prompt only), states written, keys to enter at."""
    return {
        request.request_id: {
            "hit": core.hits.get(request.request_id),
            "ends": [end for end in core.chunk_ends.get(request.request_id, []) if end <= request.num_prompt_tokens],
            "written": core.written.get(request.request_id, []),
            "keys": sorted(set.intersection(*(set(core.keys(request, group)) for group in (0, 2, *core.attention)))),
        }
        for request in requests
    }


_TURNS = [HEAD[:100] + (own(1, 30) + own(2, 80) + own(3, 90))[:end] for end in (30, 110, 200)]

# Prompts one after the other: options of their core, and of each its tokens and hint.
PROMPTS: dict[str, tuple[dict[str, int], list[tuple[list[int], list[int] | None]]]] = {
    "a prompt shorter than a block": ({}, [(HEAD[:50], [33, 50])]),
    "several boundaries over several blocks in one pass": ({}, [(HEAD[:250], [40, 64, 130, 240])]),
    "no hint": ({}, [(HEAD[:250], None)]),
    "a budget below the prompt": ({"budget": 100}, [(HEAD[:250], [40, 130, 240])]),
    "a boundary where a chunk ends": ({"budget": 100}, [(HEAD[:250], [96, 192])]),
    "a budget below the match unit": ({"budget": 10}, [(HEAD[:70], [32, 64])]),
    "a boundary at and around the prompts end": ({}, [(HEAD[:length], [128]) for length in (127, 128, 129)]),
    "boundaries at and around a block edge": ({}, [(own(number, 100), [62 + number]) for number in (1, 2, 3)]),
    # vLLM computes the last token, so the state at 128 is behind what may be found (LMCache#5249).
    "a prompt whose end is cached": ({}, [(HEAD[:length], [128]) for length in (128, 129, 128)]),
    "the same prompt again": ({}, [(HEAD[:130], [100])] * 2),
    "a conversation moves on": ({}, [(turn, [100, len(turn) - 4]) for turn in _TURNS]),
    # A turn's end alone: the last whole block is kept as without a hint, and the second request shows the rest.
    "a hint misses what is shared": ({}, [(HEAD[:150] + own(number, 320), [-4]) for number in (1, 2, 3)]),
    # The first one's ladder serves the second, which keeps the place for the third.
    "a document and its questions in one message": (
        {"budget": 512},
        [(HEAD[:400] + own(number, 30), [-4]) for number in (1, 2, 3)],
    ),
    # vLLM alone finds the last whole block before that, 192.
    "the first to leave a prompt between its states": ({}, [(HEAD[:250], [40]), (HEAD[:210] + own(1, 20), [40])]),
}

for _name, (_options, _prompts) in PROMPTS.items():
    situation(_name, **_options)(lambda core, prompts=_prompts: shown(core, *_run_all(core, prompts)))


@situation()
def a_warm_start_inside_a_block_runs_past_its_edge(core):
    a = core.request("a", HEAD[:48] + own(1, 2), [48])
    core.run()
    b = core.request("b", HEAD[:48] + own(2, 200), [48])
    core.run()
    evict(core, a, 48, core.attention[0])  # the block of which `b` has a copy
    c = core.request("c", HEAD[:48] + own(3, 9), [48])
    core.run()
    return shown(core, a, b, c)


@situation()
def the_same_prompt_twice_in_one_step(core):
    """The second must not copy the first one's private block, which the step has yet to fill."""
    _run_all(core, [(HEAD[:32] + own(1, 8), [32])])
    pair = [core.request(name, HEAD[:32] + own(2, 27), [32]) for name in "ab"]
    core.run()
    longer = [core.request(name, HEAD[:32] + own(3, 90), [32]) for name in "cd"]
    core.run()
    return shown(core, *pair, *longer)


def _rows_evicted(number: int, core: Core) -> dict[str, Any]:
    """The first of two computes the rows again; the second finds them, and an older state, in the same step."""
    a, *_ = _run_all(core, [(HEAD[:40] + own(1, 8), [32])])
    evict(core, a, 32, core.attention[number])
    pair = [core.request(name, HEAD[:40] + own(2, 10), [32, 40]) for name in "bc"]
    core.run()
    return shown(core, *pair)


situation("rows evicted and their state kept")(partial(_rows_evicted, 0))

# With the first attention group's rows in place: all groups are checked.
situation("rows of the second attention group evicted", attention_groups=2)(partial(_rows_evicted, 1))


@situation()
def one_recurrent_group_evicted(core):
    """The state of the other group alone is no state: it is written again, and found again."""
    a, *_ = _run_all(core, [(HEAD[:100] + own(1, 20), [96])])
    evict(core, a, 96, 2)
    return shown(core, *_run_all(core, [(HEAD[:100] + own(number, 20), [96]) for number in (2, 3)], first=1))


@situation()
def bad_hints(core):
    hints = ([-100], [0], [10**9], ["last:1"], ["first:1,"], ["64"], [3], "64", {"64": 1}, [True], [1.5], [])
    requests = [core.request(f"r{number}", own(number + 1, 100), hint) for number, hint in enumerate(hints)]
    core.run()
    ignored = core.scheduler.seamark.counters.counts.ignored
    return {
        "written": [core.written[request.request_id] for request in requests],
        "ignored": dict(sorted(ignored.items())),
    }


@situation()
def entries_of_all_kinds(core):
    """Counted from either end, behind occurrences, in any order."""
    opener = [7, 8, 9]
    tokens = HEAD[:60] + opener + own(1, 90) + opener + own(2, 80) + opener + own(3, 14)
    hints = (
        [-14],
        ["first:7,8,9"],
        ["last:7,8,9"],
        ["last-1:7,8,9"],
        ["last-3:7,8,9", "first:9,8"],
        [-14, 240, "last-2:7,8,9", 16, 240],
    )
    shown, resolved = [], []
    for number, hint in enumerate(hints):
        request = core.request(f"r{number}", tokens, hint, salt=str(number))
        core.run()
        shown.append(core.written[request.request_id])
        resolved.append(list(request.seamark.wish.resolved))
    return {"written": shown, "resolved": resolved, "ignored": dict(core.scheduler.seamark.counters.counts.ignored)}


@situation()
def a_prefix_is_shared_and_no_hint_says_so(core):
    """The second request shows where they part, the third resumes there; another salt shows nothing."""
    prompts = [(HEAD[:150] + own(number, 300), None) for number in (1, 2, 3)]
    other = _run_all(core, [prompts[0]], first=3, salt="other")
    requests = _run_all(core, prompts) + other
    wishes = [request.seamark.wish for request in requests]
    return {**shown(core, *requests), "shared": [wish.shared for wish in wishes]}


@situation()
def two_salts(core):
    requests = _run_all(core, [(HEAD[:130], [100])], salt="one") + _run_all(core, [(HEAD[:130], [100])], 1, "two")
    return shown(core, *requests)


@situation(budget=64)
def aborted_in_the_middle_of_its_prefix(core):
    a = core.request("a", HEAD[:250], [240])
    core.step()
    core.abort("a")
    b = core.request("b", HEAD[:250], [240])
    core.run()
    return shown(core, a, b)


@situation(budget=64)
def a_follower_waits_for_its_leader(core):
    a, b = _followed(core)
    unrelated = core.request("c", own(3, 20))
    core.run()
    order = sorted(core.chunk_ends, key=list(core.chunk_ends).index)
    return {**shown(core, a, b, unrelated), "order": order}


@situation(budget=64)
def the_leader_is_aborted(core):
    a, b = _followed(core)
    core.step()
    core.step()
    held = "b" not in core.chunk_ends
    core.abort("a")
    core.run()
    return {**shown(core, a, b), "held": held}


@situation(budget=64)
def a_follower_has_waited_long_enough(core):
    _waiting_always_pays(core)
    clock = itertools.count()
    core.scheduler.seamark.gate._clock = lambda: next(clock) * 0.6  # seconds; patience lasts one
    a = core.request("a", HEAD[:250], [240])
    b = core.request("b", HEAD[:240] + own(2, 20), [240])
    core.run()
    return shown(core, a, b)


@situation(budget=1024)
def waiting_does_not_pay(core):
    requests = [core.request(name, HEAD[:160] + own(number, 50), [160]) for number, name in enumerate("abcd", 1)]
    core.run()
    return shown(core, *requests)


@situation(budget=1, running=1)
def steps_over_single_tokens(core):
    """Such a step may be replayed as one graph of kernels, which writes no state."""
    a = core.request("a", HEAD[:20], [16])
    core.run()
    ignored = core.scheduler.seamark.counters.counts.ignored["single_token"]
    return {**shown(core, a), "ignored": ignored}


@situation(budget=70)
def a_follower_is_aborted_while_it_waits(core):
    a, _ = _followed(core)
    core.step()
    core.step()
    held = list(core.scheduler.seamark.gate.waiting)
    core.abort("b")
    core.run()
    return {**shown(core, a), "held": held, "held afterwards": list(core.scheduler.seamark.gate.waiting)}


@situation(overlap=True)
def the_cache_is_emptied_while_a_step_writes_states(core):
    a = core.request("a", HEAD[:130], [40, 96])
    core.step()
    emptied = core.scheduler.reset_prefix_cache(reset_running_requests=True)
    core.forget_sampled("a")
    core.run()
    return {"emptied": emptied, **shown(core, a)}


@situation(budget=64)
def the_cache_is_to_be_emptied_while_a_request_runs(core):
    """vLLM then answers `{"success": false}` (vllm#46893), and all is found as before."""
    a = core.request("a", HEAD[:130], [40])
    core.step()
    emptied = core.reset()
    core.run()
    return {"emptied": emptied, **shown(core, a, *_run_all(core, [(HEAD[:130], [40])]))}


@situation(budget=60)
def three_prompts_at_once_and_a_budget_below_a_block(core):
    """Each moves on by what is left of the budget, if not by a block (vllm#45414, vllm#47272)."""
    requests = [core.request(name, own(number, 158), [84, -4]) for number, name in enumerate("abc", 1)]
    core.run()
    return shown(core, *requests, *_run_all(core, [(own(1, 150), [84])]))


@situation(export=False, longest=1024)
def a_prompt_as_long_as_the_model_takes_and_a_cache_as_small_as_vllm_takes(core):
    """One of its blocks is never given out, so vLLM begins such a prompt again for ever (vllm#52520)."""
    config, groups = core.scheduler.vllm_config, core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    least = sum(cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes) for spec in specs)
    found = {}
    for name, more in (("as small", 0), ("one block more", 1)):
        taken = core.pool.get_new_blocks(core.pool.get_num_free_blocks() - (least + more - 1))
        request = core.request(name, own(more, 1023), [500, 900])
        for _ in range(50):
            core.step()
        found[name] = "answered" if request.is_finished() else "begun again and again"
        core.abort(name)
        core.pool.free_blocks(taken)
    return found


# Prompts that wait: what comes before which step, as of `Core.request`, and options. A step has room for 256 tokens.
_LONG, _SHORT, _TINY = ("long", own(1, 2000)), ("short", own(2, 100)), ("tiny", own(4, 15), None, 30)
_ANSWERS, _OLD = ("answers", own(3, 16), None, 40), ("old", own(3, 900), [890])
WAITS: dict[str, tuple[dict[int, list[tuple[Any, ...]]], dict[str, Any]]] = {
    "behind a long one": ({0: [_LONG], 1: [_SHORT]}, {}),
    "behind a long one, beside answers": ({0: [_ANSWERS], 1: [_LONG], 2: [_TINY, _SHORT]}, {}),
    "behind a long one, cached": ({0: [_OLD], 9: [_LONG], 10: [("again", own(3, 900) + own(2, 100), [890])]}, {}),
    "behind a long one that gets little at first": ({0: [*((str(n), own(n, 80)) for n in (3, 5)), _LONG, _SHORT]}, {}),
    "before a long one": ({0: [_SHORT, _LONG]}, {"writes_in_forward": False, "export": False}),
    "as long": ({0: [_LONG, ("another", own(2, 2000))]}, {}),
    "for a place": ({0: [_LONG], 1: [_SHORT]}, {"running": 1}),
    "for room": ({0: [("long", own(1, 1200))], 1: [_SHORT]}, {"blocks": 26}),
    "for what a long one computes": (
        {0: [_ANSWERS], 1: [(*_LONG, [1600])], 2: [("short", own(1, 1600) + own(2, 50), [1600])]},
        {},
    ),
}


def _waits(core: Core, arrivals: dict[int, list[tuple[Any, ...]]]) -> dict[str, float]:
    """Seconds, by the threshold to set, of steps that begin once a second."""
    core.scheduler.seamark.long_prefills.clock = itertools.count().__next__
    for step in range(max(arrivals) + 1):
        for request in arrivals.get(step, ()):
            core.request(*request)
        core.step()
    core.run()
    return dict(core.scheduler.seamark.counters.counts.long_prefill_waits)


for _name, (_arrivals, _options) in WAITS.items():
    situation(f"waits {_name}", **_options)(partial(_waits, arrivals=_arrivals))


@situation("a threshold that cuts blocks, where vLLM ends chunks", writes_in_forward=False, export=False)
def _with_a_threshold(core):
    core.scheduler.scheduler_config.long_prefill_token_threshold = 40
    waits = _waits(core, {0: [("long", own(1, 300)), ("short", own(2, 230))]})
    return {"waits": waits, **core.chunk_ends}


@situation()
def a_connector_looks_up_in_its_own_way(core):
    """As NIXL does; `rows evicted and their state kept`, once more."""
    cache = core.scheduler.kv_cache_manager
    core.scheduler._get_local_prefix_cache_hit = cache.get_computed_blocks_for_connector
    return _rows_evicted(0, core)


@situation(blocks=7)
def a_cache_with_no_block_to_spare(core):
    a, b = _run_all(core, [(HEAD[:190], [64, 100, 180]), (HEAD[:190], [180])])
    counted = core.scheduler.seamark.counters.take()
    return {**shown(core, a, b), "no_room": counted.ignored["no_room"] > 0, "why": counted.requests[-1].reason}


@situation(blocks=16, budget=512, policy="priority")
def preempted_in_the_very_step_it_was_planned_for(core):
    """The audit finds a key of a state that was never computed, should one be left (vllm#57580)."""
    low = core.request("low", HEAD[:250], [130], max_tokens=300, priority=9)
    core.step()
    high = core.request("high", own(1, 150), [130], max_tokens=300, priority=0)
    core.run()
    return {**shown(core, low, high), "preempted": low.num_preemptions + high.num_preemptions > 0}


@situation(overlap=True, budget=100)
def the_next_step_is_planned_before_the_last_is_known(core):
    requests = [core.request(name, HEAD[:130] + own(number, 60), [130], 80) for number, name in enumerate("ab", 1)]
    core.run()
    return shown(core, *requests)


@situation(writes_in_forward=False, export=False)
def a_backend_that_cannot_be_run_in_segments(core):
    for _ in range(8):  # a pass costs as much as 100 tokens
        core.scheduler.seamark.step_time.step_took(1, 0.1)
        core.scheduler.seamark.step_time.step_took(1000, 1.1)
    a = core.request("a", HEAD[:250], [40, 130])
    core.run()
    return shown(core, a)


def _run_all(core: Core, prompts: list[tuple[list[int], object]], first: int = 0, salt: str | None = None) -> list[Any]:
    """One after the other."""
    requests = []
    for number, (tokens, hint) in enumerate(prompts, first):
        requests.append(core.request(f"r{number}", tokens, hint, salt=salt))
        core.run()
    return requests


def _followed(core: Core) -> list[Any]:
    """A leader, and one that shares 200 tokens with it and waits for them."""
    _waiting_always_pays(core)
    return [core.request(name, HEAD[:200] + own(number, 20), [200]) for number, name in enumerate("ab", 1)]


def _waiting_always_pays(core: Core) -> None:
    step_time = core.scheduler.seamark.step_time
    for _ in range(8):
        step_time.step_took(1, 0.001)
        step_time.step_took(100, 1.0)
