"""Which worker was sent which prefix, how long it is, and how much of it its engine holds: beside a plain list."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import Counter

from proxy.boundaries.boundary import Boundary
from proxy.routing.prefix_index import ENTRY_BYTES, HOLDER_BYTES, Holding, PrefixIndex

KEYS = [b"%d" % number for number in range(6)]

BOOTS = "abc"


class Listed:
    def __init__(self, key: bytes, tokens: int, estimate: int) -> None:
        self.key, self.tokens, self.estimate = key, tokens, estimate
        self.held: dict[str, int] = {}  # by worker that was ever sent it


class Indexing(RuleBasedStateMachine):
    """Requests go out, engines tell what they hold, other gateways tell what they know."""

    number = st.integers(0, len(KEYS) - 1)
    boot = st.sampled_from(BOOTS)

    @initialize(room=st.sampled_from([1, 2 * ENTRY_BYTES, 4 * ENTRY_BYTES + HOLDER_BYTES, 10**6]))
    def begins(self, room: int) -> None:
        self.room, self.evictions = room, Counter("evicted", "", registry=None)
        self.index, self.listed, self.evicted = PrefixIndex(room, self.evictions), [], 0  # used last comes last
        self.told: list[Any] = []
        self.expected: list[Any] = []
        self.index.on_held = lambda *news: self.told.append(news)
        self.index.on_forget = lambda *news: self.told.append(news)

    def _find(self, key: bytes) -> Listed | None:
        return next((each for each in self.listed if each.key == key), None)

    def _tell(self, prefix: Listed, tokens: int) -> None:
        if not prefix.tokens:
            prefix.held = {boot: tokens if held else 0 for boot, held in prefix.held.items()}
        prefix.tokens = tokens

    def _use(self, key: bytes, tokens: int, estimate: int, boot: str, is_kept: bool) -> None:
        prefix = self._find(key) or Listed(key, tokens, estimate)
        self.listed = [*(each for each in self.listed if each is not prefix), prefix]
        if tokens and not prefix.tokens:
            self._tell(prefix, tokens)
        size = prefix.tokens or prefix.estimate or 1
        prefix.held[boot] = prefix.held.get(boot) or (size if is_kept else 0)

        def too_large() -> bool:
            return sum(ENTRY_BYTES + (len(each.held) - 1) * HOLDER_BYTES for each in self.listed) > self.room

        while too_large() and len(self.listed) > 1:
            self.listed.pop(0)
            self.evicted += 1

    @rule(
        numbers=st.lists(number, max_size=3),
        boot=boot,
        is_known=st.booleans(),
        estimate=st.sampled_from([0, 90]),
        hint=st.sampled_from([None, (), ("first:1",), (100, 200, 300)]),
        entry=st.sampled_from([None, "first:1"]),
    )
    def is_sent(self, numbers, boot, is_known, estimate, hint, entry) -> None:
        lengths = [100 * (number + 1) if is_known else 0 for number in numbers]
        boundaries = [
            Boundary("turn", KEYS[number], entry, tokens, estimate=estimate)
            for number, tokens in zip(numbers, lengths, strict=True)
        ]
        self.index.record(boundaries, boot, hint)
        for number, tokens in zip(numbers, lengths, strict=True):
            is_kept = hint is None or entry is None or entry in hint or tokens in hint
            self._use(KEYS[number], tokens, estimate, boot, is_kept)

    @rule(number=number, boot=boot)
    def another_gateway_says_it_is_held(self, number, boot) -> None:
        self.index.record_remote(KEYS[number], 64, boot)
        self._use(KEYS[number], 64, 64, boot, True)

    @rule(number=number, tokens=st.sampled_from([0, 100, 101]))
    def an_engine_tells_its_length(self, number, tokens) -> None:
        self.index.set_length(KEYS[number], tokens)
        if tokens and (prefix := self._find(KEYS[number])) is not None:
            self._tell(prefix, tokens)

    @rule(number=number, boot=boot, tokens=st.sampled_from([0, 96]))
    def an_engine_tells_what_it_holds(self, number, boot, tokens) -> None:
        self.index.set_held(KEYS[number], boot, tokens)
        if (prefix := self._find(KEYS[number])) is not None and boot in prefix.held:
            prefix.held[boot] = tokens
            self.expected += [(KEYS[number], tokens, boot)] if tokens else []

    @rule(numbers=st.none() | st.sets(number), boot=boot, remote=st.booleans())
    def nothing_is_held_any_more(self, numbers, boot, remote) -> None:
        """None: of all prefixes."""
        keys = [KEYS[number] for number in sorted(numbers)] if numbers is not None else [p.key for p in self.listed]
        if numbers is None:
            self.index.forget_all(boot)
        else:
            self.index.forget(keys, boot, remote=remote)
        lost = [key for key in keys if (prefix := self._find(key)) is not None and prefix.held.get(boot)]
        for key in lost:
            self._find(key).held[boot] = 0
        if lost and (numbers is None or not remote):
            self.expected.append((lost, boot))

    @invariant()
    def all_that_is_asked_of_it_is_what_the_list_says(self) -> None:
        assert len(self.index) == len(self.listed) and self.evictions._value.get() == self.evicted
        assert self.told == self.expected
        by_key = {prefix.key: prefix for prefix in self.listed}
        assert all(
            self.index.holds(key, boot) == (by_key[key].held.get(boot, 0) if key in by_key else 0)
            for key in KEYS
            for boot in BOOTS
        )
        for boots in ("", "a", "bc", "abc"):
            known = [by_key[key] for key in KEYS if key in by_key]
            longest = {
                boot: Holding(prefix.held[boot], prefix.key, bool(prefix.tokens))
                for prefix in known
                for boot in prefix.held
                if boot in boots and prefix.held[boot]
            }
            assert self.index.longest(KEYS, boots) == longest
            sent = [prefix for prefix in known if any(boot in boots for boot in prefix.held)]
            for found, deepest in ((self.index.sent(KEYS, boots), sent), (self.index.ever_sent(KEYS), known)):
                assert (found and (found.held, found.size)) == (
                    (deepest[-1].held, deepest[-1].tokens or deepest[-1].estimate or 1) if deepest else None
                )


TestIndexing = Indexing.TestCase
TestIndexing.settings = settings(max_examples=50, stateful_step_count=20)
