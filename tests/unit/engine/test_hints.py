"""A hint is a wish: what is wrong with it is dropped and counted, the rest is used."""

from collections import Counter
from types import SimpleNamespace

import pytest

from engine_patches.scheduler import hints
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.hints import (
    MAX_COMPARED,
    MAX_COMPARED_OF_HINT,
    MAX_ENTRIES,
    MAX_PATTERN,
    first_end,
    hint_in,
    last_end,
    resolve,
)
from engine_patches.scheduler.planner import Planner

IDS = list(range(1, 1001))  # the token 500 is the 500th


def read(hint, prompt=1000, unit=16):
    ignored: Counter[str] = Counter()

    def ignore(reason):
        ignored.update((reason,))

    exact = resolve(hint, IDS[:prompt], prompt, ignore)
    return Planner(Grid(unit, unit), 384).usable_positions(exact, ignore), ignored


def resolved(hint, ids=IDS):
    ignored: Counter[str] = Counter()
    return resolve(hint, ids, 1000, lambda reason: ignored.update((reason,))), ignored


def test_without_token_ids_only_counts_from_the_start_are_resolved():
    assert resolved([163, -7, "last:1", "first:1"], ids=None) == ((163, 0, 0, 0), Counter(not_found=3))


def test_a_hint_is_not_read_to_its_end():
    assert read([3] * 10_000) == ((), Counter(too_many=1, below_unit=MAX_ENTRIES))
    assert read(list(range(16, 16 * 40, 16))) == (tuple(range(16, 16 * 17, 16)), Counter(too_many=1))


def test_a_pattern_of_common_tokens_ends_the_search_early():
    class Counted(list):
        comparisons = 0

        def __getitem__(self, item):
            Counted.comparisons += 1
            return list.__getitem__(self, item)

    ids = Counted([5] * 200_000)
    assert last_end(ids, [4, 5]) == 0 and first_end(ids, [5, 4]) == 0
    assert Counted.comparisons < 3 * MAX_COMPARED
    Counted.comparisons = 0
    hint = ["last:" + ",".join(["5"] * 127 + ["4"]), "first:" + ",".join(["4"] + ["5"] * 127)] * 8
    assert resolve(hint, ids, len(ids), lambda reason: None) == (0,) * 16
    assert Counted.comparisons < 2 * MAX_COMPARED_OF_HINT


def carried(*actions, xargs=None):
    """The hint of a request that came with these `(type, version, payload)` of vLLM's KV hints, and with `xargs`."""
    made = [
        SimpleNamespace(action_id=str(number), action_type=kind, action_version=version, payload=payload)
        for number, (kind, version, payload) in enumerate(actions)
    ]
    envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=made) if actions else None
    extra = None if xargs is None else {hints.FIELD: xargs}
    return hint_in(SimpleNamespace(kv_hints=envelope, sampling_params=SimpleNamespace(extra_args=extra)))


BOUNDARIES = {
    "boundaries": [
        {"tokens": 163},
        {"tokens": -4},
        {"behind": "first", "token_ids": [7, 8]},
        {"behind": "last", "token_ids": [9], "skip": 2},
        {"behind": "last", "token_ids": [9], "skip": 0, "of a later version": 1},
    ]
}


def test_an_action_of_vllms_kv_hints_says_the_same_as_a_hint():
    assert carried(("kv.checkpoint", "1.0", BOUNDARIES)) == [163, -4, "first:7,8", "last-2:9", "last:9"]


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {},
        {"boundaries": 163},
        {"boundaries": [163]},
        {"boundaries": [{}]},
        {"boundaries": [{"tokens": True}]},
        {"boundaries": [{"tokens": "first:1"}]},
        {"boundaries": [{"behind": "middle", "token_ids": [1]}]},
        {"boundaries": [{"behind": "first", "token_ids": []}]},
        {"boundaries": [{"behind": "first", "token_ids": ["1,2", None]}]},
        {"boundaries": [{"behind": "last", "token_ids": [1], "skip": -1}]},
        {"boundaries": [{"behind": "last", "token_ids": [1] * (MAX_PATTERN + 1)}]},
    ],
)
def test_a_boundary_that_an_action_does_not_word_is_malformed(payload):
    assert read(carried(("kv.checkpoint", "1.0", payload))) == ((), Counter(malformed=1))


def test_an_action_is_not_read_to_its_end():
    many = {"boundaries": [{"tokens": 3}] * 10_000}
    assert read(carried(("kv.checkpoint", "1.0", many))) == ((), Counter(too_many=1, below_unit=MAX_ENTRIES))
