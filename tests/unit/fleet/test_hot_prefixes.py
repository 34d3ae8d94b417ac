"""Which prefixes a restarted worker gets back first, and how little a replay asks for."""

from __future__ import annotations

from proxy.boundaries.boundary import Found
from proxy.chat.chat import CHAT
from proxy.fleet.hot_prefixes import ENTRY_BYTES, WarmupRequest, WarmupSet


def replay(name: bytes = b"") -> WarmupRequest:
    return WarmupRequest(CHAT, b'{"model":"m","messages":[]}' + name, ("model",), {}, Found(), "m")


def use(prefixes: WarmupSet, key: bytes, of: WarmupRequest) -> None:
    if not prefixes.used_again(key, 0.0):
        prefixes.add(key, 100, (), of, 0.0)


def test_what_is_kept_is_bounded_and_nothing_where_text_is_not_kept():
    size = len(replay().raw) + ENTRY_BYTES
    prefixes = WarmupSet(3 * size)
    for number in range(10):
        use(prefixes, bytes([number]), replay())
    assert len(prefixes) == 3 and prefixes.held <= 3 * size
    none = WarmupSet(0)
    use(none, b"key", replay())
    assert len(none) == 0


def test_what_is_used_again_stays_and_the_least_recently_used_goes():
    size = len(replay(b"0").raw) + ENTRY_BYTES
    prefixes = WarmupSet(2 * size)
    for name in (b"0", b"1", b"0", b"2"):
        use(prefixes, name, replay(name))
    assert {request.raw[-1:] for request in prefixes.hottest({"m"}, 0.0)} == {b"0", b"2"}
