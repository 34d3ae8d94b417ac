"""Which prefixes a restarted worker gets back first, and how little a replay asks for."""

from __future__ import annotations

import asyncio
import json

from proxy.boundaries.boundary import Found
from proxy.chat.chat import CHAT
from proxy.fleet.hot_prefixes import (
    CONCURRENCY,
    ENTRY_BYTES,
    HALF_LIFE,
    MAX_REPLAYS,
    WarmupRequest,
    WarmupSet,
    replay_all,
)


def replay(name: bytes = b"", model: str = "m") -> WarmupRequest:
    return WarmupRequest(
        CHAT, b'{"model":"m","messages":[],"stream":true,"n":3}' + name, ("model", "stream", "n"), {}, Found(), model
    )


class Hot(WarmupSet):
    def used(self, key: bytes, tokens: int, shorter: tuple[bytes, ...], of: WarmupRequest, now: float) -> None:
        if not self.used_again(key, now):
            self.add(key, tokens, shorter, of, now)


def hot(size: int = 10**6) -> Hot:
    return Hot(size)


def test_what_saves_the_most_tokens_comes_first_and_the_forgotten_last():
    prefixes = hot()
    for key, tokens, uses, at in (
        (b"often", 100, 30, 0.0),
        (b"long", 2000, 1, 0.0),
        (b"old", 9000, 1, -20 * HALF_LIFE),
    ):
        for _ in range(uses):
            prefixes.used(key, tokens, (), replay(key), at)
    assert [each.raw[-4:] for each in prefixes.hottest({"m"}, 0.0)] == [b"ften", b"long", b"}old"]
    assert prefixes.hottest({"another"}, 0.0) == []


def test_each_request_that_shares_a_prefix_counts_once():
    prefixes = hot()
    for key, tokens, uses in ((b"twice", 100, 2), (b"once", 250, 1), (b"thrice", 100, 3)):
        for _ in range(uses):
            prefixes.used(key, tokens, (), replay(key), 0.0)
    assert [each.raw[-4:] for each in prefixes.hottest({"m"}, 0.0)] == [b"rice", b"once", b"wice"]


def test_a_later_turn_takes_the_place_of_an_earlier_one_that_nobody_else_used():
    prefixes = hot()
    prefixes.used(b"turn 1", 100, (b"system",), replay(), 0.0)
    prefixes.used(b"turn 2", 200, (b"system", b"turn 1"), replay(), 1.0)
    assert len(prefixes) == 1
    prefixes.used(b"system", 50, (), replay(), 2.0)
    prefixes.used(b"system", 50, (), replay(), 2.0)
    prefixes.used(b"turn 3", 300, (b"system", b"turn 2"), replay(), 3.0)
    assert len(prefixes) == 2


def test_what_is_kept_is_bounded_and_nothing_where_text_is_not_kept():
    size = len(replay().raw) + ENTRY_BYTES
    prefixes = hot(3 * size)
    for number in range(10):
        prefixes.used(bytes([number]), 100, (), replay(), float(number))
    assert len(prefixes) == 3 and prefixes.held <= 3 * size
    none = hot(0)
    none.used(b"key", 100, (), replay(), 0.0)
    assert len(none) == 0


def test_a_replay_asks_for_one_token_and_no_more():
    asked = WarmupRequest(
        CHAT,
        b'{"stream":true,"n":3,"max_tokens":900,"vllm_xargs":{"x":1},"seed":1}',
        ("stream", "n", "max_tokens", "vllm_xargs", "seed"),
        {"cache_salt": "s"},
        Found(),
        "m",
    )
    assert json.loads(asked.body_with(("first:7,8", 32, -5))) == {
        "seed": 1,
        "cache_salt": "s",
        "max_tokens": 1,
        "stream": False,
        "vllm_xargs": {"seamark_boundaries": ["first:7,8", 32, -5]},
    }


async def test_a_few_replays_run_at_once_the_first_ones_first():
    running, most, started = 0, 0, []

    async def one(request: WarmupRequest) -> None:
        nonlocal running, most
        started.append(request.raw)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    requests = [replay(bytes([number])) for number in range(MAX_REPLAYS)]
    await replay_all(requests, one)
    assert started == [request.raw for request in requests]
    assert most == CONCURRENCY


def test_the_hottest_are_no_more_than_a_restart_can_wait_for():
    prefixes = hot()
    for number in range(MAX_REPLAYS + 5):
        prefixes.used(bytes([number]), 1000 - number, (), replay(bytes([number])), 0.0)
    hottest = prefixes.hottest({"m"}, 0.0)
    assert [request.raw[-1] for request in hottest] == list(range(MAX_REPLAYS))


def test_a_prefix_that_takes_the_place_of_another_gives_its_room_back():
    prefixes = hot()
    sizes = 0
    for number in range(50):
        prefixes.used(b"%d" % number, 100, (b"%d" % (number - 1),), replay(b"x" * number), float(number))
        sizes = len(replay(b"x" * number).raw) + ENTRY_BYTES
    assert (len(prefixes), prefixes.held) == (1, sizes)


def test_what_is_used_again_stays_and_the_least_recently_used_goes():
    size = len(replay(b"0").raw) + ENTRY_BYTES
    prefixes = hot(2 * size)
    for name in (b"0", b"1", b"0", b"2"):
        prefixes.used(name, 100, (), replay(name), 0.0)
    assert {request.raw[-1:] for request in prefixes.hottest({"m"}, 0.0)} == {b"0", b"2"}
