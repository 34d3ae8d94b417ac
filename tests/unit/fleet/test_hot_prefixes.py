"""Which prefixes a restarted worker gets back first, and how little a replay asks for."""

from __future__ import annotations

import json

from proxy.boundaries.boundary import Found
from proxy.chat.chat import CHAT
from proxy.fleet.hot_prefixes import (
    ENTRY_BYTES,
    WarmupRequest,
    WarmupSet,
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


def test_what_is_kept_is_bounded_and_nothing_where_text_is_not_kept():
    size = len(replay().raw) + ENTRY_BYTES
    prefixes = hot(3 * size)
    for number in range(10):
        prefixes.used(bytes([number]), 100, (), replay(), float(number))
    assert len(prefixes) == 3 and prefixes.held <= 3 * size
    none = hot(0)
    none.used(b"key", 100, (), replay(), 0.0)
    assert len(none) == 0


def test_what_is_used_again_stays_and_the_least_recently_used_goes():
    size = len(replay(b"0").raw) + ENTRY_BYTES
    prefixes = hot(2 * size)
    for name in (b"0", b"1", b"0", b"2"):
        prefixes.used(name, 100, (), replay(name), 0.0)
    assert {request.raw[-1:] for request in prefixes.hottest({"m"}, 0.0)} == {b"0", b"2"}


def test_a_replay_asks_for_one_token_and_no_more():
    raw = b'{"stream":true,"n":3,"max_tokens":900,"vllm_xargs":{"x":1},"seed":1}'
    named = ("stream", "n", "max_tokens", "vllm_xargs", "seed")
    asked = json.loads(WarmupRequest(CHAT, raw, named, {"cache_salt": "s"}, Found(), "m").body_with(("first:7,8", 32)))
    told = {"seamark_boundaries": ["first:7,8", 32]}
    assert asked == {"seed": 1, "cache_salt": "s", "max_tokens": 1, "stream": False, "vllm_xargs": told}
