"""Which worker was sent which prefix and what its engine holds, after each event: beside plain lists."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import Counter

from proxy.boundaries.boundary import Boundary, Entry
from proxy.routing import held_states
from proxy.routing.feed_lines import read_event
from proxy.routing.held_states import HeldStates
from proxy.routing.prefix_index import ENTRY_BYTES, HOLDER_BYTES, Holding, PrefixIndex

BOOT = "w#1"


def told(key: bytes, tokens: int, entry: Entry | None = None) -> Boundary:
    """A boundary whose position is known."""
    return Boundary("explicit", key, entry if entry is not None else tokens, tokens, tokens)


def tell(states: HeldStates, *events: list) -> None:
    """The worker's feed says this."""
    for event in events:
        states.apply(read_event(json.dumps(event).encode()), BOOT)


class Gateway:
    """A prefix index, and the states that one worker is believed to hold."""

    def __init__(self) -> None:
        self.prefix_index = PrefixIndex(10**6)
        self.held_states = HeldStates(self.prefix_index, lambda *_: None)

    def send(self, request_id: str, *boundaries: Boundary, hints: int = 9) -> None:
        """`hints`: so many of the boundaries are in the hint."""
        hint = tuple(each.entry for each in boundaries[:hints])
        self.held_states.sent(request_id, boundaries, hint, BOOT)
        self.prefix_index.record(boundaries, BOOT, hint)

    def tell(self, *events: list) -> None:
        tell(self.held_states, *events)

    def held(self, *keys: bytes) -> int:
        found = self.prefix_index.longest(keys, [BOOT])
        return found[BOOT].tokens if found else 0


# Two conversations with one system prompt: of each boundary its key and its tokens.
CONVERSATIONS = (((b"s", 163), (b"t", 400), (b"u", 407)), ((b"s", 163), (b"v", 500)))

LENGTHS = dict(CONVERSATIONS[0] + CONVERSATIONS[1])


class Reporting(RuleBasedStateMachine):
    """Requests of these conversations come to an engine, which keeps states where it likes and drops them."""

    def __init__(self) -> None:
        super().__init__()
        self.gateway, self.names = Gateway(), 0
        self.under_way: dict[str, dict[str, Any]] = {}
        self.states: dict[str, tuple[int, int]] = {}  # of the engine: conversation and position, by name
        self.leads: dict[bytes, tuple[str, int]] = {}  # of the gateway: the state of a prefix, and its position
        self.guessed: dict[bytes, int] = {}  # prefixes that were sent and not yet reported

    def _is_in(self, name: str, key: bytes) -> bool:
        """Whether a prompt that begins with the prefix passes that state."""
        conversation, position = self.states[name]
        return position <= LENGTHS[key] and (position <= 163 or key in dict(CONVERSATIONS[conversation]))

    def _doubt(self, keys: Any) -> None:
        for key in keys:
            if key not in self.leads:
                self.guessed.pop(key, None)

    @precondition(lambda self: len(self.under_way) < 3)
    @rule(at=st.integers(0, 1), deep=st.integers(1, 3), hints=st.integers(1, 3), is_told=st.booleans())
    def is_sent(self, at: int, deep: int, hints: int, is_told: bool) -> None:
        """With a hint of positions, or of entries of which the engine tells what they are."""
        self.names += 1
        found = CONVERSATIONS[at][:deep]
        boundaries = [told(key, tokens, f"first:{tokens}" if is_told else tokens) for key, tokens in found]
        new = [key for key, _ in found if not self.gateway.held(key)]
        self.gateway.send(name := f"r{self.names}", *boundaries, hints=hints)
        asked = dict(found[:hints]) if is_told else {}
        self.under_way[name] = {"at": at, "new": new, "keys": dict(found), "told": asked}
        for key, tokens in found[:hints]:
            if key not in self.leads:
                self.guessed.setdefault(key, tokens)

    @precondition(lambda self: self.under_way)
    @rule(draw=st.data(), places=st.sets(st.sampled_from([144, 160, 384, 400, 496])), parts=st.booleans())
    def is_computed(self, draw: Any, places: set[int], parts: bool) -> None:
        name = draw.draw(st.sampled_from(sorted(self.under_way)))
        request = self.under_way.pop(name)
        at, asked = request["at"], request["told"] or request["keys"]
        if request["told"]:
            self.gateway.tell(["admitted", name, "cold", 0, 0, list(asked.values())])
            self._doubt(request["keys"].keys() - asked.keys())
        end = max(asked.values(), default=0)
        kept = {}
        for place in sorted(place for place in places if place <= end):
            state = f"{at if place > 163 else ''}:{place}"
            self.states[state] = at, place
            kept[place] = state
        first = {place: state for place, state in kept.items() if place <= 163}
        if parts:
            believed = [self.gateway.held(key) for key, tokens in asked.items() if tokens > 200]
            self.gateway.tell(["came", name, 200, [[*each] for each in first.items()]])
            assert believed == [self.gateway.held(key) for key, tokens in asked.items() if tokens > 200]
        later = kept.items() - first.items() if parts else kept.items()
        if not parts or end > 200:
            self.gateway.tell(["came", name, end + 9, [[*each] for each in later]])
        for key, tokens in asked.items():
            deepest = max((place for place in kept if place <= tokens), default=0)
            if not deepest:
                self._doubt([key])
            elif key not in self.leads or self.leads[key][1] < deepest:
                self.leads[key] = kept[deepest], deepest

    @precondition(lambda self: self.states)
    @rule(draw=st.data())
    def a_state_goes(self, draw: Any) -> None:
        state = draw.draw(st.sampled_from(sorted(self.states)))
        self.gateway.tell(["gone", state])
        del self.states[state]
        for key in [key for key, (name, _) in self.leads.items() if name == state]:
            del self.leads[key]
            self.guessed.pop(key, None)

    @precondition(lambda self: self.under_way)
    @rule(draw=st.data(), is_left=st.booleans())
    def is_refused_or_left(self, draw: Any, is_left: bool) -> None:
        name = draw.draw(st.sampled_from(sorted(self.under_way)))
        if is_left:
            self.gateway.held_states.left(name)
            self._doubt(self.under_way[name]["new"])
        else:
            self.gateway.held_states.refused(name)
            self._doubt(self.under_way.pop(name)["new"])

    @rule()
    def all_is_cleared(self) -> None:
        self.gateway.tell(["cleared"])
        self.states, self.leads, self.guessed = {}, {}, {}

    @invariant()
    def each_prefix_is_held_as_far_as_its_state_reaches_which_is_there(self) -> None:
        for key in LENGTHS:
            state, tokens = self.leads.get(key, ("", self.guessed.get(key, 0)))
            assert self.gateway.held(key) == tokens
            assert not state or self._is_in(state, key)


TestReporting = Reporting.TestCase
TestReporting.settings = settings(max_examples=60, stateful_step_count=20)


def test_all_that_is_remembered_is_bounded(monkeypatch):
    gateway = Gateway()
    monkeypatch.setattr(held_states, "MAX_PENDING", 10)
    monkeypatch.setattr(held_states, "MAX_TIED", 10)
    for number in range(30):
        gateway.send(f"r{number}", told(b"%d" % number, 163))
    gateway.tell(["came", "r0", 200, [[160, "a0"]]])
    assert len(gateway.held_states._pending) == 10
    for number in range(30):
        gateway.send(f"r{number}", told(b"%d" % number, 163))
        gateway.tell(["came", f"r{number}", 200, [[160, f"a{number}"]]])
    assert len(gateway.held_states._tied) == len(gateway.held_states._states) == 10
    assert [gateway.held(b"%d" % number) for number in (0, 19, 20, 29)] == [0, 0, 160, 160]


def test_the_engine_tells_how_far_a_prompt_is_computed_and_when_its_last_boundary_is_behind_it():
    computed = []
    states = HeldStates(PrefixIndex(10**6), lambda *_: None, lambda *told: computed.append(told))
    states.sent("r", (told(b"s", 163), told(b"t", 400)), (163, 400), BOOT)
    tell(states, ["came", "r", 200, [[160, "a"]]], ["came", "r", 400, []], ["came", "another", 9, []])
    assert computed == [("r", 200, False), ("r", 400, True)]


@pytest.mark.parametrize(("unit", "tokens", "held"), [(16, 400, 407), (16, 399, 163), (1, 406, 163)])
def test_what_falls_short_by_less_than_a_unit_does_not(unit, tokens, held):
    gateway = Gateway()
    gateway.send("r", told(b"s", 163), told(b"t", 407))
    gateway.held_states.fell_short([b"s", b"t"], [b"s"], tokens, unit, BOOT)
    assert gateway.held(b"s", b"t") == held


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

    @rule(numbers=st.none() | st.sets(number), boot=boot, remote=st.booleans())
    def nothing_is_held_any_more(self, numbers, boot, remote) -> None:
        """None: of all prefixes."""
        keys = [KEYS[number] for number in sorted(numbers)] if numbers is not None else [p.key for p in self.listed]
        if numbers is None:
            self.index.forget_all(boot)
        else:
            self.index.forget(keys, boot, remote=remote)
        for prefix in self.listed:
            if prefix.key in keys and boot in prefix.held:
                prefix.held[boot] = 0

    @invariant()
    def all_that_is_asked_of_it_is_what_the_list_says(self) -> None:
        assert len(self.index) == len(self.listed) and self.evictions._value.get() == self.evicted
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
            for found, deepest in zip(self.index.look_up(KEYS, (), boots)[1:], (sent, known), strict=True):
                assert (found and (found.held, found.size)) == (
                    (deepest[-1].held, deepest[-1].tokens or deepest[-1].estimate or 1) if deepest else None
                )


TestIndexing = Indexing.TestCase
TestIndexing.settings = settings(max_examples=50, stateful_step_count=20)
